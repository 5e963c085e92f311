"""python -m labs.elastic_restart"""

from labs.kit import cli

cli.main()
