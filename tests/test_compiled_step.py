"""torch.compile in a new process: break-even by hand, a missing compiler, and nothing left behind."""

import math

import psutil
import pytest
import torch

from labs import compiled_step as lab
from labs.kit.launch import launch
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


def records(eager, compiled, first_s=10.0):
    made = [Record("compiled_step", "first_step_s", "s", (first_s,), case={"cache": "empty"})]
    for way, samples in (("eager", eager), ("compiled", compiled)):
        made.append(Record("compiled_step", "step_s", "s", tuple(samples), case={"way": way, "cache": "empty"}))
    return Records(made)


def test_break_even_by_hand():
    found = records([0.030] * 8, [0.020] * 8, first_s=10.02)
    assert lab.break_even(found).value == pytest.approx(1000)
    assert lab.category(records([0.02] * 8, [0.01] * 8, 100.0)) == "over 1,000 steps"
    assert lab.category(records([0.02] * 8, [0.01] * 8, 5.0)) == "under 1,000 steps"


def test_a_compiled_step_that_saves_nothing_never_pays():
    assert lab.category(records([0.01] * 8, [0.02] * 8)) == "never"
    noisy = lab.break_even(records([0.02] * 8, [0.018, 0.023, 0.017, 0.022, 0.019, 0.021, 0.018, 0.023]))
    assert math.isinf(noisy.high) and math.isfinite(noisy.low)


def test_a_missing_compiler_is_one_line_that_names_the_fix(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    why = lab.cannot_compile(CPU)
    assert "no no-such-compiler" in why and "install" in why and "\n" not in why


def test_a_folder_with_a_blank_is_named(monkeypatch):
    monkeypatch.setattr(lab.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(lab.sysconfig, "get_path", lambda name: f"/usr/{name}")
    monkeypatch.setattr(torch, "__file__", "/srv/my course/torch/__init__.py")
    assert "/srv/my course/torch" in lab.cannot_compile(CPU)


def test_an_error_in_the_new_process_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(lab.dataclasses, "asdict", lambda config: {"model": "no.such:model"})
    why = lab.in_new_process(lab.Config(), CPU, str(tmp_path))["why"]
    assert "no.such" in why and "\n" not in why


def test_smoke_run_compares_eager_and_compiled_steps_and_leaves_no_process():
    run = launch("compiled_step", 2, device="cpu", smoke=True, oversubscribe=True)
    assert run.one("gradient_error", cache="empty").value < 1e-4
    assert len(run.one("step_s", way="eager").samples) == len(run.one("step_s", way="compiled").samples) == 2
    left = [p for p in psutil.process_iter(["cmdline"]) if "compiled_step import" in " ".join(p.info["cmdline"] or [])]
    assert not left


@pytest.mark.long
@pytest.mark.skipif(bool(lab.cannot_compile(CPU)), reason=lab.cannot_compile(CPU) or "-")
def test_a_full_cache_saves_the_compiler():
    run = launch("compiled_step", 1, device="cpu", processes=2, rounds=2, batch_size=64)
    empty, full = (run.one("first_step_s", cache=cache).value for cache in ("empty", "full"))
    assert full < empty and run.one("gradient_error", cache="empty").value < 1e-4
