"""python -m labs.gradient_compression"""

from labs.kit import cli

cli.main()
