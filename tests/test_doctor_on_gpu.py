"""What the doctor does and says where a device works beside the host, decided by planted facts: none is here."""

import time
from dataclasses import dataclass
from types import SimpleNamespace

import doctor_patients
import pytest
import torch
from doctor_facts import STEP_S, WELL, made
from doctor_patients import Clock, classifier, data, forever, hooked, look_at
from test_doctor_hooks import loader_of

from labs.doctor import bounds, compare, report, state, turns
from labs.doctor.causes import HOLDS_BACK, OPTION, READING
from labs.doctor.counterfactuals import MODES, Counterfactual
from labs.doctor.diagnosis import FROM_PARTS, IN_TURN, diagnose, healthy, unknown
from labs.doctor.facts import AS_IS, Facts, Line
from labs.doctor.hooks import Hooks, describe
from labs.doctor.ranks import Ranks
from labs.doctor.turns import LEAST_STEPS, _InTurn


def gpu(parts=None, modes=None, beside_s=None, **more):
    """Its steps as they are end with a wait; `beside_s`: a step without that wait, of the turns."""
    facts = made(parts, modes, device="cuda", **more)
    facts.turns_s[AS_IS] = [[beside_s or STEP_S]] * len(facts.turns_s[AS_IS])
    return facts


HIDDEN = {"prepare": 0.2, "device": 0.8}
"""5 ms of own code and 20 ms of the device's work, which take 25 ms only because the doctor waits for it."""


@pytest.mark.parametrize("step_s", [0.02, 0.05, 0.068, 0.5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_turn_has_several_steps_between_two_waits_for_a_device(step_s, device):
    steps = _InTurn(None, made(step_s=step_s, device=device, loader=None), Ranks(1), 10.0).steps
    assert steps >= LEAST_STEPS if device == "cuda" else steps == max(1, round(0.1 / step_s))


class Device:
    """Works beside the host, on the clock of the hooks: `give` returns at once."""

    def __init__(self, monkeypatch):
        self.clock, self.done_at = Clock(monkeypatch), 0.0
        monkeypatch.setattr(Hooks, "synchronise", lambda hooks: self.clock.sleep(self.left()))
        monkeypatch.setattr(Hooks, "mark", lambda hooks: Mark(self.clock.now + self.left()))
        monkeypatch.setattr(doctor_patients, "describe", self.describe)

    def left(self):
        return max(0.0, self.done_at - self.clock.now)

    def give(self, seconds):
        self.done_at = self.clock.now + self.left() + seconds

    def describe(self, hooks, facts):
        describe(hooks, facts)
        facts.device = "cuda"


@dataclass
class Mark:
    at: float

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize(("host_s", "step_s"), [(0.005, 0.020), (0.019, 0.020), (0.030, 0.030)])
def test_a_loader_costs_what_the_device_does_not_hide(host_s, step_s, monkeypatch):
    """A batch takes `host_s`, the device 20 ms: a step takes the longer of the two, and both where it is waited for."""
    device = Device(monkeypatch)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def training():
        for x, y in forever(loader_of(device.clock, host_s)):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            device.give(0.020)
            optimizer.step()

    facts = look_at(training, [MODES["same batch again"]], steps=6)
    assert facts.step_s == pytest.approx([host_s + 0.020] * 6)
    assert bounds.beside_s([facts]) == pytest.approx([step_s] * len(facts.turns_s[AS_IS]))
    assert bounds.in_turn([facts], "same batch again").value == pytest.approx(step_s / 0.020)


def test_own_code_beside_which_the_device_works_holds_nothing_back():
    (found,) = diagnose([gpu(HIDDEN, beside_s=0.020, step_s=0.025)])
    assert (found.name, found.kind, found.bound) == ("own_code", READING, None) and "meanwhile" in found.certainty
    assert [f.name for f in diagnose([made(HIDDEN, step_s=0.025)]) if f.kind == HOLDS_BACK] == ["own_code"]


@pytest.mark.parametrize("kind", ["data", "print", "exchange", "copy"])
def test_no_time_of_the_host_is_priced_by_arithmetic(kind):
    parts = {"device": 0.5, kind: 0.5}
    lines = [Line(kind, "it", "/x/train.py", 4, "it", 1.0, 20.0)]
    for ranks in (1, 2):
        facts = [gpu(parts, rank=rank, ranks=ranks, lines=lines) for rank in range(ranks)]
        assert not [f for f in diagnose(facts) if f.bound or f.kind != READING]


def test_what_the_host_takes_to_ask_for_an_exchange_does_not_make_it_healthy():
    facts = [gpu(WELL | {"exchange": 1e-4}, rank=rank, ranks=2, not_tried={"no exchange": "FSDP"}) for rank in range(2)]
    assert not any("exchange" in text for text in healthy(facts))
    for f in facts:
        f.training["exchanges"] = 4
    (found,) = [f for f in diagnose(facts) if f.name == "exchange"]
    assert found.bound is None and found.what.startswith("an unknown part of a step's")


def test_a_rare_save_costs_what_its_steps_are_longer_by():
    """The host's clock knows 1 ms of it; the device's share in it comes at the step's end."""
    facts = gpu(noise=0.001)
    for i in (9, 19, 29):
        facts.step_s[i] += 0.5
        facts.spans_s["save"][i], facts.spans_s["device"][i] = 0.001, 0.499
    facts.rare = ["save"]
    (found,) = diagnose([facts])
    assert (found.name, found.by) == ("checkpoint", FROM_PARTS) and "50.0 ms for each step" in found.what
    assert found.bound.value == pytest.approx(2, rel=0.01)


def _report(facts):
    return report.Report(facts, diagnose(facts), healthy(facts), unknown(facts))


def test_before_and_after_are_steps_without_that_wait():
    before, after = gpu(HIDDEN, beside_s=0.020, step_s=0.025), gpu(HIDDEN, beside_s=0.010, step_s=0.025)
    found = compare.compare(_report([before]), _report([after]))
    assert found.gain.value == pytest.approx(2) and not found.warnings
    after.turns_s = {}
    assert any("wait for the device" in text for text in compare.compare(_report([before]), _report([after])).warnings)


def test_what_is_rare_is_in_the_step_although_turns_leave_it_out():
    facts = gpu(noise=0.001)
    for i in (9, 19, 29):
        facts.step_s[i] += 0.5
        facts.spans_s["evaluation"][i] = 0.5
    assert bounds.beside_s([facts])[0] == pytest.approx(STEP_S + 0.05)


# How busy it is


def test_the_gpu_is_looked_at_several_times_before_anything_is_told_of_it():
    answers = iter([90, 10, 20, 95, 30, 40, 50])
    cuda = SimpleNamespace(utilization=lambda device: next(answers), power_draw=lambda device: 1e5)
    facts = made(machine={"cores": 2})
    looks = state.GpuLooks(SimpleNamespace(torch=SimpleNamespace(cuda=cuda), device=None), facts)
    for _ in range(state.FEWEST_LOOKS - 1):
        looks.look()
    assert facts.machine == {"cores": 2}
    looks.look()
    assert facts.machine == {"cores": 2, "gpu_percent": 30, "power_w": 100}


def test_looks_go_on_while_steps_are_in_turn_and_end_with_them(monkeypatch):
    monkeypatch.setattr(state, "LOOK_S", 0.001)
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 42)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 9e4)
    facts = Facts("train.py", ["train.py"], cost={"calls": 1.0, "call_s": 1e-6})
    with hooked(lambda seconds: None) as hooks:
        state.note(hooks, facts, "as it is")
        facts.step_s, facts.device, hooks.undisturbed = [0.1], "cuda", True
        state.note(hooks, facts, "in turn")
        looks, ends = state._gpu_looks, time.monotonic() + 60
        while "gpu_percent" not in facts.machine and time.monotonic() < ends:
            time.sleep(0.01)
        state.note(hooks, facts, "done")
    looks.join(60)
    assert facts.machine["gpu_percent"] == 42 and facts.machine["power_w"] == 90 and not looks.is_alive()


