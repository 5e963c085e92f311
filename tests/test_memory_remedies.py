"""Remedies against a full memory: what each takes away, and what finds a leak."""

import _thread
import time
from functools import partial

import pytest
import torch
from speeds import first

from labs import memory_remedies
from labs.common import models
from labs.common.oracle.reality import measured
from labs.common.oracle.step import step
from labs.common.remedies import leaks
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.memory_remedies import offload, ways_out
from labs.memory_remedies.offload import offloaded


@pytest.fixture(scope="module")
def run():
    return launch("memory_remedies", nproc=1, smoke=True)


# -- accumulation


def test_predict_by_hand():
    whole = {
        "parameters": 4,
        "gradients": 0,
        "optimizer": 8,
        "activations": 100,
        "temporaries": 10,
        "inputs/buffers": 1,
    }
    assert memory_remedies.predict(whole, 1, 4) == 123
    assert memory_remedies.predict(whole, 10, 4) == 4 + 8 + 1 + 4 + 11


@pytest.mark.long
def test_micro_batches_take_away_activations_only(run):
    peaks = {r.case["micro_batches"]: r.value for r in run.where("peak_bytes", part="accumulation")}
    assert sorted(peaks) == [1, 2, 4] and peaks[4] < 0.4 * peaks[1]
    for m, peak in peaks.items():
        assert run.one("predicted_bytes", part="accumulation", micro_batches=m).value == pytest.approx(peak, rel=0.01)
        assert run.one("gradient_error", micro_batches=m).value < 1e-5
        assert run.one("step_s", part="accumulation", micro_batches=m).value > 0


def test_gradients_are_equal_in_float64():
    workload = models.make("mlp", 0)
    workload.module.double()
    x, y = workload.make_batch(13)
    whole = ways_out.gradient(workload, x.double(), y, 1)
    for m in (2, 5, 13):
        assert torch.allclose(ways_out.gradient(workload, x.double(), y, m), whole, rtol=1e-10, atol=1e-14)


# -- remedies


@pytest.mark.parametrize("remedy", first(1, sorted(set(ways_out.REMEDIES) - set(ways_out.SMOKE))))
def test_the_other_remedies_are_for_activations(remedy):
    def peak(model, rows, chosen):
        n, conditions = ways_out.conditions(chosen, rows)
        source = offloaded(models.make(model, 0)) if chosen == ways_out.OFFLOAD else model
        return step(source, n, **conditions).peak_bytes

    assert peak("char_gpt", 16, remedy) < 0.7 * peak("char_gpt", 16, "none")
    assert peak("mlp", 16, remedy) == pytest.approx(peak("mlp", 16, "none"), rel=0.01)


def test_what_is_offloaded_comes_back_as_it_was_and_is_counted():
    plain = models.make("char_gpt", 0)
    away = offloaded(plain)
    x, y = plain.make_batch(4)
    there_and_back = []

    def through(t):
        there_and_back.append(torch.equal(offload._back(away.module._out(t)), t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(through, lambda t: t):
        plain.module(x)
    assert len(there_and_back) > 20 and all(there_and_back)
    away.module.moved_bytes = 0
    exact, grads = models.make("char_gpt", 0), []
    exact.module.double()  # in FP64: strides and addresses are others, and kernels may add in another order
    for w in (exact, offloaded(exact)):
        w.module.zero_grad()
        w.loss(w.module(x), y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in w.module.parameters()]))
    assert (grads[0] - grads[1]).norm() < 1e-12 * grads[0].norm()
    away.loss(away.module(x), y).backward()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        plain.module(x)
    assert away.module.moved_bytes == sum(saved) > 0
    real = measured(away, 16, optimizer="adam").peak_bytes
    assert step(away, 16, optimizer="adam").peak_bytes == pytest.approx(real, rel=0.02)
    assert real < 0.6 * measured(plain, 16, optimizer="adam").peak_bytes


@pytest.mark.long
def test_the_oracle_says_what_the_allocator_says(run):
    found = run.where("peak_bytes", part="remedies")
    assert len(found) == 2 * (len(ways_out.SMOKE) - 1)
    for r in found:
        case = {"part": "remedies", "model": r.case["model"], "remedy": r.case["remedy"]}
        assert run.one("predicted_bytes", **case).value == pytest.approx(r.value, rel=0.01)
        parts = [p.value for p in run.where("part_bytes", **case)]
        assert sum(parts) == run.one("predicted_bytes", **case).value


# -- leaks

LINES = {
    "losses": "loss = loss_of(module(x), y)",
    "outputs": "output = module(x)",
    "hook": "loss = loss_of(module(x), y)",
    "validation": "kept.append(loss_of(module(x), y))",
}


@pytest.mark.long
def test_growth_finds_every_leak_and_the_peak_does_not(run):
    growth = {r.case["loop"]: r.value for r in run.where("growth_bytes")}
    assert set(growth) == set(leaks.LOOPS) and set(LINES) == set(leaks.LEAKS)
    assert growth["none"] == growth[leaks.LARGER] == 0
    assert growth["losses"] == 4, "backward has freed the graph's tensors: one FP32 number per step stays"
    assert growth["outputs"] == 8 * 64 * 80 * 4 and growth["hook"] == 8 * 64 * 64 * 4
    assert growth["validation"] > 40 * growth["outputs"], "a loss without backward keeps all activations"
    assert memory_remedies.separates(run, "growth_bytes")
    assert not memory_remedies.separates(run, "peak_so_far_bytes")


@pytest.mark.long
def test_history_names_the_line(run):
    found = {r.case["loop"]: (r.case["code"], r.value) for r in run.where("site_share")}
    assert found == {loop: (code, 1.0) for loop, code in LINES.items()}
    assert all(r.case["line"].startswith("leaks.py:") for r in run.where("site_share"))
    assert run.one("site_share", loop="hook").case["op"] == "embedding"
    assert run.one("site_share", loop="validation").case["made_in"].startswith("text_models.py:")


def test_history_in_autograds_own_thread_names_the_line_that_called_backward():
    """On a GPU backward runs in a thread that no Python function has entered: there is no caller's frame in it."""

    def backward(history):
        a = torch.ones(4)
        dispatch = partial(history.__torch_dispatch__, torch.ops.aten.add.Tensor, (), (a, a))
        _thread.start_new_thread(dispatch, ())  # threading.Thread would begin with frames of Python
        until = time.monotonic() + 30
        while not history.sites and time.monotonic() < until:
            time.sleep(0.01)

    def loop(history):
        backward(history)

    def watch():
        history = leaks.History(watch.__code__)
        loop(history)
        return history

    (site,) = watch().sites.values()
    assert site.op == "add" and site.code == "backward(history)" and len(site.stack) == 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"parts": ()}, "parts must"),
        ({"parts": ("magic",)}, "parts"),
        ({"rows": (8,)}, "one number for each of the 2"),
        ({"rows": (2, 8)}, "rows must be at least 4"),
        ({"cuts": ()}, "cuts must"),
        ({"cuts": (2,)}, "cuts must hold 1"),
        ({"cuts": (1, 64)}, "at most 32"),
        ({"rounds": 0}, "rounds must"),
        ({"steps": 2}, "steps must"),
        ({"models": ("nothing", "mlp")}, "no model 'nothing'"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("memory_remedies", nproc=1, **values)
