"""Traces that torch.profiler exports, of any size: read one event at a time, kept as a few numbers for each.

A trace of 500 steps has a million events and more; `json.load` takes some twenty times their bytes of text.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from labs.common.profiling.intervals import Span, packed, union
from labs.kit.errors import BadInput, brief, require

CHUNK = 2**20  # characters read at a time
LONGEST = 2**25  # characters that one event or one fact about the run may have
PHASES = {
    "data": r"\W*(data|data loading|next batch)\W*|enumerate\(DataLoader\).*",
    "forward": r"\W*forward( pass)?\W*|DistributedDataParallel\.forward|FullyShardedDataParallel\.forward",
    "backward": r"\W*backward( pass)?\W*",
    "optimizer": r"\W*optimizer( step)?\W*|Optimizer\.step#.*",
}
"""Names of record_function ranges, the learner's and torch's own, by the lane they are drawn in."""
OF_AUTOGRAD = "autograd::engine::evaluate_function"  # backward, where the loop has no range for it
STEP = re.compile(r"ProfilerStep\s*#?\s*(\d{1,15})")
NCCL = re.compile(r"nccl(?:Symk?)?(?:Dev)?Kernel_?([A-Za-z]+)")
"""Its kernels; those of symmetric memory are ncclSymDevKernel_ in NCCL 2.27 and ncclSymkDevKernel_ later."""
ALL_WAIT = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
"""Collectives that no rank can leave before the last one has come. A broadcast's source may."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Collective:
    """One collective on one rank; times in s on the clock of its trace."""

    name: str
    """In small letters, such as "allreduce"."""
    called: float
    """When the rank came to it. With NCCL, when its kernel began: the stream's work before it was done."""
    start: float
    """When this rank began to work on it: gloo has two threads, and a third collective waits for one of them."""
    end: float
    step: int | None = None
    """Number of the profiler's step in which it began."""
    group: str = ""

    @property
    def all_wait(self) -> bool:
        """Whether it cannot end before the last rank has come."""
        return self.name.startswith(ALL_WAIT)


@dataclass(frozen=True)
class RankTrace:
    """What is kept of one rank's trace; times in s since 1970 on the clock of the rank's machine."""

    path: str
    rank: int
    world_size: int
    backend: str
    host: str
    steps: dict[int, Span]
    """{number: (start, end)} of the profiler's steps."""
    phases: dict[str, list[Span]]
    """What the rank did by lane: data, forward, backward, optimizer."""
    computes: list[Span]
    """When an operator ran, or on a GPU a kernel or copy, other than a collective."""
    collectives: list[Collective]
    """In the order in which the rank called them."""
    events: int
    on_gpu: bool

    @property
    def span(self) -> Span:
        """First start and last end of what is kept."""
        every = [s for spans in (*self.phases.values(), self.steps.values()) for s in spans]
        every += [(c.called, c.end) for c in self.collectives] + self.computes[:1] + self.computes[-1:]
        return min((a for a, _ in every), default=0.0), max((b for _, b in every), default=0.0)


