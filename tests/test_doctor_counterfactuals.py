"""Counterfactuals leave no trace, take away what their name says, and fit into their time."""

import random
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy
import pytest
import torch
from doctor_training import classifier, data, environment, forever, look_at
from torch import nn

from labs.doctor import findings, schedule
from labs.doctor.counterfactuals import MODES, Counterfactual
from labs.doctor.profile import AS_IS, Line, Profile, load, not_reached
from labs.doctor.script_process import Settings

loss_of = nn.functional.cross_entropy


@pytest.fixture
def quick(monkeypatch):
    """Two rounds of short schedule."""
    for name, value in (("LEAST_ROUNDS", 2), ("MOST_ROUNDS", 2), ("MOST_STEPS", 2)):
        monkeypatch.setattr(schedule, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Vandal(Counterfactual):
    """Whatever a counterfactual might do to a training."""

    name = "vandal"

    def why_not(self, hooks, facts):
        return ""

    def enter(self, hooks):
        self.hooks = hooks
        self.leave(hooks)

    def leave(self, hooks):
        for root in hooks.roots.values():
            for tensor in (*root.parameters(), *root.buffers()):
                tensor.data.fill_(7)
        for optimizer in hooks.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = 13.0
            for state in optimizer.state.values():
                for key, value in list(state.items()):
                    state[key] = torch.full_like(value, 3) if torch.is_tensor(value) else value
                state["litter"] = 1
        torch.rand(5), random.random(), numpy.random.rand()


class Watched:
    """Says to the training whether its step is one of a counterfactual that is taken back."""

    def __init__(self, mode, on):
        self.mode, self.on = mode, on

    def __getattr__(self, name):
        return getattr(self.mode, name)

    def enter(self, hooks):
        self.on.append(self.mode.name)
        self.mode.enter(hooks)

    def leave(self, hooks):
        self.mode.leave(hooks)
        self.on.clear()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3)


TAKEN_BACK = ("same batch again", "half precision", "single precision", "fused optimizer", "larger batch")


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (torch.optim.Adam, torch.float32),
        (sgd, torch.float64),
        pytest.param(lbfgs, torch.float32, marks=pytest.mark.long),
    ],
)
def test_steps_as_they_are_train_as_if_nothing_else_had_been(quick, make, dtype):
    """Bit for bit: weights, optimizer, schedule, dropout and statistics, with the batches that they were given."""

    def prepared():
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), *(nn.Linear(16, 16) for _ in range(3))]
        model = nn.Sequential(*layers, nn.Linear(16, 3)).to(dtype)
        optimizer = make(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)

    def step(model, optimizer, schedule, x, y):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(x.to(next(model.parameters()).dtype)), y) * (1 + random.random() + numpy.random.rand())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        schedule.step()
        return loss.item().hex()

    on, losses, batches = [], [], []

    def training():
        mine = prepared()
        for x, y in forever(data(shuffle=True, generator=torch.Generator().manual_seed(1))):
            as_it_is = not on
            loss = step(*mine, x, y)
            if as_it_is:
                losses.append(loss), batches.append((x.clone(), y.clone()))

    modes = [Watched(mode, on) for mode in (Vandal(), *(MODES[name] for name in TAKEN_BACK))]
    facts = look_at(training, modes)
    tried = {"vandal", "same batch again", "larger batch"}
    if make is not lbfgs:
        tried |= {"fused optimizer", "half precision" if dtype == torch.float32 else "single precision"}
    assert set(facts.interleaved_s) == {AS_IS, *tried}
    assert len(losses) > 20
    alone = prepared()
    assert losses == [step(*alone, x, y) for x, y in batches]


@pytest.mark.parametrize("generator_every", [1, 3])
def test_the_graph_of_a_loss_to_come_survives_what_is_put_back(quick, generator_every):
    """Of two networks that train each other: the images are made before the critic's step, and judged after it."""

    def training():
        generator, critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), classifier()
        ours, theirs = (torch.optim.Adam(m.parameters()) for m in (generator, critic))
        for number, (x, _) in enumerate(forever(data())):
            images = generator(x)
            theirs.zero_grad()
            (critic(x) - critic(images.detach())).square().mean().backward()
            theirs.step()
            if number % generator_every == 0:
                images = images if generator_every == 1 else generator(x)
                ours.zero_grad()
                critic(images).square().mean().backward()
                ours.step()

    facts = look_at(training, [MODES["same batch again"], MODES["larger batch"]])
    assert len(facts.interleaved_s) == 3
    assert facts.micro_batches == pytest.approx(1 + 1 / generator_every)  # backward passes of a step


