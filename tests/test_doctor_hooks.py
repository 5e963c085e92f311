"""The doctor's hooks: each instant of a step belongs to the right kind, and the script does not notice them."""

import builtins
import inspect
import io
import itertools
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from doctor_training import Clock, Done, classifier, data, forever, hooked, seconds_of_steps
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import dataloader

from labs.doctor import hooks as hooks_module
from labs.doctor.hooks import COLLECTIVES, COPIES, WAITS, Hooks

loss_of = nn.functional.cross_entropy


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def here():
    """Line of the caller."""
    return inspect.currentframe().f_back.f_lineno


class Slow(nn.Module):
    """Takes time in forward and in backward."""

    def __init__(self, clock, forward, backward=0.0):
        super().__init__()
        self.clock, self.forward_s, self.backward_s, self.inner = clock, forward, backward, classifier()

    def forward(self, x):
        self.clock.sleep(self.forward_s)
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.clock.sleep(self.backward_s))
        return y


class SlowData(torch.utils.data.Dataset):
    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.clock.sleep(self.seconds / 8)
        return torch.randn(8), i % 3


class SlowSgd(torch.optim.SGD):
    """A custom optimizer."""

    def __init__(self, parameters, clock, seconds):
        super().__init__(parameters, lr=0.01)
        self.clock, self.seconds = clock, seconds

    def step(self, closure=None):
        self.clock.sleep(self.seconds)
        return super().step(closure)


def loader_of(clock, seconds):
    return torch.utils.data.DataLoader(SlowData(clock, seconds), 8)


def test_every_planted_second_is_in_its_part_of_the_step(clock, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda what, file: clock.sleep(0.06))
    monkeypatch.setattr(builtins, "print", lambda *what: clock.sleep(0.05))
    model, other = Slow(clock, 0.002, 0.003), loader_of(clock, 0.08)
    optimizer = SlowSgd(model.parameters(), clock, 0.004)
    lines = {}

    def training():
        for x, y in forever(loader_of(clock, 0.001)):
            clock.sleep(0.01)
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            clock.sleep(0.02)
            loss.backward()
            print("loss", loss.item())
            lines["print"] = here() - 1
            torch.save({}, "file")
            lines["save"] = here() - 1
            with torch.no_grad():
                for x, _ in other:
                    model(x)
            optimizer.step()

    seconds, hooks = seconds_of_steps(training)
    assert seconds == {
        "data": 0.001,
        "prepare": 0.01,
        "forward": 0.002,
        "rest": 0.02,
        "backward": 0.003,
        "optimizer": 0.004,
        "print": 0.05,
        "save": 0.06,
        "evaluation": pytest.approx(5 * (0.08 + 0.002)),
    }
    noted = {line.kind: line for line in hooks.noted_lines(11)}
    assert {kind: noted[kind].line for kind in lines} == lines
    assert noted["print"].ms == pytest.approx(50) and noted["save"].calls == 1
    assert noted["synchronise"].line == lines["print"] and "loss.item()" in noted["synchronise"].code


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoints_second_forward_is_backward_and_its_first_no_evaluation(clock, reentrant):
    def training():
        first, second = Slow(clock, 0.01, 0.003), nn.Linear(3, 1)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
        while True:
            x = torch.rand(4, 8, requires_grad=True)
            second(checkpoint(first, x, use_reentrant=reentrant)).sum().backward()
            optimizer.step()

    seen = []

    def stepped(seconds):
        seen.append(({kind: round(s, 9) for kind, s in seconds.items() if s}, hooks.samples))
        if len(seen) == 12:
            raise Done

    with hooked(stepped) as hooks, suppress(Done):
        training()
    assert seen[-1] == ({"forward": 0.01, "backward": 0.013}, 4)


def _gan(clock):
    generator, critic = Slow(clock, 0.001), Slow(clock, 0.002)
    first, second = SlowSgd(critic.parameters(), clock, 0.004), SlowSgd(generator.parameters(), clock, 0.008)
    for a, b in zip(forever(loader_of(clock, 0.016)), forever(loader_of(clock, 0.032)), strict=True):
        critic(a[0]).sum().backward()
        first.step()
        generator(b[0]).sum().backward()
        second.step()


def _accumulation(clock):
    model = Slow(clock, 0.001)
    optimizer = SlowSgd(model.parameters(), clock, 0.012)
    scaler = torch.amp.GradScaler("cpu")
    for number, (x, y) in enumerate(forever(loader_of(clock, 0.024)), 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        if number % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (_gan, {"data": 0.048, "forward": 0.003, "optimizer": 0.012}),
        (_accumulation, {"data": 0.048, "forward": 0.002, "optimizer": 0.012}),
    ],
)
def test_trainings_of_all_shapes_are_seen(clock, training, expected):
    seconds, hooks = seconds_of_steps(lambda: training(clock), steps=8)
    assert seconds == expected
    assert hooks.loader is not None and hooks.called


