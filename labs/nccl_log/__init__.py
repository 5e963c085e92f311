"""Which way do the bytes go? Explains NCCL's log.

    NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING torchrun --nproc-per-node 8 train.py 2>&1 | tee nccl.log
    python -m labs.nccl_log nccl.log                            # rings, trees, transports, algorithms, warnings
    nvidia-smi topo -m > topology.txt
    python -m labs.nccl_log nccl.log --topology topology.txt    # compared with what the machine allows
    python -m labs.nccl_log --sample                            # a published log

Only reads files, so it needs no GPU. Exit code: 0, or 2 for a file without NCCL log lines.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from labs.kit import record, supervise, timeouts
from labs.kit.cli import fail
from labs.kit.errors import BadInput
from labs.nccl_log import nccl, published

PROG = "python -m labs.nccl_log"
LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING"}
"""Variables that make NCCL log the rings it built, and the algorithm it chose for each size."""


def all_reduce_sweep(gpus: int) -> tuple[record.Records, str]:
    """Run all-reduces of many sizes over NCCL on `gpus` GPUs; return (records, NCCL's log).

    The ranks start in a new process, because NCCL reads its variables only once. RuntimeError if they fail.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, files = Path(folder, "all_reduce.jsonl"), f"{folder}/nccl.%p.txt"
        command = [sys.executable, "-m", "labs.hardware_probe", "--parts", "all_reduce", "--nproc", str(gpus)]
        with supervise.started(
            [*command, "--out", str(file)],
            grace_s=timeouts.STOP_S,
            env=os.environ | LOGGING | {"NCCL_DEBUG_FILE": files},
            cwd=Path(__file__).parents[2],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as running:
            try:
                code = running.wait(timeouts.LAUNCH_S)
            except subprocess.TimeoutExpired:
                code = None
        if not file.exists():
            how = f"took more than {timeouts.LAUNCH_S:g} s" if code is None else f"ended with exit code {code}"
            raise RuntimeError(f"the sweep {how}: run {' '.join(['python', *command[1:]])} in a terminal to see why")
        logs = sorted(Path(folder).glob("nccl.*.txt"))
        from labs.kit.notebook import Results  # with matplotlib, which the command doesn't need

        return Results(record.load(file)), "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)


def answer(log: str, topology: str = "") -> Iterator[str]:
    """Yield sentences about a log and, if given, the output of `nvidia-smi topo -m`. BadInput if unreadable."""
    yield from nccl.in_words(nccl.read(log.splitlines()))
    if topology:
        yield from nccl.topology_in_words(nccl.read_topology(topology))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("log", nargs="*", type=Path, help="what the ranks printed, in one file or in many")
    parser.add_argument("--topology", type=Path, help="what `nvidia-smi topo -m` printed")
    parser.add_argument("--sample", action="store_true", help="a log that others published")
    args = parser.parse_args()
    if bool(args.log) == bool(args.sample):
        fail(PROG, "name a log, or --sample: NCCL_DEBUG=INFO torchrun ... 2>&1 | tee nccl.log makes one")
    try:
        if args.sample:
            print(f"{published.SOURCE}\n")
            log, topology = published.LOG, ""
        else:
            log = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in args.log)
            topology = args.topology.read_text(encoding="utf-8", errors="replace") if args.topology else ""
        for sentence in answer(log, topology):
            print(sentence)
    except OSError as e:
        fail(PROG, f"{e.filename}: {e.strerror}")
    except BadInput as e:
        fail(PROG, f"{', '.join(map(str, args.log))}: {e}")
