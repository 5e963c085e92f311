"""Find the cheapest DataLoader setting that feeds your model, on your own dataset, within seconds.

    tuning = tune_dataloader(dataset, step, batch_size=64)
    loader = DataLoader(dataset, 64, shuffle=True, **tuning.settings)

`step(batch)` is your training step: it moves the batch to the device itself. It really trains: give it a copy of a
model that you want to keep. From a shell: python -m labs.tune_dataloader --dataset package.module:factory
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from labs.common.loading.feed import Step
from labs.kit.errors import BadInput, require
from labs.kit.host import core_count
from labs.kit.measure import differs, sync
from labs.tune_dataloader import rules
from labs.tune_dataloader.bench import MODEL, Arm, Bench, blame
from labs.tune_dataloader.report import Tuning
from labs.tune_dataloader.rules import Choice, Setting

DEEPER, BURST_BATCHES = (4, 8), 32  # prefetch_factor; with batches per turn, since bursts are rare
OWN = ("batch_size", "num_workers", "prefetch_factor", "shuffle", "sampler", "batch_sampler", "drop_last")
ITERABLE = (
    "an iterable dataset cannot be tuned here, since how it is divided among workers is its own affair: give it "
    "__len__ and __getitem__ if its samples have numbers, or compare some num_workers by labs.common.loading.feed.drive"
)


def tune_dataloader(
    dataset: Dataset,
    step: Step,
    *,
    batch_size: int,
    budget_s: float = 20.0,
    max_workers: int | None = None,
    device: torch.device | str | None = None,
    **loader_options: Any,
) -> Tuning:
    """Search for the cheapest num_workers (and prefetch_factor) within noise of the best, and say what limits.

    The model alone (on one stored batch) and the loader alone, with more and more workers, tell which settings can
    be best; these are compared with both running together, in turn. No batch size but yours is tried.

    Args:
        dataset: map-style. It may be defined in a notebook cell where workers are forked, as on Linux.
        step: called with a collated batch; the device is synchronised after it.
        budget_s: no batch is asked for after that many seconds.
        max_workers: default twice the cores of this job, at least 8; fewer are tried where more cannot help.
        device: what to synchronise; default the accelerator, if there is one.
        loader_options: for DataLoader, such as collate_fn, pin_memory or worker_init_fn.

    Raises:
        BadInput: an argument cannot work, or the dataset or the step raises.
    """
    start = time.perf_counter()
    most = max(8, 2 * core_count()) if max_workers is None else max_workers
    _check(dataset, batch_size, budget_s, most, loader_options)
    bench = Bench(dataset, step, batch_size, _device(device), loader_options, start + budget_s)
    choice, capped = search(bench, most)
    took, more = time.perf_counter() - start, untried(bench, choice, most)
    return Tuning(choice, batch_size, bench.evidence, took, budget_s, capped, more)


def _check(dataset: Any, batch_size: int, budget_s: float, most: int, options: dict[str, Any]) -> None:
    require(not isinstance(dataset, IterableDataset), ITERABLE)
    for method in ("__getitem__", "__len__"):
        require(hasattr(dataset, method), f"the dataset, a {type(dataset).__name__}, needs {method}")
    for name, value in (("batch_size", batch_size), ("max_workers", most)):
        require(isinstance(value, numbers.Integral), f"{name} must be a whole number, not {value!r}")
    require(batch_size >= 1, f"batch_size must be at least 1, not {batch_size}")
    require(0 < budget_s < math.inf, f"budget_s must be a positive number of seconds, not {budget_s}")
    require(most >= 0, f"max_workers must not be negative: {most}")
    own = [name for name in OWN if name in options]
    require(not own, f"leave out {', '.join(own)}: the tuner decides on order and workers itself")
    with blame("len(dataset)"):
        size = len(dataset)
    require(size > 0, "the dataset is empty: there is nothing to load")
    require(batch_size <= size, f"a batch of {batch_size} needs as many samples, and the dataset has {size}")


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.device(device)
        sync(found)
    except (RuntimeError, AssertionError) as e:
        raise BadInput(f"device {str(device)!r} cannot be used: {str(e).splitlines()[0]}") from None
    return found


def search(bench: Bench, most: int) -> tuple[Choice, bool]:
    """Search step by step. Returns the choice, and whether more than `most` workers might be better."""
    bench.first()
    _climb(bench, most)
    model, tried = bench.evidence.rate(MODEL), bench.evidence.loaders()
    candidates = [Setting(w) for w in rules.finalists(model, tried)]
    guess = Setting(rules.cheapest_expected(model, tried))
    choice = _compare(bench, candidates, Choice(guess, guess, None, False))
    while above := _next_above(bench, choice, most):
        before, choice = choice, _and_also(choice, _compare(bench, [choice.setting, Setting(above)], choice))
        if choice.setting == before.setting:
            break
    capped = choice.setting.workers == most and _next_above(bench, choice, 2 * most + 1) is not None
    choice = _deepen(bench, choice, candidates)
    loader: Arm = ("loader", choice.setting)
    if not bench.evidence.of(loader) and not bench.is_over():
        bench.take(loader)
    bench.in_turn([loader, MODEL], lambda: differs(bench.evidence.ratio(loader, MODEL)), fewest=0)
    return choice, capped


def untried(bench: Bench, choice: Choice, most: int) -> int | None:
    """The next number of workers that may be faster and for which there was no time; None if there is none."""
    model, tried = bench.evidence.rate(MODEL), bench.evidence.loaders()
    arm: Arm = ("together", choice.setting)
    reached = bench.evidence.ratio(arm, MODEL).value if bench.evidence.of(arm) else 0.0
    compared = max(tried) if choice.share is None else choice.setting.workers
    more = rules.one_more(compared, model, tried, most, reached)
    hopeless = rules.reason_to_stop(model, tried, most) == "cannot catch up"
    return None if more is None or hopeless or bench.evidence.of(("together", Setting(more))) else more


def _climb(bench: Bench, most: int) -> None:
    """Measure the loader alone with more and more workers, for half of the budget at most."""
    bench.take(MODEL)
    for workers in rules.ladder(most):
        if bench.is_over(0.5):
            return
        bench.take(("loader", Setting(workers)))
        if rules.reason_to_stop(bench.evidence.rate(MODEL), bench.evidence.loaders(), most):
            return


def _compare(bench: Bench, settings: Sequence[Setting], known: Choice, batches: int = 0) -> Choice:
    """Choose among `settings`, model and loader together beside the model alone; `known` if the time is over."""
    arms: list[Arm] = [("together", s) for s in settings]

    def choice() -> Choice:
        rates = {s: rates for (_, s), rates in bench.evidence.in_turn(arms).items()}
        return rules.cheapest(rates) if rates[settings[0]] else known._replace(sure=False)

    bench.in_turn([*arms, MODEL], lambda: choice().sure, share=0.85, batches=batches)
    return choice()


def _and_also(before: Choice, now: Choice) -> Choice:
    """A choice among settings of which one had been chosen before: sure only if both were."""
    return now._replace(sure=now.sure and before.sure)


def _next_above(bench: Bench, choice: Choice, most: int) -> int | None:
    """The next larger number of workers that may be worth a try, if there was time to compare those before it."""
    if choice.share is None:
        return None
    model, tried = bench.evidence.rate(MODEL), bench.evidence.loaders()
    reached = bench.evidence.ratio(("together", choice.setting), MODEL).value
    return rules.one_more(choice.setting.workers, model, tried, most, reached)


def _deepen(bench: Bench, choice: Choice, candidates: Sequence[Setting]) -> Choice:
    """Try deeper queues for the cheapest candidate that waits in bursts, where there is one."""
    model, tried = bench.evidence.rate(MODEL), bench.evidence.loaders()
    for s in candidates:
        feeds = [t.feed for t in bench.evidence.of(("together", s))]
        waits, works = ([x for f in feeds for x in getattr(f, name)] for name in ("wait_s", "work_s"))
        if waits and rules.is_bursty(model, tried[s.workers], waits, works):
            deeper = [Setting(s.workers, p) for p in DEEPER]
            return _and_also(choice, _compare(bench, sorted({choice.setting, *deeper}), choice, BURST_BATCHES))
    return choice
