"""Training hangs: which rank, which collective, which line - and how soon do you know?

    python -m labs.hang_clinic                                        # five ways to hang, and their cures
    python -m labs.hang_clinic --drills wrong_shape dead_peer --nproc 3 --oversubscribe
    python -m labs.hang_clinic --examine 20 --timeout-s 3600          # every way, 20 times, another rank each time
    python -m labs.hang_clinic --detail                               # what torch's own checks say

About 15 s on 2 CPU cores. Each drill is a small program on as many ranks as this lab has, with processes of its own:
one rank, drawn by the seed, does the wrong thing. When nothing moves, the ranks write what they know, and are gone.
From those files alone the diagnosis is made, and then compared with what was drawn.
"""

from __future__ import annotations

import multiprocessing.util
import random
import re
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from labs.hang_clinic.hang_ranks import MONITORED, Drilled, Way, left_over, server
from labs.hang_clinic.hangs import HANGS, Hang
from labs.kit.errors import did_you_mean, require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.watch.diagnosis import Diagnosis, diagnose
from labs.watch.evidence import RankEvidence, read

FIVE = ("skipped_collective", "wrong_shape", "out_of_data", "dead_peer", "deadlocked_p2p")
SMOKE = {"drills": ("skipped_collective", "dead_peer")}
TOOLS: dict[str, Way] = {"TORCH_DISTRIBUTED_DEBUG=DETAIL": "detail", "monitored_barrier": "monitored"}
MOST_RANKS = 4
NAMED = ("rank", "collective", "line")
SAID = ("anything", "rank", "both", "collective", "asked")


@dataclass(frozen=True)
class Config:
    """Which drills, how often, how patiently."""

    drills: tuple[str, ...] = FIVE
    """Ways to hang or crash; all, where `examine` or `detail` is given and this is left as it is."""
    seed: int = 1
    """Draws the rank that does the wrong thing, for each drill."""
    examine: int = 0
    """Rounds over the drills, each with other ranks drawn."""
    patience_s: float = 1.0
    """Seconds without progress on a rank after which all write their evidence. At work: minutes."""
    cures: bool = True
    """Whether each program runs once more with its line put right."""
    detail: bool = False
    """Ask torch's own checks instead: TORCH_DISTRIBUTED_DEBUG=DETAIL, and monitored_barrier before each collective."""
    smoke: bool = False
    """Two drills."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed must be from 0 to 4294967295, not {self.seed}")
        require(0 <= self.examine <= 1000, f"examine must be from 0 to 1000 rounds, not {self.examine}")
        require(0.3 <= self.patience_s <= 30, f"patience_s must be from 0.3 to 30, not {self.patience_s}")
        require(len(self.drills) > 0, f"drills must hold some of {', '.join(HANGS)}")
        for name in self.drills:
            hint = did_you_mean(name, HANGS)
            require(name in HANGS, f"drills: there is no {name!r}: {hint}there are {', '.join(HANGS)}")

    @property
    def chosen(self) -> tuple[str, ...]:
        """The drills of a round."""
        return tuple(HANGS) if self.drills == FIVE and (self.examine or self.detail) else self.drills


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank, which waits for nobody, and for more than are needed to see it."""
    require(2 <= world_size <= MOST_RANKS, f"a hang takes 2 to {MOST_RANKS} ranks, not {world_size}: use nproc=2")


