"""python -m labs.dataset_formats"""

from labs.kit import cli

cli.main()
