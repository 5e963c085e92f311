"""A training in this process with the doctor's hooks, and a clock that only moves when the training says so."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import torch

from labs.doctor import hooks as hooks_module
from labs.doctor.hooks import Hooks
from labs.doctor.profile import Profile
from labs.doctor.schedule import plan

HERE = str(Path(__file__).parent)


class Done(BaseException):
    """All steps that were wanted are taken."""


class Clock:
    """In the hooks' eyes time passes in `sleep` alone: what they measure is exact."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(hooks_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def sleep(self, seconds):
        self.now += seconds


@contextmanager
def hooked(on_step):
    hooks = Hooks(HERE, on_step)
    hooks.install()
    try:
        yield hooks
    finally:
        hooks.remove()


def seconds_of_steps(training, steps=12, recording=True):
    """Seconds by kind of the last step, and the hooks."""
    seen = []

    def stepped(seconds):
        seen.append(dict(seconds))
        hooks.recording = recording
        if len(seen) == steps:
            raise Done

    with hooked(stepped) as hooks:
        with suppress(Done):
            training()
        return {kind: round(s, 9) for kind, s in seen[-1].items() if s}, hooks


def look_at(training, modes, steps=3, seconds=60.0):
    """Profile of a whole run."""
    facts = Profile("train.py", ["train.py"])

    def stepped(seconds):
        try:
            plan_.send(seconds)
        except StopIteration:
            raise Done from None

    with hooked(stepped) as hooks:
        plan_ = plan(hooks, facts, steps, seconds, modes)
        next(plan_)
        with suppress(Done):
            training()
    assert facts.stage == "done"
    return facts


def classifier(width=16):
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))


def data(n=64, batch_size=8, **options):
    """Batches of inputs and targets."""
    made = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 8, generator=made), torch.randint(0, 3, (n,), generator=made)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size, **options)


def forever(loader):
    """Its batches, epoch after epoch."""
    while True:
        yield from loader


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(HERE).parent), os.environ.get("PYTHONPATH", "")])}
