"""The lab's gradients, bytes and records; torch's schedules; input that cannot work; stages that fail."""

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
from labs.pipeline_parallel import analysis, torch_schedules

WHOLE = {"single", "copies"}


@pytest.fixture(scope="module", params=[*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 4])
def run(request):
    model = "deep_mlp" if request.param > 1 else "char_gpt"
    return launch("pipeline_parallel", nproc=request.param, model=model, smoke=True, oversubscribe=True)


def test_every_schedule_has_the_gradient_and_loss_of_one_process(run):
    p, found = run[0].layout["world_size"], run.where("gradient_relative_error")
    ours = {(s, by, cuts) for s in ("naive", "gpipe", "1f1b") for by, cuts in (("hand", "even"), ("hand", "uneven"))}
    layers = 10 if p > 1 else 6
    able = [n for n, (_, each) in torch_schedules.SCHEDULES.items() if each * p <= layers and (p > 1 or each == 1)]
    cases = {(r.case["schedule"], r.case["by"], r.case["cuts"]) for r in found}
    assert cases == ours | {(name, "torch", "even") for name in able}
    assert all(r.value <= 1e-5 for r in found)
    assert all(r.value <= 1e-6 for r in run.where("loss_relative_error"))


def test_torch_refuses_fewer_micro_batches_than_stages(run):
    refused = {r.case["schedule"] for r in run.where("raised")}
    assert refused == ({"1f1b", "dual_pipe_v"} if run[0].layout["world_size"] > 1 else set())
    assert all("\n" not in r.case["error"] for r in run.where("raised"))


def test_every_way_is_timed_in_every_round(run):
    steps = run.where("step_s")
    timed = {(r.case["schedule"], r.case["by"], r.case["micro_batches"]) for r in steps}
    torchs = {("1f1b", "torch", 8)}
    assert timed - torchs == {(w, "hand", 1) for w in (*WHOLE, "naive")} | {("1f1b", "hand", 8), ("gpipe", "hand", 8)}
    assert {len(r.samples) for r in steps} == {2}


def test_counted_bytes_equal_the_closed_form_and_messages_are_one_per_micro_batch(run):
    p = run[0].layout["world_size"]
    sent = run.where("sent_bytes")
    measured, modelled = ({str(r.case): r.value for r in sent if r.kind == kind} for kind in ("measured", "modelled"))
    assert measured == modelled and len(measured) == 2 * 3 * p
    for r in run.where("sent_messages"):
        has_neighbour = r.case["stage"] < p - 1 if r.case["message"] == "activation" else r.case["stage"] > 0
        assert r.value == (r.case["micro_batches"] if has_neighbour else 0)


def test_1f1b_keeps_what_its_stages_need_and_gpipe_everything(run):
    p = run[0].layout["world_size"]
    for stage in range(p):
        whole, gpipe, ours = (
            run.one("saved_bytes", schedule=s, micro_batches=m, stage=stage).value
            for s, m in (("naive", 1), ("gpipe", 8), ("1f1b", 8))
        )
        assert gpipe == pytest.approx(whole, rel=0.02)
        # The loss keeps some numbers per micro-batch; nothing else is not in proportion to the rows.
        assert ours == pytest.approx(whole * min(p - stage, 8) / 8, rel=0.05)
        assert run.one("kept_micro_batches", schedule="1f1b", micro_batches=8, stage=stage).value == min(p - stage, 8)


def test_events_fill_the_whole_step_of_every_stage(run):
    p, chain = run[0].layout["world_size"], run[0].case["chain"]
    for schedule, m in (("naive", 1), ("gpipe", 8), ("1f1b", 8)):
        events = analysis.timeline(run, chain, schedule, m)
        spent = [sum(e.end_s - e.start_s for e in events if e.stage == s) for s in range(p)]
        assert spent == pytest.approx([schedules.span_s(events)] * p, rel=1e-6)
        for stage in range(p):
            own = sorted((e for e in events if e.stage == stage), key=lambda e: e.start_s)
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))
            done = [(e.kind, e.micro_batch) for e in own if e.kind in ("forward", "backward")]
            order = schedules.SCHEDULES.get(schedule, schedules.gpipe)(stage, p, m)
            assert done == [tuple(a) for a in order]
    shares = run.where("idle_share", schedule="gpipe", micro_batches=8)
    assert [r.kind for r in shares] == ["measured", "modelled"]
    assert shares[1].value == schedules.bubble(p, 8)


