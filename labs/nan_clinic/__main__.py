"""python -m labs.nan_clinic"""

from labs.kit import cli

cli.main()
