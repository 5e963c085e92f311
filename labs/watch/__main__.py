"""Where does a training run hang? Runs your unchanged script, and reports when and where all its ranks stand still.

    torchrun --nproc-per-node 2 -m labs.watch train.py --lr 0.1         # options of labs.watch come before the script
    python -m labs.watch --patience 120 --folder debug train.py
    torchrun --nproc-per-node 2 -m labs.watch -m my_package.train --lr 0.1

When nothing moves for --patience seconds, or a rank dies, each rank writes its stacks, its last collectives and its
error into --folder, and one rank of each machine prints the diagnosis. python -m labs.postmortem FOLDER repeats it.
It reports a hang and doesn't end the run. If the run continues, it reports that. A run that ends well leaves nothing.

With NCCL it starts from what torch has: it sets TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE (unless you
did), so that torch's own dump of a timeout lands in --folder, for torchfrtrace and for labs.postmortem. It adds the
Python line of each rank, gloo, and a verdict on which of two ranks is wrong, from their earlier steps.

What counts as progress: a collective, an optimizer step, a batch of a DataLoader, the main thread's place in the
program, the processor time of a process or of its children, bytes of files and sockets. So a long save, a long
validation or a compilation is no hang. It cannot see an endless loop that computes, which looks like a long validation.
Give each collective a timeout (init_process_group(timeout=...)): when it is over, the rank that waits has an error.

Ranks find each other through torchrun's store, also on several machines; each needs the folder on a disk that all
share, or it reports its own ranks alone. It doesn't watch single ranks that the script itself starts (mp.spawn).
On nine unseen hangs rebuilt from public reports (gloo, November 2026) it named rank, call and line in eight.
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
from labs.watch.watchdog import Watchdog

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
    text = f"seconds without progress that count as a hang (default {PATIENCE_S:g})"
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help=text)
    parser.add_argument("--folder", type=Path, default=Path("debug"), help="for the evidence (default debug)")
    try:
        given, argv, module = as_main.parse(parser, args)
    except BadInput as e:
        _refuse(str(e))
    if not 1 <= given.patience < float("inf"):
        _refuse(f"--patience must be at least 1 second, not {given.patience:g}")
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
        time.sleep(10)  # until torchrun ends this rank, because the one that prints has ended
        sys.exit(2)
    fail(PROG, message)


def diagnosis(folder: Path) -> Iterator[str]:
    """The lines to print about the evidence."""
    yield from textwrap.wrap(str(diagnose(evidence.read(folder))), 112)
    yield f"python -m labs.postmortem {shlex.quote(os.path.relpath(folder))} shows what each rank did last"


def run_script(argv: list[str], module: str, watchdog: Watchdog) -> None:
    """Run a script as Python itself would, and report to the watchdog how it ends."""
    path = os.path.abspath(argv[0])  # now: the script may change the folder
    exit_at_once = os._exit

    def end(code: int) -> None:
        watchdog.end(code)
        watchdog.report(f"has ended with exit code {code}")

    def leave(code: int) -> typing.NoReturn:
        end(code)
        exit_at_once(code)

    os._exit = leave  # it runs no exit handler, so this must come first
    codes = [0]
    atexit.register(watchdog.stop)  # the first to be registered is the last to run
    atexit.register(lambda: end(codes[0]))
    try:
        as_main.run(argv, module)
    except SystemExit as e:
        codes[0] = as_main.exit_code(e)
        raise
    except BaseException as e:
        error = f"{type(e).__name__}: {e}"
        trace = as_main.of_script(e.__traceback__, path)
        watchdog.end(1, error, "".join(format_exception(type(e), e, trace)))
        print_error = sys.excepthook  # the script's own, perhaps

        def hook(kind: type, raised: BaseException, trace: types.TracebackType | None) -> None:
            print_error(kind, raised.with_traceback(as_main.of_script(trace, path)), raised.__traceback__)
            watchdog.report(f"has failed ({error})")

        sys.excepthook = hook
        raise


def main() -> None:
    """Start the watchdog, then become the script."""
    patience_s, folder, argv, module = options(sys.argv[1:])
    try:
        watchdog = Watchdog(folder, patience_s, diagnosis, PROG)
    except BadInput as e:  # a launcher's environment that contradicts itself
        _refuse(str(e))
    watchdog.start()
    run_script(argv, module, watchdog)


if __name__ == "__main__":
    main()
