"""Which checkpoints in a folder are intact? Reads every byte of each one, but loads none.

Exit code 0 if the last one is good, 1 if it is damaged or there is none, 2 if the folder cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from labs.common.checkpoints.files import Damaged, check, checkpoints, opened
from labs.kit.cli import fail

PROG = "python -m labs.checkpoints"


def verdict(path: Path) -> str:
    """Return "good, N bytes", or "damaged: " and the problem."""
    try:
        with opened(path) as file:
            check(file, path)
            return f"good, {file.seek(0, 2):,} bytes"
    except Damaged as e:
        return f"damaged: {e.problem}"


def main(args: list[str] | None = None) -> int:
    """Print one line per checkpoint, oldest first; return the exit code."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder that labs.common.checkpoints.save wrote to")
    folder = parser.parse_args(args).folder
    if not folder.is_dir():
        fail(PROG, f"{folder} is not a folder")
    try:
        paths = checkpoints(folder)
    except OSError as e:
        fail(PROG, f"cannot read {folder} ({e.strerror})")
    told = {path.name: verdict(path) for path in paths}
    good = [name for name, said in told.items() if said.startswith("good")]
    if not paths:
        print(f"no checkpoints in {folder}: expected names such as step-00000000.pt")
    else:
        last = good[-1] if good else "none"
        print(f"{len(good)} of {len(told)} checkpoints are good; a run would resume from {last}")
    for name, said in told.items():
        print(f"{name}  {said}")
    return 0 if good and good[-1] == paths[-1].name else 1


if __name__ == "__main__":
    sys.exit(main())
