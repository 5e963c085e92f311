"""python -m labs.profile_step"""

from labs.kit import cli

cli.main()