class Nothing(Counterfactual):
    """Changes nothing."""

    name, hooks, entered = "nothing", None, False

    def why_not(self, hooks, facts):
        self.hooks = hooks
        return ""

    def enter(self, hooks):
        self.entered = True

    def leave(self, hooks):
        self.entered = False


def test_it_is_looked_at_while_steps_are_as_they_are_and_are_not_waited_for(monkeypatch):
    """And of the steps as they are it is noted which of them have made a graph."""
    mode, seen, graphs = Nothing(), [], []
    monkeypatch.setattr(turns, "compiled_graphs", lambda: len(graphs))

    def training():
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, (x, _) in enumerate(forever(data())):
            model(x).sum().backward()
            if mode.hooks:
                seen.append((mode.hooks.undisturbed, mode.hooks.synchronised, mode.entered))
            if number in (12, 18, 24):
                graphs.append(number)
            optimizer.step()

    facts = look_at(training, [mode], steps=30)
    first, *others = facts.compiles["at"]
    assert facts.compiles["in_steps"] == 3 and others == [first + 6, first + 12]
    assert {entered for undisturbed, _, entered in seen if undisturbed} == {False}
    undisturbed = [waited for undisturbed, waited, _ in seen if undisturbed]
    assert undisturbed.count(False) > undisturbed.count(True) > 0, "the last step of a turn ends with a wait"


def test_a_gpu_is_called_starved_only_if_it_was_looked_at():
    for machine, name, kind in (({"gpu_percent": 40}, "python_overhead", HOLDS_BACK), ({}, "compile", OPTION)):
        (found,) = diagnose([gpu(modes={"compiled": 0.6 * STEP_S}, machine=machine)])
        assert (found.name, found.kind, found.by) == (name, kind, IN_TURN)


# Devices of other makers


def _hooks_on(device, of_torch, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: of_torch)
    hooks = Hooks("/x", lambda seconds: None)
    hooks.torch, hooks.device = torch, torch.device(device)
    return hooks


def test_any_device_that_torch_can_wait_for_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    hooks = _hooks_on("mps", torch.device("mps"), monkeypatch)
    hooks.synchronise()
    assert waited == [torch.device("mps")]
    hooks.device = torch.device("cpu")
    hooks.synchronise()
    assert len(waited) == 1


def test_a_device_that_torch_cannot_wait_for_is_told(monkeypatch):
    for of_torch, told in ((None, 1), (torch.device("xla"), 0)):
        facts = made()
        describe(_hooks_on("xla", of_torch, monkeypatch), facts)
        assert len([text for text in facts.unseen if "xla" in text]) == told
