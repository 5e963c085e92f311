"""python -m labs.memory_timeline"""

from labs.kit import cli

cli.main()
