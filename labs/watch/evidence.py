"""What each rank leaves when a training run hangs or dies, written to one folder and read back.

    rank0.recorder.json   torch's flight recorder, of gloo and NCCL: the last collectives with sizes and Python lines
    rank0.stacks.txt      where each thread of this rank was
    rank0.end.json        how this rank ended: exit code, signal, error
    nccl_rank_0           torch's own dump, which it writes when a collective times out under NCCL

A rank that was killed leaves nothing, and that is evidence as well. Reading a folder needs no torch, and runs nothing
that the files hold: torch's own torchfrtrace loads its dumps with pickle, which runs whatever a pickle says.
"""

from __future__ import annotations

import faulthandler
import io
import json
import linecache
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labs.kit import _compat
from labs.kit.record import write_atomic

BUFFER, OLDER_BUFFER = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Environment: entries that torch's flight recorder keeps, by default 2,000 in torch 2.13. 0 records nothing, which was
the default of some earlier versions. torch reads it when a process makes its first process group."""
DUMP_FILE, OLDER_DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Environment: path of NCCL's dump without the rank at its end. torch 2.13 knows both names."""
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_NAME = "nccl_rank_"
LARGEST_BYTES = 256 * 1024**2  # of a file that is read; a ring of 2,000 entries with stacks takes some 5 MB
MOST_RANKS = 100_000


