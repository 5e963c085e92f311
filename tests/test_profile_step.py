"""Shares of a step: what each moment counts as, planted costs on real ranks, the profiler's price, the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from again import holds_soon

from labs import profile_step as lab
from labs.common.profiling import shares
from labs.common.profiling.shares import Event
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.profile_step.recipes import workload_of

TINY = "tests.labs_for_tests.profiled:tiny"
STEP = Event("ProfilerStep#3", "user_annotation", 0.0, 100.0, 1)


def ranges(**spans):
    """Ranges on the main thread; host_to_device stands for its name with hyphens."""
    return [Event(name.replace("_", "-"), "user_annotation", a, b, 1) for name, (a, b) in spans.items()]


def op(name, a, b, thread=1):
    return Event(name, "cpu_op", a, b, thread)


WHOLE = ranges(data=(5, 15), host_to_device=(15, 16), forward=(20, 40), backward=(40, 80), optimizer=(82, 97))


def test_the_kernels_of_a_cuda_graph_are_those_of_the_range_that_launched_it():
    """All share the correlation of their cudaGraphLaunch; what overlaps on two streams counts once."""
    launch_ = Event("cudaGraphLaunch", "cuda_runtime", 21, 22, 1, 7)
    kernels = [Event("gemm", "kernel", a, b, tid, 7) for a, b, tid in ((30, 50, 7), (40, 60, 9), (60, 70, 7))]
    [found] = shares.of_steps(sorted([STEP, *WHOLE, launch_, *kernels], key=lambda e: e.start))
    assert found["forward"] == 40 and found["backward"] == 0


def test_a_cpu_step_is_cut_by_its_ranges():
    found = shares.on_core([STEP, *WHOLE], STEP)
    assert found == {
        "data": 10,
        "host-to-device": 1,
        "forward": 20,
        "backward": 40,
        "exposed communication": 0,
        "optimizer": 15,
        "overhead": 14,
    }


@pytest.mark.parametrize(
    ("ops", "exposed", "what"),
    [
        ([op("evaluate_function: A", 40, 60), op("c10d::allreduce_", 59, 60)], 18, "from the last operation on"),
        ([op("evaluate_function: A", 40, 80), op("c10d::allreduce_", 59, 60)], 0, "all hidden"),
        ([op("c10d::allreduce_", 50, 51)], 28, "a call is no computing, and its wait begins at the call"),
        ([op("aten::mm", 40, 80, thread=7), op("c10d::allreduce_", 60, 61)], 18, "another thread's work hides nothing"),
    ],
)
def test_communication_is_exposed_while_the_main_thread_computes_nothing(ops, exposed, what):
    gloo = Event("gloo:all_reduce", "user_annotation", 62.0, 78.0, 9)
    found = shares.on_core([STEP, *WHOLE, *ops, gloo], STEP)
    assert (found["exposed communication"], found["backward"]) == (exposed, 40 - exposed), what
    assert sum(found.values()) == 100


def test_waiting_for_data_is_no_communication():
    gloo = Event("gloo:all_reduce", "user_annotation", 2.0, 12.0, 9)
    found = shares.on_core([STEP, *WHOLE, gloo], STEP)
    assert (found["data"], found["exposed communication"], found["overhead"]) == (10, 3, 11)


def gpu_events(*device, calls=()):
    """Kernels as (name, kind, start, end, when the host launched them)."""
    found = list(calls)
    for number, (name, kind, start, end, launched) in enumerate(device):
        found.append(Event(name, kind, start, end, 20 + number % 2, number))
        found.append(Event("cudaLaunchKernel", "cuda_runtime", launched, launched + 0.1, 5, number))
    return found


def of_gpu(*device):
    events = [STEP, *WHOLE, *gpu_events(*device)]
    [found] = shares.of_steps(sorted(events, key=lambda e: e.start))
    assert sum(found.values()) == pytest.approx(100)
    return found


def test_a_gpus_kernel_belongs_to_the_range_that_launched_it_whenever_it_runs():
    found = of_gpu(("gemm", "kernel", 30, 50, 25), ("gemm", "kernel", 50, 79, 45), ("adam", "kernel", 85, 99, 83))
    assert (found["forward"], found["backward"], found["optimizer"]) == (20, 29, 14)
    assert found["data"] == 10 and found["host-to-device"] == 1, "nothing runs while the host is there"
    assert found["idle"] == (30 - 20) + (80 - 79) + (85 - 82)
    assert found["overhead"] == 5 + 4 + 2 + 1, "nothing runs while the host is between its ranges"


def test_backward_is_launched_by_autograds_thread():
    """The call stands in another thread than the ranges: the moment decides."""
    found = of_gpu(("gemm_backward", "kernel", 81, 95, 79.5))
    assert found["backward"] == 14 and found["optimizer"] == 0


def test_nccl_is_exposed_where_nothing_computes():
    nccl = ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 50, 80, 45)
    found = of_gpu(("gemm", "kernel", 45, 70, 44), nccl)
    assert (found["backward"], found["exposed communication"]) == (25, 10)


def test_a_copy_that_runs_beside_kernels_costs_nothing():
    copy = ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", 21, 41, 15.5)
    assert of_gpu(copy)["host-to-device"] == 1 + 20
    assert of_gpu(copy, ("gemm", "kernel", 21, 41, 20.5))["host-to-device"] == 1
    assert of_gpu(("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 21, 41, 30))["forward"] == 20


def test_data_behind_a_busy_gpu_is_hidden():
    assert of_gpu(("gemm of the step before", "kernel", 0, 15, -3.0))["data"] == 0


def test_a_gpu_that_is_a_step_behind_its_host_still_works_on_what_launched_it():
    """Without an item() the host is steps ahead: its queue keeps the GPU busy, and none of that is overhead."""
    early = [Event("ProfilerStep#2", "user_annotation", -100.0, 0.0, 1)]
    early += [Event(e.name, e.kind, e.start - 100, e.end - 100, 1) for e in WHOLE]
    gpu = gpu_events(("gemm", "kernel", 0, 30, -75), ("gemm", "kernel", 30, 90, -50), ("adam", "kernel", 90, 100, -10))
    _, found = shares.of_steps(sorted([*early, STEP, *WHOLE, *gpu], key=lambda e: e.start))
    assert (found["forward"], found["backward"], found["optimizer"], found["overhead"]) == (30, 60, 10, 0)


def spans(dice):
    return [(a, a + dice.randint(0, 6)) for a in (dice.randint(0, 40) for _ in range(dice.randint(0, 8)))]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "\xff",
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match=r"t\.json is no"):
        shares.read(path)


def test_a_trace_without_steps_says_what_is_missing(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2, "tid": 3}]}))
    with pytest.raises(BadInput, match="schedule"):
        shares.of_steps(shares.read(path))


# On ranks


def share_ms(nproc, *plant):
    run = launch("profile_step", nproc=nproc, model=TINY, batch_size=4, parts=("shares",), rounds=8, plant=plant)
    return {name: 1e3 * e.value for name, e in lab.share_estimates(run).items()}


@pytest.mark.timeout(200)
def test_what_is_planted_is_found_where_it_was_planted():
    places = ("data", "forward", "backward", "optimizer", "between")

    def measured():
        return share_ms(1, *(f"{place}=20" for place in places))

    plain = share_ms(1)

    def within(found):  # a sleep takes longer than asked for; in the wrong share it would count as 0 or as 40
        return all(19 <= found[lab.PLACES[place]] - plain[lab.PLACES[place]] <= 30 for place in places)

    assert holds_soon(within, measured(), measured)


@pytest.mark.timeout(200)
def test_shares_sum_to_the_step_and_the_clock_tells_the_same_exposure():
    def measured():
        return launch(
            "profile_step",
            nproc=2,
            model=TINY,
            batch_size=4,
            parts=("shares",),
            rounds=6,
            plant=("late=60", "forward=5"),
        )

    def agrees(run):
        trace, clock = lab.exposed_two_ways(run)
        parts = lab.share_estimates(run)
        return (
            all(abs(lab.covered(run, r).value - 100) <= 3 for r in (0, 1))
            and abs(trace.value - clock.value)
            <= 0.1 * clock.value + lab.of_rank(run, "step_s", 0, mode="no_sync").value
            and max(parts, key=lambda n: parts[n].value) == "exposed communication"
            # On a busy machine the waiting rank's own step grows meanwhile, which hides that much of the wait.
            and 0.045 <= parts["exposed communication"].value <= 0.075
            and parts["forward"].value >= 4.9e-3
        )

    run = measured()
    assert lab.ranks(run) == [0, 1] and "idle" not in dict(lab.share_table(run))
    assert holds_soon(agrees, run, measured)
    text = " ".join(lab.answer(run))
    assert "exposed communication" in text and "share of a step" in text


RECIPES = Path(lab.__file__).parents[1] / "recipes"


def test_a_recipes_model_and_data_are_profiled():
    run = launch("profile_step", nproc=1, parts=("shares",), smoke=True, recipe=RECIPES / "train_ddp.py", batch_size=32)
    found = lab.share_estimates(run)
    assert found["data"].value > 0 and found["backward"].value > 0
    workload = workload_of(RECIPES / "train_ddp.py", 0)
    assert sum(p.numel() for p in workload.module.parameters()) == 629_642
    x, y = workload.make_batch(8)
    assert (tuple(x.shape), tuple(y.shape)) == ((8, 1, 28, 28), (8,))
    assert any(not torch.equal(x, workload.make_batch(8)[0]) for _ in range(2)), "another batch each time"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such Python file"),
        ("def build_model(d): ...", "has no function load_data"),
        ("import sys; sys.exit('no')\ndef build_model(d): ...\ndef load_data(p): ...", "cannot be used: SystemExit"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_one_line(tmp_path, text, told):
    path = tmp_path / "r.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=told):
        lab.check_layout(lab.Config(recipe=path), 1)


# What is wrong is told at once


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"plant": ("nowhere=3",)}, "there is no place 'nowhere'"),
        ({"plant": ("data",)}, "a number of ms"),
        ({"plant": ("data=-1",)}, "above 0"),
        ({"active": 0}, "active must be"),
    ],
)
def test_bad_values_name_their_option(given, told):
    with pytest.raises(BadInput, match=told):
        lab.Config(**given)


# Sentences follow the records


def records(**samples):
    """Of rank 0: share_s by share, step_s by mode."""
    layout = {"rank": 0, "world_size": 2}
    found = [
        Record("profile_step", "share_s", "s", v, case={"share": k.replace("_", " ")}, layout=layout)
        for k, v in samples.items()
        if k not in ("profiled", "ddp", "no_sync")
    ]
    found += [
        Record("profile_step", "step_s", "s", v, case={"mode": k}, layout=layout)
        for k, v in samples.items()
        if k in ("profiled", "ddp", "no_sync")
    ]
    return Records(found)
