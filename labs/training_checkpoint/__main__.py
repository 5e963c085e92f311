"""python -m labs.training_checkpoint"""

from labs.kit import cli

cli.main()