def recorder_settings(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment with which torch records, and NCCL dumps into `folder` on a timeout; without what is already set."""
    wanted = {BUFFER: "2000", DUMP_ON_TIMEOUT: "1", DUMP_FILE: f"{folder}/{DUMP_NAME}"}
    older = {BUFFER: OLDER_BUFFER, DUMP_FILE: OLDER_DUMP_FILE}  # torch reads the older name where the newer is not set
    return {n: v for n, v in wanted.items() if n not in environ and older.get(n, n) not in environ}


def torch_dump_prefix(environ: Mapping[str, str]) -> Path:
    """Where torch writes NCCL's dumps, without the rank at the end of the name."""
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"
    return Path(environ.get(DUMP_FILE) or environ.get(OLDER_DUMP_FILE) or f"{cache}/torch/comm_lib_trace_rank_")


# What ranks write ----------------------------------------------------------------------------------------------------


def write_recorder(folder: Path, rank: int) -> Path:
    """Write what torch's flight recorder holds, from any thread, also while a collective hangs.

    There are no entries if BUFFER was 0 when the process group was made.
    """
    return _write_json(folder / f"rank{rank}.recorder.json", recorded() | {"rank": rank})


def write_stacks(folder: Path, rank: int) -> Path:
    """Append where all threads are, innermost frame first; works while a collective hangs in C++."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.stacks.txt"
    with path.open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def arm(folder: Path, rank: int) -> None:
    """Let Python write the stacks of this process there, should a signal such as SIGABRT or SIGSEGV end it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank{rank}.stacks.txt").open("a")  # open for the life of the process: nothing can be opened then
    faulthandler.enable(file, all_threads=True)


def write_end(
    folder: Path,
    rank: int,
    exit_code: int | None = None,
    signal: str = "",
    error: str = "",
    traceback: str = "",
    step: int | None = None,
) -> Path:
    """How the rank ended. exit_code None: it still ran when this was written. error is "Type: message"."""
    end = {"exit_code": exit_code, "signal": signal, "error": error, "traceback": traceback, "step": step}
    return _write_json(folder / f"rank{rank}.end.json", end)


def _write_json(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, json.dumps(values))


def recorded() -> dict[str, Any]:
    """The flight recorders of this process as one dict: "entries", "pg_status", and "pg_config" with names and ranks.

    gloo writes pg_config under an empty name: the groups that this process knows are put in its place.
    """
    found: dict[str, Any] = {"version": "", "entries": [], "pg_status": {}, "pg_config": {}}
    for dump in _compat.flight_recorders():
        held = _unpickled(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
        found["version"] = str(held.get("version", ""))
        found["entries"] += held.get("entries", [])
        found["pg_status"] |= held.get("pg_status", {})
        found["pg_config"] |= {k: v for k, v in held.get("pg_config", {}).items() if k}
    found["entries"].sort(key=lambda e: e["time_created_ns"])
    for group, ranks in _groups().items():
        found["pg_config"].setdefault(group, {"name": group, "desc": "", "ranks": str(ranks)})
    return found


def _groups() -> dict[str, list[int]]:
    """{name of a process group: its global ranks}, as far as this process is in it."""
    world = _compat.groups
    return {world.pg_names[pg]: sorted(of_global) for pg, of_global in world.pg_group_ranks.items()}


# What is read back ----------------------------------------------------------------------------------------------------


NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<(frozen|string|__array)|labs/watch/evidence\.py$")


@dataclass(frozen=True)
class Frame:
    """A line of Python that a thread was in."""

    file: str
    line: int
    name: str = ""

    def __str__(self) -> str:
        """train.py:12, with the text of the line where that file is at hand."""
        return f"{Path(self.file).name}:{self.line}" + (f" `{self.source}`" if self.source else "")

    @property
    def source(self) -> str:
        """Text of the line, without its comment; empty where the file is not here."""
        return linecache.getline(self.file, self.line).split("  #")[0].strip()

    @property
    def is_own(self) -> bool:
        """Whether it is of the training: not of torch, another installed package, Python, or what collects this."""
        return not NOT_OWN.search(self.file)


@dataclass(frozen=True)
class Call:
    """A collective, a send or a receive, as the flight recorder noted it."""

    group: str
    backend: str
    name: str
    """all_reduce, broadcast, recv, ..."""
    peers: tuple[int, ...]
    """Of a send or receive: (source, destination) by rank in the group."""
    number: int
    """Of this call in its group, from 1: the first collective of all ranks has the same. P2P calls count apart."""
    record: int
    """Place among the calls that this rank's recorder still held, over all groups."""
    sizes: tuple
    dtypes: tuple[str, ...]
    done: bool
    """Whether torch knows that it is over. False is no proof: NCCL learns it late."""
    state: str
    created_s: float
    """Time of the call, s since 1970 by that machine's clock."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""

    @property
    def own(self) -> tuple[Frame, ...]:
        """Frames of the training itself, innermost first. Empty if autograd's own thread made the call, as on GPUs."""
        return tuple(f for f in self.frames if f.is_own)

    @property
    def is_p2p(self) -> bool:
        """A send or a receive."""
        return bool(self.peers)


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    exit_code: int | None = None
    signal: str = ""
    error: str = ""
    traceback: str = ""
    step: int | None = None


@dataclass(frozen=True)
class RankEvidence:
    """What one rank left. None: that file is not there."""

    rank: int
    calls: tuple[Call, ...] | None = None
    """Oldest first; only the last ones, if the ring of the recorder was full."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """{name: global ranks}, as far as known."""
    stack: tuple[Frame, ...] | None = None
    """Main thread, innermost first."""
    crash: str = ""
    """What Python printed when a signal ended it, such as "Fatal Python error: Aborted"."""
    end: End | None = None
    files: tuple[str, ...] = ()
    """Names of the files that were used."""
    problems: tuple[str, ...] = ()
    """Files that could not be used, and why."""

    @property
    def is_silent(self) -> bool:
        """It left nothing at all."""
        return self.calls is None and self.stack is None and self.end is None


OURS = re.compile(r"rank(\d+)\.(recorder\.json|stacks\.txt|end\.json)")
NCCL = re.compile(r"[^.]*?(\d+)")  # any prefix, then the rank


def read(folder: Path | str, prefix: str = "") -> list[RankEvidence]:
    """Evidence of every rank, in order; ranks that others name and that left no file are included, and silent.

    Reads files of this module and NCCL's dumps (any name that ends with the rank), those whose name begins with
    `prefix`. A file that cannot be read is named in its rank's `problems`. OSError if there is no such folder.
    """
    found: dict[int, RankEvidence] = {}
    for path in sorted(Path(folder).iterdir()):
        ours, dump = OURS.fullmatch(path.name), NCCL.fullmatch(path.name)
        if not path.is_file() or not (ours or dump) or not path.name.startswith(prefix):
            continue
        rank = int((ours or dump)[1][-9:])
        if rank > MOST_RANKS:
            continue
        before = found.get(rank, RankEvidence(rank))
        try:
            fields = _parsed(path, ours[2] if ours else "dump")
            found[rank] = replace(before, files=(*before.files, path.name), **fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as e:
            why = f"{path.name}: {e if isinstance(e, (OSError, ValueError)) else f'not as expected ({e!r})'}"
            found[rank] = replace(before, problems=(*before.problems, why))
    known = {r for e in found.values() for ranks in e.groups.values() for r in ranks}
    return [found.get(rank, RankEvidence(rank)) for rank in range(max([*found, *known]) + 1)] if found else []


def _parsed(path: Path, kind: str) -> dict[str, Any]:
    """The fields of RankEvidence that a file fills. ValueError says what is wrong with it."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{size:,} bytes are too many")
    data = path.read_bytes()
    if not data and kind == "stacks.txt":
        return {}  # armed, and no signal came that could be caught
    if not data:
        raise ValueError("empty: the rank ended while it wrote")
    if kind == "stacks.txt":
        return _stacks(data.decode("utf-8", "replace"))
    values = _unpickled(data) if kind == "dump" and not data.startswith(b"{") else _json(data)
    return {"end": _end(values)} if kind == "end.json" else _recorder(values)


def _json(data: bytes) -> dict[str, Any]:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"no JSON, or cut short: {e}") from None
    if not isinstance(values, dict):
        raise ValueError(f"a JSON object is needed, this is {type(values).__name__}")
    return values


