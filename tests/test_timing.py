"""The report says what its records hold, the lab's records are complete, and bad input is one line."""

import os
import subprocess
import sys
import time

import pytest
import torch
from processes import PYTHON, new_environment
from torch import Tensor, nn

from labs import timing
from labs.common import models
from labs.common.models import Workload
from labs.common.timing.benchmark_loop import RUNGS, WAITS
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.long), 2])
def run(request):
    return launch("timing", nproc=request.param, smoke=True, oversubscribe=True)


def test_all_that_the_report_needs_is_recorded(run):
    n = run[0].layout["world_size"]
    assert {r.case["mode"] for r in run.where("step_s")} == ({"train"} if n == 1 else {"train", "no_sync"})
    assert {(len(r.samples), r.case["batch_per_rank"]) for r in run.where("step_s")} == {(5, 64)}
    assert [r.layout["rank"] for r in run.where("rank_step_s")] == list(range(n))
    assert len(run.one("warm_up_s").samples) == run.one("warm_up_steps").value
    assert run.one("step_flop").kind == "modelled" and run.one("step_flop").value > 0
    assert set(timing.derived(run)) <= {r.metric for r in run}
    assert ("sync_s" in timing.report(run)) == (n > 1)


def test_the_slowest_rank_is_the_jobs_time(run):
    ranks = [r.samples for r in run.where("rank_step_s")]
    assert run.one("step_s", mode="train").samples == tuple(map(max, zip(*ranks, strict=True)))


def test_every_rung_of_the_loop_gives_an_answer(run):
    answers, seen = run.where("answer_s"), run.where("seen_share")
    assert [r.case["rung"] for r in answers] == list(RUNGS) and [r.case["way"] for r in seen] == list(WAITS)
    kind = "modelled" if answers[0].layout["device"] == "cpu" else "measured"
    assert {r.kind for r in answers + seen} == {kind}, "an emulated queue is no measurement of a device"


def records(ranks=2, seconds=(1.0, 1.0, 1.0, 1.0, 2.0), alone=None, settled=True):
    layout = {"world_size": ranks}

    def make(metric, unit, samples, **case):
        return Record("timing", metric, unit, samples, case=case, layout=layout)

    found = [
        make("step_s", "s", seconds, mode="train", batch_per_rank=10),
        make("step_flop", "FLOP", (50.0,)),
        make("peak_flop_s", "FLOP/s", (90.0, 100.0, 300.0)),
        make("warm_up_s", "s", (9.0, 1.0, 1.0)),
        make("warm_up_steps", "steps", (3,), settled=settled),
    ]
    return Records(found + ([make("step_s", "s", alone, mode="no_sync", batch_per_rank=10)] if alone else []))


def test_report_by_hand():
    found = timing.report(records())
    assert found["step_s"].value == 1.0 and found["step_s"].high > 1.0
    assert found["samples_per_s"].value == 20.0  # 2 ranks of 10 samples, in 1 s
    assert found["mfu"].value == pytest.approx(0.5)  # 50 FLOP in 1 s, of 100 FLOP/s
    assert found["iqr_share"] == 0.0 and found["p95_ratio"] == pytest.approx(1.8)
    assert found["warm_up"] == "steady after 3 steps"
    assert not {"sync_s", "sync_share", "mfu_datasheet"} & set(found)


def test_one_rank_finishes_only_its_own_samples():
    assert timing.report(records(ranks=1))["samples_per_s"].value == 10.0


def test_synchronisation_is_a_difference_of_pairs():
    found = timing.report(records(seconds=(4.0, 8.0, 4.0, 8.0, 4.0), alone=(3.0, 6.0, 3.0, 6.0, 3.0)))
    assert found["sync_share"] == Estimate(0.25, 0.25, 0.25, 5, "1")
    assert found["sync_s"].value == 1.0
    negative = timing.report(records(seconds=(1.0, 1.0, 1.0, 1.0, 1.0), alone=(2.0, 1.0, 1.0, 1.0, 0.5)))
    assert negative["sync_s"].value == 0.0 and negative["sync_s"].low < 0


