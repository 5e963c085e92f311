"""Verdicts of notebook 01, each word of them from records made up for it."""

from __future__ import annotations

import dataclasses

import pytest

from labs.kit.claims import claims, table
from labs.kit.record import Record

CPU, GPU = "cpu", "cuda"
NOISE = (0.995, 1.0, 1.004, 0.998, 1.003, 1.0, 0.997, 1.002)
FAR = (0.5, 2.0, 0.6, 1.7, 0.55, 1.9, 0.65, 1.5)
UNCLEAR = 0.1  # of the best rate: a tenth, for which samples lie on both sides
ARTICLE = "labs.common.timing.benchmark_loop:article"
RUNGS = ("as printed", "data outside", "synchronise", "warm up", "median of steps")


def around(value: float, shift: int = 0) -> list[float]:
    """Samples that differ a little; another `shift` gives pairs that differ by chance."""
    return [value * NOISE[(i + shift) % len(NOISE)] for i in range(len(NOISE))]


def make(lab, metric, unit, samples, *, config=None, ranks=2, rank=None, device=CPU, kind="measured", **case):
    samples = samples if isinstance(samples, list) else [samples]
    return Record(
        lab,
        metric,
        unit,
        samples,
        kind,
        case,
        config or {},
        {"world_size": ranks, "rank": rank, "backend": "gloo", "device": device},
    )


def timing(
    model="cnn",
    answers=(1.2, 0.1, 3, 1.5, 1.4),
    ranks=(1.0, 1.05),
    no_sync=1.0,
    mfu=0.02,
    device=CPU,
    free=0.05,
    copying=0.9,
):
    """A launch of labs.timing. `answers` by rung and `ranks` in ms; step of 1 ms; shares that an early clock sees."""
    queue = "modelled" if device == CPU else "measured"

    def rec(metric, unit, samples, **case):
        return make("timing", metric, unit, samples, config={"model": model}, ranks=len(ranks), device=device, **case)

    found = [rec("answer_s", "s", around(1e-3 * a, k), rung=RUNGS[k], kind=queue) for k, a in enumerate(answers)]
    found += [
        rec("seen_share", "1", around(s), way=way, steps=10, kind=queue)
        for way, s in (("data on the device", free), ("x.to(device)", copying))
    ]
    found += [rec("rank_step_s", "s", around(1e-3 * s, k), rank=k) for k, s in enumerate(ranks)]
    found += [rec("step_s", "s", around(1e-3), mode="train"), rec("warm_up_s", "s", [5e-3, 1e-3, 1e-3])]
    found += [rec("step_s", "s", around(1e-3 * no_sync, 3), mode="no_sync")] if len(ranks) > 1 else []
    return [
        *found,
        rec("step_flop", "FLOP", 1e9 * mfu * 1e-3, kind="modelled"),
        rec("peak_flop_s", "FLOP/s", [9e8, 1e9]),
    ]


def utilisation(
    speeds=(1, 0.06, 0.05, 1e-5, 0.3),
    busy=(0.99, 0.99, 0.97, 0.99, 0.3),
    counter="CPU time of the process",
):
    jobs = ("large products", "small products", "memory traffic", "one number at a time", "waiting for data")
    found = []
    for job, speed, share in zip(jobs, speeds, busy, strict=True):
        found += [
            make("utilisation", "busy_share", "1", around(share), job=job, counter=counter),
            make("utilisation", "share_of_peak", "1", around(speed), job=job),
        ]
    return found


def batch_size(steps=None, ddp=None, ranks=2):
    """Step times in ms by batch, of one rank alone and of DDP."""
    steps = steps or {4: 1.0, 32: 1.2, 256: 3.0, 2048: 20.0}
    ddp = ddp or {b: s + 1.0 for b, s in steps.items()}
    ways = {"single": steps, "ddp": ddp} if ranks > 1 else {"single": steps}
    found = [
        make("batch_size", "step_s", "s", around(1e-3 * s, k), ranks=ranks, mode=mode, batch=b)
        for k, (mode, by_batch) in enumerate(ways.items())
        for b, s in by_batch.items()
    ]
    return found + [make("batch_size", "activation_bytes", "B", 1e3 * b, kind="modelled", batch=b) for b in steps]


