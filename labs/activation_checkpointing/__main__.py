"""python -m labs.activation_checkpointing"""

from labs.kit import cli

cli.main()