def test_predict_by_hand():
    assert timing.predict(first_s=21.0, steady_s=1.0, data_s=0.5, steps=10) == pytest.approx(
        {"as printed": 3.4, "data outside": 0.0, "synchronise": 3.0, "warm up": 1.0, "median of steps": 1.0}
    )


# -- a model of one's own


class NotOnMeta(nn.Linear):
    """Looks at its values, which meta tensors do not have."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 4)."""
        return super().forward(x + 0 * x.sum().item())


def rows(n):
    return torch.randn(n, 8), torch.randn(n, 4)


def own(module=NotOnMeta):
    return Workload(module(8, 4), rows, nn.functional.mse_loss)


def own_on_meta():
    return own(nn.Linear)


def test_flops_are_counted_on_a_real_pass_where_meta_cannot_be():
    found = [
        timing.step_flop(timing.Config(model=f"{__name__}:{name}", batch_size=16), torch.device("cpu"))
        for name in ("own", "own_on_meta")
    ]
    assert found == [2 * 2 * 16 * 8 * 4] * 2  # forward, and backward for the weight; the input needs no gradient


def test_a_model_of_ones_own_gets_the_report_and_not_the_articles_loop():
    run = launch("timing", nproc=2, model=f"{__name__}:own", batch_size=16, smoke=True, oversubscribe=True)
    assert not run.where("answer_s") and run.one("samples_per_s").value > 0


# -- bad input

mse = nn.functional.mse_loss


def raises():
    raise RuntimeError("no weights here\nand a second line")


def leaves():
    sys.exit(3)


def nothing():
    return None


def frozen():
    return Workload(nn.Linear(8, 4).requires_grad_(False), rows, mse)


def detached():
    return Workload(nn.Linear(8, 4), rows, lambda output, y: mse(output.detach(), y))


def not_a_number():
    return Workload(nn.Linear(8, 4), rows, lambda output, y: mse(output, y) * float("nan"))


def fixed_batch():
    return Workload(nn.Linear(8, 4), lambda n: rows(64), mse)


def a_dictionary():
    return Workload(nn.Linear(8, 4), lambda n: ({"x": 1, "y": 2}, torch.zeros(n)), mse)


def not_scalar():
    return Workload(nn.Linear(8, 4), rows, lambda output, y: output)


def hangs():
    time.sleep(1000)


FACTORIES = {
    "raises": "cannot be built: RuntimeError: no weights here and a second line",
    "leaves": "cannot be built: SystemExit: 3",
    "nothing": "it returned NoneType, not a labs.models.Workload",
    "frozen": "no parameter that requires a gradient",
    "detached": "its loss does not depend on a parameter",
    "not_a_number": "its first loss is nan",
    "a_dictionary": "returned dict and Tensor, two tensors are needed",
    "not_scalar": r"its loss has shape \(2, 4\), a scalar is needed",
    "fixed_batch": r"its make_batch\(2\) returned 64 rows and 64 targets",
    "hangs": "no step within 0.3 s",
    "missing": "cannot be imported",
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_that_cannot_be_timed_is_refused_in_one_line(factory, monkeypatch):
    monkeypatch.setattr(models, "STEP_LIMIT_S", 0.3 if factory == "hangs" else 60.0)
    with pytest.raises(BadInput, match=FACTORIES[factory]) as e:
        launch("timing", nproc=2, model=f"{__name__}:{factory}", oversubscribe=True)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rounds": -3}, "rounds must be at least 5"),
        ({"loop_steps": 1}, "loop_steps must be at least 2"),
        ({"least_s": float("nan")}, "least_s must be positive"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("timing", nproc=2, oversubscribe=True, **values)
    assert "\n" not in str(e.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "as_rank",
    [pytest.param(False, id="python -m"), pytest.param(True, id="under torchrun")],
)
def test_from_a_shell_bad_input_is_one_line_and_exit_code_2(as_rank):
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if as_rank else {}
    command = [*PYTHON, "-m", "labs.timing", "--model", f"{__name__}:detached"]
    environment = new_environment(**ranks)
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "does not depend on a parameter" in done.stderr