class Trace:
    """A trace file, read as a stream: `events()` yields each; `facts` holds the rest, complete when it has ended.

    Plain or gzip text, an object with traceEvents or a bare list. BadInput, one line, for anything else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.facts = Path(path), {}
        self._text, self._at, self._ended = "", 0, False
        self._json = json.JSONDecoder()

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, as the dictionary that stands in the file."""
        try:
            with _opened(self.path) as self._file:
                yield from self._all()
        except OSError as e:
            raise BadInput(f"{self.path}: {e.strerror or e}") from None
        except (EOFError, zlib.error) as e:
            raise BadInput(f"{self.path} is damaged ({e}): export or copy it again") from None
        except UnicodeDecodeError:
            raise BadInput(f"{self.path} is no text: a trace is JSON, also as .json.gz") from None
        except RecursionError:
            raise BadInput(f"{self.path} is no trace of torch.profiler: it is nested too deeply") from None

    def _all(self) -> Iterator[dict[str, Any]]:
        self._text, self._at, self._ended = "", 0, False
        if (opening := self._next()) == "[":
            yield from self._list()
            return
        require(opening == "{", f"{self.path} is no trace of torch.profiler: it does not begin as JSON does")
        found = False
        while (c := self._next()) != "}":
            if c == ",":
                continue
            self._at -= 1
            key = self._value()
            require(isinstance(key, str) and self._next() == ":", self._broken())
            if key == "traceEvents":
                require(self._next() == "[", f"{self.path} is no trace of torch.profiler: traceEvents is no list")
                found = True
                yield from self._list()
            else:
                self.facts[key] = self._value()
        require(found, f"{self.path} is no trace of torch.profiler: it has no traceEvents")

    def _list(self) -> Iterator[dict[str, Any]]:
        """The events up to the closing bracket. Most of a reader's time is here."""
        decode = self._json.raw_decode
        while (c := self._next()) != "]":
            if c == ",":
                continue
            self._at -= 1
            try:
                event, self._at = decode(self._text, self._at)
            except ValueError:
                event = self._value()  # the rest of it has not been read yet
            if type(event) is dict:
                yield event

    def _next(self) -> str:
        """The next character that is not white space, which it steps over."""
        while True:
            while self._at < len(self._text):
                c = self._text[self._at]
                self._at += 1
                if c not in " \t\r\n":
                    return c
            require(self._more(), self._broken())

    def _value(self) -> Any:
        """The JSON value that begins here; reads on until it is whole."""
        while True:
            try:
                self._next()
                self._at -= 1
                value, end = self._json.raw_decode(self._text, self._at)
            except ValueError:
                value, end = None, len(self._text)
            if end < len(self._text):  # a number at the end of what was read may go on
                self._at = end
                return value
            require(len(self._text) - self._at < LONGEST and self._more(), self._broken())

    def _more(self) -> bool:
        piece = self._file.read(CHUNK)
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def _broken(self) -> str:
        near = " ".join(self._text[self._at : self._at + 40].split())
        where = f"near {near!r}" if near else "it ends in the middle"
        return f"{self.path} is no whole trace of torch.profiler ({where}): export it again, and let the export finish"


def _opened(path: Path) -> TextIO:
    raw = path.open("rb")
    try:
        packed_ = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        return io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed_ else raw, encoding="utf-8")
    except BaseException:
        raw.close()
        raise


