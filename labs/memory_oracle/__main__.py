"""python -m labs.memory_oracle"""

from labs.kit import cli

cli.main()
