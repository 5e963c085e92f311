"""A lab's command line, derived from its Config; bad input is one line and exit code 2.

    python -m labs.X --help          torchrun --nproc-per-node 2 -m labs.X
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import io
import os
import sys
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


class BadInput(ValueError):
    """A value that cannot work. The message is one line and names the fix; nothing has been started."""

    def _render_traceback_(self) -> list[str]:
        """IPython prints this in place of a traceback: the one line is all there is to know."""
        return [f"BadInput: {self}"]


def require(condition: bool, message: str) -> None:
    """Raise BadInput(message) unless `condition`."""
    if not condition:
        raise BadInput(message)


def lab_module(name: str) -> ModuleType:
    """The module of a lab: "data_parallel" for one in labs/, "package.module" for your own. Edits take effect.

    BadInput names the labs there are, or what the module lacks.
    """
    full = name if "." in name else f"labs.{name}"
    if importlib.util.find_spec(full) is None if "." not in name else False:
        known = sorted(p.stem for p in (Path(__file__).parents[1]).glob("*.py") if "def run(config" in p.read_text())
        raise BadInput(f"there is no lab {name!r}: {_did_you_mean(name, known)}The labs are {', '.join(known)}.")
    return importlib.import_module(full)


def short_name(lab: ModuleType) -> str:
    """A lab's name in records and messages."""
    return lab.__name__.removeprefix("labs.")


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def make_config(lab: ModuleType, values: dict[str, Any]) -> Any:
    """`lab.Config(**values)`, with names and types checked. BadInput names the parameter and the fix."""
    import typeguard

    name = lab.__name__.removeprefix("labs.")
    hints = typing.get_type_hints(lab.Config)
    for key, value in values.items():
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise BadInput(f"lab {name!r} has no parameter {key!r}: {hint}It has {', '.join(hints)}.")
        try:
            typeguard.check_type(value, hints[key])
        except typeguard.TypeCheckError:
            wanted = getattr(hints[key], "__name__", str(hints[key]))
            raise BadInput(f"{key} of lab {name!r} must be {wanted}, not {value!r}") from None
    return lab.Config(**values)


@dataclass(frozen=True)
class Launch:
    """How `python -m labs.X` runs the lab; torchrun takes these from its own flags instead."""

    nproc: int = 2
    """Ranks to launch, each on a device of its own."""
    timeout_s: float = 600.0
    """Stop the run, and every process of it, after this many seconds."""
    oversubscribe: bool = False
    """Allow more ranks than devices: results are right, timings are not."""
    device: typing.Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    """Where ranks run: auto takes GPUs if there are enough, otherwise CPU cores."""


@dataclass(frozen=True)
class Output:
    """Where the records go."""

    out: Path | None = None
    """File to save the records to, as JSON lines; without it only the table is printed."""

    def __post_init__(self) -> None:
        if self.out is not None:
            folder = next(p for p in (self.out.absolute().parent, *self.out.absolute().parents) if p.exists())
            require(os.access(folder, os.W_OK), f"cannot write to {folder}: choose another file with --out")
            require(not self.out.is_dir(), f"{self.out} is a folder: name a file in it with --out")


def _command(config_type: type) -> type:
    """A dataclass of launch options, output file and the lab's own Config, flat on the command line."""
    import tyro

    flat = tyro.conf.OmitArgPrefixes
    return dataclasses.make_dataclass(
        "Command",
        [
            ("launch", flat[Launch], field(default_factory=Launch)),
            ("config", flat[config_type], field(default_factory=config_type)),
            ("output", flat[Output], field(default_factory=Output)),
        ],
    )


def parse(lab: ModuleType, prog: str, args: list[str] | None = None) -> Any:
    """Parse `args` (default: sys.argv) into launch, config and out. Bad input: one line on stderr, exit code 2."""
    import tyro

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(_command(lab.Config), args=args, prog=prog, description=lab.__doc__)
    except BadInput as e:
        fail(prog, str(e))
    except SystemExit as e:
        if not e.code:
            raise
        lines = [line.strip("│╭╮╰╯─ \n") for line in complaint.getvalue().splitlines()]
        fail(prog, " ".join(line for line in lines[1:] if line).split(" For full helptext")[0].split(" Argument helptext")[0])


def fail(prog: str, message: str) -> typing.NoReturn:
    """Print one line to stderr and leave with exit code 2."""
    print(f"{prog}: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point of every lab module: launches ranks, or is one when torchrun has set RANK."""
    name = Path(sys.argv[0]).stem
    prog = f"python -m labs.{name}"
    try:
        lab = lab_module(name)
        command = parse(lab, prog)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            from labs.kit.shell import run_under_torchrun as start
        else:
            from labs.kit.shell import run_here as start
        raise SystemExit(start(name, command))
    except BadInput as e:
        fail(prog, str(e))
