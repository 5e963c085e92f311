"""FSDP2: what one process computes, a part of the memory, and as many bytes as the closed forms say."""

import pytest
from torch import nn

from labs import fully_sharded
from labs.common import models
from labs.common.cost_model.memory import sent_per_parameter
from labs.common.sharding import fsdp
from labs.common.sharding.traffic import sent_bytes
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def run(request):
    return launch("fully_sharded", nproc=request.param, oversubscribe=True, smoke=True)


def test_every_way_has_the_gradient_of_one_process(run):
    found = {r.case["way"]: r.value for r in run.where("gradient_relative_error")}
    assert set(found) == {"ddp", "fsdp", "fsdp, kept"} and max(found.values()) < 1e-12


@pytest.mark.parametrize("metric", ["held_bytes", "gathered_bytes", "sent_bytes"])
def test_counted_is_the_closed_form(run, metric):
    """Of three ranks, which share no layer evenly, too."""
    measured = [r for r in run.where(metric) if r.kind == "measured"]
    assert len(measured) == {"held_bytes": 12, "gathered_bytes": 4, "sent_bytes": 7}[metric]
    for r in measured:
        assert [m.value for m in run.where(metric, **r.case) if m.kind == "modelled"] == [r.value]


def test_the_cost_model_counts_the_bytes_that_were_counted_here(run):
    """One accounting: what the advice of labs.strategy rests on is what Traffic saw, in both formats."""
    ranks = run[0].layout["world_size"]
    parameters = sum(p.numel() for p in models.make(fully_sharded.Config.model).module.parameters())
    for way, form in (
        ("ddp", sent_per_parameter(ranks, False)),
        ("fsdp", sent_per_parameter(ranks, True, weight=4)),
        ("fsdp, bf16", sent_per_parameter(ranks, True)),
    ):
        assert fully_sharded.total(run, "sent_bytes", way) == pytest.approx(form * parameters, rel=0.03)


def test_less_memory_at_the_peak(run):
    assert fully_sharded.peak_share(run) < 0.9
    assert fully_sharded.category(run) == "less"


@pytest.mark.parametrize(("fsdp_peak", "word"), [(50, "at most 1/n"), (70, "less"), (100, "no less")])
def test_the_category_is_the_peak_beside_ddps(fsdp_peak, word):
    peaks = {"ddp": 100, "fsdp": fsdp_peak}
    layout = {"world_size": 2}
    records = [Record("x", "peak_bytes", "B", (b,), case={"way": w}, layout=layout) for w, b in peaks.items()]
    assert fully_sharded.category(Records(records)) == word


def test_the_answer_is_that_of_the_records(run):
    said = " ".join(fully_sharded.answer(run))
    assert "times DDP's bytes in FP32" in said
    if run[0].layout["world_size"] == 2:  # nothing is padded
        assert "1.50 times DDP's bytes in FP32, and 1.00 times with BF16" in said


def test_closed_form_by_hand():
    """Shards of (3, 5) and (3,) on 2 ranks are 2 rows: 10 + 2 numbers each, so 24 are gathered."""
    model = nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))
    assert [fsdp.shard_bytes(p, 2) for p in model.parameters()] == [40, 8, 12, 4]
    gathered = 2 * (40 + 8 + 12 + 4)  # bytes of the padded whole
    forms = fsdp.predict(model, "fsdp", 2)
    assert forms == {"all_gather": 2 * gathered / 2, "reduce_scatter": gathered / 2, "gathered": 4 * 18}
    assert fsdp.predict(model, "ddp", 2) == {"all_reduce": 4 * 26, "gathered": 4 * 26}


def test_bytes_of_collectives():
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")
    assert [sent_bytes(k, 80, 4) for k in kinds] == [120, 60, 60, 80, 0]
    assert sent_bytes("reduce_scatter", 80, 4, gloo=True) == 120


@pytest.mark.parametrize("values", [{"model": "nope"}, {"batch_size": 0}, {"rounds": 2}])
def test_bad_values_are_one_line(values):
    with pytest.raises(BadInput) as e:
        launch("fully_sharded", **values)
    assert "\n" not in str(e.value)
