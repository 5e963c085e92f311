"""Verdicts of notebook 04, each word of them from records made up for it."""

from __future__ import annotations

import itertools

import pytest

from labs.chapters.nb04 import claims_amp as amp
from labs.kit.claims import claims, table
from labs.kit.record import Record

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005, 0.9995, 1.002)
PLAIN = "fp16, no scaling"
WIDE = (0.9, 1.1, 0.93, 1.08, 0.95, 1.05, 0.91, 1.09)
STATES = ("parameters", "gradients", "optimizer")


def around(value: float, shift: int = 0, n: int = 8) -> list[float]:
    """Samples that differ a little; another `shift` gives pairs that differ by chance."""
    return [value * NOISE[(i + shift) % len(NOISE)] for i in range(n)]


def make(lab, metric, unit, samples, *, kind="measured", gpu=False, config=None, **case):
    layout = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cuda" if gpu else "cpu"}
    return Record(lab, metric, unit, samples, kind, case, config or {"gpu": gpu}, layout)


# -- memory

BERT = {("bert_large", 512, 1): (5.4e9, 1.6e9, 1.3e9), ("bert_large", 512, 10): (5.4e9, 18.6e9, 12.4e9)}
RESNET = {("resnet152", 0, 64): (1e9, 20e9, 10.1e9)}
PERFECT = {("bert_large", 512, 10): (0.4e9, 23.6e9, 11.4e9)}
AT_20 = {("bert_large", 512, 10): (5.4e9, 18.6e9, 13.8e9)}


def memory(steps=None, copies=0.6e9):
    """labs.amp_memory: (bytes of states, of activations in FP32, of those under autocast) by (model, seq, batch)."""
    found = []
    for (model, seq, batch), (states, fp32, lowered) in (BERT | RESNET if steps is None else steps).items():
        for precision, activations, more in (("fp32", fp32, 0.0), ("fp16", lowered, copies)):
            parts = dict.fromkeys(STATES, states / 3) | {"activations": activations, "weight copies": more}
            found += [
                make(
                    "amp_memory",
                    "predicted_bytes",
                    "B",
                    [size],
                    kind="modelled",
                    model=model,
                    seq=seq,
                    batch=batch,
                    precision=precision,
                    category=c,
                )
                for c, size in parts.items()
            ]
    return found


# -- accuracy


def training(
    bf16=1.0, fp16=1.0, plain=0.6, n=8, flushed=(0.15, 0.001), formats=("fp32", "bf16", "fp16", PLAIN), noisy=()
):
    """labs.amp_training: accuracy over FP32's by format, without scaling for the small factor alone; and what FP16
    makes 0 without and with a scale. Formats in `noisy` differ from FP32 by up to 10 % either way."""
    found = []
    for exponent in (0, -14):
        factors = {"bf16": bf16, "fp16": fp16, PLAIN: plain if exponent else 1.0}
        for i, f in enumerate(formats):
            samples = [factors.get(f, 1.0) * s for s in around(0.8, 3 * i + exponent, n)]
            samples = [s * w for s, w in zip(samples, WIDE, strict=False)] if f in noisy else samples
            case = {"model": "perceptron", "precision": f, "loss_exponent": exponent}
            found.append(make("amp_training", "test_accuracy", "1", samples, **case))
    for scale, share in zip((1.0, 65536.0), flushed, strict=True):
        for precision, zeros in (("fp16", share + 0.1), ("fp32", 0.1)):
            case = {"model": "char_gpt", "of": "activations", "scale": scale, "precision": precision}
            found.append(make("amp_training", "zero_share", "1", [zeros], **case))
    return found


# -- orders

ORDERS = {
    "right": 4e-4,
    "right, overflow": 4e-4,
    "no zero_grad": 4e-4,
    "no zero_grad, overflow": 0.7,
    "no zero_grad, bf16": 3.0,
    "clip before unscale_": 0.99,
    "scaler, no autocast": 0.0,
}
ALL_FINE = dict.fromkeys(ORDERS, 4e-4)


