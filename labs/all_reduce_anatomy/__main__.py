"""python -m labs.all_reduce_anatomy"""

from labs.kit import cli

cli.main()
