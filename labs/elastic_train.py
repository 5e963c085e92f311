"""Does training resume where it was when a rank is killed?

    torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train --folder runs/x --epochs 2

Saves every few steps and resumes from the last good checkpoint. The training loop is labs/common/elastic/loop.py.
"""

import os
import sys

from labs.common.elastic.train import entry

if __name__ == "__main__":
    entry()
    sys.stdout.flush()
    os._exit(0)  # normal interpreter exit sometimes aborts, because torch's threads are still running
