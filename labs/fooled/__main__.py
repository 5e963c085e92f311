"""python -m labs.fooled"""

from labs.kit import cli

cli.main()
