"""Detect ranks and workers that see the same data or the same random numbers, and workers whose memory grows."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import sys
import time
import types
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.scene import DONE, WARM_UP, Scene, assignments, name_in, parsed, some, tensors_in
from labs.kit import _compat

LOOK_S, MOST_LOOKS, FEWEST_LOOKS = 0.2, 60, 8
FEWEST_BATCHES = 16
"""Minimum per worker in the second half of the looks: a worker that has just started grows for other reasons."""
LEAK_MB, HALF = 8.0, 0.45
"""Minimum growth in the second half of the looks: MB per worker, and share of the growth since the first quarter."""
MANY_OBJECTS = 50_000
DRAWS = frozenset("randint randperm permutation choice choices sample integers multinomial shuffle randrange".split())
ADDS = ("append", "extend", "add", "setdefault", "update")
WRITES = (3, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Batches after which a worker writes what it knows."""


class Data:
    """Follow DataLoaders, their samplers and their workers."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.loaders: dict[int, dict[str, Any]] = {}
        """By iterator number: its loader, batches requested, and those with a step since the one before."""
        self.numbers: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.current = self.last = self.rewound = 0  # Iterators so far; last one used; counterfactuals so far
        self.latest: Any = None  # The loader iterated last, kept alive until its batches have been counted
        self.epochs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        """By shuffling DistributedSampler: (epoch, step) at the start of each pass over it."""
        self.inputs: list[tuple[int, int]] = []
        self.input_at = ("", 0)
        self.parallel = ""
        self.looks: list[tuple[int, dict[int, float]]] = []
        self.looked, self.rarer = 0.0, 1
        self.worker: dict[str, Any] = {}
        self.made: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # Lines that create loaders and samplers
        self.sampled = False  # Whether a DistributedSampler was made

    def install(self) -> None:
        """Hook into loaders and samplers. Call it before a loader forks workers, because they inherit the hooks."""
        from torch.utils.data import DataLoader, DistributedSampler

        self.scene.listen(_compat.LoaderIterator, "__init__", self._making)
        self.scene.replace(_compat.LoaderIterator, "__next__", self._next)
        self.scene.listen(DistributedSampler, "__iter__", self._sampling)
        for kind in (DataLoader, DistributedSampler):
            self.scene.listen(kind, "__init__", after=self._note_line)
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            self.scene.replace(getattr(_compat.fetchers, name), "fetch", self._fetching)

    # In the script's process

    def _making(self, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        self.current, self.latest = self.current + 1, loader
        self.numbers[iterator] = self.current
        of = {"loader": weakref.ref(loader), "training": 0, "n": 0, "at": self.scene.line(), "last": -1}
        of |= {"rewound": self.rewound, "number": self.current}
        self.loaders[self.current] = iterator._doctor_pass = of

    def _next(self, original: Any, iterator: Any) -> Any:
        of = getattr(iterator, "_doctor_pass", None)
        if of is not None:
            of["n"] += 1
            self.last = of["number"]
            if not self.scene.away():
                of["training"] += of["last"] not in (-1, self.scene.step)
                of["last"] = self.scene.step
        return original(iterator)

    def training(self, loader: Any) -> bool:
        """Return whether optimizer steps were taken between a loader's batches."""
        return any(of["training"] for of in self.loaders.values() if of["loader"]() is loader)

    def shared_out(self) -> bool:
        """Return whether a DistributedSampler splits the training data."""
        return any(type(sampler).__name__ == "DistributedSampler" for sampler in self._training_samplers())

    def _training_samplers(self) -> list[Any]:
        return [getattr(of["loader"](), "sampler", None) for of in self.loaders.values() if of["training"]]

    def _note_line(self, _: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        self.made[made] = self.scene.line()
        self.sampled |= isinstance(made, torch.utils.data.DistributedSampler)

    def _sampling(self, sampler: Any) -> None:
        if sampler.shuffle:
            self.epochs.setdefault(sampler, []).append((sampler.epoch, self.scene.step))

    def forward(self, module: Any, training: bool, again: bool, args: Any, kwargs: Any) -> object:
        """Digest the model's inputs in the first steps."""
        step = self.scene.step
        if training and not again and step <= WARM_UP and not (self.inputs and self.inputs[-1][0] == step):
            self.parallel = self.parallel or _data_parallel(module)
            if self.parallel:
                self.inputs.append((step, _digest((args, kwargs))))
                self.input_at = self.scene.line()
        return DONE if step > WARM_UP else None

    def resumed(self) -> None:
        """Count counterfactuals: each restores the random state, so later epochs may start like earlier ones."""
        self.rewound += 1

    def after_step(self, optimizer: Any, number: int) -> None:
        """Measure the workers' memory from time to time."""
        now = time.monotonic()
        if now < self.looked + LOOK_S * self.rarer or not hasattr(psutil, "LINUX"):
            return
        self.looked = now
        if len(self.looks) == MOST_LOOKS:
            self.looks, self.rarer = self.looks[::2], 2 * self.rarer
        for iterator, number in list(self.numbers.items()):
            of = self.loaders[number]
            if of["training"] and (workers := getattr(iterator, "_workers", None)):
                sizes = {w.pid: mb for w in workers if (mb := _private_mb(w.pid)) is not None}
                if sizes and (not self.looks or self.looks[-1][1].keys() == sizes.keys()):
                    self.looks.append((of["n"], sizes))
                else:
                    self.looks = [(of["n"], sizes)] if sizes else []
                if len(self.looks) % 10 == 9:
                    self.scene.keep()
                return

    # In a worker

    def _fetching(self, original: Any, fetcher: Any, index: Any) -> Any:
        if self.scene.thread != -1:
            return original(fetcher, index)
        mine = self.worker
        if not mine:
            mine |= {"number": self.current, "pid": os.getpid(), "fetched": 0, "batches": [], "history": []}
            with suppress(Exception):
                mine["before"], mine["sizes"] = _random_states(fetcher.dataset), [_sizes(fetcher.dataset)]
        batch = original(fetcher, index)
        mine["fetched"] += 1
        with suppress(Exception):
            if mine["fetched"] <= WRITES[0]:
                mine["batches"].append(_digest(batch))
            if mine["fetched"] in WRITES:
                self._leave(fetcher.dataset)
        return batch

    def _leave(self, dataset: Any) -> None:
        mine = self.worker
        if "after" not in mine:
            mine["after"] = _random_states(dataset)
        mine["sizes"] = [mine["sizes"][0], _sizes(dataset)]
        mine["history"].append((mine["fetched"], mine["sizes"][1]))
        info = torch.utils.data.get_worker_info()
        part = os.path.join(self.scene.scratch, f"worker-{os.getpid()}.part")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(file, json.dumps(mine | {"worker": info.id}).encode())
        os.close(file)
        os.replace(part, part.replace(".part", ".json"))

    # Findings

    def findings(self) -> list[Match | dict[str, Any]]:
        """Return findings about loaders, samplers and workers, and this rank's input digests for `compare`."""
        rows = [json.loads(path.read_text()) for path in Path(self.scene.scratch).glob("worker-*.json")]
        left = [row for row in rows if row["number"] in self.loaders]
        out = [*self._same_epoch(), *self._workers(left), *self._growth(left), *[{"probe": "_sampled"}] * self.sampled]
        if len(self.inputs) >= 3:
            digests = [digest for _, digest in self.inputs]
            drawn = any(of["training"] for of in self.loaders.values()) or self._draws_rows()
            of = next((of for of in self.loaders.values() if of["training"]), {"at": self.input_at})
            loader = of["loader"]() if "loader" in of else None
            dataset = getattr(loader, "dataset", None)
            made_at = ("", 0) if loader is None else self.made.get(loader, ("", 0))
            place = made_at if made_at[0] else of["at"]
            row = {"kind": self.parallel, "digests": digests, "place": place, "sampler": self._share()}
            if (place := self._stream(dataset)) is not None:
                row |= {"place": place, "stream": type(dataset).__name__}
            out += [{"probe": "_inputs", **row}] if drawn else []  # otherwise made-up data, as in a benchmark
        return out

    def _stream(self, dataset: Any) -> tuple[str, int] | None:
        """Return the place of `__iter__` if the dataset is one of the script's own streams, else None."""
        code = getattr(getattr(type(dataset), "__iter__", None), "__code__", None) if self._is_stream(dataset) else None
        return (code.co_filename, code.co_firstlineno) if code and self.scene.owns(code.co_filename) else None

    def _is_stream(self, dataset: Any) -> bool:
        return isinstance(dataset, torch.utils.data.IterableDataset)

    def _share(self) -> list[Any] | None:
        """Return [rank, place] of the DistributedSampler that splits the training data; None if unknown."""
        samplers = [s for s in self._training_samplers() if s in self.made]
        return [samplers[0].rank, list(self.made[samplers[0]])] if samplers else None

    def _draws_rows(self) -> bool:
        """Return whether the script picks batches from its data at random."""
        for file in self.scene.sources():
            nodes = list(ast.walk(parsed(file)))
            drawn: set[str] = set()
            for _ in range(2):
                bound = [(t, n.value) for n in nodes if isinstance(n, ast.Assign) for t in n.targets]
                bound += [(n.target, n.iter) for n in nodes if isinstance(n, ast.For | ast.comprehension)]
                drawn |= {ast.unparse(t) for t, value in bound if _random(value, drawn)}
            if any(isinstance(n, ast.Subscript) and _random(n.slice, drawn) for n in nodes):
                return True
        return "Generator(" in self.scene.text()

    def _same_epoch(self) -> Iterator[Match]:
        for loader, of in {id(of["loader"]()): (of["loader"](), of) for of in self.loaders.values()}.values():
            sampler = getattr(loader, "sampler", None)
            passes = self.epochs.get(sampler, []) if type(sampler).__name__ == "DistributedSampler" else []
            same = all(a[0] == b[0] and a[1] < b[1] for a, b in pairwise(passes))
            if len(passes) > 1 and same and self.training(loader):
                yield matched("same-order", of["at"], passes=len(passes), epoch=passes[0][0])

    def _workers(self, left: list[dict[str, Any]]) -> Iterator[Match]:
        told: set[str] = set()
        for one in left:
            of = self.loaders[one["number"]]
            loader = of["loader"]()
            if loader is None:
                continue
            mates = [r for r in left if r["number"] == one["number"] and r["worker"] > one["worker"]]
            before = [n for n, o in self.loaders.items() if n < one["number"] and o["loader"]() is loader]
            before = [n for n in before if self.loaders[n]["rewound"] == of["rewound"]]
            earlier = [r for r in left if r["number"] in before and r["worker"] == one["worker"]]
            same = [r for r in mates if r["batches"] == one["batches"] and len(set(r["batches"])) > 1]
            if same and self._is_stream(loader.dataset) and "data" not in told:
                told.add("data")
                place = self._stream(loader.dataset) or of["at"]
                yield matched("workers-yield-the-same", place, workers=loader.num_workers, times=len(same) + 1)
            for others, when in ((mates, "in all workers"), (earlier, "in each epoch")):
                for name in set(_repeated(one, others)) - told if self.training(loader) else ():
                    told.add(name)
                    yield self._same_numbers(loader, of["at"], name=name, when=when, times=1 + len(others))

    def _same_numbers(self, loader: Any, at: tuple[str, int], name: str, **words: Any) -> Match:
        function = getattr(loader.worker_init_fn, "__code__", None)
        if name.startswith("the ") and function is not None:
            place = function.co_filename, function.co_firstlineno
            return matched("same-global-draws", place, name=name, **words)
        return matched("same-draws", self._assigned(name) or at, name=name, **words)

    def _assigned(self, name: str) -> tuple[str, int] | None:
        """Return the first place that assigns to this name; for a dotted name, preferably to an attribute."""
        made = [(f, n) for f in self.scene.sources() for n, _ in assignments(f, name)]
        held = [(f, n) for f, n in made if any(isinstance(t, ast.Attribute) for of in n.targets for t in ast.walk(of))]
        return next(((f, n.lineno) for f, n in (held if "." in name else []) or made), None)

    def _growth(self, left: list[dict[str, Any]]) -> Iterator[Match]:
        if len(self.looks) < FEWEST_LOOKS:
            return
        half = len(self.looks) // 2
        (_, early), (n_middle, middle), (n_last, last) = (self.looks[i] for i in (half // 2, half, -1))
        late = [last[pid] - middle[pid] for pid in last]
        thirds = [self.looks[half + i * (len(self.looks) - 1 - half) // 3][1] for i in range(4)]
        steady = all(b[pid] - a[pid] > 0.1 * (last[pid] - middle[pid]) for a, b in pairwise(thirds) for pid in last)
        mine = [row for row in left if row["pid"] in last and len(row.get("sizes", [])) > 1]
        sizes = [(name, first.get(name, n), n) for first, now in (r["sizes"] for r in mine) for name, n in now.items()]
        grown = {name: (before, after) for name, before, after in sizes if after > before}
        of = next((o for o in self.loaders.values() if o["training"]), None)
        loader = of["loader"]() if of else None
        enough = all(mb >= LEAK_MB / (4 if grown else 1) for mb in late)
        if loader is None or not (enough and steady) or sum(late) < HALF * sum(last[pid] - early[pid] for pid in last):
            return
        held = list(_held(loader.dataset))
        lists = [n for n, v in held if isinstance(v, list | dict) and len(v) >= MANY_OBJECTS]
        if n_last - n_middle < FEWEST_BATCHES * len(last) * (1 if grown or lists else 4):
            return
        per_batch = sum(late) / (n_last - n_middle)
        fits = per_batch * _batches(loader) < 0.25 * psutil.virtual_memory().available / 2**20
        if grown and fits and all(_bounded(loader, row, grown) for row in mine):
            return
        place, why, fix = of["at"], "", "Keep nothing from sample to sample in the dataset"
        if grown:
            name, (before, after) = max(grown.items(), key=lambda item: item[1][1])
            why = f": {name} went from {before} to {after} entries"
            place = self._grower(name.rpartition(".")[2]) or place
        elif lists:
            why = f": each worker copies the Python objects of {lists[0]} as it reads them (their reference counts)"
            place, fix = self._assigned(lists[0]) or place, "Hold them as one array or tensor, not as Python objects"
        words = {"per_1000_batches": 1e3 * per_batch, "per_worker": sum(late) / len(late), "why": why, "fix": fix}
        yield matched("workers-grow", place, workers=len(last), **words)

    def _grower(self, name: str) -> tuple[str, int] | None:
        """Return the line that adds to a list, dict or set of this name, or that decorates a function of this name."""
        for file in self.scene.sources():
            for node in ast.walk(parsed(file)):
                if isinstance(node, ast.FunctionDef) and node.name == name and node.decorator_list:
                    return file, node.decorator_list[0].lineno
                held = [t.value for t in getattr(node, "targets", ()) if isinstance(t, ast.Subscript)]
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ADDS:
                    held = [node.func.value]
                if any(name_in(h) == name for h in held):
                    return file, node.lineno
        return None


def compare(per_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Match]:
    """Return a finding if all ranks of a data-parallel run got the same batches, and these change between steps."""
    rows = [row for of in per_rank for row in of if row["probe"] == "_inputs"]
    if len(rows) < 2 or len(rows) != len(per_rank) or not all(row["kind"] for row in rows):
        return []
    digests = [row["digests"] for row in rows]
    if any(d != digests[0] for d in digests) or len(set(digests[0])) < 2:
        return []
    words = {"ranks": len(rows), "batches": len(digests[0])}
    why = f": {rows[0]['stream']}.__iter__ gives each rank all of them" if "stream" in rows[0] else ""
    shares = [row["sampler"] for row in rows]
    if all(shares) and len({rank for rank, _ in shares}) == 1:
        rank, place = shares[0]
        why = f": the DistributedSampler has rank {rank} on each of them"
        return [matched("sampler-has-one-rank", tuple(place), why=why, **words)]
    return [matched("ranks-see-the-same", tuple(rows[0]["place"]), why=why, **words)]


def _random(node: ast.AST, drawn: set[str]) -> bool:
    """Return whether an expression draws random numbers or uses a variable in `drawn`, which holds some."""
    inner = list(ast.walk(node))
    return any(isinstance(n, ast.Call) and name_in(n.func) in DRAWS for n in inner) or any(
        isinstance(n, ast.Name) and n.id in drawn for n in inner
    )


def _data_parallel(module: Any) -> str:
    """Return "ddp" or "fsdp" if each rank should get its own data; "" if ranks may share data on purpose."""
    kind = type(module).__name__
    if kind == "OptimizedModule":
        return _data_parallel(module._orig_mod)
    if kind == "DistributedDataParallel":
        world = torch.distributed.get_world_size()
        return "ddp" if len(torch.distributed.get_process_group_ranks(module.process_group)) == world else ""
    if kind == "FullyShardedDataParallel" or any(k.__name__ == "FSDPModule" for k in type(module).__mro__):
        meshes = {getattr(p, "device_mesh", None) for p in module.parameters()} - {None}
        return "fsdp" if all(m.ndim == 1 and m.size() == torch.distributed.get_world_size() for m in meshes) else ""
    return ""


def _digest(tree: Any) -> int:
    """Return a checksum of the tensors in a tree: their shapes and `some` elements."""
    with torch.no_grad():
        return zlib.crc32(repr([(list(t.shape), some(t).tolist()) for t in tensors_in(tree)]).encode())


def _private_mb(pid: int) -> float | None:
    """Return a process's private memory, in MiB, including swap; None if the system doesn't report it."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(("Private_Dirty", "Swap:"))) / 1024


def _held(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value): attributes of a dataset and of objects up to two levels below, cached methods, globals."""
    seen, level = set(), [("dataset", dataset)]
    for _ in range(3):
        following = []
        for name, owner in level:
            if id(owner) in seen or isinstance(owner, type | types.ModuleType):
                continue
            seen.add(id(owner))
            for key, value in list(getattr(owner, "__dict__", {}).items()):
                yield f"{name}.{key}", value
                items = enumerate(value[:8]) if isinstance(value, list | tuple) else [("", value)]
                following += [(f"{name}.{key}", v) for _, v in items if hasattr(v, "__dict__")]
        level = following
    for key, value in list(vars(type(dataset)).items()):
        if hasattr(value, "cache_info"):
            yield f"dataset.{key}", value
    function = getattr(type(dataset), "__getitem__", None) or getattr(type(dataset), "__iter__", None)
    for key, value in list(getattr(function, "__globals__", {}).items()):
        yield key, value


def _random_states(dataset: Any) -> dict[str, int]:
    """Return {name: digest of its state} for each random number generator that a worker may use."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {
        "the module random": random.getstate(),
        "the generator of PyTorch": torch.get_rng_state().tolist(),
    }
    if numpy is not None:
        states["the module numpy.random"] = repr(numpy.random.get_state(legacy=False))
    for name, value in _held(dataset):
        if isinstance(value, random.Random):
            states[name] = value.getstate()
        elif isinstance(value, torch.Generator):
            states[name] = value.get_state().tolist()
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            states[name] = repr(value.bit_generator.state)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            states[name] = repr(value.get_state(legacy=False))
    return {name: zlib.crc32(repr(state).encode()) for name, state in states.items()}


def _sizes(dataset: Any) -> dict[str, int]:
    """Return {name: number of entries} of each list, dict, set and unbounded function cache in a dataset."""
    sizes = {}
    for name, value in _held(dataset):
        if isinstance(value, list | dict | set):
            sizes[name] = len(value)
        elif hasattr(value, "cache_info") and value.cache_info().maxsize is None:
            sizes[name] = value.cache_info().currsize
    return sizes


def _repeated(one: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[str]:
    """Yield names of generators that were used and that started in the same state in one of `others`."""
    before, after = one.get("before", {}), one.get("after", {})
    for name, state in before.items():
        if after.get(name) != state and any(r.get("before", {}).get(name) == state for r in others):
            yield name


def _bounded(loader: Any, row: dict[str, Any], grown: dict[str, tuple[int, int]]) -> bool:
    """Return whether everything that grew may be a cache bounded by the data, with one entry per sample."""
    held = [getattr(loader.dataset, name.partition(".")[2], None) for name in grown]
    if not all(isinstance(h, dict) or hasattr(h, "cache_info") for h in held) or _batches(loader) == math.inf:
        return False
    epoch = _batches(loader) / loader.num_workers
    later = [(n, sizes) for n, sizes in row["history"] if n >= epoch]
    if len(later) < 2:
        return True
    (n_first, first), (n_last, last) = later[0], later[-1]
    new = (n_last - n_first) * (loader.batch_size or 1) * (1 - 1 / loader.num_workers) ** (n_first / epoch)
    return all(last[name] - first.get(name, 0) <= 1.1 * new for name in grown if name in last)


def _batches(loader: Any) -> float:
    """Return the batches per epoch; infinity for a stream of unknown length."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")
