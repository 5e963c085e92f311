"""Remedies against a full memory: what each takes away, what finds a leak, and the folklore about the cache."""

import _thread
import math
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from speeds import first

from labs import memory_remedies
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.parts import models
from labs.parts.oracle.reality import measured
from labs.parts.oracle.step import step
from labs.parts.remedies import leaks, offload, on_gpu, ways_out
from labs.parts.remedies.blocks import MIB
from labs.parts.remedies.caching_allocator import CachingAllocator
from labs.parts.remedies.offload import offloaded
from labs.parts.remedies.requests import LONGEST, SHORTEST, Replay, bert_run, draw_lengths, slivers
from labs.parts.remedies.ways_to_allocate import BETWEEN, EACH, EXPANDABLE, LATE, PLAIN, WAYS, fragment, train


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


@pytest.mark.long
def test_which_part_fills_the_memory_decides(run):
    """A remedy that halves one model's peak does nothing for the other's."""
    peak = {(r.case["model"], r.case["remedy"]): r.value for r in run.where("predicted_bytes", part="remedies")}
    saved = {key: 1 - value / peak[key[0], "none"] for key, value in peak.items()}
    full_of = {r.case["model"]: r.case["full_of"] for r in run.where("predicted_bytes", part="remedies")}
    assert full_of == {"char_gpt": "activations", "mlp": "states"}
    for remedy in (ways_out.HALF, "4 micro-batches"):
        assert saved["char_gpt", remedy] > 0.3 and abs(saved["mlp", remedy]) < 0.01, remedy
    for remedy in ("SGD with momentum", ways_out.LEAN):
        assert saved["char_gpt", remedy] < 0.05 and saved["mlp", remedy] > 0.2, remedy


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


def test_conditions_and_categories():
    assert ways_out.conditions("none", 9) == (9, {"optimizer": "adam"})
    assert ways_out.conditions(ways_out.HALF, 8) == (4, {"optimizer": "adam"})
    assert ways_out.conditions("SGD with momentum", 8) == (8, {"optimizer": "momentum"})
    trace = step("mlp", 4, optimizer="adam")
    parts, lean = (ways_out.peak_parts(trace, r) for r in ("none", ways_out.LEAN))
    parameters = 658_698
    assert parts["optimizer"] - lean["optimizer"] == pytest.approx(parameters * (8 - 2 * (1 + 4 / 2048)), rel=1e-4)
    assert ways_out.dominated_by(parts) == "states"


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


@pytest.mark.long
def test_the_peak_so_far_never_falls(run):
    for r in run.where("peak_so_far_bytes"):
        live = run.one("live_bytes", loop=r.case["loop"]).samples
        assert list(r.samples) == sorted(r.samples) and all(p >= n for p, n in zip(r.samples, live, strict=True))


def test_live_bytes_are_those_of_all_tensors():
    job = leaks.job(models.make("mlp", 0), [4, 4, 4], torch.device("cpu"))
    there = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in job.tensors()}
    found = leaks.watch(job, leaks.outputs)
    assert found.live_bytes[0] == sum(there.values()) + 4 * 10 * 4 and found.growth_bytes == 4 * 10 * 4


def test_a_hook_is_taken_away():
    job = leaks.job(models.make("mlp", 0), [2, 2, 2], torch.device("cpu"))
    leaks.watch(job, leaks.hook)
    assert not any(m._forward_hooks for m in job.workload.module.modules())


# -- the cache, simulated


@pytest.fixture(scope="module")
def work():
    lengths = draw_lengths(4, 30, 1)
    return bert_run(lengths, rows=8), lengths


def test_lengths():
    lengths = draw_lengths(8, 40, 0)
    assert len(lengths) == 40 and len(set(lengths)) == 8 and max(lengths) == LONGEST and min(lengths) >= SHORTEST
    assert lengths == draw_lengths(8, 40, 0) != draw_lengths(8, 40, 1)


def test_a_step_frees_what_it_asks_for(work):
    run, _ = work
    sizes = sum(size for _, size in run.resident)
    parameters = sum(p.numel() for p in models_on_meta().parameters())
    assert sizes >= 12 * parameters, "parameters and Adam's two states"
    for requests in run.steps.values():
        asked = [n for n, size in requests if size]
        assert len(asked) == len(set(asked)), "a number stands for one tensor"
        replay = Replay(CachingAllocator())
        replay.feed(run.resident)
        before = replay.allocator.stats.requested_bytes
        replay.feed(requests)
        assert replay.allocator.stats.requested_bytes == before


def models_on_meta():
    from labs.parts.models.large_models import bert
    from labs.parts.remedies.requests import SHAPE

    with torch.device("meta"):
        return bert(SHAPE, LONGEST).module


def test_the_folklore(work):
    run, lengths = work
    plain, each, expandable = (train(run, lengths, WAYS[way]) for way in (PLAIN, EACH, EXPANDABLE))
    assert plain.lasting_allocs == expandable.lasting_allocs == 0 and each.lasting_allocs > 10
    share = [o.stats.reserved_peak_bytes / plain.stats.allocated_peak_bytes for o in (plain, each, expandable)]
    assert share[0] > share[1] > share[2] > 0.99 and share[0] > 1.1
    assert all(o.fits and o.steps == len(lengths) for o in (plain, each, expandable))


