"""What notebook 02's records say of a loader: who waits, what workers bring, what copies to a GPU cost."""

from __future__ import annotations

from collections.abc import Sequence

from labs.common.loading.rates import counted, quotient
from labs.kit.claims import GAIN, last, pairs, percent
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records

WAITS = 5.0  # % of the time from which on a device waits for data
PLAIN = {"way", "model", "workers", "batch"}  # the case of a run whose other settings are those of DataLoader

Rates = dict[int, Record]
"""Samples per second by number of workers, in ascending order."""
Gains = dict[int, Estimate]
"""By number of workers: samples per second over those without."""


def brings(gains: Sequence[Estimate]) -> tuple[list[bool], list[bool]]:
    """For `word`: which of these gains are shown, and which are shown to be no more than GAIN."""
    return [g.low > 1 for g in gains], [g.high < GAIN for g in gains]


def device(run: Records) -> str:
    """What a reader must know of where it ran; empty on a GPU."""
    return "" if run[0].layout["device"] == "cuda" else "; the device is a CPU, whose cores the workers share"


def ends(gains: dict[str, Gains]) -> str:
    """The lowest and the highest gain, and where they are."""
    flat = [(g, job, n) for job, by in gains.items() for n, g in by.items()]
    found = [f(flat, key=lambda x: x[0].value) for f in (min, max)]
    return " to ".join(f"{g} ({job}, {counted(n)})" for g, job, n in found[: len(flat)])


# -- labs.dataloader: a model and a loader, each alone and together


def together(run: Records) -> dict[str, Rates]:
    """{model: rates of model and loader together}."""
    found: dict[str, Rates] = {}
    for r in sorted(run.where("images_per_s", way="both"), key=lambda r: r.case["workers"]):
        if set(r.case) <= PLAIN:
            found.setdefault(r.case["model"], {})[r.case["workers"]] = r
    return found


def waits(run: Records) -> dict[str, dict[int, Estimate]]:
    """{model: {workers: % of the time that waits for data}}, in ascending order of workers."""
    found: dict[str, dict[int, Estimate]] = {}
    for r in sorted(run.where("wait_share"), key=lambda r: r.case["workers"]):
        found.setdefault(r.case["model"], {})[r.case["workers"]] = percent(r)
    return found


def speeds(run: Records) -> list[tuple[Estimate, Estimate, str]]:
    """(rate of the loader alone over the model alone, % of the time that waits, which case), slowest loader first."""
    found = []
    for model, by in waits(run).items():
        alone = run.one("images_per_s", way="model", model=model)
        for n, share in by.items():
            if n:
                speed = quotient(run.one("images_per_s", way="loader", workers=n), alone)
                found.append((speed, share, f"{model}, {counted(n)}"))
    return sorted(found, key=lambda x: x[0].value)


# -- gains by workers


def swept(evidence: Records) -> dict[str, Gains]:
    """{workload: gains}, in turn, of the full sweep of labs.tune_dataloader."""
    found: dict[str, Gains] = {}
    sweep = last(evidence, "tune_dataloader", "rate_per_s", by="sweep").where("rate_per_s", by="sweep", prefetch=2)
    for without in (r for r in sweep if r.case["workers"] == 0):
        name = without.case["workload"]
        others = [r for r in sweep.where(workload=name) if r.case["workers"]]
        found[name] = {r.case["workers"]: pairs(r, without) for r in others}
    return found


def scaled(evidence: Records) -> dict[str, Gains]:
    """{"sleep" and "compute": gains}, in turn, of items without a model. LookupError without workers."""
    run, found = last(evidence, "loader_traps", "items_per_s"), {}
    for source in ("sleep", "compute"):
        without = run.one("items_per_s", source=source, workers=0)
        rates = [r for r in run.where("items_per_s", source=source) if r.case["workers"]]
        if not rates:
            raise LookupError(f"launch('loader_traps', traps=['scaling']) with workers is needed for {source!r}")
        found[source] = {r.case["workers"]: pairs(r, without) for r in rates}
    return found


def first_batch(evidence: Records) -> Estimate:
    """How many times as long the first batch of an epoch takes with workers that are started for it."""
    run = last(evidence, "loader_traps", "first_batch_s", workers=0)
    started = [r for r in run.where("first_batch_s", persistent=False) if r.case["workers"]]
    if not started:
        raise LookupError("launch('loader_traps', traps=['first_batch']) with workers is needed")
    return quotient(min(started, key=lambda r: r.value), run.one("first_batch_s", workers=0))
