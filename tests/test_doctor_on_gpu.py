"""What the doctor does and says where a device works beside the host, decided by planted facts: none is here."""

from dataclasses import dataclass

import pytest
import torch
from doctor_profiles import made
from doctor_training import Clock, classifier, forever, look_at
from test_doctor_hooks import loader_of

from labs.doctor import estimated_gain, report, usage
from labs.doctor.bottlenecks import SLOW, UNPRICED
from labs.doctor.counterfactuals import MODES
from labs.doctor.findings import find
from labs.doctor.hooks import Hooks, describe
from labs.doctor.profile import AS_IS, Line


def gpu(parts=None, modes=None, **more):
    profile = made(parts, modes, device="cuda", **more)
    profile.training["dtypes"] = ["bfloat16"]
    return profile


class Device:
    """Works beside the host, on the clock of the hooks: `give` returns at once."""

    def __init__(self, monkeypatch):
        self.clock, self.done_at = Clock(monkeypatch), 0.0
        monkeypatch.setattr(Hooks, "synchronise", lambda hooks: self.clock.sleep(self.left()))
        monkeypatch.setattr(Hooks, "mark", lambda hooks: Mark(self.clock.now + self.left()))
        monkeypatch.setattr(usage, "describe", self.describe)

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

    facts = look_at(training, {"same batch again": MODES["same batch again"]}, steps=6)
    assert facts.step_s[1:] == pytest.approx([step_s] * 5), "from mark to mark: nobody waits between"
    assert {round(s, 4) for turn in facts.interleaved_s[AS_IS] for s in turn} == {step_s}
    assert estimated_gain.interleaved([facts], "same batch again").value == pytest.approx(step_s / 0.020)


def test_own_code_beside_which_the_device_works_has_no_price():
    parts, lines = {"prepare": 0.4, "forward": 0.6}, [Line("prepare", "", "/x/train.py", 4, "x()", 0.0, 20.0)]
    (found,) = find([gpu(parts, lines=lines)])
    assert (found.name, found.kind, found.gain) == ("own_code", UNPRICED, None)
    assert [f.name for f in find([made(parts, lines=lines)]) if f.kind == SLOW] == ["own_code"]


@pytest.mark.parametrize("kind", ["data", "exchange"])
def test_no_time_of_the_host_is_priced_by_arithmetic(kind):
    lines = [Line(kind, "it", "/x/train.py", 4, "it", 1.0, 20.0)]
    for ranks in (1, 2):
        profiles = [gpu({kind: 0.5, "forward": 0.5}, rank=rank, ranks=ranks, lines=lines) for rank in range(ranks)]
        assert not [f for f in find(profiles) if f.gain or f.kind != UNPRICED]


def test_the_picture_of_a_step_is_the_devices():
    profile = gpu(step_s=0.004, device_s={"forward": [0.001], "backward": [0.0015], "optimizer": [0.0005]})
    rows = {kind: share for kind, _, _, share in report.parts(profile)}
    assert rows == pytest.approx({"forward": 0.25, "backward": 0.375, "optimizer": 0.125, "idle": 0.25}, rel=0.02)
    page = report.page(report.make([profile]), everything=True)
    assert "other work, waits for the host" in page and "By the host's clock" in page


@pytest.mark.parametrize(("forward_s", "starved"), [(0.02, True), (0.045, False)])
def test_python_is_called_too_slow_only_where_the_gpu_waits_for_it(forward_s, starved):
    found = [f.name for f in find([gpu(device_s={"forward": [forward_s]})])]
    assert ("python_overhead" in found) == starved


def test_copies_are_named_by_the_gpus_clock_and_without_a_price():
    lines = [Line("copy", "to", "/x/train.py", 4, "x = x.to(device)", 1.0, 9.0)]
    [found] = find([gpu(device_s={"copy": [0.02], "forward": [0.03]}, lines=lines)])
    assert (found.name, found.kind, found.gain) == ("copies", UNPRICED, None) and found.line == "train.py:4"


def test_what_is_between_forward_and_backward_is_the_loss(monkeypatch):
    """By the device's clock, as copies to it are: what is left of a step may be a wait for the host."""
    hooks, clock = Hooks("/x", lambda seconds: None), [0.0]
    hooks.device, hooks.recording = torch.device("cuda"), True
    monkeypatch.setattr(Hooks, "mark", lambda hooks: Mark(clock[0]))

    def takes(seconds):
        clock[0] += seconds

    hooks._on_device("forward", takes, (0.2,), {})
    clock[0] += 0.1
    hooks._on_device("backward", takes, (0.4,), {})
    clock[0] += 0.3
    hooks._on_device("forward", takes, (0.2,), {})
    assert hooks.device_seconds() == pytest.approx({"forward": 0.4, "loss": 0.1, "backward": 0.4})
