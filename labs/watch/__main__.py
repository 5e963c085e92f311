"""Where does a training hang? Runs your unchanged script, and tells when and where all its ranks stand still.

    torchrun --nproc-per-node 2 -m labs.watch train.py --lr 0.1         # options of labs.watch come before the script
    python -m labs.watch --patience 120 --folder debug train.py
    torchrun --nproc-per-node 2 -m labs.watch -m my_package.train --lr 0.1

When nothing moves for --patience seconds, or a rank dies, each rank writes its stacks, its last collectives and its
error into --folder, and one rank of each machine prints the diagnosis, as python -m labs.postmortem FOLDER does later.
A hung training is told, not ended: it may go on, and then that is told, too. After a run that ends well nothing stays.

What moves: a collective, an optimizer step, a batch of a DataLoader, the main thread's place in the program, the time
of a process or of those that it has started, bytes of files and of sockets. So a long save, a long validation or a
compilation is no hang. Not told: an endless loop that computes, which looks like a long validation. Give each
collective a timeout (init_process_group(timeout=...)): when it is over, the rank that waits has an error.

Ranks know of each other through torchrun's store, on several machines, too; each needs the folder on a disk that all
share, or it tells its own ranks alone. Ranks that the script itself starts (mp.spawn) are not watched one by one.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import sys
import textwrap
import time
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from traceback import format_exception

from labs.kit import as_main
from labs.kit.cli import fail
from labs.kit.errors import BadInput
from labs.watch import evidence
from labs.watch.diagnosis import diagnose
from labs.watch.watchman import Watchman

PROG = as_main.typed("train-watch", "labs.watch")
PATIENCE_S = 60.0


def options(args: list[str]) -> tuple[float, Path, list[str], str]:
    """Patience in s, folder, script with its own arguments, its name as a module or "". Bad input: one line, code 2."""
    parser = argparse.ArgumentParser(
        PROG,
        f"{PROG} [--patience S] [--folder DIR] train.py ...",
        as_main.examples(__doc__, "labs.watch", PROG),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _refuse
    told = f"seconds without any movement that are a hang (default {PATIENCE_S:g})"
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help=told)
    parser.add_argument("--folder", type=Path, default=Path("debug"), help="for evidence, if there is need of it")
    try:
        given, argv, module = as_main.parse(parser, args)
    except BadInput as e:
        _refuse(str(e))
    if not 1 <= given.patience < float("inf"):
        _refuse(f"--patience must be a number of seconds from 1 on, not {given.patience:g}")
    if not Path(argv[0]).is_file():
        _refuse(f"there is no script {argv[0]}")
    folder = given.folder.absolute()
    if folder.exists() and not folder.is_dir():
        _refuse(f"--folder {given.folder} is not a folder")
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(there, os.W_OK):
        _refuse(f"--folder: cannot write to {there}")
    return given.patience, folder, argv, module


def _refuse(message: str) -> typing.NoReturn:
    """By one rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # until torchrun ends this rank, which it does when the one that tells is gone
        sys.exit(2)
    fail(PROG, message)


def diagnosis(folder: Path) -> Iterator[str]:
    """What is printed about the evidence."""
    yield from textwrap.wrap(str(diagnose(evidence.read(folder))), 112)
    yield f"python -m labs.postmortem {shlex.quote(os.path.relpath(folder))} tells what each rank did last"


def run_script(argv: list[str], module: str, watchman: Watchman) -> None:
    """Run a script as Python itself would, and tell the watchman how it ends."""
    path = os.path.abspath(argv[0])  # now: the script may change the folder
    leave_at_once = os._exit

    def end(code: int) -> None:
        watchman.end(code)
        watchman.tell(f"has ended with exit code {code}")

    def leave(code: int) -> typing.NoReturn:
        end(code)
        leave_at_once(code)

    os._exit = leave  # it runs nothing of what is left to do, so that this must come before
    codes = [0]
    atexit.register(watchman.stop)  # the first to be registered is the last to run
    atexit.register(lambda: end(codes[0]))
    try:
        as_main.run(argv, module)
    except SystemExit as e:
        codes[0] = as_main.exit_code(e)
        raise
    except BaseException as e:
        words = f"{type(e).__name__}: {e}"
        own = as_main.of_script(e.__traceback__, path)
        watchman.end(1, words, "".join(format_exception(type(e), e, own)))
        print_error = sys.excepthook  # the script's own, perhaps

        def hook(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
            print_error(kind, error.with_traceback(as_main.of_script(trace, path)), error.__traceback__)
            watchman.tell(f"has failed ({words})")

        sys.excepthook = hook
        raise


def main() -> None:
    """Arm, and become the script."""
    patience_s, folder, argv, module = options(sys.argv[1:])
    try:
        watchman = Watchman(folder, patience_s, diagnosis, PROG)
    except BadInput as e:  # a launcher's environment that does not fit
        _refuse(str(e))
    watchman.start()
    run_script(argv, module, watchman)


if __name__ == "__main__":
    main()