def test_near_the_limit_cudamalloc_is_tried_again(work):
    run, lengths = work
    needed = train(run, lengths, WAYS[PLAIN]).stats.reserved_peak_bytes
    ample, tight, less = (train(run, lengths, WAYS[PLAIN], share * needed) for share in (1.0, 0.97, 0.5))
    assert ample.fits and ample.stats.num_alloc_retries == 0
    assert tight.stats.num_alloc_retries > 0
    assert not less.fits and less.stats.num_ooms == 1 and less.steps < len(lengths)


def test_empty_cache_helps_in_time_only():
    first, second, last = slivers(3, 50, 30)
    assert sum(size for _, size in first) == 150 and len(first) == 6
    assert second == [(3, 30), (4, 30), (5, 30)] and last == [(6, 60)]
    fits = {way: fragment(way, 4, 50 * MIB, 30 * MIB, 200 * MIB).fits for way in (PLAIN, LATE, BETWEEN, EXPANDABLE)}
    assert fits == {PLAIN: False, LATE: False, BETWEEN: True, EXPANDABLE: True}


@pytest.mark.long
def test_the_lab_records_the_folklore(run):
    assert {r.case["way"] for r in run.where("fits", part="lengths")} == set(WAYS)
    assert memory_remedies.enough_headroom(run, EXPANDABLE) <= memory_remedies.enough_headroom(run, PLAIN)
    assert all(r.kind == "modelled" for part in ("lengths", "fragmentation") for r in run.where(part=part))


def test_enough_headroom_is_where_all_larger_devices_fit():
    def record(headroom, fits):
        return SimpleNamespace(case={"headroom": headroom}, value=fits)

    def found(*fits):
        rows = [record(h, f) for h, f in zip((1.0, 1.1, 1.2), fits, strict=True)] + [record("unlimited", 1)]
        return memory_remedies.enough_headroom(SimpleNamespace(where=lambda *a, **k: rows), PLAIN)

    assert found(0, 1, 1) == 1.1 and found(1, 0, 1) == 1.2 and found(1, 1, 1) == 1.0 and found(1, 1, 0) == math.inf


# -- what needs a GPU


@pytest.mark.long
def test_without_cuda_some_functions_say_0_and_some_raise(run):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    words = {r.case["call"]: (r.case["words"], r.case["answer"]) for r in run.where("raised")}
    assert words["torch.cuda.max_memory_allocated()"] == ("", "0"), "no error, and no peak either"
    assert words["torch.cuda.memory_summary()"][0].startswith("KeyError")
    assert not len(run.where(part="gpu"))


class FakeCuda:
    """As much of torch.cuda as is asked; `stats` are what its allocator says."""

    def __init__(self, stats, free=60, total=100, uuid="abc") -> None:
        self.stats, self.free, self.total, self.uuid, self.calls = stats, free, total, uuid, []

    def memory_stats(self, device):
        return dict(self.stats)

    def mem_get_info(self, device):
        return self.free, self.total

    def get_device_properties(self, device):
        return SimpleNamespace(uuid=self.uuid)

    def memory_reserved(self, device):
        return 10

    def empty_cache(self):
        self.calls.append("empty_cache")

    def set_per_process_memory_fraction(self, fraction, device):
        self.calls.append(fraction)


def test_the_allocator_sees_less_than_the_device():
    cuda = FakeCuda({"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 10})
    gpus = [SimpleNamespace(uuid="GPU-xyz", memory_used_bytes=1), SimpleNamespace(uuid="GPU-abc", memory_used_bytes=45)]
    found = on_gpu.views("cuda:0", cuda, lambda: gpus)
    assert found == {"allocated": 5, "reserved": 10, "device": 40, "nvml": 45}
    assert "nvml" not in on_gpu.views("cuda:0", cuda, lambda: [])


def test_a_budget_is_taken_back():
    cuda = FakeCuda({})
    with pytest.raises(KeyError), on_gpu.limited(40, "cuda:0", True, cuda, cuda.calls.append):
        assert cuda.calls == ["empty_cache", 0.5, "expandable_segments:True"]
        raise KeyError
    assert cuda.calls[3:] == ["expandable_segments:False", "empty_cache", 1.0]
    with pytest.raises(ValueError, match="more than this device has left"):
        on_gpu.fraction_for(95, 10, 100)


@pytest.mark.parametrize("fits", [True, False])
def test_counters_are_differences(fits):
    cuda = FakeCuda({"num_alloc_retries": 3, "reserved_bytes.all.current": 7})

    def work():
        cuda.stats["num_alloc_retries"] += 2
        if not fits:
            raise torch.OutOfMemoryError("full")

    found = on_gpu.counted(work, "cuda:0", cuda)
    assert (found.fits, found.reserved_bytes, found.changes["num_alloc_retries"]) == (fits, 7, 2)
    assert set(found.changes) == set(on_gpu.COUNTED)


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
    assert on_gpu.largest_line({"segments": [{"blocks": blocks}]}, "/labs") == ("a.py:7", 9)
    assert on_gpu.largest_line({"segments": []}, "/labs") == ("", 0)


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
        ({"lengths": 1}, "lengths must"),
        ({"batches": 1}, "batches must"),
        ({"models": ("nothing", "mlp")}, "no model 'nothing'"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("memory_remedies", nproc=1, **values)
