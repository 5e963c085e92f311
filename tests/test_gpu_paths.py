"""What runs on GPUs only, as far as it can be judged without one: against stand-ins, and against the source itself."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import FakeNvml, card

from labs import elastic_restart, memory_oracle, timing
from labs.common.oracle.reality import Measured, of_allocator
from labs.kit import hardware, nvml
from labs.kit.errors import BadInput
from labs.kit.rank import Rank, same_bits_every_time

ROOT = Path(__file__).parents[1]
REPORT = nvml.report
GPU = torch.device("cuda", 0)


def on(device) -> Rank:
    return Rank(0, 1, 0, 1, torch.device(device), "gloo", ())


def calls(name: str):
    """(file, call) of every call of something that ends so, in labs."""
    for path in sorted((ROOT / "labs").rglob("*.py")):
        if name.rpartition(".")[2] not in (text := path.read_text()):  # to parse all files takes seconds
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name):
                yield str(path.relative_to(ROOT)), node


def test_nobody_turns_cudnn_off_by_the_way():
    """torch.backends.cudnn.flags() has enabled=False by default."""
    found = list(calls("cudnn.flags"))
    assert found
    assert [path for path, call in found if "enabled" not in {k.arg for k in call.keywords}] == []


def test_a_gloo_group_of_some_ranks_is_made_by_these_alone():
    """With a default group bound to a GPU, torch has all other ranks split its communicator, and no member does."""
    found = [{k.arg: ast.unparse(k.value) for k in call.keywords} for _, call in calls("dist.new_group") if call.args]
    gloo = [given for given in found if "gloo" in given.get("backend", "")]
    assert all(given.get("use_local_synchronization") == "True" for given in gloo)


def exclusive(monkeypatch):
    fake = FakeNvml([card(mode=3)])
    monkeypatch.setattr(hardware.nvml, "report", lambda *_, **how: REPORT(fake, **how))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_what_starts_a_second_process_on_an_exclusive_gpu_says_so_before(monkeypatch):
    exclusive(monkeypatch)
    monkeypatch.setattr(timing, "one_answer", lambda *_: pytest.fail("a process was started"))
    with pytest.raises(BadInput, match="GPU 0 is in exclusive-process mode"):
        timing.answers(timing.Config(), on(GPU))
    with pytest.raises(BadInput, match="exclusive-process mode"):
        list(elastic_restart.run(elastic_restart.Config(), on(GPU)))


def test_the_ranks_of_a_restart_run_where_the_lab_does():
    def device(rank):
        arguments = elastic_restart._arguments(elastic_restart.RUNS["uninterrupted"], elastic_restart.Config(), rank)
        return arguments[arguments.index("--device") + 1]

    assert device(on("cpu")) == "cpu" and device(on(GPU)) == "auto"


def test_same_bits_are_asked_of_a_gpu_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *a, **k: asked.append((a, k)))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    same_bits_every_time(torch.device("cpu"))
    assert not asked
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # somebody's own choice stays; the test leaves none behind
    same_bits_every_time(GPU)
    assert asked == [((True,), {"warn_only": True})]


def stats(requested, allocated, reserved):
    return {
        f"{k}_bytes.all.{w}": v
        for k, v in (("requested", requested), ("allocated", allocated), ("reserved", reserved))
        for w in ("current", "peak")
    }


def test_a_gpus_peak_is_what_was_asked_for_less_what_was_there():
    found = of_allocator(stats(100, 512, 2_000), stats(1100, 2048, 4_000))
    assert (found.peak_bytes, found.allocated_bytes, found.reserved_bytes) == (1000, 1536, 4_000)
    assert found.tensor_bytes is None


def test_a_large_model_runs_on_a_gpu_where_there_is_room(monkeypatch):
    rank = SimpleNamespace(device=torch.device("cuda"), record=lambda metric, unit, value, **case: (metric, value))
    trace = memory_oracle.oracle.step("mlp", 8, target="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        memory_oracle.oracle, "measured", lambda *args, **given: Measured(trace.peak_bytes + 100, None, 2000, 3000)
    )
    for room, ran in ((1.1, False), (1.3, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, room=room: (room * trace.peak_bytes, 10**9))
        found = dict(memory_oracle._real_step(rank, "mlp", "mlp", 0, 8, optimizer="sgd", policy="none"))
        assert ("measured_bytes" in found) == ran
    assert found["measured_bytes"] == trace.peak_bytes + 100 and found["reserved_bytes"] == 3000