def drawn(config: Config, name: str, round_: int, ranks: int) -> int:
    """The rank that does the wrong thing."""
    return random.Random(f"{config.seed} {round_} {name}").randrange(ranks)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Drill after drill. Rank 0 starts their processes and reads what they leave; the other ranks wait."""
    if rank.rank == 0:
        run_folder = multiprocessing.util.get_temp_dir()  # the launcher's, which goes even if this rank is killed
        with unpinned(rank), tempfile.TemporaryDirectory(dir=run_folder) as folder, server() as drill:
            rounds = max(1, config.examine)
            todo = [(i, name) for i in range(rounds) for name in config.chosen]
            for done, (i, name) in enumerate(todo, start=1):
                case = {"drill": name, "round": i, "wrong": drawn(config, name, i, rank.world_size)}
                make = asked_torch if config.detail else drilled
                yield from make(config, rank, drill, Path(folder) / f"{i}-{name}", case)
                rank.progress(done, len(todo), name)
            yield rank.record("leftovers", "1", float(len(list(Path(folder).iterdir()))), rank=0, what="folders")
    rank.barrier()


def drilled(config: Config, rank: Rank, drill: Callable[..., Drilled], folder: Path, case: dict) -> Iterator[Record]:
    """One program: how it ended, what the evidence says, whether that is right, and the same program cured."""
    name, wrong, ranks = case["drill"], case["wrong"], rank.world_size
    ended = drill(name, ranks, wrong, False, folder, config.patience_s)
    start = time.perf_counter()
    evidence = read(folder)
    found = diagnose(evidence)
    read_s = time.perf_counter() - start
    for what, value in is_right(HANGS[name], found, wrong, ranks).items():
        yield rank.record("right", "1", float(value), rank=0, what=what, **case)
    said = {"found": found.kind, "sure": found.sure, "said": str(found), "exit_codes": list(ended.exit_codes)}
    yield rank.record("evidence_s", "s", max(0.0, ended.ended - moment(folder, evidence)), rank=0, **case, **said)
    yield rank.record("reading_s", "s", read_s, rank=0, **case)
    pids = ended.pids
    if config.cures:
        cured_folder = folder / "cured"
        cured = drill(name, ranks, wrong, True, cured_folder, 10 * config.patience_s)
        pids += cured.pids
        well = cured.well and diagnose(read(cured_folder)).kind == "nothing wrong"
        yield rank.record("cured", "1", float(well), rank=0, **case, cure=HANGS[name].cure)
    yield rank.record("leftovers", "1", float(len(left_over(pids))), rank=0, what="processes", **case)
    _remove(folder)


def moment(folder: Path, evidence: list[RankEvidence]) -> float:
    """When the last rank last got on, time.time(): its last call in any recorder, or when the programs began."""
    calls = [c.created_s for e in evidence for c in e.calls or ()]
    return max([*calls, (folder / "began").stat().st_mtime])


def is_right(hang: Hang, found: Diagnosis, wrong: int, ranks: int) -> dict[str, bool]:
    """Whether the diagnosis is sure, and names what was planted."""
    return {
        "rank": found.sure and found.ranks == hang.ranks(wrong, ranks),
        "collective": found.collective in hang.collective,
        "line": found.line is not None and found.line.line in hang.lines and found.line.file.endswith("hangs.py"),
    }


def asked_torch(
    config: Config, rank: Rank, drill: Callable[..., Drilled], folder: Path, case: dict
) -> Iterator[Record]:
    """What torch's own checks print for one program: whether that names the rank, and the collective.

    A "names" record for each `what`: anything, rank, both (it shows what two ranks call, not which is wrong),
    collective, crashed, asked (0: the check does not stand before the call in question).
    """
    hang = HANGS[case["drill"]]
    for tool, way in TOOLS.items():
        place = folder / way
        ended = drill(case["drill"], rank.world_size, case["wrong"], False, place, config.patience_s, way)
        said = told(ended.printed)
        more = {
            "crashed": -signal.SIGSEGV in ended.exit_codes,  # no program here does that by itself
            "asked": way != "monitored" or not set(hang.collective).isdisjoint(MONITORED),
        }
        for what, value in (named(said, hang, case["wrong"], rank.world_size) | more).items():
            yield rank.record("names", "1", float(value), rank=0, tool=tool, what=what, said=said[:300], **case)
        yield rank.record(
            "leftovers", "1", float(len(left_over(ended.pids))), rank=0, what="processes", tool=tool, **case
        )
    _remove(folder)


SAYS = re.compile(r"^.*(?:mismatch between collectives|monitoredBarrier).*$", re.M)
LATE = re.compile(r"Ranks? ([\d, ]+) failed to pass")
SENT_TO = re.compile(r"from rank (\d+)\. Please check")  # what the others print: whose log to read
SHOWN = re.compile(r"Rank (\d+) is running collective: (.*?)(?=, but Rank|\.Collectives differ| \| |$)")


def told(printed: str) -> str:
    """The lines in which a check says something, other than that a connection or the time is over."""
    return " | ".join(dict.fromkeys(line.strip() for line in SAYS.findall(printed)))


def named(said: str, hang: Hang, wrong: int, ranks: int) -> dict[str, bool]:
    """Whether the text singles out the right rank, shows what two ranks call, and has the name of the collective."""
    blamed = {int(n) for found in LATE.findall(said) or SENT_TO.findall(said) for n in re.findall(r"\d+", found)}
    shown = {int(rank): call for rank, call in SHOWN.findall(said)}
    calls = [c.replace("_", "") for c in hang.collective]
    return {
        "anything": bool(said),
        "rank": (blamed or odd_ones(shown)) == set(hang.ranks(wrong, ranks)),
        "both": len(set(shown.values())) > 1,
        "collective": any(c in said.replace("_", "").lower() for c in calls),
    }


def odd_ones(shown: dict[int, str]) -> set[int]:
    """Ranks whose call is not that of most ranks which a text shows; none, if no call is that of most."""
    usual, count = Counter(shown.values()).most_common(1)[0] if shown else ("", 0)
    return {rank for rank, call in shown.items() if call != usual} if count > len(shown) / 2 else set()


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


# What a learner reads


def counts(run: Records) -> dict[str, dict[str, tuple[int, int]]]:
    """{drill: {"rank", "collective", "line", "cured", "clean": (right, tried)}}."""
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for name in dict.fromkeys(r.case["drill"] for r in run.where("right")):
        row = {what: [r.value == 1 for r in run.where("right", drill=name, what=what)] for what in NAMED}
        row["cured"] = [r.value == 1 for r in run.where("cured", drill=name)]
        row["clean"] = [r.value == 0 for r in run.where("leftovers", drill=name)]
        table[name] = {what: (sum(values), len(values)) for what, values in row.items()}
    return table


def answer(run: Records) -> Iterator[str]:
    """How often the diagnosis was right, how soon, what is left; or what torch's own checks named."""
    left = sum(r.value for r in run.where("leftovers"))
    clean = "Nothing is left of them." if not left else f"{left:.0f} processes or files are left of them."
    if tools := run.where("names", what="rank"):
        for tool in TOOLS:
            rows = {what: run.where("names", tool=tool, what=what) for what in SAID}
            of = {what: [r.case["drill"] for r in rs if r.value] for what, rs in rows.items()}
            only = [drill for drill in of["both"] if drill not in of["rank"]]
            yield (
                f"{tool} says something in {len(of['anything'])} of {len(of['asked'])} drills. It singles out the "
                f"right rank in {len(of['rank'])} ({', '.join(of['rank']) or 'none'}), shows what two ranks call, not "
                f"which is wrong, in {len(only)} ({', '.join(only) or 'none'}), and has the name of the collective in "
                f"{len(of['collective'])}."
            )
            if crashed := [r.case["drill"] for r in run.where("names", tool=tool, what="crashed") if r.value]:
                yield (
                    f"With {tool} the ranks of {', '.join(crashed)} crashed below Python (SIGSEGV), and said nothing. "
                    "torch 2.13.0 without CUDA does so with gloo when DDP is made, healthy programs included."
                )
        yield f"{len({r.case['drill'] for r in tools})} ways to hang were tried. {clean}"
        return
    table = counts(run)
    tried = sum(row["line"][1] for row in table.values())
    right = {what: sum(row[what][0] for row in table.values()) for what in ("rank", "collective", "line", "cured")}
    yield (
        f"{tried} hangs and crashes in {len(table)} ways, the rank drawn each time: the diagnosis named the right rank "
        f"{right['rank']} times, the collective {right['collective']} times, the line {right['line']} times."
    )
    if missed := [name for name, row in table.items() if min(row[w][0] for w in NAMED) < row["line"][1]]:
        yield f"Not all right: {', '.join(missed)}."
    seconds = [r.value for r in run.where("evidence_s")]
    reading = [r.value for r in run.where("reading_s")]
    yield (
        f"From the last progress to the files of all ranks it took {statistics.median(seconds):.1f} s (at most "
        f"{max(seconds):.1f} s; {run[0].config['patience_s']:g} s of it is patience), to read them "
        f"{1e3 * statistics.median(reading):.0f} ms."
    )
    if cures := sum(row["cured"][1] for row in table.values()):
        yield f"With the line put right, {right['cured']} of {cures} ended well. {clean}"
    else:
        yield clean
