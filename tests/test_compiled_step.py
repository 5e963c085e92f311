"""torch.compile: break-even by hand, breaks and recompiles counted, a missing compiler said, nothing left behind."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from processes import HERE, SURVIVAL_S, wait_for

from labs import compiled_step
from labs.compiled_step import Config, break_even, cannot_compile, graphs_after, in_steps, predict
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


def records(eager, compiled, first=(10.0, 2.0), imported=1.0):
    made = [Record("compiled_step", "import_s", "s", (imported,))]
    for way, samples in (("eager", eager), ("compiled", compiled)):
        made.append(Record("compiled_step", "step_s", "s", tuple(samples), case={"way": way, "backend": "inductor"}))
    for cache, s in zip(("empty", "full"), first, strict=True):
        made.append(Record("compiled_step", "first_step_s", "s", (s,), case={"cache": cache, "backend": "inductor"}))
    return Records(made)


def test_break_even_by_hand():
    assert predict(10.0, 0.02, 0.01) == pytest.approx(1000)
    assert predict(10.0, 0.02, 0.02) == predict(10.0, 0.02, 0.03) == math.inf


def test_no_shown_gain_never_pays_and_a_shown_loss_is_told_apart():
    noisy = break_even(records([0.02] * 8, [0.018, 0.023, 0.017, 0.022, 0.019, 0.021, 0.018, 0.023]))
    assert math.isinf(noisy.high) and math.isfinite(noisy.low) and "no difference" in in_steps(noisy)
    assert "no faster" in in_steps(break_even(records([0.01] * 8, [0.02] * 8)))


def test_a_missing_compiler_is_one_line_that_names_the_fix(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = cannot_compile(CPU)
    assert "no no-such-compiler" in said and "install" in said and "\n" not in said
    monkeypatch.setattr(compiled_step.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(compiled_step.sysconfig, "get_path", lambda name: f"/usr/{name}")
    monkeypatch.setattr(torch, "__file__", "/srv/torch/__init__.py")
    assert cannot_compile(CPU) == ""
    monkeypatch.setattr(torch, "__file__", "/srv/my course/torch/__init__.py")
    assert "/srv/my course/torch" in cannot_compile(CPU) and "a folder without a blank" in cannot_compile(CPU)


def without_compiler(config):
    """On a rank: what `run` yields where no compiler is found."""

    class Alone:
        rank, device = 0, CPU

        def record(self, metric, unit, samples, **case):
            return metric, case

        def progress(self, *_):
            pass

        def barrier(self):
            pass

    compiled_step.shutil.which = lambda name: None  # this rank's own copy
    return list(compiled_step.run(config, Alone()))


def test_without_a_compiler_breaks_and_recompiles_are_still_counted():
    [found] = run_on_ranks(without_compiler, 1, Config())
    metrics = [metric for metric, _ in found]
    assert metrics.count("not_possible") == 1 and "step_s" not in metrics
    assert metrics.count("graph_breaks") == 4 and metrics.count("graphs") == 3
    said = " ".join(
        compiled_step.answer(
            Records(
                [
                    Record("compiled_step", m, "1", (1.0,), case={k: v for k, v in case.items() if k != "rank"})
                    for m, case in found
                ]
            )
        )
    )
    assert said.startswith("Not compiled: torch.compile needs a C++ compiler")


def counts():
    made = [graphs_after([8, 7, 6, 5], dynamic) for dynamic in (None, False, True)]
    return made, [compiled_step.breaks(f, torch.randn(8, 4), torch.randn(4, 4)) for f in compiled_step.HABITS.values()]


def test_breaks_and_recompiles():
    [(made, broken)] = run_on_ranks(counts, 1)
    assert made == [[1, 2, 2, 2], [1, 2, 3, 4], [1, 1, 1, 1]]
    assert [(graphs, count) for graphs, count, _ in broken] == [(1, 0), (2, 1), (2, 1), (2, 1)]
    assert not broken[0][2] and "item" in broken[1][2][0]


KILLED = """
import os, signal
from labs import compiled_step
with compiled_step.empty_cache():
    os.makedirs(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    print(os.environ["TORCHINDUCTOR_CACHE_DIR"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_compiler_leaves_no_cache():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, cwd=HERE.parent, check=False)
    folder = Path(done.stdout.strip()).parent
    assert done.returncode < 0 and folder.name.startswith("labs-"), done.stderr
    wait_for(lambda: not folder.exists(), SURVIVAL_S)


def test_smoke_run_compiles_nothing_to_machine_code():
    run = launch("compiled_step", nproc=2, smoke=True, oversubscribe=True)
    assert run.one("step_s", way="compiled").case["backend"] == "aot_eager"
    assert run.one("gradient_error").value < 1e-4
    assert len(run.where("first_step_s")) == 2 and run.one("kernels", way="eager").value > 20


@pytest.mark.quiet
@pytest.mark.skipif(bool(cannot_compile(CPU)), reason=cannot_compile(CPU) or "-")
def test_compiled_step_is_the_eager_one_with_fewer_kernels():
    run = launch("compiled_step", nproc=1, device="cpu", batch_size=64, rounds=2)
    assert run.one("gradient_error").value < 1e-4, "relative to the largest gradient, FP32 in another order"
    calls = run.one("kernels", way="compiled")
    assert calls.value < run.one("kernels", way="eager").value
    assert any(name.startswith("cpp_fused") for name in calls.case["names"])
    cold, warm = (run.one("first_step_s", cache=c).value for c in ("empty", "full"))
    assert warm < cold, "the full cache saves the C++ compiler, seconds of work"
    ours = [p for p in psutil.process_iter(["cmdline"]) if "compile_worker" in " ".join(p.info["cmdline"] or [])]
    assert not ours, "no worker of the compiler outlives the run"


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": 0},
        {"shapes": 65},
        {"model": "nothing"},
    ],
)
def test_bad_values(values):
    with pytest.raises(BadInput, match=next(iter(values))):
        Config(**values)
