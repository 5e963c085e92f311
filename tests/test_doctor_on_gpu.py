"""What the doctor does and says where a device works beside the host, decided by planted facts: none is here."""

from dataclasses import dataclass

import doctor_patients
import pytest
import torch
from doctor_facts import STEP_S, made
from doctor_patients import Clock, classifier, data, forever, look_at
from test_doctor_hooks import loader_of

from labs.doctor import bounds, compare, report
from labs.doctor.causes import HOLDS_BACK, OPTION, READING
from labs.doctor.counterfactuals import MODES, Counterfactual
from labs.doctor.diagnosis import IN_TURN, diagnose, healthy, unknown
from labs.doctor.facts import AS_IS, Line
from labs.doctor.hooks import Hooks, describe
from labs.doctor.ranks import Ranks
from labs.doctor.turns import LEAST_STEPS, _InTurn
from labs.kit import _compat


def gpu(parts=None, modes=None, beside_s=None, **more):
    """Its steps as they are end with a wait; `beside_s`: a step without that wait, of the turns."""
    facts = made(parts, modes, device="cuda", **more)
    facts.turns_s[AS_IS] = [[beside_s or STEP_S]] * len(facts.turns_s[AS_IS])
    return facts


HIDDEN = {"prepare": 0.2, "device": 0.8}
"""5 ms of own code and 20 ms of the device's work, which take 25 ms only because the doctor waits for it."""


@pytest.mark.parametrize(("step_s", "device"), [(0.02, "cuda"), (0.5, "cuda"), (0.05, "cpu")])
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


@pytest.mark.parametrize("kind", ["data", "exchange"])
def test_no_time_of_the_host_is_priced_by_arithmetic(kind):
    parts = {"device": 0.5, kind: 0.5}
    lines = [Line(kind, "it", "/x/train.py", 4, "it", 1.0, 20.0)]
    for ranks in (1, 2):
        facts = [gpu(parts, rank=rank, ranks=ranks, lines=lines) for rank in range(ranks)]
        assert not [f for f in diagnose(facts) if f.bound or f.kind != READING]


def _report(facts):
    return report.Report(facts, diagnose(facts), healthy(facts), unknown(facts))


def test_before_and_after_are_steps_without_that_wait():
    before, after = gpu(HIDDEN, beside_s=0.020, step_s=0.025), gpu(HIDDEN, beside_s=0.010, step_s=0.025)
    found = compare.compare(_report([before]), _report([after]))
    assert found.gain.value == pytest.approx(2) and not found.warnings
    after.turns_s = {}
    assert any("wait for the device" in text for text in compare.compare(_report([before]), _report([after])).warnings)


# How busy it is


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
    monkeypatch.setattr(_compat, "compiled_graphs", lambda: len(graphs))

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
