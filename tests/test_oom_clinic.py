"""What filled the memory is named from signs alone, in real ends of real programs; each cure gives what it should."""

import dataclasses
import inspect
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401  as in every rank; children would import it, and make a folder for its cache
from processes import MARK, assert_no_survivors

from labs import oom_clinic as lab
from labs.chapters.nb10 import figures_memory as figures
from labs.common.oracle.trace import CATEGORIES
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch
from labs.kit.plot import to_png
from labs.oom_clinic import memory_end, memory_faults
from labs.oom_clinic.memory_end import Signs, Trial, run_until_end
from labs.oom_clinic.memory_faults import CURES, ENDS, PROGRAMS, TRIM, WHAT, Cure

linux = pytest.mark.skipif(not memory_end.LINUX, reason="limits and counts of a process's memory are Linux's here")
MB = 1e6


def signs(exit_code=-9, message="", steps=6, states=1.0, activations=1.0, left=None, **more):
    """Signs with sizes in MB; `left` is what a step leaves by category."""
    base = dict.fromkeys((f.name for f in dataclasses.fields(Signs)), 0.0)
    live = {**dict.fromkeys(CATEGORIES, 0.0), "parameters": states * MB, "activations": activations * MB}
    growth = {**dict.fromkeys(CATEGORIES, 0.0), **{c: size * MB for c, size in (left or {}).items()}}
    sizes = {name: size * MB if name not in ("tensors_left", "nodes_left") else size for name, size in more.items()}
    counted = {"message": message, "exit_code": exit_code, "steps": steps, "live": live, "live_growth": growth}
    return Signs(**base | counted | sizes)


ERROR_12 = (
    "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000 bytes. Error code 12"
)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("none", signs(0, trainer=3.0)),
        ("batch", signs(activations=30, trainer=32)),
        ("batch", signs(1, ERROR_12, steps=0, activations=30, trainer=32, limit_bytes=33)),
        ("states", signs(states=30, activations=2, trainer=33)),
        ("graph", signs(trainer=60, trainer_growth=10, left={"activations": 9.9}, tensors_left=13, nodes_left=29)),
        ("outputs", signs(trainer=60, trainer_growth=10, left={"activations": 9.9}, tensors_left=1)),
        ("outputs", signs(trainer=60, trainer_growth=10, left={"activations": 9.9}, tensors_left=1, nodes_left=12)),
        ("closure", signs(trainer=60, trainer_growth=10, left={"inputs/buffers": 9.9}, tensors_left=2)),
        ("python_objects", signs(trainer=60, trainer_growth=10, left={"activations": 0.1})),
        (
            "worker_objects",
            signs(1, "DataLoader worker (pid 7) is killed by signal: Killed.", trainer=20, workers=60, worker_growth=6),
        ),
        ("worker_buffers", signs(trainer=20, workers=60, worker_growth=0.2)),
        ("prefetch", signs(trainer=20, workers=25, shared=70)),
        (
            "shared_memory",
            signs(
                1,
                "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No "
                "space left on device (28)",
                steps=0,
                workers=20,
            ),
        ),
        (
            "shared_memory",
            signs(
                1,
                "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
                "possible that dataloader's workers are out of shared memory.",
                trainer=30,
            ),
        ),
        ("address_space", signs(1, ERROR_12, trainer=20, activations=15, limit_bytes=170)),
        ("address_space", signs(1, "OSError: [Errno 12] Cannot allocate memory", steps=0, trainer=1, limit_bytes=170)),
        ("batch", signs(1, "ValueError: too many values", activations=30, trainer=20, limit_bytes=170)),
        ("unknown", signs(1, "RuntimeError: out of memory", states=0, activations=0)),
    ],
)
def test_every_cause_is_named_by_its_signs(planted, found):
    assert lab.name(found).cause == planted


def test_there_is_a_program_and_an_end_for_each_cause_and_its_guilty_line_is_marked():
    assert set(PROGRAMS) == set(ENDS) == set(WHAT)
    for program in PROGRAMS.values():
        assert inspect.getsource(program).count("# <-") == 1


# Real ends


@pytest.fixture
def nothing_stays(tmp_path, monkeypatch):
    """No process, no file in the folder for temporary files, nothing more in /dev/shm."""
    shm = Path("/dev/shm")
    before = set(os.listdir(shm)) if shm.exists() else set()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert_no_survivors(os.environ[MARK], os.getpid())
    assert not list(tmp_path.iterdir())
    mine = [name for name in set(os.listdir(shm)) - before if str(os.getpid()) in name] if shm.exists() else []
    assert not mine


