"""python -m labs.gradient_accumulation"""

from labs.kit import cli

cli.main()
