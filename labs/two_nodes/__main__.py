"""python -m labs.two_nodes"""

from labs.kit import cli

cli.main()
