"""python -m labs.tune_dataloader"""

from labs.kit import cli

cli.main()
