"""What was recorded on GPUs: it is labelled, its absence is said, and today's models of a GPU still agree with it."""

import pytest

from labs.common import models, oracle
from labs.common.memory import saved_tensors
from labs.common.models.large_models import bert
from labs.common.sources import on_gpus
from labs.kit import claim_records
from labs.kit.record import Record, Records

H200 = {"gpus": ["NVIDIA H200"], "torch": "2.11.0", "utc": "2026-11-26T00:00:00+00:00"}


def rec(metric, samples, lab="mixed_precision", device="cuda", kind="measured", **case):
    samples = samples if isinstance(samples, tuple) else (samples,)
    return Record(
        lab, metric, "s", samples, case=case, kind=kind, layout={"device": device, "world_size": 1}, provenance=H200
    )


def test_runs_of_cpus_are_none_of_gpus(tmp_path):
    for machine, device in (("card", "cuda"), ("cores", "cpu")):
        (tmp_path / machine).mkdir()
        Records([rec("step_s", 1.0, device=device)]).save(tmp_path / machine / "mixed_precision.jsonl")
    (run,) = on_gpus.runs("mixed_precision", tmp_path)
    assert run[0].kind == "recorded" and run[0].layout["device"] == "cuda"
    assert on_gpus.runs("timing", tmp_path) == []


def test_a_gpu_keeps_the_bytes_that_are_traced_without_one():
    """Autocast's casts, the copies of weights, cross_entropy's two logarithms, fused attention: the H200 kept them."""
    (run,) = on_gpus.runs("mixed_precision")
    rows = [r for r in run.where("saved_bytes") if r.case["precision"] != "tf32"]
    assert {r.case["precision"] for r in rows} == {"fp32", "bf16", "fp16"} and len(rows) >= 12
    for r in rows:
        traced = saved_tensors.trace(models.make(r.case["model"]), r.case["batch"], r.case["precision"], "cuda")
        assert abs(traced.activations + traced.weight_copies - r.value) <= 64, r.case


def test_a_gpus_allocator_was_asked_for_what_the_oracle_traces():
    """The peak is the optimizer's, which rounds up."""
    (run,) = on_gpus.runs("memory_oracle")
    real = run.one("measured_bytes", model="bert_large", batch=16, set_to_none=True)
    traced = oracle.step(lambda: bert(None, 128), 16, target="cuda", optimizer="adam").peak_bytes
    assert traced == pytest.approx(real.value, rel=0.0025)


# -- claims


def test_evidence_of_gpus_is_that_of_gpus():
    for number in ("01", "02", "03", "10"):
        for found in claim_records.kept_of_gpus(number):
            assert found.provenance["gpus"] and all(r.kind != "measured" for r in found)
