"""Verdicts of notebook 05, each word of them from records made up for it."""

from __future__ import annotations

import itertools

import pytest

from labs.kit.claims import claims, table
from labs.kit.record import Record

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005, 0.9995, 1.002)
WIDE = (0.9, 1.1, 0.93, 1.08, 0.95, 1.05, 0.91, 1.09)


def make(lab, metric, unit, samples, *, kind="measured", gpu=False, config=None, **case):
    layout = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cuda" if gpu else "cpu"}
    samples = samples if isinstance(samples, (list, tuple)) else [samples]
    return Record(lab, metric, unit, samples, kind, case, {"gpu": gpu, **(config or {})}, layout)


# -- memory_oracle

STEP = {
    "seq": 0,
    "optimizer": "momentum",
    "precision": "fp32",
    "micro_batches": 1,
    "target": "cuda",
    "set_to_none": True,
}


def steps(model, peaks, phase="backward", states=0.6e9, **given):
    """Traces of one model: {(policy, batch): peak bytes}."""
    found = []
    for (policy, batch), peak in peaks.items():
        case = {**STEP, "part": model, "model": model, "policy": policy, "batch": batch, **given}
        fixed = min(states, peak)
        parts = {
            "parameters": fixed / 2,
            "gradients": 0.0,
            "optimizer": fixed / 2,
            "temporaries": 0.0,
            "activations": peak - fixed,
            "inputs/buffers": 0.0,
        }
        found += [
            make("memory_oracle", "peak_bytes", "B", b, kind="modelled", category=c, **case) for c, b in parts.items()
        ]
        found.append(make("memory_oracle", "peak_op", "1", 7, kind="modelled", phase=phase, op="add", **case))
        found.append(make("memory_oracle", "trace_s", "s", batch / 30, **case))
    return found


def resnet(none=None, stage=0.6, block=0.4, per_image=0.18e9, **given):
    """ResNet-152: {batch: peak without checkpoints}, and shares of it that are left with them."""
    none = {b: 0.6e9 + b * per_image for b in (32, 60)} if none is None else none
    shares = {"none": 1.0, "stage": stage, "block": block}
    return steps("resnet152", {(p, b): k * peak for p, k in shares.items() if k for b, peak in none.items()}, **given)


def bert(per_row=0.3e9, states=4e9, seq=128, kept=False, small=8e9, **given):
    """BERT-large: a large batch, on whose line one of 16 with `small` bytes need not be."""
    case = {"seq": seq, "optimizer": "adam", "set_to_none": not kept, **given}
    return steps("bert_large", {("none", 16): small, ("none", 64): states + 64 * per_row}, states=states, **case)


def limit(more=24.1e9):
    """The largest batch of ResNet-152 that fits; with `more` None no batch was too large."""
    case = {**STEP, "part": "resnet152", "model": "resnet152", "policy": "none", "memory_gb": 24.0}
    found = [make("memory_oracle", "largest_batch", "1", 130, kind="modelled", **case)]
    if more:
        found.append(make("memory_oracle", "next_batch_bytes", "B", more, kind="modelled", **case))
    return found


def real(off=1.001, workspace=0.0, models=("mlp", "cnn"), resident=True):
    """Small models, traced and really run: real bytes over traced ones, workspace over them."""
    found = [make("memory_oracle", "resident_bytes", "B", 0.3e9, after="large models")] if resident else []
    for model, factor in zip(models, off if isinstance(off, tuple) else (off, off), strict=False):
        found += steps(model, {("none", 32): 10e6}, states=1e6)
        case = {**STEP, "part": model, "model": model, "policy": "none", "batch": 32}
        for metric, size in (("measured_bytes", factor * 10e6), ("workspace_bytes", workspace * 10e6)):
            found.append(make("memory_oracle", metric, "B", size, **case))
    return found


# -- activation_checkpointing


def again(
    times=(1.33, 1.2),
    flops=(4 / 3, 7 / 6),
    saved=(0.02, 0.5),
    n=8,
    noisy=False,
    model="deep_mlp",
    gpu=False,
    policies=("segments:4", "segments:2:keep_last"),
    selective=True,
):
    """The part pareto: time, operations and saved bytes of two policies, over those of none; and selective."""
    rows = [("none", 0.0, 1.0, 1.0, 1.0), *zip(policies, (1.0, 0.5), times, flops, saved, strict=False)]
    rows += [("selective", 1.0, times[0], 1.0, 0.55)] * selective
    found, config = [], {"model": model}
    for i, (policy, share, time, operations, left) in enumerate(rows):
        case = {"part": "pareto", "model": model, "policy": policy, "segments": 4, "share": share}
        step_s = [0.1 * time * NOISE[(3 * i + k) % 8] * (WIDE[k] if noisy and i else 1.0) for k in range(n)]
        values = {"step_s": step_s, "flops": operations * 3e9, "saved_bytes": left * 20e6, "gradients_equal": 1.0}
        found += [
            make("activation_checkpointing", m, "1", v, gpu=gpu, config=config, **case) for m, v in values.items()
        ]
    return found


WARNING = "torch.utils.checkpoint: pass use_reentrant. Starting in PyTorch 2.9, leaving it out will raise. More words"


