"""Verdicts of notebook 06, each word of them from records made up for it."""

from __future__ import annotations

import pytest

from labs.kit.claims import claims, table
from labs.kit.record import Record

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005, 0.9995, 1.002)
WIDE = (0.7, 1.3, 0.75, 1.25, 0.8, 1.2, 0.72, 1.28)


def around(value: float, shift: int = 0, n: int = 8) -> list[float]:
    """Samples that differ a little; another `shift` gives pairs that differ by chance."""
    return [value * NOISE[(i + shift) % len(NOISE)] for i in range(n)]


def make(lab, metric, unit, samples, *, kind="measured", world=2, gpu=False, config=None, **case):
    layout = {"world_size": world, "rank": None, "backend": "gloo", "device": "cuda" if gpu else "cpu"}
    return Record(lab, metric, unit, samples, kind, case, config or {}, layout)


# -- pipelines

TIMELINES = {("naive", 1): ((0, 1), (1, 2)), ("1f1b", 8): ((0, 1), (0.5, 1.5)), ("gpipe", 8): ((0, 1), (0, 1))}


def pipeline(chain="char_gpt", naive=0.97, best=1.75, idle=0.5, world=2):
    """labs.pipeline_parallel of one model; `naive`, `best` and `copies` are speeds over one device."""
    steps = {
        ("single", "hand", 1): 1.0,
        ("naive", "hand", 1): 1 / naive,
        ("1f1b", "hand", 2): 1.2 / best,
        ("1f1b", "hand", 8): 1 / best,
        ("gpipe", "hand", 8): 1.1 / best,
        ("1f1b", "torch", 8): 1.3 / best,
        ("copies", "hand", 1): 2 / 1.9,
    }

    def one(metric, unit, samples, **case):
        return make("pipeline_parallel", metric, unit, samples, world=world, chain=chain, **case)

    found = [
        one("step_s", "s", around(t, i), schedule=s, by=by, micro_batches=m)
        for i, ((s, by, m), t) in enumerate(steps.items())
    ]
    found += [
        one("gradient_relative_error", "1", [e], schedule="1f1b", cuts=c) for c, e in (("even", 1e-8), ("uneven", 2e-7))
    ]
    found += [
        one("idle_share", "1", around(idle), schedule="naive", micro_batches=1),
        one("idle_share", "1", [0.5], schedule="naive", micro_batches=1, kind="modelled"),
    ]
    found += [
        one("saved_bytes", "B", [b], schedule="naive", micro_batches=1, stage=i) for i, b in enumerate((6e6, 6e6))
    ]
    return found + [
        one("timeline_s", "s", t, schedule=s, micro_batches=m, stage=i, action="forward", numbers=[0])
        for (s, m), both in TIMELINES.items()
        for i, t in enumerate(both)
    ]


# -- data and tensor parallelism


def data(speed=1.8, noisy=False):
    """labs.data_parallel, weak scaling."""
    ddp = [speed / w for w in (WIDE if noisy else around(1.0, 3))]
    return [
        make("data_parallel", "samples_per_s", "1/s", rate, config={"model": "cnn"}, way=way)
        for way, rate in (("single", around(1.0)), ("ddp", ddp))
    ]


def tensor():
    """labs.tensor_parallel: two cells, and the bytes of two models."""
    found = []
    for rows, factor in ((32, 0.2), (512, 1.0)):
        for i, (mode, s) in enumerate({"single": 1.0, "tensor": 1.6 * factor, "ddp": 1.7 * factor}.items()):
            case = {"mode": mode, "width": 512, "rows": rows}
            found.append(make("tensor_parallel", "step_s", "s", around(1 / s, i), **case))
        case = {"mode": "tensor", "width": 512, "rows": rows}
        found.append(make("tensor_parallel", "step_s", "s", [9.0], kind="modelled", **case))
    for model, size in (("mlp", 1e5), ("char_gpt", 1e6)):
        for mode, s in (("single", 1.0), ("tensor", 0.6)):
            found += [
                make("tensor_parallel", "bytes_per_rank", "B", [s * size], what=w, model=model, mode=mode)
                for w in ("parameters", "activations")
            ]
    return found


def sharded(ddp=1.0):
    """labs.fully_sharded: what DDP and FSDP2 have of the whole."""
    found = []
    for way, share, form in (("ddp", ddp, 1.0), ("fsdp", 0.5, 0.5)):
        for what in ("parameters", "gradients", "optimizer"):
            case = {"what": what, "way": way, "model": "mlp"}
            found += [
                make("fully_sharded", "bytes_per_rank", "B", [1e6 * s], kind=k, **case)
                for k, s in (("measured", share), ("modelled", form))
            ]
    return found


# -- the article's split


def split(first=(0, 0, 0), wrong=(0.1, 0.17, 0.18), first_loss=9.8):
    """labs.broken_split: trained tensors of the first half in the article's way and in the right one; losses."""
    found = []
    ways = {
        "own input": (first, 0.73),
        "received": (first, 0.73),
        "gradient sent back": ((2, 2, 2), 0.83),
    }
    for way, (trained, score) in ways.items():
        case = {"way": way, "loss": "logits"}
        for half, tensors in (("first", trained), ("second", (2, 2, 2))):
            found.append(make("broken_split", "trained_parameters", "parameter tensors", tensors, half=half, **case))
            found.append(make("broken_split", "moved", "1", [0.8 * bool(t) for t in tensors], half=half, **case))
        found.append(make("broken_split", "test_accuracy", "1", [score] * 3, **case))
        found.append(make("broken_split", "first_loss", "nats", [2.3] * 3, **case))
    case = {"way": "gradient sent back", "loss": "as probabilities"}
    found.append(make("broken_split", "test_accuracy", "1", wrong, **case))
    return [*found, make("broken_split", "first_loss", "nats", [first_loss] * 3, **case)]


BOTH = [*pipeline(), *pipeline("deep_mlp", best=1.7)]
MEMORY = [*sharded(), *data()]
ALL_DO = [*pipeline(naive=1.2), *sharded(ddp=0.5), *data()]

BY_CLAIM = {
    "D04": [("depends", BOTH + MEMORY), ("holds", ALL_DO), ("holds", ALL_DO + tensor())],
    "D06": [
        ("holds", BOTH + data()),
        ("depends", BOTH + data(1.4)),
        ("depends", BOTH + data(noisy=True)),
        ("not tried yet", data() + pipeline(world=4)),
    ],
    "D16": [("does not hold", split()), ("holds", split(first=(2, 2, 2)))],
    "D17": [("does not hold", split()), ("holds", split(wrong=(0.83, 0.835, 0.829), first_loss=2.3))],
    "D18": [("does not hold", BOTH), ("holds", pipeline(idle=0.05))],
}
EVERYTHING = [*BOTH, *MEMORY, *tensor(), *split()]


@pytest.mark.parametrize("claim", BY_CLAIM)
def test_the_records_decide(claim):
    for word, records in BY_CLAIM[claim]:
        found = table("06", records, gpus=0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_of_the_notebook_is_tried_without_a_gpu():
    assert set(BY_CLAIM) == {c.id for c in claims("06") if not c.verdict}
    found = table("06", EVERYTHING, gpus=0, strict=True)
    assert not any(v.word.startswith(("needs", "not tried")) for _, v in found.rows)


# -- what rests on constants: other constants, other words


def word(claim, records=()):
    return table("06", records, gpus=0, strict=True).verdict(claim).word
