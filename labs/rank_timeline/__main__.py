"""python -m labs.rank_timeline"""

from labs.rank_timeline import main

main()
