"""Verdicts of notebook 02, each word of them from records made up for it."""

from __future__ import annotations

import dataclasses

import pytest

from labs.chapters.nb02 import claims_loading as loading
from labs.kit.claims import claims, table
from labs.kit.record import Record, Records

NOISE = (0.995, 1.0, 1.004, 0.998, 1.003)
MODELS = {"light": 4000, "even": 1000, "heavy": 250}
LOADER = {0: 500, 1: 500, 2: 1000, 4: 2000}


def around(value: float, shift: int = 0, n: int = 5) -> list[float]:
    """Samples that differ a little; another `shift` gives pairs that differ by chance."""
    return [value * NOISE[(i + shift) % len(NOISE)] for i in range(n)]


def make(lab, metric, unit, samples, *, kind="measured", gpu=False, config=None, **case):
    layout = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cuda" if gpu else "cpu"}
    return Record(lab, metric, unit, samples, kind, case, config or {}, layout)


def rate(samples, gpu=False, **case):
    return make("dataloader", "images_per_s", "1/s", samples, batch=16, gpu=gpu, **case)


def prediction(models=MODELS, loader=LOADER, shares=None, both=None, noise=1.0, gpu=False):
    """labs.dataloader, part prediction; `shares` and `both` by model and workers, by default what theory expects."""
    found = [rate(around(v, n), way="loader", workers=n, gpu=gpu) for n, v in loader.items()]
    for model, alone in models.items():
        found.append(rate(around(alone, 1), way="model", model=model, gpu=gpu))
        for n, v in loader.items():
            together = min(alone, v) if n else 1 / (1 / alone + 1 / v)
            together, share = (both or {}).get((model, n), together), max(0.01, 1 - together / alone)
            samples = around(together, n + 2)
            samples[0] *= noise
            found.append(rate(samples, way="both", model=model, workers=n, gpu=gpu))
            waits = around((shares or {}).get((model, n), share), n)
            found.append(make("dataloader", "wait_share", "1", waits, gpu=gpu, model=model, workers=n))
    found.append(rate(around(1.0), way="both", model="even", workers=2, prefetch_factor=4, gpu=gpu))
    return found


def transfer(pinned=1.3, overlap=1.5, gpu=True):
    """labs.dataloader, part transfer: rates with pin_memory, and with non_blocking too, over plain .to(device)."""
    ways = {(False, False): 1.0, (False, True): 1.0, (True, False): pinned, (True, True): overlap}
    return [
        rate(around(1000 * v, i), way="both", model="even", workers=4, pin_memory=p, non_blocking=n, gpu=gpu)
        for i, ((p, n), v) in enumerate(ways.items())
    ]


def trap(metric, unit, samples, name, kind="measured", **case):
    return make("loader_traps", metric, unit, samples, kind=kind, trap=name, **case)


def processes(workers=4, found=4, trainer=False):
    case = {"workers": workers}
    pids = [1000.0 + i for i in range(found)]
    return [
        trap("worker_processes", "processes", [found], "workers", trainer_reads=trainer, children=True, **case),
        trap("worker_pids", "pid", [*pids, *pids], "workers", **case),
        trap("worker_private_bytes", "B", [1.1e7] * found, "workers", **case),
    ]


def scaling(sleep=8.0, compute=2.0):
    """Gains of the most workers; half of them with half as many."""
    found = []
    for source, gain in (("sleep", sleep), ("compute", compute)):
        for workers, k in ((0, 1.0), (4, gain), (8, gain)):
            samples = around(300 * k, workers)
            found.append(trap("items_per_s", "1/s", samples, "scaling", source=source, workers=workers))
    return found


def starts(slow=20.0):
    found = [
        trap("first_batch_s", "s", around(2e-3, n=3), "first_batch", workers=0, start_method="none", persistent=False),
    ]
    for persistent, k in ((False, slow), (True, 1.0)):
        case = {"workers": 2, "start_method": "fork", "persistent": persistent}
        found.append(trap("first_batch_s", "s", around(2e-3 * k, 1, 3), "first_batch", **case))
    return found


