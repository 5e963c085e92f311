"""A lab's command line, derived from its Config; bad input is one line and exit code 2.

python -m labs.X --help          torchrun --nproc-per-node 2 -m labs.X
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from labs.kit.errors import BadInput, require
from labs.kit.lab import (
    CANNOT_BE_JUDGED,
    cannot_be_judged,
    check_layout,
    did_you_mean,
    lab_module,
    make_config,
    recordable,
    short_name,
)

__all__ = [
    "BadInput",
    "Launch",
    "Output",
    "check_layout",
    "fail",
    "lab_module",
    "main",
    "make_config",
    "parse",
    "parse_config",
    "require",
    "short_name",
]


@dataclass(frozen=True)
class Launch:
    """How ranks are started on this machine. Under torchrun, its own flags say how many."""

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
            require(not self.out.is_dir(), f"{self.out} is a folder: name a file in it with --out")
            target = self.out.absolute()
            folder = next(p for p in (*target.parents, target) if p.exists())  # "/" has no parents
            require(folder.is_dir(), f"{folder} is not a folder: choose another file with --out")
            require(os.access(folder, os.W_OK), f"cannot write to {folder}: choose another file with --out")


def _command(config_type: type) -> type:
    """A dataclass of launch options, output file and the lab's own Config, flat on the command line."""
    import tyro

    def flat(kind: type, title: str) -> Any:
        named = tyro.conf.arg(name=title, prefix_name=False)
        return typing.Annotated[kind, named, tyro.conf.OmitArgPrefixes]

    return dataclasses.make_dataclass(
        "Command",
        [
            ("config", flat(config_type, "lab"), field(default_factory=config_type)),
            ("launch", flat(Launch, "launch"), field(default_factory=Launch)),
            ("output", flat(Output, "output"), field(default_factory=Output)),
        ],
    )


def parse(lab: ModuleType, prog: str, args: list[str] | None = None) -> Any:
    """Parse `args` (default: sys.argv) into launch, config and output. Bad input: one line, exit code 2."""
    return _parse(_command(lab.Config), (lab.Config, Launch, Output), lab.__doc__, prog, args)


def parse_config(config_type: type, description: str, prog: str, args: list[str] | None = None) -> Any:
    """Parse `args` into a Config alone, for a tool that launches no ranks. Bad input: one line, exit code 2."""
    return _parse(config_type, (config_type,), description, prog, args)


def _parse(command: type, parts: tuple[type, ...], description: str, prog: str, args: list[str] | None) -> Any:
    import tyro

    complaint = io.StringIO()
    args = sys.argv[1:] if args is None else args
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = tyro.cli(command, args=args, prog=prog, description=description,
                              config=(tyro.conf.FlagCreatePairsOff,))  # fmt: skip
        recordable(parsed.config if len(parts) > 1 else parsed)
        return parsed
    except CANNOT_BE_JUDGED as e:
        fail(prog, str(cannot_be_judged(e, (a for a in args if a.startswith("--")))))
    except SystemExit as e:
        if not e.code:
            raise
        fail(prog, _unknown_option(parts, args) or _own_words(e) or _one_line(complaint.getvalue()))


def _own_words(error: BaseException | None) -> str:
    """What a Config's own check said, before tyro broke it into lines as wide as the terminal, paths included."""
    while error is not None and not isinstance(error, BadInput):
        error = error.__cause__ or error.__context__
    return str(error or "")


def _unknown_option(parts: tuple[type, ...], args: list[str]) -> str:
    names = [f.name for part in parts for f in dataclasses.fields(part)]
    known = ["--help", "-h", *(f"--{name.replace('_', '-')}" for name in names)]
    for arg in args:
        option = arg.split("=")[0].replace("_", "-")
        if option.startswith("-") and not re.match(r"-([\d.]|inf|nan)", option) and option not in known:
            return f"there is no option {option}: {did_you_mean(option, known)}--help lists them all"
    return ""


def _one_line(complaint: str) -> str:
    """What tyro printed in a box, drawn in lines or in ASCII, without box, title and the help it adds."""
    lines = [line.strip("│ ") for line in complaint.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("╰╯─-"))
    text = re.split(r" (For full helptext|Argument helptext)", text)[0]
    return re.sub(r"^Error parsing ((config|launch|output|lab|Config): )?", "", text)


def fail(prog: str, message: str) -> typing.NoReturn:
    """Print one line to stderr and leave with exit code 2. What Python calls nproc=2 is --nproc 2 here."""
    message = re.sub(r"\b(nproc|device|timeout_s)=\"?([\w-]+)\"?", r"--\1 \2", message)
    message = message.replace("oversubscribe=True", "--oversubscribe").replace("--timeout_s", "--timeout-s")
    print(f"{prog}: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Entry point of every lab module: launches ranks, or is one when torchrun has set RANK."""
    spec = sys.modules["__main__"].__spec__
    full = spec.name if spec else Path(sys.argv[0]).stem  # `python -m package.lab`, or `python lab.py` in its folder
    name, prog = short_name(full), f"python -m {full}"
    try:
        lab = lab_module(name)
        command = parse(lab, prog)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            from labs.kit.shell import run_under_torchrun

            _leave(run_under_torchrun(name, command))
        from labs.kit.shell import run_here

        raise SystemExit(run_here(name, command))
    except BadInput as e:
        fail(prog, str(e))


def _leave(code: int) -> typing.NoReturn:
    """Exit at once. On a loaded machine the interpreter's own end meets threads of torch that are still running.

    Then a rank whose work is done and saved now and then aborts ("terminate called without an active exception"),
    and torchrun reports the whole job as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
