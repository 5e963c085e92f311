"""What do all ranks do at the same time, and for whom do they wait?

    python -m labs.rank_timeline                                # records a training of its own, on 2 ranks
    python -m labs.rank_timeline --nproc 4 --oversubscribe --folder traces    # keeps traces, page and merged trace
    python -m labs.rank_timeline --shift-ms 50                  # clocks of two machines, 50 ms apart
    python -m labs.rank_timeline rank0.json rank1.json.gz [--folder FOLDER]   # traces of yours, gloo or NCCL
    torchrun --nproc-per-node 2 -m labs.rank_timeline --model my_package.module:factory

About 5 s on 2 CPU cores. Every rank records a trace with torch.profiler; one of them is late in backward. The traces
are put on one clock: the difference of two machines' clocks is estimated from the collectives in the traces. Into a
folder it writes timeline.html, which zooms without a network, and merged.json, which Perfetto (ui.perfetto.dev) opens.
Traces of yours are read without starting a rank.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labs.common.profiling import late_training, traces
from labs.common.profiling.intervals import length
from labs.kit import cli, measure
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder
from labs.rank_timeline import clock, timeline_page
from labs.rank_timeline.clock import LANES, Merged

PROG = "python -m labs.rank_timeline"
WARM_UP = 4  # steps before the recording: DDP rearranges its buckets after the first


@dataclass(frozen=True)
class Config:
    """What is recorded, and which rank is late in it."""

    folder: str | None = None
    """Folder for the ranks' traces, timeline.html and merged.json; all ranks must see it."""
    model: str = late_training.SLEEPING
    """"sleeping": layers that sleep, so that ranks can share cores; or one of labs.models.MODELS, or
    package.module:factory."""
    layers: int = 6
    """Layers of the sleeping model."""
    layer_ms: float = 1.5
    """Time of one of them forward, in ms; backward takes twice as long."""
    width: int = 256
    """Width of its layers."""
    batch_size: int = 32
    """Samples per rank."""
    delay_ms: float = 30.0
    """How late one rank is, in ms, in every step."""
    late_rank: int | None = None
    """Which rank; by default the seed decides."""
    place: str = "backward"
    """Where it is late: data, forward, backward or optimizer."""
    shift_ms: float = 0.0
    """So much the clock of every second rank's trace is set ahead, as if it came from another machine."""
    steps: int = 12
    """Steps to record."""
    seed: int = 0
    """Seed of the model, of the data and of the choice of the late rank."""
    smoke: bool = False
    """Three steps."""

    def __post_init__(self) -> None:
        late_training.require_training(self)
        require(self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        require(abs(self.shift_ms) < 1e9, f"shift_ms must be below 1e9 in size, not {self.shift_ms}")
        require(self.late_rank is None or self.late_rank >= 0, f"late_rank must be a rank, not {self.late_rank}")
        require_folder(self.folder)


def require_folder(folder: str | None) -> None:
    """BadInput unless it is None, or a folder that is there or can be made, and written to."""
    if folder is None:
        return
    require(bool(folder.strip()) and "\0" not in folder, "folder must name a folder: --folder traces")
    place = Path(folder).absolute()
    there = next(p for p in (place, *place.parents) if p.exists())
    require(there.is_dir(), f"{there} is not a folder: choose another --folder")
    require(os.access(there, os.W_OK), f"cannot write to {there}: choose another --folder")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for a rank that there is not, or a model that cannot be built."""
    require(
        config.late_rank is None or config.late_rank < world_size,
        f"late_rank {config.late_rank} needs more ranks: the last of {world_size} is {world_size - 1}",
    )
    late_training.build(config)


def late_rank_of(config: Config, world_size: int) -> int:
    """The rank that is late."""
    drawn = random.Random(config.seed).randrange(world_size)
    return drawn if config.late_rank is None else config.late_rank


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Record on every rank, read each trace where it lies, merge what was read."""
    training = late_training.Training(late_training.build(config), config.batch_size, rank.device)
    late = late_rank_of(config, rank.world_size)
    mine = {config.place: 1e-3 * config.delay_ms} if rank.rank == late else {}
    with watched_folder() as own:
        folder = Path(config.folder or own)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank{rank.rank}.json"
        record(training, mine, 3 if config.smoke else config.steps, path, rank)
        if config.shift_ms and rank.rank % 2:
            set_clock(path, 1e-3 * config.shift_ms)
        merged = clock.merge(rank.gather(traces.read(path)))
    if config.folder and rank.rank == 0:
        write(merged, folder, [folder / f"rank{r}.json" for r in range(rank.world_size)])
    rank.barrier()  # files are there when a rank says it is done
    yield rank.record("planted_s", "s", 1e-3 * config.delay_ms, kind="modelled", of_rank=late, place=config.place)
    for r in merged.ranks:
        shift_s = 1e-3 * config.shift_ms * (r % 2)
        yield rank.record("planted_offset_s", "s", shift_s, kind="modelled", of_rank=r)
    yield from records_of(merged, rank)


def record(training: late_training.Training, late: dict[str, float], steps: int, path: Path, rank: Rank) -> None:
    """Profile `steps` steps of a training that has warmed up, and write the trace to `path`."""
    from torch.profiler import ProfilerActivity, profile, schedule

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints two lines on every rank
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (rank.device.type == "cuda")
    for _ in range(WARM_UP):
        training.step({})
    rank.barrier()
    # One step of the schedule warms the profiler up; acc_events only silences a warning about cycles, there is one.
    with profile(
        activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), acc_events=True
    ) as profiler:
        for _ in range(steps + 1):
            training.step(late)
            profiler.step()
    profiler.export_chrome_trace(str(path))


