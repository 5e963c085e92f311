"""python -m labs.gpu_acceptance"""

from labs.gpu_acceptance import main

main()
