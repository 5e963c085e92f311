"""The lab's counts equal its closed forms, its records are complete, and bad input is refused in one line."""

import math
import socket
from pathlib import Path

import pytest

from labs import data_parallel
from labs.chapters.nb03 import figures
from labs.common import models
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def run(request):
    return launch("data_parallel", nproc=request.param, model="cnn", smoke=True, oversubscribe=True)


def test_every_way_is_timed_in_every_round(run):
    n = run[0].layout["world_size"]
    cases = {(r.case["mode"], r.case["ranks"]) for r in run.where("step_s")}
    assert cases == {("single", 1), ("copies", n), ("ddp", n), ("dp", n)}
    assert {len(r.samples) for r in run.where("step_s")} == {2}


def test_counted_bytes_equal_the_closed_forms(run):
    n = run[0].layout["world_size"]
    forms = data_parallel.predict(data_parallel.Config(smoke=True), n)
    counted = {r.case["way"]: r.value for r in run.where("bytes_per_step")}
    assert all(math.isclose(counted.get(way, 0), value) for way, value in forms.items() if way != "ddp sent")


@pytest.mark.skipif(not (hasattr(socket, "TCP_INFO") and Path("/proc/self/fd").is_dir()), reason="needs Linux")
@pytest.mark.parametrize("nproc", [pytest.param(2, marks=pytest.mark.long), 3])
def test_the_kernel_counts_what_a_ring_sends(nproc):
    run = launch("data_parallel", nproc=nproc, model="mlp", modes=("single", "ddp"), smoke=True, oversubscribe=True)
    sent, ring = run.one("wire_bytes_per_step").samples, 2 * (nproc - 1) / nproc * 4 * 658_698
    assert len(sent) == nproc
    assert all(ring <= n < 1.01 * ring for n in sent), "headers of gloo are all that may be more"


def test_strong_scaling_shares_one_batch():
    run = launch("data_parallel", nproc=2, model="mlp", split="strong", batch_size=64, smoke=True, oversubscribe=True)
    assert run.one("step_s", mode="ddp").case["batch_per_rank"] == 32
    assert run.one("step_s", mode="single").case["batch_per_rank"] == 64


def step(mode, ranks, rows, seconds):
    case = {"mode": mode, "ranks": ranks, "batch_per_rank": rows}
    return Record("data_parallel", "step_s", "s", seconds, case=case, layout={"world_size": 2})


def test_speedups_compare_samples_per_second():
    weak = data_parallel.speedups(Records([step("single", 1, 64, (1.0, 2.0)), step("ddp", 2, 64, (1.25, 2.5))]))
    strong = data_parallel.speedups(Records([step("single", 1, 64, (1.0, 2.0)), step("ddp", 2, 32, (0.625, 1.25))]))
    assert weak["ddp", 2].value == strong["ddp", 2].value == pytest.approx(1.6)


def test_modelled_speedup_adds_the_all_reduce_to_the_step():
    records = Records(
        [
            step("single", 1, 64, (1.0,)),
            step("ddp", 2, 64, (1.3,)),
            Record("data_parallel", "all_reduce_s", "s", (0.25,), layout={"world_size": 2}),
        ]
    )
    assert data_parallel.modelled_speedup(records) == pytest.approx(2 / 1.25)


def test_the_figure_names_a_ceiling_only_where_ddp_is_shown_to_be_below_it():
    def told(low, high):
        return figures.ways_message(
            2, Estimate(1.84, 1.4, 2.2, 8), Estimate(1.77, 1.6, 2.3, 8), Estimate(1, low, high, 8)
        )

    assert told(0.8, 0.9) == "2 ranks train 1.84 times as fast as one; the machine allows 1.77"
    assert told(0.9, 1.1).endswith("as fast as one, not shown to be slower than copies that never talk")
    assert told(1.1, 1.2).endswith(", faster than copies that never talk")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 33, "split": "strong"}, "multiple of 2"),
        ({"modes": ("ddp",)}, "must hold 'single'"),
        ({"inner": 0}, "inner must be at least 1"),
        ({"model": "resnet"}, "there is no model 'resnet'"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("data_parallel", nproc=2, oversubscribe=True, **values)
    assert "\n" not in str(e.value)


def own_model():
    return models.Workload(models.ConvNet(width=4), models.cnn().make_batch, models.cnn().loss)


def test_a_model_of_ones_own_runs_like_the_others():
    run = launch("data_parallel", nproc=2, model=f"{__name__}:own_model", smoke=True, oversubscribe=True)
    size = models.gradient_bytes(own_model().module)
    assert run.one("bytes_per_step", way="ddp handed over").value == size
