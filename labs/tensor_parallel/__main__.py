"""python -m labs.tensor_parallel"""

from labs.kit import cli

cli.main()
