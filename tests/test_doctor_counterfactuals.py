"""Counterfactuals leave no trace, take away what their name says, and fit into their time."""

import random
from contextlib import contextmanager
from functools import partial

import numpy
import pytest
import torch
from doctor_training import classifier, data, forever, look_at
from torch import nn

from labs.doctor import schedule
from labs.doctor.counterfactuals import MODES, why_not
from labs.doctor.hooks import Hooks
from labs.doctor.profile import AS_IS, Profile

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


@contextmanager
def vandalised(hooks):
    """Whatever a counterfactual might do to a training."""
    yield
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


SAME_BATCH = {"same batch again": MODES["same batch again"]}


def watched(modes, on):
    """Says to the training whether its step is one of a counterfactual that is taken back."""

    @contextmanager
    def applied(mode, hooks):
        on.append(mode)
        with mode(hooks):
            yield
        on.clear()

    return {name: partial(applied, mode) for name, mode in modes.items()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=3)


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

    facts = look_at(training, watched({"vandal": vandalised, **SAME_BATCH}, on))
    assert set(facts.interleaved_s) == {AS_IS, "vandal", "same batch again"}
    assert len(losses) > 12
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

    facts = look_at(training, SAME_BATCH)
    assert len(facts.interleaved_s) == 2
    assert facts.micro_batches == pytest.approx(1 + generator_every)  # backward passes of a step


@pytest.mark.parametrize("writes", [False, True])
def test_a_batch_that_the_script_takes_apart_is_whole_again_and_one_that_it_writes_into_is_not_given_twice(
    quick, writes
):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return {"x": torch.full((8,), float(i + 1)), "y": i % 3}

    model, on, sums = classifier(), [], []
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)

    def training():
        for batch in forever(torch.utils.data.DataLoader(Rows(), 8)):
            y, x = batch.pop("y"), batch["x"]
            sums.append((bool(on), x.sum().item()))
            x = x.div_(255) if writes else x / 255
            loss_of(model(x), y).backward()
            optimizer.step()

    facts = look_at(training, watched(SAME_BATCH, on))
    assert any(repeated for repeated, _ in sums) != writes
    assert ("writes into" in facts.not_tried.get("same batch again", "")) == writes


def test_the_training_set_may_be_evaluated_in_inference_mode(quick):
    """Its batches are inference tensors, which have no version counter."""
    model, loader = classifier(), data()

    def training():
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        while True:
            for x, y in loader:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
            with torch.inference_mode():
                sum(model(x).sum() for x, _ in loader)

    assert len(look_at(training, SAME_BATCH, steps=20).interleaved_s) == 2


def test_reasons_against_each(monkeypatch):
    hooks = Hooks("/x", lambda spans: None)
    hooks.called, hooks.device = {1}, torch.device("cpu")

    def reason(mode, device="cpu", **training):
        facts = Profile("x", ["x"], device=device, training=training)
        return why_not(mode, hooks, facts)

    same_batch, exchange, waits, buffers = MODES
    assert "DataLoader" in reason(same_batch) and "Distributed" in reason(exchange) and "no buffers" in reason(buffers)
    assert "GPU" in reason(waits) and "no line" in reason(waits, "cuda")


def test_ddp_sends_buffers_again_after_steps_without_them(tmp_path):
    hooks = Hooks("/x", lambda spans: None)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        hooks.ddp = [nn.parallel.DistributedDataParallel(nn.BatchNorm1d(4))]
        for _ in range(2):
            with MODES["no buffer broadcast"](hooks):
                assert not hooks.ddp[0].broadcast_buffers
            assert hooks.ddp[0].broadcast_buffers
    finally:
        torch.distributed.destroy_process_group()
