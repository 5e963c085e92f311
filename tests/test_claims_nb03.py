"""Verdicts of notebook 03, each word of them from records made up for it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from labs.chapters.nb03 import claims as nb03
from labs.kit.claims import claims, judge_of, table
from labs.kit.record import Record, Records

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005, 0.9995, 1.002)
WIDE = (0.5, 2.0, 0.6, 1.7, 0.55, 1.9, 0.65, 1.5)


def make(lab, metric, samples, config=None, device="cpu", unit="s", **case):
    samples = samples if isinstance(samples, list | tuple) else (samples,)
    layout = {"world_size": 2, "rank": None, "backend": "gloo", "device": device}
    return Record(lab, metric, unit, tuple(samples), "measured", case, config or {}, layout)


def times(seconds, wide=False):
    return [seconds * k for k in (WIDE if wide else NOISE)]


def speed(
    single=0.05,
    ddp=0.055,
    model="cnn",
    split="weak",
    wide=False,
    device="cpu",
    moved=1e6,
    dp=0.06,
):
    config = {"model": model, "split": split}

    def step(mode, ranks, seconds):
        case = {"mode": mode, "ranks": ranks, "batch_per_rank": 64}
        return make("data_parallel", "step_s", times(seconds, wide and mode == "ddp"), config, device, **case)

    return [
        step("single", 1, single),
        step("ddp", 2, ddp),
        step("dp", 2, dp),
        make("data_parallel", "bytes_per_step", moved, config, device, "B", way="dp replicate"),
    ]


def both(**times):
    return speed(**times) + speed(model="mlp", **times)


def without_counter(records):
    """As on GPUs, where nothing counts what DataParallel moves."""
    return [r for r in records if r.metric != "bytes_per_step"]


def cells(*speedups, wide=False):
    """labs.crossover with these speed-ups of DDP on 2 ranks, by batch; all-reduces of 1 kB cost next to nothing."""
    found = [make("crossover", "all_reduce_s", 1e-6 * (1 + s / 1e6), size=s) for s in (2**12, 2**20)]
    for batch, speedup in enumerate(speedups, start=1):
        case = {"width": 64, "batch": batch, "gradient_bytes": 1000}
        found += [
            make("crossover", "step_s", times(0.01), mode="single", **case),
            make("crossover", "step_s", times(0.02 / speedup, wide), mode="ddp", **case),
        ]
    return found


def linked(latency_s=1e-3, b_s=1e9, noise=(1.0,), ranks=2):
    """labs.crossover where a DDP step is one rank's step and then an all-reduce: 3 widths x 3 batches."""
    sizes = [2**12, 2**20, 2**23]
    layout = {"world_size": ranks, "rank": None, "backend": "gloo", "device": "cpu"}
    found = [make("crossover", "all_reduce_s", latency_s + s / b_s, size=s) for s in sizes]
    cases = [(s, batch) for s in sizes for batch in (4, 64, 1024)]
    for (size, batch), k in zip(cases, itertools.cycle(noise)):
        case = {"width": size, "batch": batch, "gradient_bytes": size}
        single = 1e-3 * batch / 16
        found += [
            make("crossover", "step_s", times(single), mode="single", **case),
            make("crossover", "step_s", times(k * (single + latency_s + size / b_s)), mode="ddp", **case),
        ]
    return [dataclasses.replace(r, layout=layout) for r in found]


def training(**changed):
    f = {"twice": 1.0, "steps": 16, "falls": (2.0, 1.0), "same": 1.0} | changed
    return [
        make("ddp_training", "raised", f["twice"], case="setup_twice", error="ValueError: twice"),
        make("ddp_training", "steps_per_epoch", f["steps"], case="ddp"),
        make("ddp_training", "loss", [*[f["falls"][0]] * 10, *[f["falls"][1]] * 10], case="ddp"),
        make("ddp_training", "same_order_next_epoch", f["same"], case="no_set_epoch"),
    ]