def test_a_batch_that_the_script_takes_apart_is_whole_again(quick):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return {"x": torch.full((8,), float(i + 1)), "y": i % 3}

    model, sums = classifier(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    on = []

    def training():
        for batch in forever(torch.utils.data.DataLoader(Rows(), 8)):
            y, x = batch.pop("y"), batch["x"]
            sums.append((bool(on), x.sum().item()))
            x.div_(255)
            loss_of(model(x), y).backward()
            optimizer.step()

    look_at(training, [Watched(MODES["same batch again"], on)])
    assert any(repeated for repeated, _ in sums)
    assert all(s % 32 == 0 and s >= 8 * 36 for _, s in sums)  # none was divided twice


def _seen(monkeypatch, **training):
    facts = Profile(
        "x",
        ["x"],
        training={
            "autocast": "",
            "dtypes": ["float32"],
            "compiled": False,
            "fsdp": False,
            "data_parallel": False,
            **training,
        },
    )
    facts.spans_s, facts.step_s = {"data": [0.0]}, [1.0]
    return facts


def test_reasons_against_each(monkeypatch):
    model = classifier()
    hooks = SimpleNamespace(
        torch=torch,
        loader=None,
        called={1},
        roots={1: model},
        optimizers={},
        anomaly=False,
        unused_seen=False,
        last_batch=lambda: None,
        device=torch.device("cpu"),
    )
    facts = _seen(monkeypatch)
    reasons = {name: mode.why_not(hooks, facts) for name, mode in MODES.items()}
    can = {name for name, why in reasons.items() if not why}
    assert can - {"fewer threads"} == {"half precision", "compiled"}
    assert facts.training["half"] == "bfloat16"
    assert "FP64" in MODES["half precision"].why_not(hooks, _seen(monkeypatch, dtypes=["float64"]))
    hooks.optimizers = {1: torch.optim.LBFGS(model.parameters())}
    assert "passes" in MODES["half precision"].why_not(hooks, _seen(monkeypatch))
    hooks.optimizers = {}
    hooks.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert not MODES["half precision"].why_not(hooks, facts) and facts.training["half"] == "float16"
    facts = _seen(monkeypatch, autocast="bfloat16")
    assert "bfloat16" in MODES["half precision"].why_not(hooks, facts)
    facts = _seen(monkeypatch, fsdp=True)
    assert "FSDP" in MODES["no exchange"].why_not(hooks, facts)
    facts.device = "cuda"
    assert "GPU" in MODES["fewer threads"].why_not(hooks, facts)
    assert MODES["no waiting line"].why_not(hooks, facts)  # no line waits
    facts.device, facts.lines = "mps", [Line("synchronise", "item", "/x/train.py", 4, "loss.item()", 1.0, 9.0)]
    assert not MODES["no waiting line"].why_not(hooks, facts)


def test_in_single_precision_lines_after_the_step_find_gradients_and_evaluation_works(quick):
    """As they do in the capstone: a script reads p.grad after the step, zeroes it in place, and evaluates."""
    model, dtypes = classifier().double(), set()
    optimizer, twin = sgd(model.parameters()), torch.zeros((), dtype=torch.float64)

    def training():
        for x, y in forever(data()):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model(x.double()), y).backward()
            optimizer.step()
            dtypes.update((p.dtype, p.grad.dtype) for p in model.parameters())
            twin.add_(sum(p.grad.abs().sum().item() for p in model.parameters()))
            with torch.no_grad():
                model(x.double())

    facts = look_at(training, [MODES["single precision"]])
    assert all(facts.interleaved_s["single precision"]) and "single precision" not in facts.not_tried
    assert dtypes == {(torch.float64, torch.float64), (torch.float32, torch.float32)}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float64}


# What a script does not survive


def test_what_a_script_ends_before_is_named_with_how_it_ended(tmp_path):
    """Its 7 steps end while it is looked at as it is."""
    steps, named = 7, ["same batch again", "compiled"]
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        torch.set_num_threads(1)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(torch.randn({8 * steps}, 8))
        for (x,) in torch.utils.data.DataLoader(data, 8):
            model(x).sum().backward()
            optimizer.step()
    """)
    )
    modes = ("same batch again", "compiled")
    settings = Settings([str(script)], str(tmp_path), steps=3, seconds=20, modes=modes)
    command = [sys.executable, "-m", "labs.doctor.script_process", str(settings.save())]
    subprocess.run(command, env=environment(), check=True, timeout=250)
    facts = load(settings.profile_path)
    assert facts.ended == "script ended" and not_reached(facts) == named
    (said,) = [text for text in findings.unknown([facts]) if text.startswith("not tried")]
    assert f"{', '.join(named)} (the run ended after {facts.steps} steps" in said and "--only NAME" in said


@pytest.mark.long
@pytest.mark.parametrize("how", ["raise ValueError('only 8')", pytest.param("os._exit(4)", marks=pytest.mark.drill)])
def test_a_script_that_does_not_survive_one_leaves_all_others(tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        import torch
        torch.set_num_threads(1)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.utils.data.TensorDataset(torch.randn(800, 8))
        while True:
            for (x,) in torch.utils.data.DataLoader(data, 8):
                if len(x) != 8:
                    {how}
                model(x).sum().backward()
                optimizer.step()
    """)
    )
    modes = ("same batch again", "fused optimizer", "larger batch", "other loaders")
    settings = Settings([str(script)], str(tmp_path), steps=3, seconds=20, modes=modes)
    command = [sys.executable, "-m", "labs.doctor.script_process", str(settings.save())]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250)
    facts = load(settings.profile_path)
    others = ("same batch again", "fused optimizer")
    reasons = {name: facts.not_tried.get(name, "") + facts.left_out.get(name, "") for name in others}
    slow = {name for name, why in reasons.items() if "times as long" in why or "too short" in why}  # a busy machine
    # What promises less than the larger batch comes after it: noise may turn the two promises round
    late = {"fused optimizer"} if "would have been after 'larger batch'" in reasons["fused optimizer"] else set()
    assert facts.ended == "done" and set(facts.interleaved_s) == {AS_IS, *others} - slow - late, reasons
    assert "larger batch" in facts.not_tried and not facts.trying
    assert "--without 'larger batch'" in facts.left_out.get("other loaders", "") or facts.not_tried.get("other loaders")
    if "raise" in how:
        assert "only 8" in facts.not_tried["larger batch"] and done.returncode == 0
        assert "Traceback" not in done.stderr
