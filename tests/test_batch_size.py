"""The curve through two batch sizes, what is read off the records, and the bytes that a batch keeps."""

import math

import pytest

from labs import batch_size as lab
from labs.common import models
from labs.common.memory.activation_bytes import activation_bytes
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records


def step(mode, batch, samples):
    return Record("batch_size", "step_s", "s", samples, case={"mode": mode, "batch": batch}, layout={"world_size": 2})


def planted(fixed_s, sample_s, mode="single", batches=(8, 32, 256, 1024), drift=(1.0, 2.0, 1.0)):
    """Steps of t(b) = fixed_s + b sample_s on a machine that has a slow spell in round 2."""
    return [step(mode, b, [(fixed_s + b * sample_s) * d for d in drift]) for b in batches]


def test_two_batches_give_the_whole_curve():
    curve = lab.predict(32, 1e-3 + 32e-5, 256, 1e-3 + 256e-5)
    assert (curve.small, curve.large) == (32, 256)
    assert curve.fixed_s == pytest.approx(1e-3) and curve.sample_s == pytest.approx(1e-5)
    assert curve.step_s(4096) == pytest.approx(1e-3 + 4096e-5)
    assert curve.half_batch == pytest.approx(100)


def test_the_knee_has_half_of_the_throughput_that_no_batch_exceeds():
    curve = lab.predict(32, 3e-3, 256, 4e-3)
    ceiling = curve.samples_per_s(math.inf)
    assert curve.samples_per_s(curve.half_batch) == pytest.approx(ceiling / 2)
    assert curve.samples_per_s(1e9) == pytest.approx(ceiling, rel=1e-3)
    assert [curve.samples_per_s(b) for b in (32, 256)] == pytest.approx([32 / 3e-3, 256 / 4e-3])


def test_a_fixed_cost_below_zero_is_noise():
    assert lab.predict(32, 1.0, 256, 10.0).fixed_s == 0


@pytest.mark.parametrize(("small_s", "large_s"), [(3e-3, 1e-3), (2e-3, 2e-3)])
def test_steps_that_do_not_get_longer_are_a_fixed_cost_alone(small_s, large_s):
    curve = lab.predict(32, small_s, 256, large_s)
    assert (curve.fixed_s, curve.sample_s) == pytest.approx((2e-3, 0.0))
    assert math.isinf(curve.half_batch) and math.isinf(curve.samples_per_s(math.inf))


def test_batches_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="two batches"):
        lab.predict(256, 1e-3, 32, 2e-3)


def test_curve_and_knee_are_found_in_records():
    records = Records(planted(2e-3, 1e-5) + planted(8e-3, 1e-5, "ddp"))
    assert lab.fit_ends(records).fixed_s == pytest.approx(2e-3)
    assert lab.fit_ends(records, "ddp", 8, 1024).half_batch == pytest.approx(800)
    knee = lab.knee(records)  # a slow spell scales a whole round, and leaves its knee alone
    assert (knee.value, knee.low, knee.high, knee.n) == pytest.approx((200, 200, 200, 3))
    with pytest.raises(LookupError, match="batch"):
        lab.fit_ends(records, small=31)


def test_rounds_without_a_slope_do_not_make_a_knee():
    records = Records([step("single", 32, [1e-3, 9e-3]), step("single", 256, [2e-3, 2e-3])])
    assert lab.knee(records).n == 1
    assert lab.knee(Records([step("single", 32, [2e-3]), step("single", 256, [1e-3])])) is None


def test_throughput_counts_the_samples_of_all_ranks():
    records = Records(planted(0.0, 1e-3, drift=(1.0,)) + planted(0.0, 1e-3, "ddp", drift=(1.0,)))
    assert {b: e.value for b, e in lab.throughput(records).items()} == pytest.approx(
        dict.fromkeys((8, 32, 256, 1024), 1e3)
    )
    assert lab.throughput(records, "ddp")[32].value == pytest.approx(2e3)
    assert lab.latency(records)[256].value == pytest.approx(0.256)


def test_communication_share_is_judged_pair_by_pair():
    records = Records([step("ddp", 32, [4.0, 8.0, 40.0]), step("no_sync", 32, [1.0, 2.0, 10.0])])
    share = lab.communication_share(records)[32]
    assert (share.value, share.low, share.high) == (0.75, 0.75, 0.75)
    assert lab.communication_share(Records(planted(1e-3, 1e-5))) == {}


def test_modelled_share_by_hand():
    all_reduce = Record("batch_size", "all_reduce_s", "s", (3e-3,))
    records = Records([*planted(1e-3, 1e-5), *planted(4e-3, 1e-5, "ddp"), all_reduce])
    assert lab.modelled_share(records)[1024] == pytest.approx(3e-3 / (3e-3 + 1e-3 + 1024e-5))
    assert lab.modelled_share(Records(planted(1e-3, 1e-5))) == {}


def test_activation_bytes_by_hand():
    """Kept of each row: 1024 inputs, 512 and 256 outputs of ReLU, 10 log-probabilities, one label; 4 B of the loss."""
    workload = models.build("mlp")
    batches = (1, 2, 4, 8, 16, 32, 64, 100, 512)
    counted = [activation_bytes(workload, *workload.make_batch(b)) for b in batches]
    assert counted == [b * (4 * (1024 + 512 + 256 + 10) + 8) + 4 for b in batches]


@pytest.mark.parametrize(("nproc", "modes"), [(1, {"single"}), (2, {"single", "ddp", "no_sync"})])
def test_every_batch_and_way_is_measured(nproc, modes):
    run = launch("batch_size", nproc, oversubscribe=True, smoke=True, batches=(8, 32, 256, 4096), budget_s=1e-3)
    steps = run.where("step_s")
    assert {(r.case["mode"], r.case["batch"]) for r in steps} == {(m, b) for m in modes for b in (8, 32, 256)}
    assert all(len(r.samples) == 2 for r in steps)
    assert run.one("gradient_bytes").value == models.gradient_bytes(models.build("mlp").module)
    assert [r.case["batch"] for r in run.where("activation_bytes")] == [8, 32, 256, 4096]
    assert set(lab.communication_share(run)) == ({8, 32, 256} if nproc > 1 else set())
    assert len(run.where("all_reduce_s")) == nproc - 1
    assert lab.fit_ends(run).half_batch >= 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batches": ()}, "batches must hold positive numbers"),
        ({"batches": (32, 32)}, "batches must be different"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"budget_s": math.nan}, "budget_s must be positive"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("batch_size", **values)
    assert "\n" not in str(e.value)
