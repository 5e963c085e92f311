"""Memory over several steps: a leak's bytes and category against an independent count, its line, a GPU's snapshot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labs import memory_timeline as lab
from labs.common import models
from labs.common.oracle.trace import CATEGORIES
from labs.common.remedies import leaks
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.memory_timeline import memory_steps

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run():
    return launch("memory_timeline", nproc=1, loops=lab.COURSE, batch_size=32, steps=5)


@pytest.mark.parametrize("loop", lab.COURSE)
def test_what_a_step_leaves_behind_is_what_is_counted_without_the_tracker(run, loop):
    expected = run.one("expected_growth_bytes", loop=loop).value
    assert (expected == 0) == (loop == "none")
    assert lab.growth(run, loop) == ({"activations": expected} if expected else {})
    text = " ".join(lab.answer(run))
    assert "not the same" not in text


def test_a_kept_graph_holds_what_its_layers_save(run):
    """mlp, 32 rows: outputs of the two ReLUs and of log_softmax, FP32, nll_loss's total weight, and the loss."""
    assert run.one("expected_growth_bytes", loop="validation").value == 4 * (32 * (512 + 256 + 10) + 1 + 1)


def test_the_line_that_holds_it_is_the_loops(run):
    source = Path(leaks.__file__).read_text().splitlines()
    for loop, code in (("validation", "kept.append(loss_of(module(x), y))"), ("outputs", "output = module(x)")):
        [record] = run.where("held_share", loop=loop)
        assert record.case["code"] == code and record.value == 1
        number = int(record.case["line"].removeprefix("leaks.py:"))
        assert code in source[number - 1]
        assert record.case["inner"].startswith("leaks.py:"), "no line of the tracker's own"


def test_the_curve_ends_each_step_at_what_is_left_and_touches_its_peak(run):
    for loop in lab.COURSE:
        moments = run.one("curve_step", loop=loop).samples
        curve = {c: run.one("curve_bytes", loop=loop, category=c).samples for c in CATEGORIES}
        sums = [sum(at) for at in zip(*curve.values(), strict=True)]
        assert sorted(moments) == list(moments) and moments[-1] == 5.0
        for step, peak in enumerate(run.one("peak_bytes", loop=loop).samples):
            inside = [s for m, s in zip(moments, sums, strict=True) if step < m <= step + 1]
            assert max(inside) == peak
    states = {c: set(run.one("after_step_bytes", loop="none", category=c).samples) for c in CATEGORIES}
    size = sum(p.nbytes for p in models.make("mlp").module.parameters())
    assert states["parameters"] == {size} and states["gradients"] == {0}
    assert states["activations"] == {4}, "the loss, to which the loop still has a name"
    assert states["optimizer"] == {2 * size + 4 * 6}, "two moments of Adam, and its count for each of 6 parameters"


def test_peak_is_that_of_the_allocator():
    """From what torch's own profiler lists, workspace of kernels and all: the tracker may miss little."""
    from labs.common.activation_memory.allocator import watch

    job = leaks.job(models.make("mlp"), [64] * 4, CPU)
    found = memory_steps.watch(job, leaks.clean)
    before = sum(found.after[c][-1] for c in CATEGORIES)
    other = leaks.job(models.make("mlp"), [64] * 4, CPU)
    x, y = other.batches[0]
    live = watch(lambda: other.workload.loss(other.workload.module(x), y), lambda loss: other.update(loss), CPU)
    assert found.peak[1] - before == pytest.approx(live.peak, rel=0.05)


def test_phases_are_told_without_touching_the_loop():
    def loop(job):
        for x, y in job.batches:
            loss = job.workload.loss(job.workload.module(x), y)
            loss.backward()
            job.optimizer.step()
            yield  # gradients stay

    job = leaks.job(models.make("mlp"), [8] * 4, CPU)
    found = memory_steps.watch(job, loop)
    size = sum(p.nbytes for p in job.workload.module.parameters())
    assert found.after["gradients"] == [size] * 4


def test_growth_is_from_step_to_step():
    assert memory_steps.slope([0, 10, 20, 30]) == 10 and memory_steps.slope([0, 5, 5, 5]) == 0


class FakeHistory:
    """The history of CUDA's allocator, with one block that is alive."""

    def __init__(self, filename):
        self.calls, self.filename = [], filename

    def record_memory_history(self, enabled="all", max_entries=0):
        self.calls.append(enabled)

    def memory_snapshot(self):
        frames = [{"filename": "/torch/x.py", "line": 1}, {"filename": self.filename, "line": 77}]
        block = {"state": "active_allocated", "size": 4096, "frames": frames}
        return {"segments": [{"blocks": [block, {"state": "inactive", "size": 9}]}]}

    def dump_memory(self, path):
        self.calls.append(path)


def test_a_gpus_snapshot_names_the_line_and_history_is_switched_off_again(tmp_path):
    fake = FakeHistory(leaks.__file__)
    job = SimpleNamespace(batches=[1, 2])
    steps = []

    def loop(job):
        for batch in job.batches:
            steps.append(batch)
            yield

    found = memory_steps.snapshot(job, loop, tmp_path / "s.pickle", fake)
    assert found == ("leaks.py:77", 4096) and steps == [1, 2]
    assert fake.calls == ["all", str(tmp_path / "s.pickle"), None]

    def fails(job):
        raise RuntimeError("out of memory")
        yield

    with pytest.raises(RuntimeError):
        memory_steps.snapshot(job, fails, None, fake)
    assert fake.calls[-1] is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loops": ("leaky",)}, "there is no loop 'leaky'"),
        ({"loops": ()}, "loops must hold"),
        ({"loops": ("no_such_module:loop",)}, "No module named"),
        ({"steps": 3}, "steps must be from 4"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_values_name_their_option(given, told):
    with pytest.raises(BadInput, match=told):
        lab.Config(**given)


def without_yield(job):
    job.batches = []


def ends_early(job):
    yield


@pytest.mark.parametrize(
    ("loop", "told"), [(without_yield, "must yield after each step"), (ends_early, "after 1 of 3")]
)
def test_a_loop_of_ones_own_that_does_not_yield_each_step_is_one_line(loop, told):
    """A function without yield gives None, and next(None) or StopIteration would tell nobody what to change."""
    batches = [(torch.zeros(1), torch.zeros(1))] * 3
    with pytest.raises(BadInput, match=told):
        memory_steps.watch(
            SimpleNamespace(
                batches=batches,
                workload=models.make("mlp"),
                optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
            ),
            loop,
        )


def test_the_snapshot_names_the_outermost_line_of_ours():
    def block(size, *lines, state="active_allocated"):
        return {"size": size, "state": state, "frames": [{"filename": f, "line": n} for f, n in lines]}

    blocks = [
        block(5, ("/torch/x.py", 1), ("/labs/a.py", 7)),
        block(4, ("/labs/a.py", 7)),
        block(6, ("/labs/a.py", 3), ("/labs/a.py", 8), ("/usr/run.py", 2)),
        block(100, ("/labs/a.py", 9), state="inactive"),
        block(50, ("/torch/x.py", 1)),
    ]
    assert memory_steps.largest_line({"segments": [{"blocks": blocks}]}, "/labs") == ("a.py:7", 9)
    assert memory_steps.largest_line({"segments": []}, "/labs") == ("", 0)
