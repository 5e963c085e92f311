"""python -m labs.memory_remedies"""

from labs.kit import cli

cli.main()
