"""Does a training go on where it was, when one of its ranks is killed?

    torchrun --nproc-per-node 2 --max-restarts 2 -m labs.elastic_train --folder runs/x --epochs 2

Saves every few steps and goes on from the last good checkpoint. The training is in labs/common/elastic/train.py.
"""

import os
import sys

from labs.common.elastic.train import entry

if __name__ == "__main__":
    entry()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own end now and then meets threads of torch that are still running, and aborts