@dataclass
class _Kept:
    """What the loop over a file's events gathers. All times in microseconds, as they stand in it."""

    steps: dict[int, Span] = field(default_factory=dict)
    cpu: dict[str, list[Span]] = field(default_factory=lambda: {lane: [] for lane in PHASES})
    gpu: dict[str, list[Span]] = field(default_factory=lambda: {lane: [] for lane in PHASES})
    ops: tuple[array, array] = field(default_factory=lambda: (array("d"), array("d")))
    kernels: tuple[array, array] = field(default_factory=lambda: (array("d"), array("d")))
    autograd: tuple[array, array] = field(default_factory=lambda: (array("d"), array("d")))
    calls: list[tuple[float, str]] = field(default_factory=list)
    collectives: list[tuple[float, float, str, str]] = field(default_factory=list)
    gpu_steps: dict[int, Span] = field(default_factory=dict)
    on_gpu: bool = False
    events: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Sort one event in; what is no bar with a time is left out."""
        self.events += 1
        if event.get("ph") != "X":
            return
        start, end = _times(event)
        if end < start:
            return
        name, kind = str(event.get("name", "")), event.get("cat")
        if kind in ON_GPU:
            self.on_gpu = True
            if called := NCCL.match(name):
                args = event.get("args") or {}
                told = args.get("Collective name") or called[1]
                self.collectives.append((start, end, _plain(told), str(args.get("Process Group Name", ""))))
            else:
                _note(self.kernels, start, end)
        elif kind == "cpu_op":
            if name.startswith("c10d::"):
                self.calls.append((start, _plain(name[6:])))
            elif not name.startswith(("record_param_comms", "nccl:")):
                _note(self.ops, start, end)
                if name.startswith(OF_AUTOGRAD):
                    _note(self.autograd, start, end)
        elif kind == "user_annotation" and name.startswith("gloo:"):
            self.collectives.append((start, end, _plain(name[5:]), ""))
        elif kind in ("user_annotation", "gpu_user_annotation"):
            on_host = kind == "user_annotation"
            lanes, steps = (self.cpu, self.steps) if on_host else (self.gpu, self.gpu_steps)
            if number := STEP.match(name):
                # A GPU's step is written once for each of its streams: it lasts from the first to the last.
                first, last = steps.get(int(number[1]), (start, end))
                steps[int(number[1])] = (min(first, start), max(last, end))
            elif lane := lane_of(name):
                lanes[lane].append((start, end))


def lane_of(name: str) -> str:
    """The lane of a range by its name; "" if it has none."""
    return next((lane for lane, pattern in PHASES.items() if re.fullmatch(pattern, name, re.IGNORECASE)), "")


def _times(event: dict[str, Any]) -> Span:
    """(start, end) in microseconds; (1, 0) if there are none. Old versions write them as text."""
    try:
        start, lasts = float(event["ts"]), float(event["dur"])
    except (KeyError, TypeError, ValueError):
        return 1.0, 0.0
    return (start, start + lasts) if math.isfinite(start) and 0 <= lasts < math.inf else (1.0, 0.0)


def _note(spans: tuple[array, array], start: float, end: float) -> None:
    spans[0].append(start)
    spans[1].append(end)


def _plain(name: Any) -> str:
    """A collective by one name, however it is written: "c10d::_allgather_base_", "AllGather" and "all_gather"."""
    return re.sub(r"[^a-z]|base|coalesced|into_?tensor|tensor", "", str(name).lower())


def read(path: str | Path, rank: int | None = None) -> RankTrace:
    """What a trace says of its rank, in bounded memory. `rank` is used where the file names none. BadInput."""
    file, kept = Trace(path), _Kept()
    for event in file.events():
        kept.add(event)
    about, base_s = _about(file), 1e-9 * _number(file, "baseTimeNanoseconds")
    lanes = {lane: kept.gpu[lane] or spans for lane, spans in kept.cpu.items()}
    if not lanes["backward"]:
        lanes["backward"] = packed(*kept.autograd)
    steps = {n: _seconds(span, base_s) for n, span in sorted((kept.gpu_steps or kept.steps).items())}
    found = RankTrace(
        str(path),
        about.get("rank", -1 if rank is None else rank),
        about.get("world_size", 0),
        about.get("backend", ""),
        str(file.facts.get("host_name", "")),
        steps,
        {lane: [_seconds(s, base_s) for s in union(spans)] for lane, spans in lanes.items()},
        [_seconds(s, base_s) for s in packed(*(kept.kernels if kept.on_gpu else kept.ops))],
        list(_collectives(kept, base_s, steps)),
        kept.events,
        kept.on_gpu,
    )
    require(
        bool(found.span[1]),
        f"{path} holds no operator, range or collective: profile some steps with activities=[ProfilerActivity.CPU]",
    )
    return found


def _about(file: Trace) -> dict[str, Any]:
    """rank, world_size and backend from distributedInfo, where they make sense."""
    said = file.facts.get("distributedInfo")
    said = said if isinstance(said, dict) else {}
    kinds = {"rank": int, "world_size": int, "backend": str}
    return {name: said[name] for name, kind in kinds.items() if type(said.get(name)) is kind}


def _number(file: Trace, name: str) -> float:
    value = file.facts.get(name, 0)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    require(good, f"{file.path}: {name} is {brief(value)}, not a number: export the trace again")
    return float(value)


def _seconds(span: Span, base_s: float) -> Span:
    return base_s + 1e-6 * span[0], base_s + 1e-6 * span[1]


def _collectives(kept: _Kept, base_s: float, steps: dict[int, Span]) -> Iterator[Collective]:
    """In order, each with the moment of its call and the step it belongs to.

    gloo runs what is called as c10d::allreduce_ on a thread of its own; the k-th call is the k-th that is run. Where
    their numbers differ, as at the start of a recording, the run's own start stands for the call.
    """
    ran = sorted(c for c in kept.collectives if c[2] not in ("send", "recv"))
    calls = sorted(start for start, name in kept.calls if name not in ("send", "recv", "recvanysource"))
    if kept.on_gpu or len(calls) != len(ran) or any(call > c[0] + 1e3 for call, c in zip(calls, ran, strict=True)):
        calls = [c[0] for c in ran]
    ends = iter(chain(steps.items(), [(None, (math.inf, math.inf))]))
    number, span = next(ends)
    for called, (start, end, name, group) in zip(calls, ran, strict=True):
        at, (began, ended) = base_s + 1e-6 * called, _seconds((start, end), base_s)
        while number is not None and at >= span[1]:
            number, span = next(ends)
        yield Collective(name, min(at, began), began, ended, number if at >= span[0] else None, group)
