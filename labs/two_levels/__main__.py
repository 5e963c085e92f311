"""python -m labs.two_levels"""

from labs.kit import cli

cli.main()
