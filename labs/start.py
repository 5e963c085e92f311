"""Start the course: JupyterLab on your copies of the notebooks, in my/.

    python -m labs.start                            # notebook 00
    python -m labs.start 03                         # your copy of notebook 03
    python -m labs.start notebooks/03_dataparallel_vs_ddp.ipynb     # the course's original of a file, with outputs
    python -m labs.start 03 --no-browser --port 9000                # further options go to JupyterLab

`make lab` and the container run this. It first makes any missing copies (labs.kit.copies).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from urllib.parse import quote

from labs.kit import copies, requirements
from labs.kit.errors import BadInput, require

PROG = "python -m labs.start"
SETTINGS = Path(__file__).resolve().parent / "kit" / "jupyterlab"


def opened(name: str, root: Path = copies.ROOT) -> tuple[str, list[str]]:
    """Return (path below `root` of the file to open first, lines to print for the learner).

    A path outside my/ is opened directly, without touching my/, so that readers need no write permission. BadInput if
    the notebook or file doesn't exist, or if my/ can't be used.
    """
    given = Path(os.path.normpath(root / name)) if "/" in name else None  # my/ itself may be a link
    if given and not given.is_relative_to(root / copies.FOLDER):
        require(given.is_relative_to(root) and given.is_file(), f"there is no file {name} in the course, {root}")
        return given.relative_to(root).as_posix(), []
    target = given or root / copies.FOLDER / f"{copies.choose(name, root)}.ipynb"
    said = copies.lines(copies.update(root=root))
    require(target.is_file(), f"there is no file {target.relative_to(root).as_posix()}: name a notebook, such as 03")
    return target.relative_to(root).as_posix(), said


def arguments(path: str, root: Path = copies.ROOT) -> list[str]:
    """Return JupyterLab's options: serve the course folder and open `path` in it."""
    return [
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{quote(path)}",
        f"--LabApp.app_settings_dir={SETTINGS}",
        "--KernelManager.transport_encryption=auto",
    ]


def main() -> None:
    """Run the command line; returns when JupyterLab ends."""
    words = sys.argv[1:]
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return
    name = words.pop(0) if words and not words[0].startswith("-") else "00"
    try:
        problem = requirements.torch_problem(requirements.installed("torch"))  # before anything imports torch
        require(not problem, problem)
        path, said = opened(name)
    except BadInput as e:
        print(f"{PROG}: {e}", file=sys.stderr)
        raise SystemExit(2) from None
    print(*said, sep="\n", end="\n" * bool(said), flush=True)
    from labs.kit.course import use_own_kernel

    use_own_kernel()
    from jupyterlab.labapp import main as jupyterlab

    sys.argv = ["jupyter-lab", *arguments(path), *words]
    jupyterlab()


if __name__ == "__main__":
    main()