def scaling(errors=None, lowered=0.0):
    """labs.loss_scaling: parameter errors by order; those with "overflow" and an error of 0.5 or more lose steps."""
    found = []
    for optimizer, (order, error) in itertools.product(("sgd", "adamw"), (ORDERS | (errors or {})).items()):
        steps = 8 if "overflow" in order and error > 0.5 else 20
        case = {
            "order": order,
            "optimizer": optimizer,
            "precision": "bf16" if "bf16" in order else "fp16",
            "reference_steps": 20,
            "raised": "none",
            "warned": "none",
            "event": "none",
        }
        norm = [1e5, 2e5, 3e5] if order == "clip before unscale_" else [1.5, 1.6, 5.0]
        values = {
            "parameter_error": [error],
            "update_ratio": [abs(1 - error)],
            "diverged": [0],
            "clip_norm": norm,
            "optimizer_steps": [steps],
            "last_scale": [65536.0],
            "lowered_share": [lowered if order == "scaler, no autocast" else 1.0],
        }
        found += [make("loss_scaling", metric, "1", samples, **case) for metric, samples in values.items()]
    case = {"order": "no zero_grad, bf16"}
    return [*found, make("loss_scaling", "same_batch_norm_ratio", "1", [1.0, 2.0, 3.0], **case)]


def traces(infinite=(0, 1, 0), skipped=None, scale=(4.0, 4.0, 2.0), expected=None, start=(1, 1, 0)):
    found = []
    for name, inf, skip in (("planted overflow", infinite, skipped or infinite), ("too large a start", start, start)):
        values = {"found_inf": inf, "skipped": skip, "scale": scale, "predicted_scale": expected or scale}
        found += [make("loss_scaling", metric, "1", v, trace=name) for metric, v in values.items()]
    return found


# -- speed


def speed(factor=0.1, share=0.4, models=("cnn", "mlp"), gpu=False, n=8, skip=(), side=0.1, noisy=False):
    """labs.mixed_precision: FP16's speed over FP32's, the share of the saved bytes that it does not keep."""
    found = []

    def record(metric, unit, samples, kind="measured", **case):
        found.append(make("mixed_precision", metric, unit, samples, kind=kind, gpu=gpu, **case))

    for model in models:
        case = {"model": model, "batch": 8}
        record("step_s", "s", around(0.01, n=n), precision="fp32", **case)
        record("saved_bytes", "B", [1e6], precision="fp32", **case)
        if model in skip:
            record("skipped_step_s", "s", [0.01 / factor], "modelled", precision="fp16", **case)
        else:
            samples = [s * (w**3 if noisy else 1.0) for s, w in zip(around(0.01 / factor, 3, n), WIDE, strict=True)]
            record("step_s", "s", samples, precision="fp16", **case)
            record("saved_bytes", "B", [1e6 * (1 - share)], precision="fp16", **case)
    if side:
        for k, case in ((1.0, {"precision": "fp32", "casts": False}), (side, {"precision": "fp16", "casts": True})):
            record("step_s", "s", around(1e-3 / k, n=n), part="matmul", side=256, **case)
    return found


