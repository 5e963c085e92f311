"""Checker of notebook 02 on random numbers: what each DataLoader worker draws, epoch after epoch."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from labs.chapters.nb02.exercise_loader import read
from labs.kit.check import Mistake

Function = Callable[..., Any]
Numbers = dict[str, dict[int, tuple[float, ...]]]  # {source: {worker: what it drew}}
WORKERS = 3


class Augmented(Dataset):
    """Two samples per worker; each is what the dataset's own generator and the global ones give there."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.report: dict[str, Any] = {}

    def __len__(self) -> int:
        return 2 * WORKERS

    def __getitem__(self, index: int) -> tuple[int, dict[str, float], dict[str, Any]]:
        own = self.rng.random() if isinstance(self.rng, np.random.Generator) else 0.0
        drawn = {"dataset.rng": own, "np.random": np.random.random(), "torch": torch.rand(()).item(),
                 "random": random.random()}  # fmt: skip
        return get_worker_info().id, drawn, self.report


def check_worker_init(f: Function) -> None:
    """Different numbers in every worker and epoch, and the same ones again in a run with the same seed."""
    torch_seeds = torch.Generator().manual_seed(20)
    (first, report), (second, _) = (_epoch(f, torch_seeds) for _ in range(2))
    again, _ = _epoch(f, torch.Generator().manual_seed(20))
    own, later = first["dataset.rng"], second["dataset.rng"]
    if report["type"] != "Generator":
        raise Mistake(f"dataset.rng is a {report['type']} now: the dataset calls what a NumPy Generator has, such as "
                      "integers()", "np.random.default_rng(seed) makes a Generator")  # fmt: skip
    if alike := _alike(own):
        raise Mistake(*_why_alike(alike, report, epochs_differ=own != later))
    if any(own[w] == later[w] for w in own):
        other, _ = _epoch(f, torch.Generator().manual_seed(20), dataset_seed=2)
        raise Mistake(*_why_repeated(own, depends_on_dataset=other["dataset.rng"] != own))
    if own != again["dataset.rng"]:
        raise Mistake(
            f"a second run with the same torch seed draws other numbers: worker 0 began with {own[0][0]:.3f}, then "
            f"with {again['dataset.rng'][0][0]:.3f}",
            "no clock, no pid, no default_rng() without a seed: torch.initial_seed() repeats when a run is repeated",
        )
    _check_global_sources(first, second, again)


def _epoch(f: Function, torch_seeds: torch.Generator, dataset_seed: int = 1) -> tuple[Numbers, dict[str, Any]]:
    """What the workers of a new epoch drew, and what the learner's worker_init did in the first of them."""

    def init(worker_id: int) -> None:
        dataset = get_worker_info().dataset
        dataset.report = _report(f, worker_id, dataset)

    try:
        items = read(Augmented(dataset_seed), WORKERS, worker_init=init, torch_seeds=torch_seeds)
    except Exception as e:
        for words, what, hint in KNOWN_ERRORS:
            if re.search(words, str(e)):
                raise Mistake(what, hint) from e
        raise
    numbers: Numbers = {}
    for worker, drawn, _ in items:
        for source, number in drawn.items():
            of_worker = numbers.setdefault(source, {})
            of_worker[worker] = (*of_worker.get(worker, ()), number)
    return numbers, items[0][2]


KNOWN_ERRORS = [
    (r"Seed must be between 0 and 2\*\*32", "np.random.seed() takes 32 bits, and torch.initial_seed() has up to 64",
     "nor is it needed: torch seeds np.random in every worker. Make a new np.random.default_rng(...), which takes any"),
    (r"Generator' object has no attribute 'seed'", "a NumPy Generator has no seed(): it gets its seed when it is made",
     "replace it: get_worker_info().dataset.rng = np.random.default_rng(...)"),
    (r"NoneType' object has no attribute 'rng'|name 'dataset' is not defined", "your code does not find the dataset",
     "in a worker, get_worker_info().dataset is its own copy"),
]  # fmt: skip


