"""python -m labs.gpu"""

from labs.gpu import main

main()
