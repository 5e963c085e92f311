"""python -m labs.sharded_checkpoint"""

from labs.kit import cli

cli.main()
