"""A lab's command line, derived from its Config: runs the lab, prints its answer and saves the records.

python -m labs.X --help          torchrun --nproc-per-node 2 -m labs.X

Bad input gives one line and exit code 2. To report it quickly, slow modules are imported only where they're used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import socket
import sys
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from labs.kit import record, timeouts
from labs.kit.errors import BadInput, did_you_mean, require
from labs.kit.lab import CANNOT_BE_JUDGED, cannot_be_judged, check_layout, for_smoke, lab_module, recordable, short_name

if TYPE_CHECKING:
    from labs.kit.monitor import Trace

SHORT_S = 2.0  # in shorter runs, the ranks' own start and end look like a busy neighbour


@dataclass(frozen=True)
class Launch:
    """How to start ranks on this machine. Under torchrun, its own flags set their number."""

    nproc: int = 2
    """Number of ranks to launch, each on its own device."""
    timeout_s: float = timeouts.COMMAND_S
    """Stop the run and all its processes after this many seconds."""
    oversubscribe: bool = False
    """Allow more ranks than devices: results stay right, timings don't."""
    device: typing.Literal["auto", "cpu", "cuda", "cuda-shared"] = "auto"
    """Where ranks run. auto uses GPUs if there are enough, otherwise CPU cores."""


@dataclass(frozen=True)
class Output:
    """Where the records go."""

    out: Path | None = None
    """File for the records, as JSON lines."""
    table: bool = False
    """Also print every record after the answer."""

    def __post_init__(self) -> None:
        if self.out is not None:
            require(not self.out.is_dir(), f"{self.out} is a folder: name a file in it with --out")
            target = self.out.absolute()
            folder = next(p for p in (*target.parents, target) if p.exists())  # "/" has no parents
            require(folder.is_dir(), f"{folder} is not a folder: choose another file with --out")
            require(os.access(folder, os.W_OK), f"cannot write to {folder}: choose another file with --out")


def _command(config_type: type) -> type:
    """Return a dataclass of launch options, output options and the lab's Config, flat on the command line."""
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
            parsed = tyro.cli(
                command, args=args, prog=prog, description=description, config=(tyro.conf.FlagCreatePairsOff,)
            )
        recordable(parsed.config if len(parts) > 1 else parsed)
        return parsed
    except CANNOT_BE_JUDGED as e:
        fail(prog, str(cannot_be_judged(e, (a for a in args if a.startswith("--")))))
    except SystemExit as e:
        if not e.code:
            raise
        fail(prog, _unknown_option(parts, args) or _own_words(e) or _one_line(complaint.getvalue()))


def _own_words(error: BaseException | None) -> str:
    """Return the Config's own message, before tyro wrapped it to the terminal's width."""
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
    """Return the message that tyro printed in a box, without the box, its title and the help that tyro adds."""
    lines = [line.strip("│ ") for line in complaint.splitlines()[1:]]
    text = " ".join(line for line in lines if line.strip("╰╯─-"))
    text = re.split(r" (For full helptext|Argument helptext)", text)[0]
    return re.sub(r"^Error parsing ((config|launch|output|lab|Config): )?", "", text)


