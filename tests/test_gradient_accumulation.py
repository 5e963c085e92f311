"""The right loop equals one process with the whole batch; every wrong one is seen to be wrong; traffic as predicted."""

import pytest

from labs import gradient_accumulation as lab
from labs.common import models
from labs.common.data_parallel.gradient_buckets import bucket_bytes
from labs.kit.errors import BadInput
from labs.kit.launch import launch

RIGHT = ("whole_batch", "no_sync", "sync_every", "forward_outside")
WRONG_ANYWHERE = ("loss_not_divided", "mean_of_means", "zero_grad_inside", "step_inside", "clip_inside", "batchnorm")
APART = ("last_in_no_sync", "step_inside")
SMALL = {"smoke": True, "micro_batch": 8, "accumulate": 3, "oversubscribe": True}


@pytest.fixture(
    scope="module", params=[(1, "mlp"), pytest.param((2, "mlp"), marks=pytest.mark.long), (2, "cnn")], ids=str
)
def run(request):
    """The comparison in float64, where all that is left is mistakes."""
    nproc, model = request.param
    return launch("gradient_accumulation", nproc, model=model, dtype="float64", **SMALL)


def value(run, metric, way):
    return run.one(metric, way=way).value


def test_records_are_complete(run):
    per_way = {
        "gradient_relative_error",
        "gradient_scale",
        "parameter_spread",
        "optimizer_steps",
        "all_reduces_per_step",
        "bytes_per_step",
    }
    assert all({r.metric for r in run.where(way=way)} >= per_way for way in lab.WAYS)
    assert {r.case["way"] for r in run.where("step_s")} == set(lab.TIMED)
    assert {r.case["effective_batch"] for r in run.where("step_s")} == {8 * 3 * run[0].layout["world_size"]}


def test_right_ways_have_the_gradient_of_the_whole_batch(run):
    for way in RIGHT:
        assert value(run, "gradient_relative_error", way) <= 1e-12, way
        assert value(run, "parameter_spread", way) == 0, way


def test_wrong_ways_are_seen_to_be_wrong(run):
    for way in WRONG_ANYWHERE:
        assert value(run, "gradient_relative_error", way) > 1e-2, way


def test_only_loops_without_a_last_all_reduce_drive_the_ranks_apart(run):
    several = run[0].layout["world_size"] > 1
    for way in lab.WAYS:
        assert (value(run, "parameter_spread", way) > 0.1) == (several and way in APART), way


def test_without_other_ranks_no_all_reduce_is_needed(run):
    alone = run[0].layout["world_size"] == 1
    assert (value(run, "gradient_relative_error", "last_in_no_sync") <= 1e-12) == alone


def test_traffic_and_scale_are_as_predicted(run):
    for way, expected in lab.predict(lab.Config(**run[0].config)).items():
        assert value(run, "all_reduces_per_step", way) == expected.all_reduces, way
        assert value(run, "bytes_per_step", way) == expected.bytes, way
        assert value(run, "optimizer_steps", way) == expected.optimizer_steps, way
        if expected.gradient_scale is not None:
            assert value(run, "gradient_scale", way) == pytest.approx(expected.gradient_scale, rel=1e-9), way


def test_forgetting_all_but_the_last_loses_length(run):
    assert value(run, "gradient_scale", "zero_grad_inside") < 0.6
    assert value(run, "gradient_scale", "step_inside") > 1.2


def test_activations_shrink_with_the_micro_batch(run):
    whole, micro = (value(run, "activation_bytes", way) for way in ("whole_batch", "no_sync"))
    assert 2 < whole / micro <= 3.01


def test_parity_in_float32_is_rounding():
    """A sum of another order: the convolutions add up 1024 positions per row."""
    run = launch("gradient_accumulation", 2, model="cnn", ways=("no_sync",), **SMALL)
    assert value(run, "gradient_relative_error", "no_sync") <= 1e-5


def test_buckets_by_hand():
    # Backward order: 40 B + 10,240 B of the head, 1,024 B + 524,288 B, 2,048 B + 2,097,152 B.
    module = models.build("mlp").module
    assert bucket_bytes(module, 25) == [2_634_792]
    assert bucket_bytes(module, 0.25) == [535_592, 2_099_200]
    assert bucket_bytes(module, 1e-6) == [p.numel() * 4 for p in reversed(list(module.parameters()))]


def test_prediction_by_hand():
    four = lab.predict(lab.Config(accumulate=5, ways=("no_sync", "sync_every", "last_in_no_sync")))
    assert [(t.all_reduces, t.bytes) for t in four.values()] == [(2, 2_634_792), (10, 5 * 2_634_792), (0, 0)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"accumulate": 1}, "1 is no accumulation"),
        ({"bucket_cap_mb": 0.0}, "must be positive"),
        ({"ways": ("nosync",)}, "there is no way 'nosync'"),
        ({"model": "resnet"}, "there is no model 'resnet'"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("gradient_accumulation", **values)
    assert "\n" not in str(e.value)
