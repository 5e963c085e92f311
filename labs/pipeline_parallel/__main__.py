"""python -m labs.pipeline_parallel"""

from labs.kit import cli

cli.main()
