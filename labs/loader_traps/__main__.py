"""python -m labs.loader_traps"""

from labs.kit import cli

cli.main()
