"""Verdicts of notebook 02 on data loading, from records of dataloader and loader_workers."""

from __future__ import annotations

from labs.claims.registry import Verdict, last, verdict, verdict_for
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Records

WAITS = 0.05
"""Share of its time above which a loop counts as waiting for data."""


def _run(records: Records) -> Records:
    """Return the last launch of labs.dataloader that has all its arms."""
    return last(records, "dataloader", "wait_share", way="both", step="sleeps")


def _waits(run: Records, workers: int, step: str = "computes") -> Estimate:
    return estimate(run.one("wait_share", way="both", workers=workers, step=step).samples)


def _workers(run: Records) -> int:
    return max(r.case["workers"] for r in run.where("wait_share"))


@verdict("A33")
def a33_a_slow_loader_lets_the_model_wait(records: Records) -> Verdict:
    """Holds if the loop waits wherever the loader alone is slower than the model alone."""
    run = _run(records)
    model = run.one("images_per_s", way="model")
    idle, busy, said = [], [], []
    for both in run.where("wait_share", way="both"):
        workers, step = both.case["workers"], both.case["step"]
        loader = run.one("images_per_s", way="loader", workers=workers)
        if paired_ratio(loader.samples, model.samples).high < 1:
            share = _waits(run, workers, step)
            idle.append(share.low > WAITS)
            busy.append(share.high < WAITS)
            said.append(f"{share.scaled(100, '%')} ({workers} workers, step {step})")
    if not idle:
        raise LookupError("launch('dataloader') with a model that is faster than the loader is needed")
    return verdict_for(
        idle, busy, f"where the loader alone is slower than the model, the loop waits: {'; '.join(said)}"
    )


@verdict("D23")
def d23_workers_are_the_cure(records: Records) -> Verdict:
    """Holds if a loop that waits without workers trains faster with them."""
    run = _run(records)
    share, n = _waits(run, 0), _workers(run)
    gain = paired_ratio(*(run.one("images_per_s", way="both", workers=w, step="computes").samples for w in (n, 0)))
    because = (
        f"without workers the loop waits for {share.scaled(100, '%')} of its time; {n} workers on shared cores give "
        f"{gain} the images/s"
    )
    return verdict_for([share.low > WAITS and gain.low > 1], [share.high < WAITS or gain.high < 1], because)


@verdict("E06")
def e06_workers_load_in_parallel_and_cut_waiting(records: Records) -> Verdict:
    """Holds if two workers load more than one for every kind of item, and the loop waits less than without workers."""
    run, alone = _run(records), last(records, "loader_workers", "model_share")
    gains = {
        items: paired_ratio(*(alone.one("model_share", items=items, workers=n).samples for n in (2, 1)))
        for items in ("wait", "compute")
    }
    before, after = _waits(run, 0), _waits(run, _workers(run))
    said = ", ".join(f"{gain} if items {items}" for items, gain in gains.items())
    because = (
        f"two workers load as much as one, times {said}; waiting falls from {before.scaled(100, '%')} to "
        f"{after.scaled(100, '%')}"
    )
    right = [*(gain.value > 1.1 for gain in gains.values()), after.high < before.low]
    return verdict_for(right, [*(gain.value < 1 for gain in gains.values()), after.low > before.high], because)
