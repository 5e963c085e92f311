"""python -m labs.mixed_precision"""

from labs.kit import cli

cli.main()