def _report(f: Function, worker_id: int, dataset: Augmented) -> dict[str, Any]:
    """Call `f` and tell what it did, as far as that can be seen in the worker."""
    names, rng, rng_state, global_state = set(vars(dataset)), dataset.rng, _state(dataset.rng), _state(np.random)
    returned = f(worker_id)
    return {
        "type": type(dataset.rng).__name__,
        "returned": returned is not None,
        "untouched": dataset.rng is rng and _state(rng) == rng_state,
        "new names": sorted(set(vars(dataset)) - names),
        "seeded np.random": _state(np.random) != global_state,
        "from outside": any(value is dataset.rng for value in _outer_values(f)),
    }


def _state(source: Any) -> str:
    return str(source.get_state() if source is np.random else source.bit_generator.state)


def _outer_values(f: Function) -> list[Any]:
    """Values of the variables that `f` uses and does not make."""
    f = inspect.unwrap(f)
    used = inspect.getclosurevars(f) if inspect.isfunction(f) else None
    return [*used.globals.values(), *used.nonlocals.values()] if used else []


def _alike(numbers: dict[int, tuple[float, ...]]) -> list[int]:
    """The first workers that drew the same, if any did."""
    groups = ([w for w in numbers if numbers[w] == drawn] for drawn in numbers.values())
    return next((g for g in groups if len(g) > 1), [])


def _why_alike(alike: list[int], report: dict[str, Any], *, epochs_differ: bool) -> tuple[str, str]:
    workers = f"workers {', '.join(map(str, alike[:-1]))} and {alike[-1]}"
    copied = f"{workers} still draw the same numbers"
    assign = "get_worker_info().dataset is the worker's own copy of the dataset: give its rng a new generator"
    if report["untouched"] and report["new names"]:
        return f"{copied}: you set dataset.{report['new names'][0]}, but the dataset draws from dataset.rng", assign
    if report["untouched"] and report["returned"]:
        return f"{copied}: DataLoader throws away what worker_init returns", assign
    if report["untouched"] and report["seeded np.random"]:
        return f"{copied}: you seeded np.random, which torch does anyway; dataset.rng does not look at it", assign
    if report["untouched"]:
        return f"{copied}: each has a copy of the dataset, with dataset.rng as it was in the main process", assign
    if report["from outside"]:
        return (f"{copied}: your generator was made before the workers were, so each of them got a copy of it",
                "make it inside of worker_init: that runs in the worker")  # fmt: skip
    if epochs_differ:
        return (f"{workers} draw the same numbers; they are new in every epoch, but not in every worker",
                "torch.initial_seed() is one number plus the worker's id: take it as it is")  # fmt: skip
    return (f"{workers} draw the same numbers, in every epoch: your seed is the same for all of them",
            "torch.initial_seed() is another number in every worker and in every epoch")  # fmt: skip


def _why_repeated(own: dict[int, tuple[float, ...]], *, depends_on_dataset: bool) -> tuple[str, str]:
    what = f"the workers differ, but the second epoch draws what the first drew: worker 0 has {own[0][0]:.3f} twice"
    if depends_on_dataset:
        return (f"{what}. Your numbers still come from dataset.rng, and each epoch's workers get a fresh copy of that "
                "from the main process", "take the seed from torch.initial_seed()")  # fmt: skip
    return (f"{what}. Each epoch starts new workers, whose ids are 0, 1, 2 again: your seed holds nothing that is new "
            "in an epoch", "torch.initial_seed() is new in every epoch")  # fmt: skip


def _check_global_sources(first: Numbers, second: Numbers, again: Numbers) -> None:
    """Mistake if a global source, which torch seeds well in every worker, no longer is after worker_init."""
    for source in ("np.random", "torch", "random"):
        drawn = [*first[source].values(), *second[source].values()]
        if len(set(drawn)) < len(drawn):
            raise Mistake(
                f"dataset.rng is right, but you also reset {source}: workers or epochs now draw the same from it",
                f"DataLoader has seeded {source} in this worker already: leave it alone",
            )
        if first[source] != again[source]:
            raise Mistake(
                f"dataset.rng is right, but you also reset {source}, and not to the same in a second run",
                f"DataLoader has seeded {source} in this worker already: leave it alone",
            )