def fail(prog: str, message: str) -> typing.NoReturn:
    """Print one line to stderr and exit with code 2, with nproc=2 rewritten as --nproc 2."""
    message = re.sub(r"\b(nproc|device|timeout_s)=\"?([\w-]+)\"?", r"--\1 \2", message)
    message = message.replace("oversubscribe=True", "--oversubscribe").replace("--timeout_s", "--timeout-s")
    print(f"{prog}: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """Drop the remaining output silently if the reader of stdout leaves early, as in `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit


def main() -> None:
    """Run a lab module as a program: launch ranks, or be one if torchrun has set RANK."""
    spec = sys.modules["__main__"].__spec__
    # `python -m package.lab`, or `python lab.py` in its folder
    full = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    name, prog = short_name(full), f"python -m {full}"
    try:
        lab = lab_module(name)
        command = parse(lab, prog)
        command.config = for_smoke(lab, command.config)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            _leave(run_under_torchrun(name, command))
        raise SystemExit(run_here(name, command))
    except BadInput as e:
        fail(prog, str(e))


def _leave(code: int) -> typing.NoReturn:
    """Exit at once, without the interpreter's cleanup.

    On a loaded machine, cleanup can meet running torch threads. Then a rank that has already saved its results
    sometimes aborts ("terminate called without an active exception"), and torchrun reports that the job failed.
    """
    with closed_pipe_is_no_error():
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare() -> None:
    """Fork the server that ranks come from before this process has threads; then import what is needed later."""
    from labs.kit.fork_server import start_fork_server

    start_fork_server(forked=True)
    import pandas  # noqa: F401
    import scipy.special  # noqa: F401


def run_here(lab: str, command: Any) -> int:
    """Launch ranks on this machine, for `python -m labs.X`. Returns the exit code."""
    from labs.kit.hardware import place

    place(command.launch.nproc, command.launch.device, command.launch.oversubscribe)  # raises BadInput before the start
    prepare()
    from labs.kit.display import TerminalView
    from labs.kit.failure import RankFailed
    from labs.kit.launch import launch

    options, values = command.launch, _values(command.config)
    try:
        run = launch(
            lab,
            options.nproc,
            timeout_s=options.timeout_s,
            device=options.device,
            oversubscribe=options.oversubscribe,
            view=TerminalView(lab),
            **values,
        )
    except RankFailed as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all ranks stopped, nothing was recorded", file=sys.stderr)
        return 130
    return report(lab_module(lab), run, run.monitor, command.output)


def run_under_torchrun(lab: str, command: Any) -> int:
    """Run one rank of a torchrun job; rank 0 prints and saves the records. Returns the exit code."""
    from labs.kit.display import TerminalView
    from labs.kit.hardware import place, why_cores
    from labs.kit.monitor import Monitor
    from labs.kit.rank import process_group
    from labs.kit.rank_process import RunLab

    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    check_layout(lab_module(lab), command.config, int(os.environ["WORLD_SIZE"]))
    placement = place(local_size, command.launch.device, command.launch.oversubscribe)
    body = RunLab(lab, _values(command.config))
    view = TerminalView(lab) if os.environ["RANK"] == "0" else None
    with process_group(placement[local_rank], timeout_s=command.launch.timeout_s) as rank:
        hosts = rank.gather((rank.rank, os.getpid(), socket.gethostname()))
        pids = {r: pid for r, pid, host in hosts if host == socket.gethostname()}
        if view:
            view.note(why_cores(placement, command.launch.device))
            rank.on_progress = view.progress
        used = {d.index for d in placement if d.kind != "cpu"}
        with (
            Monitor(lambda: pids, gpus=used, cores=rank.host_cores)
            if local_rank == 0
            else contextlib.nullcontext() as monitor
        ):
            records = body(rank)
    if view is None:
        return 0
    view.close()
    machines = {"machines": len({host for *_, host in hosts})}  # the rest of the provenance is rank 0's
    attached = record.attach_provenance(records)
    kept = record.Records(dataclasses.replace(r, provenance=r.provenance | machines) for r in attached)
    return report(lab_module(lab), kept, monitor.trace, command.output)


def _values(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


ROWS = 20
"""Print the records below the answer if there are at most this many."""


def report(lab: ModuleType, records: record.Records, trace: Trace | None, output: Output) -> int:
    """Print the lab's answer and save `records`, if asked to. Returns the exit code.

    `lab.answer(records)` yields two to six sentences. The records follow as a table if they are few, or with --table.
    If saving fails (disk full, read-only), they are printed to stdout, so nothing is lost.
    """
    answer = list(lab.answer(records)) if hasattr(lab, "answer") and len(records) else []
    with closed_pipe_is_no_error():
        for sentence in answer:
            print(textwrap.fill(sentence, 100, subsequent_indent="  "))
        if output.table or not answer or len(records) <= ROWS:
            print(f"\n{_table(records)}" if answer else _table(records))
        else:
            print(f"\n{len(records)} records: --table prints them, --out FILE saves them.")
    if trace is not None and trace.energy_j > 0:
        print(f"The GPU boards used {trace.energy_j:,.0f} J in this run (NVML's counter).", file=sys.stderr)
    if trace is not None and trace.t_s[-1:] > [SHORT_S] and (warning := trace.disturbance()):
        print(warning, file=sys.stderr)
    if output.out is None:
        return 0
    try:
        saved = records.save(output.out)
    except OSError as e:
        with closed_pipe_is_no_error():
            print("".join(records.lines()), end="")
        print(f"could not save to {output.out} ({e.strerror}): the records are printed above instead", file=sys.stderr)
        return 1
    with closed_pipe_is_no_error():
        print(f"saved to {saved}")
    return 0


def _table(records: record.Records) -> str:
    import pandas

    from labs.kit.measure import estimate

    rows = [
        {
            "metric": r.metric,
            **r.case,
            "median [95 %]": str(estimate(r.samples, r.unit)),
            "n": len(r.samples),
            "kind": r.kind,
        }
        for r in records
    ]
    table = pandas.DataFrame(rows).astype(object).fillna("")
    return table.to_string(index=False, max_colwidth=60) if rows else "no records"