def signs_of(trials, at_once=1):
    """As in a rank: in children of a process that is new.

    A child of this one takes memory that this one has freed and not given back: it is resident from the start, so that
    nothing would grow.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_all_signs, trials, at_once).result()


def _all_signs(trials, at_once):
    return list(run_until_end(trials, at_once))


def ended(cause, end, seed=0, size=1.0):
    limit = memory_faults.limit_bytes(cause, size)
    [found] = signs_of([Trial(cause, end, limit, size, lab.END_STEPS, seed)])
    return found


@linux
@pytest.mark.drill
@pytest.mark.parametrize(("cause", "end"), [(c, end) for c, (kinds, _) in ENDS.items() for end in kinds])
def test_a_real_end_has_its_message_and_its_name_and_leaves_nothing(cause, end, nothing_stays):
    found = ended(cause, end)
    assert lab.name(found).cause == cause, found
    words = {
        "data": ("can't allocate memory", "MemoryError"),
        "addresses": ("Cannot allocate memory",),
        "shm": ("shared memory", "Bus error"),
    }
    if end in words:
        assert found.exit_code == 1 and any(w in found.message for w in words[end]), found
    elif found.exit_code == -9:
        assert not found.message  # there was no time for one
    else:
        assert "DataLoader worker" in found.message, found


@linux
@pytest.mark.drill
@pytest.mark.long
def test_all_are_named_in_several_sizes_and_seeds():
    run = launch("oom_clinic", nproc=1, parts=("ends",), seeds=(1, 2, 3), sizes=(0.8, 2.0), timeout_s=250)
    assert [pair for pair in lab.confusion(run) if pair[0] != pair[1]] == []
    assert len(run.where("named")) == 3 * 2 * 17 + 3 * 2


@pytest.mark.long
@linux
def test_a_program_that_is_well_is_not_accused(nothing_stays):
    [found] = signs_of([Trial("healthy")])
    assert found.exit_code == 0 and found.steps == 6 and lab.name(found).cause == lab.NOBODY


@linux
def test_an_end_before_its_time_leaves_no_process(nothing_stays, monkeypatch):
    monkeypatch.setattr(memory_end.timeouts, "CHILD_S", 0.5)
    with pytest.raises(TimeoutError, match="prefetch has not ended"):
        list(run_until_end([Trial("prefetch", steps=32)] * 2, at_once=2))


@pytest.mark.long
@linux
def test_several_at_once_come_back_in_their_order(nothing_stays):
    trials = [Trial(cause, steps=4) for cause in ("worker_buffers", "healthy", "closure")]
    first, second, third = signs_of(trials, at_once=3)
    assert first.workers > 40 * MB > max(second.workers, third.workers)
    assert third.trainer > 20 * MB > second.trainer


# What cures give


@pytest.mark.long
@linux
def test_resident_memory_is_what_the_trace_without_memory_says():
    """Two counts that share nothing: the kernel's pages, and sizes of tensors that have none."""
    cures = [Cure(), CURES["half the batch"], CURES["checkpointing"], CURES["4 micro-batches"]]
    for cure, found in zip(cures, signs_of([Trial("batch", steps=2, cure=c) for c in cures], 2), strict=True):
        expected = lab.predict("batch", cure)
        assert abs(found.resident_peak - expected) < 0.1 * expected + 3 * MB


@linux
def test_what_a_leak_leaves_is_counted_by_hand():
    """outputs: 8,000 rows of 100 numbers in FP32; closure: 50,000 rows of 32."""
    kept, batches = run_until_end([Trial("outputs", steps=4), Trial("closure", steps=4)], 2)
    assert kept.live_growth["activations"] == 4 * 8_000 * memory_end.LABELS
    assert batches.live_growth["inputs/buffers"] == 4 * 50_000 * 32
    assert batches.live_growth["activations"] == 0


@pytest.fixture(scope="module")
def run():
    if not memory_end.LINUX:
        pytest.skip("Linux only")
    cures = (
        "half the batch",
        TRIM,
        "4 micro-batches",
        "checkpointing",
        "SGD, no momentum",
        "detach()",
        "keep numbers only",
    )
    return launch(
        "oom_clinic",
        nproc=1,
        causes=("batch", "states", "graph", "outputs", "shared_memory"),
        cures=cures,
        timeout_s=250,
    )


def test_the_right_cure_gives_memory_and_half_the_batch_gives_none_to_states_and_leaks(run):
    cells = lab.given(run)
    for cause in ("states", "graph", "outputs"):
        assert "half the batch" not in lab.helpful(run, cause)
    assert {"half the batch", "4 micro-batches", "checkpointing"} <= set(lab.helpful(run, "batch"))
    assert lab.helpful(run, "states") == ["SGD, no momentum"]
    assert set(lab.helpful(run, "graph")) == {"detach()", "keep numbers only"}
    assert cells["graph"]["checkpointing"].postpones and not cells["graph"]["checkpointing"].is_nothing
    assert lab.helpful(run, "outputs") == ["keep numbers only"] and cells["outputs"]["detach()"].is_nothing
    assert cells["shared_memory"]["half the batch"].share == pytest.approx(0.5, abs=0.1)


def test_the_answer_and_the_page_say_what_the_records_hold(run, monkeypatch):
    text = " ".join(lab.answer(run))
    assert "10 of 10 programs were named right" in text and "checkpointing (a graph" in text
    assert run.one("left_over", of="processes").value == 0
    shown, tables, said = [], [], []
    monkeypatch.setattr(figures, "show", lambda fig, alt: (shown.append(alt), to_png(fig)))
    monkeypatch.setattr(figures, "show_table", tables.append)
    monkeypatch.setattr(figures, "say", said.append)
    figures.cures(run)
    figures.messages(run)
    figures.named(run)
    figures.half_the_batch(run)
    assert shown[0].startswith("Half the batch helps against 2 of 5 causes")
    assert "(none)" in set(tables[0]["last words"]) and any(line.startswith("* 10 of 10 ends") for line in said)
    assert "For the 2 leaks of the trainer that is by definition" in said[-1]
    assert said[-1].endswith("Of the 3 that are no such leaks it helps against 2.")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"causes": ("leak",)}, "there is no leak"),
        ({"cures": ("pray",)}, "there is no pray"),
        ({"sizes": (0.0,)}, "sizes"),
        ({"at_once": 0}, "at_once"),
        ({"parts": ()}, "parts"),
        ({"seeds": ()}, "seeds"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        make_config(lab_module("oom_clinic"), values)
