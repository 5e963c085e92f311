"""Which way do the bytes go? NCCL's own log, in words.

    NCCL_DEBUG=INFO torchrun --nproc-per-node 8 train.py 2>&1 | tee nccl.log
    python -m labs.nccl_log nccl.log                            # rings, trees, transports, variables, warnings
    nvidia-smi topo -m > topology.txt
    python -m labs.nccl_log nccl.log --topology topology.txt    # beside what the machine would allow
    python -m labs.nccl_log --sample 8xA100                     # a sample made by hand, to see what is told

Reads files only: no GPU is needed. Exit code: 0, or 2 for a file that holds no log of NCCL.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from labs.kit.cli import fail
from labs.kit.errors import BadInput
from labs.nccl_log import nccl, nccl_samples

PROG = "python -m labs.nccl_log"


def answer(log: str, topology: str = "") -> Iterator[str]:
    """Sentences about the text of a log and, if given, the text that `nvidia-smi topo -m` printed. BadInput."""
    yield from nccl.in_words(nccl.read(log.splitlines()))
    if topology:
        yield from nccl.topology_in_words(nccl.read_topology(topology))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("log", nargs="*", type=Path, help="what the ranks printed, in one file or in many")
    parser.add_argument("--topology", type=Path, help="what `nvidia-smi topo -m` printed")
    parser.add_argument("--sample", choices=nccl_samples.SAMPLES, help="a log that was made by hand, not recorded")
    args = parser.parse_args()
    if bool(args.log) == bool(args.sample):
        fail(PROG, "name a log, or a --sample: NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log makes one")
    try:
        if args.sample:
            print(f"{nccl_samples.LABEL}\n")
            log, topology = nccl_samples.SAMPLES[args.sample]
        else:
            log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in args.log)
            topology = args.topology.read_text(encoding="utf-8", errors="replace") if args.topology else ""
        for sentence in answer(log, topology):
            print(sentence)
    except OSError as e:
        fail(PROG, f"{e.filename}: {e.strerror}")
    except BadInput as e:
        fail(PROG, f"{', '.join(map(str, args.log))}: {e}")