def variants(missing=0):
    """The part variants: what leaving use_reentrant out does in the first scenario; the others only warn."""
    found = []
    for i, scenario in enumerate(("first layer", "whole model")):
        for variant in ("left out", "use_reentrant=False"):
            out = variant == "left out"
            texts = ["another warning", WARNING] if out else []
            warnings = {"categories": ["UserWarning"][: len(texts)], "texts": texts}
            case = {"part": "variants", "scenario": scenario, "variant": variant}
            rows = {
                "raised": (False, {"error": ""}),
                "parameters_without_gradient": (missing * (i == 0 and out), {}),
                "warnings": (len(texts), warnings),
            }
            found += [make("activation_checkpointing", m, "1", v, **case, **more) for m, (v, more) in rows.items()]
    return found


def sequences(left=0.1, lengths=(1024, 2048)):
    """The part sequences: with checkpoints the peak grows as these powers of the length and is so much of none's."""
    found = []
    for (attention, order), seq in itertools.product((("eager", 1.7), ("sdpa", 1.0)), lengths):
        case, block = {"part": "sequences", "attention": attention, "seq": seq}, 1e9 * (seq / 2048) ** order
        for policy, size in (("none", block / left), ("block", block if attention == "eager" else block / 4)):
            size = size / 4 if attention == "sdpa" and policy == "none" else size
            found.append(
                make("activation_checkpointing", "peak_bytes", "B", size, kind="modelled", policy=policy, **case)
            )
        share = 0.8 if attention == "eager" else 0.0
        found.append(make("activation_checkpointing", "square_share", "1", share, kind="modelled", **case))
    return found


# -- memory_remedies

NO_HELP = {
    "half the batch": 1.0,
    "4 micro-batches": 1.0,
    "bf16 autocast": 1.0,
    "SGD with momentum": 0.5,
    "Adam in 8 bits": 0.7,
}
HELP = {
    "half the batch": 0.53,
    "4 micro-batches": 0.3,
    "bf16 autocast": 0.6,
    "SGD with momentum": 0.98,
    "Adam in 8 bits": 0.97,
}
REMEDIES = "memory_remedies"


def remedies(activations=None, states=None):
    """Peaks under each remedy over that without, of a model full of activations and of one full of states."""
    found, factors = [], {"activations": activations or HELP, "states": states or NO_HELP}
    for (full_of, by), model in zip(factors.items(), ("char_gpt", "mlp"), strict=True):
        for remedy, factor in {"none": 1.0, **by}.items():
            case = {"part": "remedies", "model": model, "remedy": remedy, "full_of": full_of, "rows": 32}
            found.append(make(REMEDIES, "predicted_bytes", "B", 30e6 * factor, kind="modelled", at="backward", **case))
            if remedy != "Adam in 8 bits":
                found.append(make(REMEDIES, "peak_bytes", "B", 30e6 * factor, **case))
    return found


def accumulation():
    case = {"part": "accumulation", "model": "char_gpt", "rows": 32}
    found = [make(REMEDIES, "gradient_error", "1", e, micro_batches=m, **case) for m, e in ((1, 0.0), (4, 1e-7))]
    times = {m: [k * 0.1 * NOISE[(m + i) % 8] for i in range(8)] for m, k in ((1, 1.0), (4, 1.1))}
    return found + [make(REMEDIES, "step_s", "s", s, micro_batches=m, **case) for m, s in times.items()]


SIZES = {32: 6e9, 60: 11.2e9}
BY_CLAIM = {
    "A27": [("holds", real() + resnet()), ("does not hold", real(off=1.2)), ("holds", real(workspace=0.35))],
    "B15": [("depends", resnet(SIZES)), ("holds", resnet(SIZES, 0.62, 0.63))],
    "D02": [("depends", resnet()), ("does not hold", resnet(per_image=0.01e9))],
    "D03": [("depends", bert() + bert(0.5e9, seq=512)), ("does not hold", bert(0.05e9))],
    "C28": [("holds", resnet() + limit()), ("does not hold", limit(more=None))],
    "B12": [("depends", again()), ("does not hold", again((1.4, 1.1))), ("not tried yet", again(n=2))],
    "B13": [("depends", variants(missing=4)), ("holds", variants())],
    "B14": [("depends", again()), ("does not hold", again(saved=(0.0, 0.0)))],
    "B16": [("depends", sequences()), ("does not hold", sequences(left=0.95))],
    "B41": [("depends", remedies()), ("holds", remedies(states=HELP))],
    "D24": [
        ("depends", remedies() + accumulation()),
        ("holds", remedies(states=HELP) + accumulation()),
        ("does not hold", remedies(NO_HELP) + accumulation()),
    ],
}
EVERYTHING = [
    *resnet(SIZES),
    *bert(),
    *bert(kept=True, states=6e9),
    *limit(),
    *real(),
    *again(),
    *sequences(),
    *variants(missing=4),
    *remedies(),
    *accumulation(),
]
TRACED = ("B15", "B16", "C28", "D02", "D03")


@pytest.mark.parametrize("claim", BY_CLAIM)
def test_the_records_decide(claim):
    for word, records in BY_CLAIM[claim]:
        found = table("05", records, gpus=0, strict=True).verdict(claim)
        assert found.word == word, found.because


def test_every_claim_of_the_notebook_is_tried():
    assert set(BY_CLAIM) == {c.id for c in claims("05") if not c.verdict}
    found = [(c, v) for c, v in table("05", EVERYTHING, gpus=0, strict=True).rows if not c.verdict]
    assert not any(v.word == "not tried yet" for _, v in found)
    assert all(v.kind == ("modelled" if c.id in TRACED else "measured") for c, v in found)