def sweep():
    """labs.tune_dataloader: gains of 4 workers by workload."""
    found = []
    for name, gain in {"tiny": 0.5, "decode": 1.8, "slow": 4.0}.items():
        for workers, prefetch, k in ((0, 2, 1.0), (4, 2, gain), (4, 4, 99.0)):
            case = {"workload": name, "workers": workers, "prefetch": prefetch, "by": "sweep"}
            found.append(make("tune_dataloader", "rate_per_s", "1/s", around(1e3 * k, workers, 3), **case))
    return [*found, make("tune_dataloader", "rate_per_s", "1/s", [9.0], **{**case, "by": "tuned", "workers": 0})]


def shares(value):
    """`wait_share` of all models, with any number of workers."""
    return {(m, n): value for m in MODELS for n in LOADER}


FAST_MODELS = {"light": 20_000, "heavy": 10_000}
ALONE = {("light", n): 490 for n in LOADER} | {("heavy", n): 490 for n in LOADER}
QUICK = starts(slow=1.0)
BY_CLAIM = {
    "A33": [("holds", prediction()), ("does not hold", prediction(shares=shares(0.01)))],
    "D23": [
        ("holds", prediction()),
        ("does not hold", prediction(models=FAST_MODELS, both=ALONE)),
        ("depends", prediction(models=FAST_MODELS, both=ALONE, noise=1.5)),
    ],
    "E05": [("does not hold", processes(0, 1, True) + processes()), ("holds", processes(4, 1, True))],
    "E06": [
        ("depends", scaling() + prediction() + sweep()),
        ("holds", scaling() + prediction()),
        ("does not hold", scaling(1.0, 1.0) + prediction(shares=shares(0.5))),
    ],
    "E08": [
        ("depends", prediction() + scaling() + starts()),
        ("holds", prediction() + scaling() + QUICK),
        ("not tried yet", prediction() + scaling()),
    ],
}


@pytest.mark.parametrize("claim", BY_CLAIM)
def test_the_records_decide(claim):
    for word, records in BY_CLAIM[claim]:
        found = table("02", records, gpus=1 if word == "not tried yet" else 0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_that_the_records_decide_is_tried():
    assert set(BY_CLAIM) == {c.id for c in claims("02") if not c.verdict}
    everything = [*prediction(), *processes(), *scaling(), *starts(), *sweep()]
    found = table("02", everything, gpus=0, strict=True)
    assert found.counts.get("not tried yet", 0) == 0
    assert all(v.kind == "measured" for c, v in found.rows if c.id in BY_CLAIM)


def test_what_ten_noisy_batches_cannot_tell_is_no_verdict_against_more_workers():
    """1.6 x [0.9, 3] is no proof that more workers cure nothing."""
    both = {("light", n): 490 * (1.6 if n > 1 else 1) for n in LOADER}
    noisy = prediction(models={"light": 4000}, both=both, noise=1.0)
    wide = [
        dataclasses.replace(r, samples=tuple(r.value * k for k in (0.5, 1.7, 1.0, 0.6, 1.5)))
        if r.case.get("way") == "both"
        else r
        for r in noisy
    ]
    found = table("02", wide, gpus=0).verdict("D23")
    assert found.word == "depends" and found.because.startswith("this run cannot tell: ")


def test_runs_that_took_no_turns_are_as_uncertain_as_both_together():
    a, b = (make("lab", "rate", "1/s", samples) for samples in ([1.0, 1.2, 1.4], [0.5, 0.6, 0.7]))
    found = loading.quotient(a, b)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 1.0 / 0.7, 1.4 / 0.5))
    with pytest.raises(LookupError, match="one sample"):
        loading.quotient(a, make("lab", "rate", "1/s", [0.5]))


def test_settings_of_other_parts_are_not_taken_for_the_plain_run():
    rates = loading.together(Records([*prediction(), *transfer()]))
    assert {m: list(by) for m, by in rates.items()} == {m: [0, 1, 2, 4] for m in MODELS}
    assert rates["even"][2].value == pytest.approx(1000, rel=0.01)