BOTH = ("bf16", "fp16")
TRAINED = scaling() + training()
FINE = scaling(ALL_FINE)
WORSE = scaling({"right": 0.1})
BY_CLAIM = {
    "A30": [
        ("depends", memory()),
        ("holds", memory(AT_20, copies=0.0)),
        ("does not hold", memory(RESNET)),
        ("not tried yet", memory({})),
        ("not tried yet", training()),
    ],
    "B07": [
        ("depends", memory()),
        ("holds", memory(RESNET)),
        ("does not hold", memory(BERT)),
        ("does not hold", memory({("resnet152", 0, 1): (1e9, 20e9, 8e9)})),
        ("not tried yet", training()),
    ],
    "B10": [
        ("does not hold", memory()),
        ("holds", memory(PERFECT, copies=0.0)),
        ("depends", memory(PERFECT | {("bert_large", 128, 70): BERT["bert_large", 512, 10]})),
        ("not tried yet", memory(RESNET)),
        ("not tried yet", memory({k: v for k, v in BERT.items() if k[2] == 1})),
    ],
    "A31": [
        ("holds", training()),
        ("does not hold", training(bf16=0.9, fp16=0.9)),
        ("depends", training(bf16=0.9)),
        ("depends", training(noisy=BOTH)),
        ("depends", training(bf16=0.98, fp16=0.98, noisy=BOTH)),
        ("not tried yet", training(n=4)),
        ("not tried yet", training(formats=("fp32", PLAIN))),
        ("not tried yet", memory()),
    ],
    "B11": [
        ("holds", training()),
        ("holds", training(bf16=0.985, fp16=0.985)),
        ("depends", training(bf16=0.98, fp16=0.98)),
        ("depends", training(bf16=0.97)),
        ("does not hold", training(bf16=0.9, fp16=0.9)),
        ("depends", training(noisy=BOTH)),
        ("not tried yet", training(n=4)),
    ],
    "A32": [
        ("depends", TRAINED),
        ("holds", scaling() + training(bf16=0.9)),
        ("does not hold", scaling() + training(plain=1.0)),
        ("does not hold", scaling(lowered=1.0) + training()),
        ("depends", scaling() + training(bf16=0.9, plain=0.97, noisy=(PLAIN,))),
        ("depends", scaling() + training(plain=0.97, noisy=(PLAIN,))),
        ("depends", scaling() + training(plain=1.0, noisy=("bf16",))),
        ("not tried yet", training()),
        ("not tried yet", scaling()),
        ("not tried yet", scaling() + training(formats=("fp32", "fp16", PLAIN))),
        ("not tried yet", scaling() + training(formats=("fp32", "bf16", "fp16"))),
    ],
    "E19": [
        ("holds", TRAINED + traces()),
        ("depends", TRAINED + traces(skipped=(0, 0, 0))),
        ("depends", TRAINED + traces(expected=(4.0, 4.0, 4.0))),
        ("depends", scaling() + traces() + training(plain=1.0)),
        ("depends", scaling() + traces() + training(flushed=(0.15, 0.1))),
        ("does not hold", scaling() + traces(skipped=(0, 0, 0)) + training(plain=1.0, flushed=(0.15, 0.15))),
        ("depends", scaling({"right, overflow": 0.9}) + traces() + training()),
        ("not tried yet", TRAINED),
        ("not tried yet", TRAINED + traces(infinite=(0, 0, 0))),
        ("not tried yet", scaling() + traces()),
    ],
    "B09": [
        ("does not hold", scaling()),
        ("holds", FINE),
        ("depends", WORSE),
        ("does not hold", scaling(ALL_FINE | {"no zero_grad, overflow": 0.7})),
        ("not tried yet", [r for r in scaling() if r.case["order"] != "no zero_grad, bf16"]),
        ("not tried yet", training()),
    ],
    "E20": [
        ("depends", TRAINED),
        ("holds", FINE + training()),
        ("does not hold", scaling() + training(fp16=0.9)),
        ("not tried yet", scaling()),
        ("not tried yet", training()),
    ],
    "D25": [
        ("depends", scaling() + traces()),
        ("holds", FINE + traces(infinite=(0, 0, 0), start=(0, 0, 0))),
        ("depends", FINE + traces()),
        ("depends", scaling() + traces(infinite=(0, 0, 0), start=(0, 0, 0))),
        ("does not hold", WORSE + traces()),
        ("not tried yet", scaling()),
        ("not tried yet", traces()),
    ],
    "E16": [
        ("depends", speed()),
        ("holds", speed(2.0, gpu=True)),
        ("does not hold", speed(share=-0.1, gpu=True)),
        ("depends", speed(share=-0.1)),  # of a CPU alone: the article is about GPUs
        ("depends", speed(1.0)),
        ("depends", speed(1.1, noisy=True)),
        ("depends", speed(0.95, share=-0.1, noisy=True)),
        ("depends", speed() + speed(2.0, gpu=True)),
        ("does not hold", speed(share=-0.1, gpu=True, skip=("mlp",))),
        ("depends", speed(skip=("mlp",))),
        ("not tried yet", speed(models=())),
        ("not tried yet", training()),
    ],
}
BY_CLAIM["E18"] = BY_CLAIM["B09"]
CASES = [(claim, word, records) for claim, cases in BY_CLAIM.items() for word, records in cases]
EVERYTHING = [*memory(), *TRAINED, *traces(), *speed()]