@pytest.mark.parametrize("kind", ["generator", "functional"])
def test_what_cannot_be_seen_is_in_the_scripts_own_time(clock, kind):
    model = Slow(clock, 0.001)
    optimizer = SlowSgd(model.parameters(), clock, 0.004)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                clock.sleep(0.001)
                yield torch.randn(8), 1

    def made():
        while True:
            clock.sleep(0.008)
            yield torch.randn(8, 8), torch.ones(8, dtype=torch.long)

    def training():
        for x, y in made() if kind == "generator" else torch.utils.data.DataLoader(Stream(), 8):
            weights = dict(model.named_parameters())
            out = torch.func.functional_call(model, weights, x) if kind == "functional" else model(x)
            loss_of(out, y).backward()
            optimizer.step()

    seconds, hooks = seconds_of_steps(training)
    if kind == "generator":
        assert seconds == {"prepare": 0.008, "forward": 0.001, "optimizer": 0.004} and hooks.loader is None
    else:
        assert seconds == {"data": 0.008, "forward": 0.001, "optimizer": 0.004}


def test_nothing_is_left_after_them():
    def all_of():
        places = [(torch.Tensor, n) for n in (*WAITS, *COPIES)]
        places += [(torch, "save"), (torch, "compile"), (builtins, "print"), (torch.autograd, "backward")]
        places += [(torch.distributed, n) for n in COLLECTIVES]
        places += [(torch.utils.data.DataLoader, "__iter__")]
        places += [(dataloader._BaseDataLoaderIter, n) for n in ("__init__", "__next__")]
        return {(owner, name): (getattr(owner, name), name in vars(owner)) for owner, name in places}

    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def training():
        for x, y in forever(data()):
            loss_of(model(x), y).backward()
            optimizer.step()

    before = all_of()
    _, hooks = seconds_of_steps(training)
    assert hooks.called and all_of() == before
    assert model._compiled_call_impl is None
    torch.save(model, io.BytesIO())


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, x):
        return self.inner(x.to(torch.float32))


def _compiled_step(model, optimizer):
    @torch.compile(backend="eager")
    def step(x, y):
        loss = loss_of(model(x.to(torch.float32)), y)
        if loss.item() > 1e9:
            raise ValueError("too large")
        loss.backward()
        optimizer.step()

    return step


def test_torch_compile_sees_none_of_it():
    import torch._dynamo

    def count(with_hooks):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = Own()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def training():
            step = _compiled_step(model, optimizer)
            for x, y in itertools.islice(forever(data()), 12):
                step(x, y)

        if with_hooks:
            seconds_of_steps(training)
        else:
            training()
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), [*model.parameters()]

    graphs, breaks, weights = count(False)
    with_hooks = count(True)
    assert with_hooks[0] == graphs >= 1 and with_hooks[1] <= breaks
    assert all(torch.equal(a, b) for a, b in zip(with_hooks[2], weights, strict=True))


# What it must not do


def test_no_driver_is_asked_before_the_script_does_it(monkeypatch):
    """The first question settles which GPUs are visible, and forbids to use them in a fork."""

    def asked(*args):
        raise AssertionError("the driver was asked")

    for owner, name in (
        (torch.cuda, "is_available"),
        (torch.cuda, "device_count"),
        (torch.accelerator, "is_available"),
        (torch._C, "_cuda_getDeviceCount"),
        (torch.cuda, "_lazy_init"),
    ):
        monkeypatch.setattr(owner, name, asked, raising=False)
    with hooked(lambda seconds: None):
        pass


def test_the_doctors_own_lines_and_packages_below_the_script_are_none_of_its_lines():
    """A script may lie beside labs/, and its folder may be the one in which pip installs with --user."""
    root = Path(hooks_module.__file__).parents[2]
    hooks = Hooks(str(root), lambda seconds: None)
    hooks.recording = True
    hooks._noted("print", abs)(1)
    assert [(line.file, line.line) for line in hooks.noted_lines(1)] == [(__file__, here() - 1)]
    scope = {}
    source = "import sys\ndef frame():\n    return sys._getframe()\n"
    for folder, mine in (("src", True), (".local/lib/python3.11/site-packages", False), ("dist-packages/x", False)):
        exec(compile(source, str(root / folder / "part.py"), "exec"), scope)
        file, _ = hooks.own_line(scope["frame"]())
        assert (file == str(root / folder / "part.py")) == mine
