"""Where does a training run hang? Runs your unchanged script, and reports when and where all its ranks stop moving.

    torchrun --nproc-per-node 2 -m labs.watch train.py --lr 0.1         # options of labs.watch come before the script
    python -m labs.watch --patience 120 --folder debug train.py
    torchrun --nproc-per-node 2 -m labs.watch -m my_package.train --lr 0.1

When nothing moves for --patience seconds, or a rank dies, each rank writes its stacks, its last collectives and its
error into --folder, and one rank of each machine prints the diagnosis. python -m labs.postmortem FOLDER repeats it. It
reports a hang without ending the run, and also reports if the run continues. A run that ends well leaves nothing.

With NCCL it builds on PyTorch's tools: it sets TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE (unless you
did), so that PyTorch's dump after a timeout lands in --folder, for torchfrtrace and labs.postmortem. It adds each
rank's Python line, gloo, and a verdict on which of two ranks is wrong, from their earlier steps.

Progress is a collective, an optimizer step, a DataLoader batch, a new place of the main thread in the program, CPU time
of the process or its children, or bytes through files and sockets. So a long save, a long validation or a compilation
isn't a hang. It can't detect an endless loop that computes, which looks like a long validation. Give each collective a
timeout (init_process_group(timeout=...)), so that a waiting rank gets an error.

Ranks find each other through torchrun's store, even across machines. They need the folder on a shared disk; otherwise
each machine reports only its own ranks. It doesn't watch ranks that the script itself starts (mp.spawn). On nine unseen
hangs rebuilt from public reports (gloo, November 2026) it named rank, call and line in eight.
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
    """Return patience in s, folder, script with its arguments, module name or "". Bad input: one line, exit code 2."""
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
    """Exit with a message from one rank of each machine."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # torchrun ends this rank once the printing one has ended
        sys.exit(2)
    fail(PROG, message)


def diagnosis(folder: Path) -> Iterator[str]:
    """Yield the lines to print about the evidence."""
    yield from textwrap.wrap(str(diagnose(evidence.read(folder))), 112)
    yield f"python -m labs.postmortem {shlex.quote(os.path.relpath(folder))} shows what each rank did last"


def run_script(argv: list[str], module: str, watchdog: Watchdog) -> None:
    """Run a script as Python itself would, and report its end to the watchdog."""
    path = os.path.abspath(argv[0])  # resolve now, because the script may change directory
    exit_at_once = os._exit

    def end(code: int) -> None:
        watchdog.end(code)
        watchdog.report(f"has ended with exit code {code}")

    def leave(code: int) -> typing.NoReturn:
        end(code)
        exit_at_once(code)

    os._exit = leave  # it runs no exit handlers, so report first
    codes = [0]
    atexit.register(watchdog.stop)  # the first registered handler runs last
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
        print_error = sys.excepthook  # possibly the script's own

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
    except BadInput as e:  # a launcher's environment contradicts itself
        _refuse(str(e))
    watchdog.start()
    run_script(argv, module, watchdog)


if __name__ == "__main__":
    main()