@pytest.mark.parametrize(("claim", "word", "records"), CASES, ids=[f"{c}-{w}" for c, w, _ in CASES])
def test_the_records_decide(claim, word, records):
    found = table("04", records, gpus=0, strict=True).verdict(claim)
    assert found.word == word, found.because
    assert word == "not tried yet" or len(found.because) > 20
    assert word != "not tried yet" or "launch('" in found.because


def test_every_claim_of_the_notebook_is_tried_without_a_gpu():
    assert set(BY_CLAIM) == {c.id for c in claims("04") if not c.verdict}
    for claim, cases in BY_CLAIM.items():
        assert len({word for word, _ in cases} - {"not tried yet"}) >= 2, f"{claim} has no records that turn it round"
    found = table("04", EVERYTHING, gpus=0, strict=True)
    assert not any(v.word.startswith(("needs", "not tried")) for _, v in found.rows)
    assert {c.id for c, v in found.rows if v.kind == "modelled"} == {"A30", "B07", "B10"}


UNTOLD = {
    "A31": training(noisy=BOTH),
    "B11": training(noisy=BOTH),
    "E20": FINE + training(noisy=BOTH),
    "A32": scaling() + training(plain=0.97, noisy=(PLAIN,)),
    "E16": speed(0.95, share=0.4, noisy=True, gpu=True),
}


@pytest.mark.parametrize("claim", sorted(UNTOLD))
def test_samples_that_show_nothing_are_no_case_that_differs(claim):
    found = table("04", UNTOLD[claim], gpus=0, strict=True).verdict(claim)
    assert found.word == "depends" and "this run cannot tell" in found.because.lower(), found


def test_both_kinds_of_attention_are_steps_of_their_own():
    both = [
        make("amp_memory", r.metric, r.unit, r.samples, kind="modelled", **(r.case | {"attention": a}))
        for a in ("eager", "sdpa")
        for r in memory(BERT)
    ]
    found = table("04", both, gpus=0, strict=True)
    assert (
        "BERT-large 33 % of activations, 23 % of all; BERT-large, fused attention 33 %" in found.verdict("B07").because
    )
    assert "of 4 cases" in found.verdict("A30").because and "fused attention, batch 10" in found.verdict("B10").because


def test_the_last_launch_with_enough_in_it_is_the_evidence():
    few = [make("amp_training", r.metric, r.unit, r.samples, config={"smoke": True}, **r.case) for r in training(n=2)]
    assert table("04", training() + few, gpus=0, strict=True).verdict("A31").word == "holds"
    only = [
        make("loss_scaling", r.metric, r.unit, r.samples, config={"orders": ["right"]}, **r.case)
        for r in scaling()
        if r.case["order"] == "right"
    ]
    assert table("04", scaling() + only + training(), gpus=0, strict=True).verdict("E20").word == "depends"
    later = [
        make("mixed_precision", r.metric, r.unit, r.samples, config={"model": "cnn"}, **r.case)
        for r in speed(2.0, models=("cnn",), side=0)
    ]
    assert {g.model: round(g.speed.value, 1) for g in amp.gained(speed() + later)} == {"cnn": 2.0, "mlp": 0.1}
