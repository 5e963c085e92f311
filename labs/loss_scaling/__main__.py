"""python -m labs.loss_scaling"""

from labs.kit import cli

cli.main()
