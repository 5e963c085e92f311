"""Verdicts of notebook 04, each word of them from records made up for it."""

from __future__ import annotations

import itertools

import pytest

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


def training(bf16=1.0, fp16=1.0, plain=0.6, n=8, noisy=()):
    """labs.amp_training: accuracy over FP32's by format, without scaling for the small factor alone; and what FP16
    makes 0 without and with a scale. Formats in `noisy` differ from FP32 by up to 10 % either way."""
    found = []
    for exponent in (0, -14):
        factors = {"bf16": bf16, "fp16": fp16, PLAIN: plain if exponent else 1.0}
        for i, f in enumerate(("fp32", "bf16", "fp16", PLAIN)):
            samples = [factors.get(f, 1.0) * s for s in around(0.8, 3 * i + exponent, n)]
            samples = [s * w for s, w in zip(samples, WIDE, strict=False)] if f in noisy else samples
            case = {"model": "perceptron", "precision": f, "loss_exponent": exponent}
            found.append(make("amp_training", "test_accuracy", "1", samples, **case))
    for scale, share in ((1.0, 0.15), (65536.0, 0.001)):
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


def scaling(errors=None):
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
            "lowered_share": [0.0 if order == "scaler, no autocast" else 1.0],
        }
        found += [make("loss_scaling", metric, "1", samples, **case) for metric, samples in values.items()]
    case = {"order": "no zero_grad, bf16"}
    return [*found, make("loss_scaling", "same_batch_norm_ratio", "1", [1.0, 2.0, 3.0], **case)]


def traces(infinite=(0, 1, 0), skipped=None, start=(1, 1, 0)):
    found, scale = [], (4.0, 4.0, 2.0)
    for name, inf, skip in (("planted overflow", infinite, skipped or infinite), ("too large a start", start, start)):
        values = {"found_inf": inf, "skipped": skip, "scale": scale, "predicted_scale": scale}
        found += [make("loss_scaling", metric, "1", v, trace=name) for metric, v in values.items()]
    return found


# -- speed


def speed(factor=0.1, share=0.4, models=("cnn", "mlp"), gpu=False, side=0.1, noisy=False):
    """labs.mixed_precision: FP16's speed over FP32's, the share of the saved bytes that it does not keep."""
    found = []

    def record(metric, unit, samples, **case):
        found.append(make("mixed_precision", metric, unit, samples, gpu=gpu, **case))

    for model in models:
        case = {"model": model, "batch": 8}
        record("step_s", "s", around(0.01), precision="fp32", **case)
        record("saved_bytes", "B", [1e6], precision="fp32", **case)
        samples = [s * (w**3 if noisy else 1.0) for s, w in zip(around(0.01 / factor, 3), WIDE, strict=True)]
        record("step_s", "s", samples, precision="fp16", **case)
        record("saved_bytes", "B", [1e6 * (1 - share)], precision="fp16", **case)
    if side:
        for k, case in ((1.0, {"precision": "fp32", "casts": False}), (side, {"precision": "fp16", "casts": True})):
            record("step_s", "s", around(1e-3 / k), part="matmul", side=256, **case)
    return found


TRAINED = scaling() + training()
FINE = scaling(ALL_FINE)
BY_CLAIM = {
    "A30": [("depends", memory()), ("does not hold", memory(RESNET))],
    "B07": [("depends", memory()), ("holds", memory(RESNET))],
    "B10": [("does not hold", memory()), ("holds", memory(PERFECT, copies=0.0))],
    "A31": [("holds", training()), ("does not hold", training(bf16=0.9, fp16=0.9))],
    "B11": [("holds", training()), ("does not hold", training(bf16=0.9, fp16=0.9))],
    "A32": [("depends", TRAINED), ("does not hold", scaling() + training(plain=1.0))],
    "E19": [
        ("holds", TRAINED + traces()),
        ("depends", TRAINED + traces(skipped=(0, 0, 0))),
        ("not tried yet", TRAINED),
    ],
    "B09": [("does not hold", scaling()), ("holds", FINE)],
    "E18": [("does not hold", scaling()), ("holds", FINE)],
    "E20": [("depends", TRAINED), ("holds", FINE + training())],
    "D25": [
        ("depends", scaling() + traces()),
        ("holds", FINE + traces(infinite=(0, 0, 0), start=(0, 0, 0))),
    ],
    "E16": [
        ("depends", speed()),
        ("holds", speed(2.0, gpu=True)),
        ("does not hold", speed(share=-0.1, gpu=True)),
    ],
}
EVERYTHING = [*memory(), *TRAINED, *traces(), *speed()]


@pytest.mark.parametrize("claim", BY_CLAIM)
def test_the_records_decide(claim):
    for word, records in BY_CLAIM[claim]:
        found = table("04", records, gpus=0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_of_the_notebook_is_tried_without_a_gpu():
    assert set(BY_CLAIM) == {c.id for c in claims("04") if not c.verdict}
    found = table("04", EVERYTHING, gpus=0, strict=True)
    assert not any(v.word.startswith(("needs", "not tried")) for _, v in found.rows)
    assert {c.id for c, v in found.rows if v.kind == "modelled"} == {"A30", "B07", "B10"}