def set_clock(path: Path, ahead_s: float) -> None:
    """Rewrite a small trace as a clock that is so much ahead would have written it."""
    text = path.read_text("utf-8")
    base = re.compile(r'("baseTimeNanoseconds": )(\d+)')
    path.write_text(base.sub(lambda m: f"{m[1]}{int(m[2]) + round(1e9 * ahead_s)}", text, count=1), "utf-8")


def records_of(merged: Merged, rank: Rank) -> Iterator[Record]:
    """Clocks, lanes and arrivals, each of its rank; spans as start, end, start, end, ... since the first moment."""
    for r, offset, lanes, steps in zip(merged.ranks, merged.offsets, merged.lanes, merged.steps, strict=True):
        case = {"of_rank": r, "how": offset.how, "collectives": offset.collectives, "in_words": str(offset)}
        yield rank.record("clock_offset_s", "s", offset.s, **case)
        for lane in LANES:
            if spans := lanes[lane]:
                yield rank.record("spans_s", "s", [t for span in spans for t in span], of_rank=r, lane=lane)
        yield rank.record("steps_s", "s", [t for span in steps.values() for t in span], of_rank=r)
    for r, *late in zip(merged.ranks, *(a.late_s for a in merged.last_arrivals), strict=True):
        if late:
            yield rank.record("late_s", "s", late, of_rank=r)


def read_traces(paths: Sequence[str | Path]) -> Merged:
    """Traces of your own on one clock, one file for each rank. Where a file does not name its rank, its place does."""
    read = [traces.read(path) for path in paths]
    if any(t.rank < 0 for t in read):
        named = Counter(t.rank for t in read if t.rank >= 0)
        require(not named, "some of these traces name their rank and some do not: export all in the same way")
        read = [traces.read(path, rank=k) for k, path in enumerate(paths)]
    return clock.merge(read)


def write(merged: Merged, folder: str | Path, paths: Sequence[str | Path]) -> list[Path]:
    """timeline.html, which zooms in any browser, and merged.json for Perfetto, into `folder`. BadInput if it fails."""
    page, trace = Path(folder) / "timeline.html", Path(folder) / "merged.json"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        timeline_page.write(merged, page)
        timeline_page.write_chrome(merged, paths, trace)
    except OSError as e:
        raise BadInput(f"{folder}: {e.strerror or e}: choose another --folder") from None
    return [page, trace]


