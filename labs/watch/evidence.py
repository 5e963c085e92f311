"""What each rank leaves when a training run hangs or dies: written to one folder and read back.

    rank0.recorder.json   PyTorch's flight recorder for gloo and NCCL: last collectives, sizes and Python lines
    rank0.stacks.txt      where each thread of this rank was
    rank0.end.json        how this rank ended: exit code, signal, error
    nccl_rank_0           PyTorch's own dump after an NCCL collective timed out

A killed rank leaves nothing, which is evidence as well. Reading a folder needs no torch and never runs code from the
files, unlike PyTorch's torchfrtrace, which unpickles its dumps and so runs whatever a pickle contains.
"""

from __future__ import annotations

import faulthandler
import io
import json
import linecache
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from labs.kit import _compat
from labs.kit.record import write_atomic

BUFFER, OLDER_BUFFER = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
"""Environment variables: how many entries the flight recorder keeps. Default 2,000 in torch 2.13; 0, the default of
some earlier versions, records nothing. torch reads it when a process makes its first process group.
"""
DUMP_FILE, OLDER_DUMP_FILE = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
"""Environment variables: path of NCCL's dump, without the trailing rank. torch 2.13 knows both names."""
DUMP_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
DUMP_NAME = "nccl_rank_"
LARGEST_BYTES = 256 * 1024**2  # largest file to read; a ring of 2,000 entries with stacks takes some 5 MB
MOST_RANKS = 100_000