def accumulation(undivided=4.0, right=1.0):
    return [
        make("gradient_accumulation", "gradient_scale", right, way="no_sync"),
        make("gradient_accumulation", "gradient_scale", undivided, way="loss_not_divided"),
        make("gradient_accumulation", "all_reduces_per_step", 2, way="no_sync"),
        make("gradient_accumulation", "all_reduces_per_step", 8, way="sync_every"),
        make("gradient_accumulation", "step_s", 0.01, way="no_sync", effective_batch=128),
    ]


def parity(plain):
    return [
        make("ddp_parity", "gradient_relative_error", e, model=m, dtype="float64", sync_batchnorm=False)
        for m, e in (("cnn", plain), ("cnn_batchnorm", 0.1))
    ]


MLP = {"model": "mlp"}
HOLDS, NOT, DEPENDS = "holds", "does not hold", "depends"
CASES = {
    "A02": [(NOT, speed(**MLP)), (DEPENDS, speed(single=5.0, **MLP))],
    "A09": [(NOT, training()), (HOLDS, training(twice=0.0))],
    "A12": [(NOT, training()), (DEPENDS, training(steps=1))],
    "A13": [(NOT, speed(ddp=0.2, **MLP)), (HOLDS, speed(ddp=0.04, **MLP))],
    "A15": [(HOLDS, training()), (NOT, training(falls=(1.0, 2.0)))],
    "A17": [(NOT, speed(**MLP)), (DEPENDS, speed(single=5.0, **MLP))],
    "A20": [(DEPENDS, cells(0.5, 1.5)), (HOLDS, cells(1.2, 1.5)), (NOT, cells(0.5, 0.8))],
    "A21": [(HOLDS, cells(0.5, 1.5)), (DEPENDS, cells(1.2, 1.5))],
    "B03": [(HOLDS, linked()), (DEPENDS, linked(b_s=1e13)), (DEPENDS, linked(noise=(*[1] * 8, 8)))],
    "B34": [(DEPENDS, accumulation()), (HOLDS, accumulation(1.0))],
    "B37": [(DEPENDS, training()), (HOLDS, training(same=0.0))],
    "B46": [(NOT, speed() + cells(0.5, 1.9)), (HOLDS, speed(ddp=0.051) + cells(1.9))],
    "C27": [(HOLDS, cells(0.5, 1.5)), (NOT, cells(1.5, 0.5))],
    "D07": [(HOLDS, parity(1e-15)), (NOT, parity(0.1))],
    "E14": [
        ("needs 2 GPUs", both()),
        (NOT, both(device="cuda")),
        (DEPENDS, both(device="cuda", dp=0.04)),
    ],
    "E15": [(HOLDS, speed()), (NOT, speed(moved=0.0)), (HOLDS, without_counter(speed(device="cuda")))],
}


@pytest.mark.parametrize("claim", CASES)
def test_the_word_follows_the_records(claim):
    for word, evidence in CASES[claim]:
        found = table("03", Records(evidence), gpus=0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_that_records_decide_is_turned_round():
    assert {c.id for c in claims("03") if judge_of(c)} == set(CASES)


UNTOLD = {
    "A13": [*speed(ddp=0.05, wide=True, **MLP)],
    "C27": cells(0.3, 0.4, wide=True),
    "E14": both(device="cuda", dp=0.055, wide=True),
}


@pytest.mark.parametrize("claim", sorted(UNTOLD))
def test_samples_that_show_nothing_are_no_case_that_differs(claim):
    found = table("03", Records(UNTOLD[claim]), gpus=0, strict=True).verdict(claim)
    assert found.word == DEPENDS and "this run cannot tell" in found.because.lower(), found


def test_a_torch_that_speaks_of_no_replicas_leaves_it_open(monkeypatch):
    monkeypatch.setattr(nb03, "documented", lambda term: "")
    found = table("03", Records(without_counter(speed(device="cuda"))), gpus=8, strict=True)
    assert found.verdict("E15").word == "not tried yet"


def test_one_rank_is_compared_with_nothing():
    found = table("03", Records(linked(ranks=1)), gpus=0, strict=True)
    assert {found.verdict(claim).word for claim in ("A20", "A21", "B03", "C27")} == {"not tried yet"}