def test_records_answer_the_questions_of_the_notebook(run):
    chain = run[0].case["chain"]
    assert analysis.fit(run, chain).step_s(8) > 0
    assert set(analysis.speedups(run, chain)) == set(analysis.shares_of_ceiling(run, chain))
    assert {i.micro_batches for i in analysis.idle_shares(run, chain)} == {1, 8}


def test_predict_by_hand():
    assert pipeline_parallel.predict(2, 8) == {
        "idle_share": pytest.approx(1 / 9),
        "speedup": pytest.approx(16 / 9),
        "kept by gpipe": 8,
        "kept by 1f1b": 2,
    }


@pytest.mark.parametrize(
    ("nproc", "values", "words"),
    [
        (2, {"batch_size": 36}, "8 micro-batches do not divide a batch of 36 rows: take a batch_size that is a mult"),
        (3, {"model": f"{__name__}:own"}, "has 2 layers, not enough for 3 stages: use at most 2 ranks"),
        (2, {"cuts": (6,)}, "there is no cut at 6: char_gpt has 6 layers, so cuts go from 1 to 5"),
        (2, {"model": f"{__name__}:not_sequential"}, "is a Linear: a pipeline cuts an nn.Sequential"),
        (2, {"torch_schedules": ("zero",)}, "is none of gpipe, 1f1b"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(nproc, values, words):
    with pytest.raises(BadInput, match=words.replace("(", r"\(")) as e:
        launch("pipeline_parallel", nproc=nproc, oversubscribe=True, **values)
    assert "\n" not in str(e.value)


def rows(n):
    return torch.randn(n, 4), torch.randn(n, 2)


def own():
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), rows, nn.functional.mse_loss)


def not_sequential():
    return Workload(nn.Linear(4, 2), rows, nn.functional.mse_loss)


class Fails(nn.Module):
    """Works at first, so that it passes the checks made before the ranks start."""

    def __init__(self, hangs):
        super().__init__()
        self.hangs, self.calls = hangs, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 6:
            if self.hangs:
                time.sleep(60)
            raise FloatingPointError("not today")
        return x


def hangs():
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), Fails(True)), rows, nn.functional.mse_loss)


def raises():
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), Fails(False)), rows, nn.functional.mse_loss)


def test_a_model_of_ones_own_runs_like_the_others():
    values = {"model": f"{__name__}:own", "smoke": True, "too_big": True, "torch_schedules": ()}
    run = launch("pipeline_parallel", nproc=2, oversubscribe=True, **values)
    assert not WHOLE & {r.case["schedule"] for r in run.where("step_s")}
    assert not len(run.where("gradient_relative_error"))
    assert run.where("sent_bytes", stage=0, message="activation")[0].value == 32 * 4 * 4  # rows, numbers, bytes


@pytest.mark.drill
@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("raises", "stage 1 of 2 failed in the forward of micro-batch 2: FloatingPointError: not today"),
        ("hangs", "for the gradient of micro-batch 0 from stage 1: that stage hangs, or needs longer than wait_s=0.5"),
    ],
)
def test_a_stage_that_fails_is_named_and_nothing_stays(factory, words):
    start = time.monotonic()
    with pytest.raises(RankFailed) as e:
        launch("pipeline_parallel", nproc=2, model=f"{__name__}:{factory}", wait_s=0.5, smoke=True, oversubscribe=True)
    assert any(words in line for line in str(e.value).splitlines())
    assert time.monotonic() - start < 60, "long before the launch would have run out of time"
    assert_no_survivors(os.environ[MARK], os.getpid())
