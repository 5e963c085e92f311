"""python -m labs.amp_training"""

from labs.kit import cli

cli.main()
