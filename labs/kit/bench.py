"""How long does a learner wait for ranks? launch() against torchrun, in turn, with a lab that does nothing else.

    python -m labs.kit.bench --rounds 5 --nproc 2

About 20 s on 2 CPU cores. "first launch" includes one `import torch`, which later launches do not wait for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labs.kit import cli
from labs.kit.display import View
from labs.kit.errors import BadInput, require
from labs.kit.measure import estimate, interleave
from labs.kit.rank import Rank
from labs.kit.record import Record, Records, attach_provenance

EMPTY = "labs.kit.bench"  # this module is also the lab: `run` below is all that its ranks do


@dataclass(frozen=True)
class Config:
    """How much to measure."""

    rounds: int = 5
    """Times that both are started, in turn."""
    smoke: bool = False
    """One round."""

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """What is started: one record, after all ranks have met."""
    rank.barrier()
    yield rank.record("ranks", "1", rank.world_size)


def start_launch(options: cli.Launch) -> None:
    """As a notebook does it."""
    from labs.kit.launch import launch  # here, since ranks import this module and need nothing of it

    launch(EMPTY, options.nproc, device=options.device, oversubscribe=options.oversubscribe, view=View())


def start_torchrun(options: cli.Launch) -> None:
    """The same lab on the same ranks, by a fresh torchrun. CalledProcessError if that fails."""
    flags = ["--device", options.device, *(["--oversubscribe"] if options.oversubscribe else [])]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.nproc),
            "-m",
            EMPTY,
            *flags,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def measure(config: Config, options: cli.Launch) -> Records:
    """Seconds of a first launch, of later ones and of torchrun, and the ratio of these two, pair by pair."""
    begin = time.perf_counter()
    start_launch(options)
    first = time.perf_counter() - begin
    steps = {"launch": lambda: start_launch(options), "torchrun": lambda: start_torchrun(options)}
    seconds = interleave(steps, 1 if config.smoke else config.rounds, torch.device("cpu"))
    ratios = [slow / fast for slow, fast in zip(seconds["torchrun"], seconds["launch"], strict=True)]
    case = {"ranks": options.nproc}
    return attach_provenance(
        [Record("kit.bench", "start_s", "s", (first,), case={"by": "first launch", **case})]
        + [Record("kit.bench", "start_s", "s", tuple(s), case={"by": by, **case}) for by, s in seconds.items()]
        + [Record("kit.bench", "ratio", "x", tuple(ratios), case={"by": "torchrun / launch", **case})]
    )


def answer(records: Records) -> Iterator[str]:
    """How long a launch takes, and how many times longer torchrun."""
    if not records.where("ratio"):  # a rank that torchrun has started
        return
    first, warm = (records.one("start_s", by=by) for by in ("first launch", "launch"))
    ratio = records.one("ratio")
    yield (
        f"Once torch is loaded, {warm.case['ranks']} ranks start, meet and end in {estimate(warm.samples, 's')}; "
        f"the first launch of a process takes {first.value:.1f} s."
    )
    yield f"A fresh torchrun takes {estimate(ratio.samples, 'x')} as long."


def main() -> None:
    """Print the answer and all medians with their intervals; save the records if asked to."""
    prog = "python -m labs.kit.bench"
    command = cli.parse(types.SimpleNamespace(Config=Config, __doc__=__doc__), prog)
    try:
        raise SystemExit(
            cli.report(sys.modules[__name__], measure(command.config, command.launch), None, command.output)
        )
    except BadInput as e:
        cli.fail(prog, str(e))


if __name__ == "__main__":
    cli.main() if "RANK" in os.environ else main()
