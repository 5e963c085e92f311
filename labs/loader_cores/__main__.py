"""python -m labs.loader_cores"""

from labs.kit import cli

cli.main()
