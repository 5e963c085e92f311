"""python -m labs.clinic"""

from labs.clinic import main

main()