def sentences(merged: Merged) -> Iterator[str]:
    """Clocks, who comes last, and how much of the communication nothing hides."""
    traces_ = merged.traces
    events = sum(t.events for t in traces_)
    steps = max(len(t.steps) for t in traces_)
    yield (
        f"{len(traces_)} rank{'s' if len(traces_) > 1 else ''}, {steps} steps, {events:,} events; clocks: "
        + "; ".join(map(str, merged.offsets))
        + "."
    )
    missing = sorted({*range(max(t.world_size for t in traces_))} - {*merged.ranks})
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        yield f"Traces are missing of rank {listed}: whoever comes last may be one of them."
    if len(traces_) > 1:
        yield blame(merged)
    for trace, lanes in zip(traces_, merged.lanes, strict=True):
        if under_way := length(lanes["all-reduce"]):
            yield (
                f"Rank {trace.rank}: collectives are under way for {1e3 * under_way:.1f} ms, and for "
                f"{1e3 * length(lanes['wait']):.1f} ms of that nothing computes."
            )


def blame(merged: Merged) -> str:
    """Who is last to arrive, how often and by how much, in a sentence."""
    arrivals = merged.last_arrivals
    if not arrivals:
        return "No collective for which all wait is in all of these traces: who comes last cannot be told."
    last, times = Counter(a.last for a in arrivals).most_common(1)[0]
    found = [a for a in arrivals if a.last == last]
    by = measure.estimate([a.by_s for a in found], "s")
    said = f"rank {merged.ranks[last]} comes last in {times} of {len(arrivals)} steps, {by} after the one before it"
    if by_chance(times, len(arrivals), len(merged.ranks)) > 0.05:
        return f"That one rank comes last more often than by chance cannot be told: {said}."
    doubt_s = max(merged.offsets[r].doubt_s for r in {last, *(a.before_last for a in found)})
    if by.low <= doubt_s:
        return (
            f"Who holds the others up cannot be told: {said}, and their clocks may be {1e3 * doubt_s:.2f} ms "
            "further apart than they were taken to be."
        )
    return f"Who holds the others up: {said}."


def by_chance(times: int, steps: int, ranks: int) -> float:
    """An upper limit of the probability that some rank is last in so many steps, if each is drawn by lot."""
    from scipy.special import bdtrc

    return min(1.0, ranks * float(bdtrc(times - 1, steps, 1 / ranks)))


def answer(run: Records) -> Iterator[str]:
    """Of a run that recorded its own traces: the clocks, and whether the late rank was found."""
    yield "Clocks: " + "; ".join(r.case["in_words"] for r in run.where("clock_offset_s")) + "."
    [planted] = run.where("planted_s")
    late = {r.case["of_rank"]: measure.estimate(r.samples, "s") for r in run.where("late_s")}
    if not late:
        yield "One rank waits for nobody."
        return
    last = max(late, key=lambda r: late[r].value)
    yield (
        f"{1e3 * planted.value:g} ms were planted in {planted.case['place']} of rank {planted.case['of_rank']}. In "
        f"the merged traces rank {last} comes last to the end of a step, {late[last]} after the first."
    )


def main() -> None:
    """The command line: reads traces if its first words are files, records otherwise."""
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        tell(*_files_and_folder())
    else:
        cli.main()


def _files_and_folder() -> tuple[list[str], str | None]:
    parser = argparse.ArgumentParser(prog=PROG)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--folder")
    parser.error = lambda message: cli.fail(PROG, f"{message}: {PROG} rank0.json rank1.json.gz [--folder FOLDER]")
    found = parser.parse_args()
    return found.traces, found.folder


def tell(paths: Sequence[str], folder: str | None = None) -> None:
    """Print what traces of yours say; write page and merged trace into `folder`. Bad input: one line, exit code 2."""
    try:
        require_folder(folder)
        merged = read_traces(paths)
        with cli.closed_pipe_is_no_error():
            for sentence in sentences(merged):
                print(textwrap.fill(sentence, 100, subsequent_indent="  "))
            for path in write(merged, folder, paths) if folder else ():
                print(f"wrote {path}")
    except BadInput as e:
        cli.fail(PROG, str(e))
