"""python -m labs.hang_clinic"""

from labs.kit import cli

cli.main()
