"""python -m labs.oom_clinic"""

from labs.kit import cli

cli.main()
