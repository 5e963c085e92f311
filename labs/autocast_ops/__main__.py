"""python -m labs.autocast_ops"""

from labs.kit import cli

cli.main()