def validation(one_after_the_other=1.5, in_turn=1.0, scatter=0.3):
    def rec(samples, **case):
        return make("measure_validation", "step_s", "s", samples, ranks=1, **case)

    found = []
    for order, slower in (("one after the other", one_after_the_other), ("in turn", in_turn)):
        found += [
            rec(around(s, k), part="neighbour", order=order, side=side)
            for k, (side, s) in enumerate({"A": 1.0, "B": slower}.items())
        ]
    for k, arm in enumerate(("A", "A again")):
        found.append(rec([1.0 + scatter * k * (i % 2) for i in range(8)], part="planted", arm=arm, slower=0.0))
    return found


def scattered(records, **case):
    """The same records, where those of this case tell nothing: their samples lie far apart."""

    def scatter(r):
        return dataclasses.replace(r, samples=tuple(s * k for s, k in zip(r.samples, FAR, strict=True)))

    return [scatter(r) if case.items() <= r.case.items() and len(r.samples) > 1 else r for r in records]


EVENLY = dict.fromkeys(("speeds", "busy"), (1,) * 5)
BY_CLAIM = {
    "A25": [
        ("depends", utilisation()),
        ("holds", utilisation(**EVENLY)),
        ("depends", utilisation(speeds=(1, 1, UNCLEAR, 1, 1), busy=(1,) * 5)),
    ],
    "C13": [("depends", utilisation()), ("holds", utilisation(**EVENLY))],
    "E26": [("depends", utilisation()), ("does not hold", utilisation(**EVENLY))],
    "C03": [("does not hold", [])],
    "C05": [("does not hold", timing(ARTICLE)), ("depends", timing(ARTICLE, mfu=0.5))],
    "C06": [
        ("needs 1 GPU", timing()),
        ("depends", timing(device=GPU)),
        ("does not hold", timing(copying=0.4, device=GPU)),
    ],
    "C07": [("does not hold", timing()), ("holds", timing(answers=(1,) * 5))],
    "C08": [("depends", timing()), ("holds", timing(answers=(1,) * 5))],
    "C09": [
        ("does not hold", timing(ranks=(1.0, 1.2))),
        ("depends", timing(ranks=(1.0, 1.03))),  # 3 % are no other result
        ("not tried yet", timing(ranks=(1.0,))),
    ],
    "C10": [("holds", batch_size()), ("depends", batch_size({4: 1.0, 256: 80.0}))],
    "C15": [
        ("depends", batch_size()),
        ("holds", batch_size({32: 1.2, 256: 3.0, 512: 6.0})),
        ("depends", scattered(batch_size({32: 1.2, 256: 3.0, 512: 6.0}), batch=512)),  # 1 x, but not shown
    ],
    "C22": [
        ("does not hold", timing() + batch_size() + validation()),
        ("depends", validation(one_after_the_other=1.0, scatter=0.0)),
    ],
    "E23": [("holds", batch_size()), ("depends", batch_size(ddp={4: 1.0, 32: 1.2, 256: 3.0, 2048: 40.0}))],
}


@pytest.mark.parametrize("claim", BY_CLAIM)
def test_the_records_decide(claim):
    for word, records in BY_CLAIM[claim]:
        found = table("01", records, gpus=1 if word == "not tried yet" else 0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_of_the_notebook_is_tried():
    assert set(BY_CLAIM) == {c.id for c in claims("01") if not c.verdict}
    everything = [
        *timing(ARTICLE),
        *timing(),
        *utilisation(),
        *batch_size(),
        *validation(),
    ]
    found = table("01", everything, gpus=0, strict=True)
    assert found.counts.get("not tried yet", 0) == 0
    kinds = {c.id: v.kind for c, v in found.rows if not c.verdict}
    assert {c for c, kind in kinds.items() if kind != "measured"} == {"C03", "C06", "C07", "C08"}
    assert kinds["C07"] == kinds["C08"] == "modelled", "on a CPU the loop's queue is emulated"
