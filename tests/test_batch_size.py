"""What is read off throughput against batch, and that the lab records it."""

import pytest

from labs import batch_size as lab
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records


def step(mode, batch, seconds):
    drift = (1.0, 2.0, 1.0, 1.0, 1.0, 1.0)  # a slow spell of the machine
    samples = [seconds * d for d in drift]
    return Record("batch_size", "step_s", "s", samples, case={"mode": mode, "batch": batch}, layout={"world_size": 2})


def planted(fixed_s, sample_s, ddp_s=0.0, batches=(8, 32, 64, 256, 1024)):
    return Records(
        step(mode, b, fixed_s + b * sample_s + more)
        for mode, more in (("single", 0.0), ("ddp", ddp_s))
        for b in batches
    )


def test_the_knee_is_the_first_batch_with_half_of_the_best_throughput():
    assert lab.knee(planted(1e-3, 2e-5)) == 64  # half of the limit at a batch of 50
    assert lab.knee(planted(1e-9, 2e-5)) == 8


def test_ranks_win_from_the_batch_whose_step_outlasts_the_exchange():
    found = lab.speedups(planted(1e-3, 2e-5, ddp_s=5e-3))
    assert found[8].high < 1 < found[1024].low
    assert found[256].value == pytest.approx(2 * 6.12 / 11.12)
    assert lab.category(planted(1e-3, 2e-5, ddp_s=5e-3)) == "knee inside: True; DDP at the ends: ['loses', 'wins']"
    assert lab.speedups(Records([step("single", 8, 1.0)])) == {}


@pytest.fixture(scope="module")
def run():
    return launch("batch_size", nproc=2, oversubscribe=True, smoke=True, batches=(4, 32, 512))


def test_every_way_takes_its_turn_at_every_batch(run):
    assert [(r.case["mode"], r.case["batch"]) for r in run.where("step_s")] == [
        ("single", 4), ("ddp", 4), ("single", 32), ("ddp", 32),
    ]  # fmt: skip
    kept = {r.case["batch"]: r.value for r in run.where("activation_bytes")}
    assert kept[32] == pytest.approx(8 * kept[4], rel=0.05)


@pytest.mark.parametrize("batches", [(), (0, 4), (4, 4)])
def test_bad_batches(batches):
    with pytest.raises(BadInput, match="batches must"):
        launch("batch_size", nproc=1, batches=batches)