def recorder_settings(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the unset variables that make torch record, and NCCL dump into `folder` after a timeout."""
    wanted = {BUFFER: "2000", DUMP_ON_TIMEOUT: "1", DUMP_FILE: f"{folder}/{DUMP_NAME}"}
    older = {BUFFER: OLDER_BUFFER, DUMP_FILE: OLDER_DUMP_FILE}  # torch falls back to the older name
    return {n: v for n, v in wanted.items() if n not in environ and older.get(n, n) not in environ}


def torch_dump_prefix(environ: Mapping[str, str]) -> Path:
    """Return where torch writes NCCL's dumps, without the trailing rank."""
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"
    return Path(environ.get(DUMP_FILE) or environ.get(OLDER_DUMP_FILE) or f"{cache}/torch/comm_lib_trace_rank_")


# Writing -------------------------------------------------------------------------------------------------------------


def write_recorder(folder: Path, rank: int) -> Path:
    """Write the contents of torch's flight recorder, from any thread, even while a collective hangs.

    There are no entries if BUFFER was 0 when the process group was made.
    """
    return _write_json(folder / f"rank{rank}.recorder.json", recorded() | {"rank": rank})


def write_stacks(folder: Path, rank: int) -> Path:
    """Append all threads' stacks, innermost frame first; works even while a collective hangs in C++."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.stacks.txt"
    with path.open("a") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def arm(folder: Path, rank: int) -> None:
    """Let Python write this process's stacks there if a signal such as SIGABRT or SIGSEGV ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"rank{rank}.stacks.txt").open("a")  # stays open, because nothing can be opened after the signal
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
    """Write how the rank ended. exit_code None: it was still running. error is "Type: message"."""
    end = {"exit_code": exit_code, "signal": signal, "error": error, "traceback": traceback, "step": step}
    return _write_json(folder / f"rank{rank}.end.json", end)


def _write_json(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_atomic(path, json.dumps(values))


def recorded() -> dict[str, Any]:
    """Return this process's flight recorders as one dict: "entries", "pg_status", and "pg_config" with names and ranks.

    gloo writes pg_config under an empty name, so this uses the groups that the process knows instead.
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
    """Return {process group name: global ranks} for the groups that this process is in."""
    world = _compat.groups
    return {world.pg_names[pg]: sorted(of_global) for pg, of_global in world.pg_group_ranks.items()}


# Reading -------------------------------------------------------------------------------------------------------------


NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<(frozen|string|__array)|labs/watch/evidence\.py$")


@dataclass(frozen=True)
class Frame:
    """A Python line that a thread was in."""

    file: str
    line: int
    name: str = ""

    def __str__(self) -> str:
        """Format as train.py:12, with the line's text if the file is available."""
        return f"{Path(self.file).name}:{self.line}" + (f" `{self.source}`" if self.source else "")

    @property
    def source(self) -> str:
        """Text of the line, without its comment; empty if the file isn't available."""
        return linecache.getline(self.file, self.line).split("  #")[0].strip()

    @property
    def is_own(self) -> bool:
        """Whether it is training code, not torch, another installed package, Python, or the code that collects this."""
        return not NOT_OWN.search(self.file)


@dataclass(frozen=True)
class Call:
    """A collective, send or receive, as the flight recorder noted it."""

    group: str
    backend: str
    name: str
    """all_reduce, broadcast, recv, ..."""
    peers: tuple[int, ...]
    """(source, destination) of a send or receive, by rank in the group; empty for a batch of them."""
    is_p2p: bool
    """Whether it is a send, a receive, or a batch of them."""
    number: int
    """Number of this call in its group, from 1, the same on all ranks. P2P calls are counted separately."""
    record: int
    """Position among the calls that this rank's recorder still held, over all groups."""
    sizes: tuple
    dtypes: tuple[str, ...]
    done: bool
    """Whether torch knows that it is done. False proves nothing, because NCCL learns it late."""
    state: str
    created_s: float
    """Time of the call, in s since 1970 by that machine's clock."""
    frames: tuple[Frame, ...] = ()
    """Innermost first."""

    @property
    def own(self) -> tuple[Frame, ...]:
        """Frames of the training code, innermost first. Empty if autograd's thread made the call, as on GPUs."""
        return tuple(f for f in self.frames if f.is_own)


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
    """What one rank left. None: the file is missing."""

    rank: int
    calls: tuple[Call, ...] | None = None
    """Oldest first; only the last ones, if the recorder's ring was full."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """{name: global ranks}, as far as known."""
    stack: tuple[Frame, ...] | None = None
    """Main thread, innermost first."""
    crash: str = ""
    """What Python printed when a signal ended it, such as "Fatal Python error: Aborted"."""
    end: End | None = None
    files: tuple[str, ...] = ()
    """Names of the files used."""
    problems: tuple[str, ...] = ()
    """Files that couldn't be used, and why."""

    @property
    def is_silent(self) -> bool:
        """Whether it left nothing at all."""
        return self.calls is None and self.stack is None and self.end is None


OURS = re.compile(r"rank(\d+)\.(recorder\.json|stacks\.txt|end\.json)")
NCCL = re.compile(r"[^.]*?(\d+)")  # any prefix, then the rank


def read(folder: Path | str, prefix: str = "") -> list[RankEvidence]:
    """Return the evidence of every rank, in order, including silent ranks that only the others mention.

    Reads this module's files and NCCL's dumps (any name that ends with the rank) whose name starts with `prefix`. Lists
    unreadable files in their rank's `problems`. OSError if the folder doesn't exist.
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
    """Return the fields of RankEvidence that a file fills. ValueError says what is wrong with it."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{size:,} bytes are too many")
    data = path.read_bytes()
    if not data and kind == "stacks.txt":
        return {}  # armed, but no catchable signal came
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
    """Loads only plain containers, strings and numbers: a pickle that names a class or function could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"names {module}.{name}: a dump holds plain values alone, so this is not one; not loaded")


def _unpickled(data: bytes) -> dict[str, Any]:
    try:
        values = _Plain(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as e:  # pickle raises almost anything for invalid bytes
        raise ValueError(f"no dump of a flight recorder, or cut short: {type(e).__name__}: {e}") from None
    if not isinstance(values, dict):
        raise ValueError(f"no dump of a flight recorder: it holds a {type(values).__name__}")
    return values


def _recorder(values: dict[str, Any]) -> dict[str, Any]:
    entries = values.get("entries", [] if "version" in values else None)  # missing before the first collective
    if not isinstance(entries, list):
        raise ValueError("has no list of entries: no dump of a flight recorder")
    config = {k: v for k, v in (values.get("pg_config") or {}).items() if k}
    groups = {str(name): _ranks(of.get("ranks", "[]")) for name, of in config.items()}
    return {"calls": tuple(_calls(entries)), "groups": {n: r for n, r in groups.items() if r}}


def _ranks(text: Any) -> tuple[int, ...]:
    """Parse "[0, 1]", or a list."""
    found = [int(n) for n in re.findall(r"\d+", str(text))]
    return tuple(sorted(r for r in found if r <= MOST_RANKS))


def _batch(e: dict[str, Any]) -> tuple[str, int]:
    return str(e["process_group"][0]), int(e["p2p_seq_id"])


def _calls(entries: list[dict[str, Any]]) -> Iterator[Call]:
    """Parse the entries: JSON and pickle differ only in tuples and lists."""
    # torch never updates the sends and receives of batch_isend_irecv: the entry that closes a batch has its state
    batches = {_batch(e) for e in entries if e.get("is_p2p") and str(e["profiling_name"]).endswith(":coalesced")}
    for place, e in enumerate(entries):
        backend, _, text = str(e["profiling_name"]).rpartition(":")
        name, *meta = text.split(" ")
        peers = tuple(int(n) for n in re.findall(r"\d+", meta[0])) if meta else ()
        if "<-" in "".join(meta):  # "recv 3<-0" means 0 -> 3
            peers = peers[::-1]
        p2p = bool(peers) or bool(e.get("is_p2p"))
        yield Call(
            group=str(e["process_group"][0]),
            backend=backend,
            name=name,
            peers=peers,
            is_p2p=p2p,
            number=int(e["p2p_seq_id"] if p2p else e["collective_seq_id"]),
            record=place,
            sizes=_plain_tuple(e["input_sizes"]),
            dtypes=tuple(map(str, e.get("input_dtypes", ()))),
            done=e["state"] == "completed" or bool(e.get("retired")) or (bool(peers) and _batch(e) in batches),
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


FRAME = re.compile(r'^  File "(.*)", line (\d+),? in (.*)$', re.M)  # tracebacks have a comma, stacks don't
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*most recent call first\):$", re.M)


def _stacks(text: str) -> dict[str, Any]:
    """Return the main thread of the file's last dump, which faulthandler writes last. A crash adds a line before it."""
    crash = re.findall(r"^Fatal Python error: .*$", text, re.M)
    dumps = THREAD.split(text)
    if len(dumps) < 2:
        raise ValueError("holds no stack: the rank ended while it wrote, or before it had anything to write")
    found = tuple(Frame(file, int(line), name) for file, line, name in FRAME.findall(dumps[-1]))
    return {"stack": found, "crash": crash[-1] if crash else ""}


def clear(folder: Path, rank: int | None = None, ranks: int = MOST_RANKS) -> None:
    """Remove what earlier ranks wrote to `folder`: all, or `rank` and those from `ranks` on, so that runs don't mix."""
    for path in folder.iterdir() if folder.is_dir() else ():
        ours = OURS.fullmatch(path.name) or re.fullmatch(rf"{DUMP_NAME}(\d+)", path.name)
        if ours and (rank in (None, int(ours[1])) or int(ours[1]) >= ranks):
            path.unlink(missing_ok=True)  # another rank may do the same
