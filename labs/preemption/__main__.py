"""python -m labs.preemption"""

from labs.kit import cli

cli.main()
