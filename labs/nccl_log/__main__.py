"""python -m labs.nccl_log"""

from labs.nccl_log import main

main()
