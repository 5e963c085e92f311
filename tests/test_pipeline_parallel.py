"""The pipeline lab's gradients, bytes, moments and records; input that can't work; stages that fail."""

import itertools
import os
import time

import pytest
import torch
from processes import MARK, assert_no_survivors
from torch import nn

from labs import pipeline_parallel
from labs.common.models import Workload
from labs.common.pipelines import schedules
from labs.kit.errors import BadInput
from labs.kit.launch import RankFailed, launch
from labs.kit.record import Record, Records
from labs.pipeline_parallel import counting


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3])
def run(request):
    small = {"micro_batches": (1, 4, 8), "batch_size": 8}
    return launch("pipeline_parallel", nproc=request.param, smoke=True, oversubscribe=True, **small)


def test_every_schedule_has_the_gradient_of_one_process(run):
    found = run.where("gradient_relative_error")
    assert {(r.case["schedule"], r.case["micro_batches"]) for r in found} == {
        ("1f1b", 1), ("1f1b", 4), ("1f1b", 8), ("gpipe", 4),
    }  # fmt: skip
    assert all(r.value <= 1e-12 for r in found)


def test_every_way_is_timed_in_every_round(run):
    steps = run.where("step_s")
    assert {(r.case["schedule"], r.case["micro_batches"]) for r in steps} >= {("single", 1), ("gpipe", 4)}
    assert len(steps) == 5 and {len(r.samples) for r in steps} == {2}


def test_1f1b_keeps_what_its_stages_need_and_gpipe_everything(run):
    p = run[0].layout["world_size"]
    for stage, m in itertools.product(range(p), (1, 4, 8)):
        whole = run.one("kept_bytes", schedule="gpipe", micro_batches=1, stage=stage).value
        kept = {s: run.one("kept_bytes", schedule=s, micro_batches=m, stage=stage).value for s in ("gpipe", "1f1b")}
        assert kept["gpipe"] == pytest.approx(whole, rel=0.02)
        # The loss keeps some numbers per micro-batch; all else is in proportion to the rows.
        assert kept["1f1b"] == pytest.approx(whole * min(p - stage, m) / m, rel=0.05)
        assert run.one("kept_micro_batches", schedule="1f1b", micro_batches=m, stage=stage).value == min(p - stage, m)


def test_moments_fill_the_whole_step_of_every_stage_in_the_schedules_order(run):
    p = run[0].layout["world_size"]
    for schedule, m in (("1f1b", 1), ("gpipe", 4), ("1f1b", 4)):
        spans = run.where("span_s", schedule=schedule, micro_batches=m)
        end = max(r.samples[1] for r in spans)
        for stage in range(p):
            own = sorted((r for r in spans if r.case["stage"] == stage), key=lambda r: r.samples)
            assert sum(r.samples[1] - r.samples[0] for r in own) == pytest.approx(end, rel=1e-6)
            assert all(a.samples[1] <= b.samples[0] + 1e-9 for a, b in itertools.pairwise(own))
            done = [(r.case["part"], r.case["number"]) for r in own if r.case["part"] in ("forward", "backward")]
            assert done == [tuple(a) for a in schedules.SCHEDULES[schedule](stage, p, m)]
    measured, modelled = (run.one(name, schedule="gpipe", micro_batches=4) for name in ("idle_share", "idle_formula"))
    assert (measured.kind, modelled.value) == ("measured", schedules.bubble(p, 4)) and 0 < measured.value < 1


def made(**seconds):
    cases = {"single": {"schedule": "single", "micro_batches": 1}}
    cases |= {f"m{m}": {"schedule": "1f1b", "micro_batches": m} for m in (1, 4, 16)}
    return Records(Record("pipeline_parallel", "step_s", "s", [s] * 6, case=cases[name]) for name, s in seconds.items())


def test_the_category_is_the_fastest_of_the_pipelines():
    assert pipeline_parallel.category(made(single=0.1, m1=2.0, m4=1.3, m16=1.4)) == "4 micro-batches"
    assert pipeline_parallel.category(made(single=0.1, m1=2.0, m4=1.3, m16=1.2)) == "16 micro-batches"


def test_the_answer_is_that_of_the_records(run):
    said = " ".join(pipeline_parallel.answer(run))
    assert "is best" in said and "rank 0 keeps" in said and "within" in said


@pytest.mark.parametrize(
    ("nproc", "values", "words"),
    [
        (2, {"batch_size": 36}, "16 micro-batches do not divide a batch of 36 rows: take a multiple of 16"),
        (2, {"micro_batches": (4,)}, "must include 1, the naive split"),
        (2, {"compare": 5}, "compare, 5, must be one of the micro_batches"),
        (3, {"model": f"{__name__}:own"}, "has 2 layers, not enough for 3 stages: use at most 2 ranks"),
        (2, {"model": f"{__name__}:idle_stage"}, "stage 0 of 2 has no parameter to train: use fewer ranks"),
        (2, {"model": f"{__name__}:not_sequential"}, "is a Linear: a pipeline cuts an nn.Sequential"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(nproc, values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("pipeline_parallel", nproc=nproc, oversubscribe=True, **values)
    assert "\n" not in str(e.value)


def rows(n):
    return torch.randn(n, 4), torch.randn(n, 2)


def own():
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), rows, nn.functional.mse_loss)


def not_sequential():
    return Workload(nn.Linear(4, 2), rows, nn.functional.mse_loss)


def idle_stage():
    return Workload(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), rows, nn.functional.mse_loss)


class Fails(nn.Module):
    """Works at first, so that it passes the checks made before the ranks start."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 4:
            raise FloatingPointError("not today")
        return x


def raises():
    return Workload(nn.Sequential(nn.Linear(4, 4), Fails(), nn.Linear(4, 2)), rows, nn.functional.mse_loss)


@pytest.mark.drill
def test_a_stage_that_fails_is_named_and_nothing_stays():
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"failed in the forward of micro-batch .: FloatingPointError: not today"):
        launch("pipeline_parallel", nproc=2, model=f"{__name__}:raises", smoke=True, oversubscribe=True)
    assert time.monotonic() - start < 60, "long before the launch would have run out of time"
    assert_no_survivors(os.environ[MARK], os.getpid())


def test_what_backward_keeps_is_counted_until_it_is_freed():
    layer = nn.Linear(16, 16)
    with counting(layer.parameters()) as kept:
        first = layer(torch.ones(4, 16))
        one = kept.now
        second = layer(torch.ones(4, 16)).relu()
        assert one == 4 * 16 * 4 and kept.now == 3 * one  # an input; another input and a ReLU's output
        first.sum().backward()
        assert kept.now == 2 * one
        second.sum().backward()
        assert kept.now == 0 and kept.peak == 3 * one