class _Plain(pickle.Unpickler):
    """Loads dicts, lists, tuples, texts and numbers: a pickle that names a class or function could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"names {module}.{name}: a dump holds plain values alone, so this is not one; not loaded")


def _unpickled(data: bytes) -> dict[str, Any]:
    try:
        values = _Plain(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as e:  # pickle raises nearly anything for bytes that are none
        raise ValueError(f"no dump of a flight recorder, or cut short: {type(e).__name__}: {e}") from None
    if not isinstance(values, dict):
        raise ValueError(f"no dump of a flight recorder: it holds a {type(values).__name__}")
    return values


def _recorder(values: dict[str, Any]) -> dict[str, Any]:
    entries = values.get("entries", [] if "version" in values else None)  # left out before the first collective
    if not isinstance(entries, list):
        raise ValueError("has no list of entries: no dump of a flight recorder")
    config = {k: v for k, v in (values.get("pg_config") or {}).items() if k}
    groups = {str(name): _ranks(of.get("ranks", "[]")) for name, of in config.items()}
    return {"calls": tuple(_calls(entries)), "groups": {n: r for n, r in groups.items() if r}}


def _ranks(text: Any) -> tuple[int, ...]:
    """Of "[0, 1]", or of a list."""
    found = [int(n) for n in re.findall(r"\d+", str(text))]
    return tuple(sorted(r for r in found if r <= MOST_RANKS))


def _calls(entries: list[dict[str, Any]]) -> Iterator[Call]:
    """Parse the entries: JSON and pickle differ in tuples and lists alone."""
    for place, e in enumerate(entries):
        backend, _, text = str(e["profiling_name"]).rpartition(":")
        name, *meta = text.split(" ")
        peers = tuple(int(n) for n in re.findall(r"\d+", meta[0])) if meta else ()
        if "<-" in "".join(meta):  # "recv 3<-0" stands for 0 -> 3
            peers = peers[::-1]
        p2p = bool(peers) or bool(e.get("is_p2p"))
        yield Call(
            group=str(e["process_group"][0]),
            backend=backend,
            name=name,
            peers=peers,
            number=int(e["p2p_seq_id"] if p2p else e["collective_seq_id"]),
            record=place,
            sizes=_plain_tuple(e["input_sizes"]),
            dtypes=tuple(map(str, e.get("input_dtypes", ()))),
            done=e["state"] == "completed" or bool(e.get("retired")),
            state=str(e["state"]),
            created_s=1e-9 * int(e.get("time_created_ns") or 0),
            frames=tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in e.get("frames", ())),
        )


def _plain_tuple(values: Any) -> Any:
    return tuple(map(_plain_tuple, values)) if isinstance(values, (list, tuple)) else values


def _end(values: dict[str, Any]) -> End:
    kinds = {"exit_code": int, "signal": str, "error": str, "traceback": str, "step": int}
    for name, value in values.items():
        if name in kinds and value is not None and not isinstance(value, kinds[name]):
            raise ValueError(f"field {name!r}: {kinds[name].__name__} or null needed, not {value!r:.60}")
    texts = {n: values.get(n) or "" for n in ("signal", "error", "traceback")}
    return End(values.get("exit_code"), texts["signal"], texts["error"], texts["traceback"], values.get("step"))


FRAME = re.compile(r'^  File "(.*)", line (\d+),? in (.*)$', re.M)  # with a comma in a traceback, without in a stack
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*most recent call first\):$", re.M)


def _stacks(text: str) -> dict[str, Any]:
    """The main thread of the last dump in the file: faulthandler writes it last. A crash adds a line before its own."""
    crash = re.findall(r"^Fatal Python error: .*$", text, re.M)
    dumps = THREAD.split(text)
    if len(dumps) < 2:
        raise ValueError("holds no stack: the rank ended while it wrote, or before it had anything to write")
    found = tuple(Frame(file, int(line), name) for file, line, name in FRAME.findall(dumps[-1]))
    return {"stack": found, "crash": crash[-1] if crash else ""}


def clear(folder: Path, rank: int | None = None) -> None:
    """Remove what earlier ranks, or one of them, wrote to `folder`, so that two runs are not mixed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        ours = OURS.fullmatch(path.name) or re.fullmatch(rf"{DUMP_NAME}(\d+)", path.name)
        if ours and rank in (None, int(ours[1])):
            os.unlink(path)
