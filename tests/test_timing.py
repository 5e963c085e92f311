"""Each fault of the loop mixes in what it should, its processes leave nothing, a bad model is refused in one line."""

import dataclasses
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from labs import timing
from labs.common import models
from labs.common.models import Workload
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

CPU = torch.device("cpu")
DATA_S, FIRST_S, STEADY_S, HICCUP_S = 1.0, 500.0, 10.0, 100.0


class SimulatedGpu:
    """Host and device with clocks of their own: steps 0 and 8 take longer, a step is launched in no time."""

    def __init__(self):
        self.now = self.free = 0.0
        self.steps = 0

    def make_batch(self):
        self.now += DATA_S
        tensor = SimpleNamespace()
        tensor.to = lambda device: self.synchronize() or tensor  # from ordinary memory: waits for the queue
        return tensor, tensor

    def step(self, x, y):
        extra = {0: FIRST_S - STEADY_S, 8: HICCUP_S}.get(self.steps, 0.0)
        self.free = max(self.now, self.free) + STEADY_S + extra
        self.steps += 1

    def synchronize(self, *_):
        self.now = max(self.now, self.free)


@pytest.fixture
def simulated(monkeypatch):
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.now))
    monkeypatch.setattr(timing.measure, "sync", gpu.synchronize)
    monkeypatch.setattr(timing, "now", lambda device: max(gpu.now, gpu.free))
    monkeypatch.setattr(timing, "seconds_between", lambda a, b: b - a)
    return gpu


EXPECTED = {
    "as printed": (DATA_S + FIRST_S + HICCUP_S + 8 * STEADY_S) / 10,  # each copy waits: only the last step escapes
    "data outside": 0.0,  # nothing waits: the clock saw the host only
    "synchronise": (FIRST_S + HICCUP_S + 9 * STEADY_S) / 10,
    "warm up": (HICCUP_S + 10 * STEADY_S) / 10,
    "median of steps": STEADY_S,
}


@pytest.mark.parametrize("name", timing.RUNGS)
def test_every_loop_prints_what_it_mixes_in(name, simulated):
    assert timing.LOOPS[name](simulated.step, simulated.make_batch, 10, CPU) == pytest.approx(EXPECTED[name], rel=0.01)


@pytest.fixture(scope="module")
def run():
    return launch("timing", nproc=2, smoke=True, oversubscribe=True)


def test_all_that_the_report_needs_is_recorded(run):
    assert [r.case["rung"] for r in run.where("answer_s")] == list(timing.RUNGS)
    assert not run.where("seen_share"), "a CPU has no queue"
    assert len(run.one("warm_up_s").samples) == run.one("warm_up_steps").value
    assert len(run.one("step_s", mode="train", batch_per_rank=64).samples) == 6
    assert run.one("step_flop").value > 0 and "DDP step on 2 ranks" in " ".join(timing.answer(run))


def records(**answers):
    rows = {**dict.fromkeys(timing.RUNGS, 1.0), **{k.replace("_", " "): v for k, v in answers.items()}}
    noise = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)
    return Records(
        Record("timing", "answer_s", "s", [s * k for k in noise], case={"rung": rung}) for rung, s in rows.items()
    )


def test_the_largest_fault_is_found():
    assert timing.largest_fault(records(as_printed=25.0, data_outside=24.0, synchronise=22.0)) == "warm up"
    found = records(as_printed=3.0, data_outside=1.2, synchronise=1.2)
    assert timing.largest_fault(found) == "data outside" and "is wrong" in timing.category(found)
    assert timing.over_repaired(found)["as printed"].value == pytest.approx(3, rel=0.02)


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
    found = [timing.step_flop(timing.Config(model=f"{__name__}:{name}", batch_size=16), CPU)
             for name in ("own", "own_on_meta")]  # fmt: skip
    assert found == [2 * 2 * 16 * 8 * 4] * 2  # forward, and backward for the weight; the input needs no gradient


def test_a_model_of_ones_own_gets_the_report_and_not_the_articles_loop():
    run = launch("timing", nproc=1, model=f"{__name__}:own", batch_size=16, smoke=True)
    assert not run.where("answer_s") and any("A training step takes" in line for line in timing.answer(run))


# -- processes


def broken():
    def loss(output, target):
        raise RuntimeError("no such loss\nand more lines")

    return Workload(nn.Linear(2, 1), lambda n: (torch.zeros(n, 2), torch.zeros(n, 1)), loss)


def lost():
    os.kill(os.getpid(), signal.SIGKILL)


def endless():
    time.sleep(1000)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("broken", "RuntimeError: no such loss$"),
        ("lost", "died without a message"),
        ("endless", "no answer within 0.5 s"),
    ],
)
def test_what_goes_wrong_in_a_process_is_one_line_and_leaves_none(factory, words, monkeypatch):
    monkeypatch.setattr(timing, "ANSWER_WITHIN_S", 0.5 if factory == "endless" else 60.0)
    config = dataclasses.replace(timing.Config(smoke=True), model=f"{__name__}:{factory}")
    with pytest.raises(RuntimeError, match=words) as e:
        timing.one_answer(config, "synchronise", CPU)
    assert "\n" not in str(e.value) and "(synchronise)" in str(e.value)
    assert multiprocessing.active_children() == []


# -- bad input

mse = nn.functional.mse_loss


def raises():
    raise RuntimeError("no weights here\nand a second line")


def frozen():
    return Workload(nn.Linear(8, 4).requires_grad_(False), rows, mse)


def detached():
    return Workload(nn.Linear(8, 4), rows, lambda output, y: mse(output.detach(), y))


def not_scalar():
    return Workload(nn.Linear(8, 4), rows, lambda output, y: output)


def fixed_batch():
    return Workload(nn.Linear(8, 4), lambda n: rows(64), mse)


FACTORIES = {
    "raises": "cannot be built: RuntimeError: no weights here and a second line",
    "frozen": "no parameter that requires a gradient",
    "detached": "its loss does not depend on a parameter",
    "not_scalar": r"its loss has shape \(2, 4\), a scalar is needed",
    "fixed_batch": r"its make_batch\(2\) returned 64 rows and 64 targets",
    "endless": "no step within 0.3 s",
    "missing": "cannot be imported",
}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_that_cannot_be_timed_is_refused_in_one_line(factory, monkeypatch):
    monkeypatch.setattr(models, "STEP_LIMIT_S", 0.3 if factory == "endless" else 60.0)
    with pytest.raises(BadInput, match=FACTORIES[factory]) as e:
        launch("timing", nproc=2, model=f"{__name__}:{factory}", oversubscribe=True)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(("name", "value"), [("seconds", 0), ("seconds", float("nan"))])
def test_bad_input_is_one_line_before_anything_starts(name, value):
    with pytest.raises(BadInput, match=f"{name} must be more than 0"):
        launch("timing", nproc=1, **{name: value})
