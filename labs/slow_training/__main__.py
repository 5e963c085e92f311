"""python -m labs.slow_training"""

from labs.kit import cli

cli.main()
