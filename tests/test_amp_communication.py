"""Autocast leaves what DDP sends as it is; a compression hook halves it, at a price in the gradient."""

import dataclasses
import itertools

import pytest

from labs import amp_communication as lab
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Records
from labs.parts import models

BYTES = models.gradient_bytes(models.mlp().module)
PRECISIONS = ("fp32", "bf16", "fp16")
CASES = list(itertools.product(PRECISIONS, ("none", "fp16")))


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def run(request):
    return launch("amp_communication", nproc=request.param, oversubscribe=True, smoke=True)


@pytest.mark.parametrize(("precision", "hook"), CASES)
def test_buckets_are_fp32_whatever_autocast_does(run, precision, hook):
    buckets = run.one("bucket_bytes", precision=precision, hook=hook)
    assert (buckets.value, buckets.case["dtype"]) == (BYTES, "float32")


@pytest.mark.parametrize(("precision", "hook"), CASES)
def test_only_the_hook_halves_what_is_sent(run, precision, hook):
    wire = run.one("wire_bytes", precision=precision, hook=hook)
    assert (wire.value, wire.case["dtype"]) == ((BYTES, "float32") if hook == "none" else (BYTES / 2, "float16"))
    sent, expected = (run.one(m, precision=precision, hook=hook).value for m in ("sent_bytes", "predicted_sent_bytes"))
    n = run[0].layout["world_size"]
    assert sent == expected == 2 * (n - 1) / n * wire.value


def test_compression_changes_the_gradient_a_little(run):
    for precision, hook in CASES:
        error = run.one("gradient_relative_error", precision=precision, hook=hook, reference="without hook").value
        assert error == 0 if hook == "none" else error < 5e-3, (precision, hook)
        assert 0 <= run.one("gradient_underflow_share", precision=precision, hook=hook).value < 0.1
    added = run.one("gradient_relative_error", precision="fp32", hook="fp16", reference="without hook").value
    assert added > 1e-5  # a gradient that bf16 computed has few digits: alone, FP16 holds most of them exactly
    lowered = run.one("gradient_relative_error", precision="bf16", hook="none", reference="fp32").value
    assert lowered > 1e-3


def test_bf16_compression_is_refused_without_nccl(run):
    refused = run.one("hook_refused", precision="fp32", hook="bf16")
    if "nccl" in run[0].layout["backend"]:
        pytest.skip("NCCL takes it")
    assert refused.value == 1
    assert refused.case["error"].startswith("TypeError: BF16 all reduce communication hook required")
    assert not run.where("wire_bytes", hook="bf16")


def test_predict_by_hand():
    assert [lab.predict(800, h, 4) for h in ("none", "fp16", "bf16")] == [1200, 600, 600]
    assert lab.predict(800, "none", 1) == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be"),
        ({"model": "gpt5"}, "there is no model"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("amp_communication", nproc=2, oversubscribe=True, **values)


def test_the_answer_is_about_bytes_and_turns_with_them(run):
    told = " ".join(lab.answer(run))
    assert "BF16, FP16 with no hook: 1.00 times as many bytes" in told
    assert "FP32, BF16, FP16 with FP16 hook: 0.50 times as many bytes; the hook changes the gradient by up to" in told
    lowered = {id(r) for r in run.where("wire_bytes", hook="none") if r.case["precision"] != "fp32"}
    half = Records([dataclasses.replace(r, samples=(r.value / 2,)) if id(r) in lowered else r for r in run])
    assert "BF16, FP16 with no hook: 0.50 times as many bytes" in " ".join(lab.answer(half))
