"""python -m labs.many_ranks"""

from labs.kit import cli

cli.main()
