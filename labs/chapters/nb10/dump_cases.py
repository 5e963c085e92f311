"""Flight Recorder's dumps of jobs that hang: some recorded on real ranks with gloo, others made from seeds.

    python -m labs.chapters.nb10.dump_cases        # for maintainers: record flight_dumps.json anew, about a minute

Entries hold those of torch's fields that a post-mortem needs, under their names. gloo never writes how far a collective
has come: its state is "scheduled" in every entry, as it is in the made ones.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labs.chapters.nb10 import three_steps as job
from labs.kit import _compat, hardware
from labs.kit.launch import run_on_ranks

Entry = dict[str, Any]
Dumps = dict[int, list[Entry]]
Groups = dict[str, list[int]]
Answer = tuple[int, str, str, int, str] | None
"""(rank, kind, group, number in that group, "file.py:line"), or None if nobody did anything wrong."""

FILE = Path(__file__).with_name("flight_dumps.json")
FIELDS = (
    "process_group",
    "collective_seq_id",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "state",
    "time_created_ns",
    "frames",
)


@dataclass(frozen=True)
class Case:
    """What was left of a job, and what had happened to it."""

    name: str
    dumps: Dumps
    groups: Groups
    answer: Answer


# -- jobs of four ranks that were recorded


RECORDED: dict[str, tuple[int, str, str, int, str] | None] = {
    "skips its pair": (1, "missing", "1", 3, "dist.all_reduce(torch.ones(8), group=pair)"),
    "leaves the loop": (2, "missing", "0", 6, "dist.all_reduce(torch.ones(16))"),
    "dies": (3, "dead", "0", 6, "dist.all_reduce(torch.ones(16))"),
    "gathers": (0, "other collective", "0", 6, "dist.all_gather([torch.ones(16) for _ in range(4)], torch.ones(16))"),
    "is slow": None,
}
"""{fault: what is to be found, with the line's text in place of its number}."""


def _recorded_on_rank(fault: str) -> list[Entry] | None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "200"  # read at the first entry
    wait = datetime.timedelta(seconds=2)
    pairs = [dist.new_group(ranks, timeout=wait) for ranks in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    _compat.set_group_timeout(wait)
    try:
        job.three_steps(rank, fault, pairs[rank // 2])
        time.sleep(3)  # busy with something else
    except RuntimeError:  # it has waited for too long
        pass
    if fault == "dies" and rank == 3:
        return None
    dumped = next(_compat.flight_recorders())(True, True, False)  # the form in JSON has no frames
    return [_shortened(e) for e in pickle.loads(dumped)["entries"]]


def _shortened(entry: Entry) -> Entry:
    kept = {field: entry[field] for field in FIELDS}
    kept["frames"] = [{**f, "filename": _short(f["filename"])} for f in entry["frames"][:4]]
    return kept


def _short(path: str) -> str:
    for folder in ("site-packages/", "labs/chapters/nb10/", "labs/"):
        if folder in path:
            return ("" if "nb10" in folder else folder) + path.partition(folder)[2]
    return Path(path).name


def _record() -> None:
    program = Path(job.__file__)
    text = program.read_text().splitlines()
    found = []
    for fault, what in RECORDED.items():
        each = run_on_ranks(_recorded_on_rank, 4, fault)
        answer = None
        if what:
            number = next(i for i, line in enumerate(text, 1) if line.strip() == what[4])
            answer = [*what[:4], f"{program.name}:{number}"]
        dumps = {rank: entries for rank, entries in enumerate(each) if entries is not None}
        found.append(
            {
                "name": f"recorded: {fault}",
                "answer": answer,
                "dumps": dumps,
                "groups": {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3]},
            }
        )
    machine = f"{os.cpu_count()} cores of an {hardware.cpu_name()}"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    origin = {"torch": torch.__version__, "date": today, "backend": "gloo", "machine": machine}
    FILE.write_text(json.dumps({"about": origin, "cases": found}).replace("}, {", "},\n{") + "\n")


@functools.cache
def _from_file() -> list[Case]:
    rows = json.loads(FILE.read_text())["cases"]
    return [
        Case(
            row["name"],
            {int(rank): entries for rank, entries in row["dumps"].items()},
            row["groups"],
            tuple(row["answer"]) if row["answer"] else None,
        )
        for row in rows
    ]


def about() -> str:
    """Where the recorded dumps come from."""
    a = json.loads(FILE.read_text())["about"]
    return f"Recorded on {a['machine']}, {a['date']}, 4 ranks with {a['backend']} of torch {a['torch']}."


# -- jobs that are made: ranks walk through a program, and stop where nobody lets them go on


@dataclass(frozen=True)
class Call:
    """A collective in the program: in which kind of group ("all" or "pair"), and what FR writes of it."""

    of: str
    name: str
    size: int
    dtype: str
    line: int
    line_of_rank_0: int = 0
    """Where rank 0 calls the same from another line; 0: nowhere."""


STEP = (
    Call("all", "broadcast", 1, "Long", 31),
    Call("pair", "all_reduce", 4096, "BFloat16", 38),
    Call("pair", "all_reduce", 4096, "BFloat16", 40),
    Call("all", "all_reduce", 1024, "Float", 47),
    Call("all", "all_reduce", 1024, "Float", 47),
    Call("all", "all_gather", 1024, "Float", 52),
    Call("all", "all_reduce", 2, "Double", 66, line_of_rank_0=63),
)
STEPS, STEP_NS, JITTER_NS = 4, 1_000_000_000, 20_000_000
LAST = 3 * len(STEP)  # the first call of the last step


def _program(ranks: int) -> tuple[list[Call], Groups]:
    pairs = {str(1 + k // 2): [k, k + 1] for k in range(0, ranks, 2)}
    return list(STEP) * STEPS, {"0": list(range(ranks)), **pairs}


@dataclass
class Rank:
    """One rank on its way: what is left to call, what it has called."""

    number: int
    todo: list[tuple[int, Call]]
    """(place in the program, which gives the time; what is called there)"""
    called: list[tuple[str, int, int, Call]]
    """(group, number in it, place, what)"""

    def group(self, call: Call) -> str:
        """Name of the group in which it takes part in this call."""
        return "0" if call.of == "all" else str(1 + self.number // 2)

    def count(self, group: str) -> int:
        """Collectives that it has called in this group."""
        return sum(g == group for g, *_ in self.called)


def _walk(ranks: list[Rank], groups: Groups) -> None:
    """Let each rank call what it has to, as far as it gets."""
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            if rank.todo and _may_go_on(rank, ranks, groups):
                place, call = rank.todo.pop(0)
                group = rank.group(call)
                rank.called.append((group, rank.count(group) + 1, place, call))
                moved = True


def _may_go_on(rank: Rank, ranks: list[Rank], groups: Groups) -> bool:
    """Whether the last collective that this rank has called is over for it."""
    if not rank.called:
        return True
    group, number, _, call = rank.called[-1]
    theirs = {r: next((c for g, n, _, c in ranks[r].called if (g, n) == (group, number)), None) for r in groups[group]}
    if any(c is not None and _what(c) != _what(call) for c in theirs.values()):
        return False
    if call.name == "broadcast":  # a root waits for nobody, and nobody but for the root
        return theirs[min(groups[group])] is not None
    return all(theirs.values())


def _what(call: Call) -> tuple[str, int, str]:
    return call.name, call.size, call.dtype


Change = Callable[[list[Rank]], None]


def _made(
    name: str, seed: int, change: Change, answer: Answer, ranks: int = 4, keep: int = 17, lost: tuple[int, ...] = ()
) -> Case:
    """A job that `change` did something to; each rank keeps its last `keep` entries, the files of `lost` are lost."""
    dice = random.Random(seed)
    program, groups = _program(ranks)
    crew = [Rank(r, list(enumerate(program)), []) for r in range(ranks)]
    change(crew)
    _walk(crew, groups)
    start = 1_790_000_000_000_000_000 + seed * 10**12
    dumps = {}
    for rank in crew:
        entries = []
        for group, number, place, call in rank.called:
            at = start + place * STEP_NS // len(STEP) + dice.randrange(JITTER_NS)
            entries.append(_entry(rank.number, group, number, call, at))
        if rank.number not in lost:
            dumps[rank.number] = entries[-keep - dice.randrange(3) :]
    return Case(name, dumps, groups, answer)


C10D, LOGGER = (f"site-packages/torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger"))
NN, FUNCTION = (f"site-packages/torch/{name}.py" for name in ("distributed/nn/functional", "autograd/function"))
LINES = {"broadcast": 3145, "all_reduce": 3245, "all_gather": 4280}
"""Of torch 2.13, where distributed_c10d.py records the call."""
WITH_GRADIENTS = (("forward", NN, 408), ("apply", FUNCTION, 625), ("all_gather", NN, 168))
"""Frames that torch.distributed.nn.functional.all_gather adds: a program's line is not always equally deep."""


def _frames(call: Call, line: int) -> list[dict[str, Any]]:
    within = WITH_GRADIENTS if call.name == "all_gather" else ()
    rows = [(call.name, C10D, LINES[call.name]), ("wrapper", LOGGER, 83), *within]
    rows += [("train_step", "train.py", line), ("main", "train.py", 88)]
    return [{"name": name, "filename": file, "line": n} for name, file, n in rows]


def _entry(rank: int, group: str, number: int, call: Call, at_ns: int) -> Entry:
    line = call.line_of_rank_0 if rank == 0 and call.line_of_rank_0 else call.line
    return {
        "process_group": [group, "default_pg" if group == "0" else "undefined"],
        "collective_seq_id": number,
        "profiling_name": f"gloo:{call.name}",
        "input_sizes": [[call.size]],
        "input_dtypes": [call.dtype],
        "state": "scheduled",
        "time_created_ns": at_ns,
        "frames": _frames(call, line),
    }


def _number(place: int, of: str) -> int:
    """Number in its group of the program's call at `place`."""
    program, _ = _program(4)
    return sum(c.of == of for c in program[: place + 1])


def _stops(rank: int, place: int) -> Change:
    """It calls nothing from there on."""

    def change(crew: list[Rank]) -> None:
        del crew[rank].todo[place:]

    return change


def _skips(ranks: tuple[int, ...], place: int) -> Change:
    """They leave out one call, and go on."""

    def change(crew: list[Rank]) -> None:
        for rank in ranks:
            del crew[rank].todo[place]

    return change


def _calls(rank: int, place: int, call: Call, instead: bool = True) -> Change:
    """It calls something else there, or something more."""

    def change(crew: list[Rank]) -> None:
        crew[rank].todo[place : place + instead] = [(place, call)]

    return change


def _end(place: int) -> Change:
    """The job is no further than this call."""

    def change(crew: list[Rank]) -> None:
        for rank in crew:
            del rank.todo[place + 1 :]

    return change


def _both(one: Change, other: Change) -> Change:
    def change(crew: list[Rank]) -> None:
        one(crew)
        other(crew)

    return change


EXTRA = Call("all", "all_reduce", 1, "Float", 71)
SMALL = Call("all", "all_reduce", 512, "Float", 47)
HALF = Call("all", "all_gather", 1024, "Half", 52)
END = len(STEP) * STEPS
REDUCE, GATHER, PAIR, LOSS = LAST + 3, LAST + 5, LAST + 2, LAST + 6


@functools.cache
def _all() -> list[Case]:
    return [
        *_from_file(),
        _made(
            "a gradient is missing", 1, _stops(3, REDUCE), (3, "missing", "0", _number(REDUCE, "all"), "train.py:47")
        ),
        _made("a slow step", 2, _end(GATHER), None),
        _made("a broadcast is missing", 3, _stops(2, LAST), (2, "missing", "0", _number(LAST, "all"), "train.py:31")),
        _made(
            "a pair's partner is missing",
            4,
            _stops(4, PAIR),
            (4, "missing", "3", _number(PAIR, "pair"), "train.py:40"),
            ranks=6,
        ),
        _made(
            "a smaller tensor",
            5,
            _calls(1, REDUCE, SMALL),
            (1, "other size", "0", _number(REDUCE, "all"), "train.py:47"),
        ),
        _made(
            "another dtype", 6, _calls(0, GATHER, HALF), (0, "other size", "0", _number(GATHER, "all"), "train.py:52")
        ),
        _made(
            "one leaves out a collective",
            7,
            _skips((2,), GATHER),
            (2, "other collective", "0", _number(GATHER, "all"), "train.py:66"),
        ),
        _made(
            "three leave out a collective",
            8,
            _skips((0, 1, 3), GATHER),
            (2, "other collective", "0", _number(GATHER, "all"), "train.py:52"),
        ),
        _made(
            "one more at the end",
            9,
            _calls(0, END, EXTRA),
            (0, "extra", "0", _number(END - 1, "all") + 1, "train.py:71"),
        ),
        _made(
            "one more on the way",
            10,
            _calls(3, REDUCE, EXTRA, instead=False),
            (3, "other size", "0", _number(REDUCE, "all"), "train.py:71"),
        ),
        _made(
            "a file is missing, and its rank is dead",
            11,
            _stops(1, GATHER),
            (1, "dead", "0", _number(GATHER, "all"), "train.py:52"),
            lost=(1,),
        ),
        _made(
            "a file is missing, and another rank is to blame",
            12,
            _stops(0, GATHER),
            (0, "missing", "0", _number(GATHER, "all"), "train.py:52"),
            lost=(3,),
        ),
        _made("a slow step, two lines of code", 13, _end(LOSS), None, ranks=6),
        _made(
            "a pair's partner and a file are missing",
            14,
            _stops(1, PAIR),
            (1, "missing", "1", _number(PAIR, "pair"), "train.py:40"),
            ranks=6,
            lost=(4,),
        ),
        _made(
            "a broadcast is missing, and the ring is short",
            15,
            _stops(1, LAST),
            (1, "missing", "0", _number(LAST, "all"), "train.py:31"),
            keep=9,
        ),
    ]


def cases() -> list[Case]:
    """All cases, recorded ones first; the caller's own, to change as they like."""
    return copy.deepcopy(_all())


if __name__ == "__main__":
    from labs.chapters.nb10 import dump_cases  # ranks cannot import __main__

    dump_cases._record()
