"""Exercises of notebook 05: right answers of another style pass, each known mistake is named, a gap is shown."""

import copy
import functools
import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs.exercises import nb05
from labs.exercises.nb05 import EXERCISES, Trainer
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


@pytest.mark.parametrize(
    ("name", "mistake"), [(name, m) for name, exercise in EXERCISES.items() for m in exercise.mistakes]
)
def test_each_known_mistake_is_named(name, mistake):
    assert mistake.what in examine(name, mistake.answer).text


def measure_as_a_module(blocks, x, y, recompute):
    """By id of the storage, the mean of three steps, a Sequential."""
    model, criterion = nn.Sequential(*blocks), nn.MSELoss()
    seen = {}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t
        return t

    def again(out, block):
        return checkpoint(block, out, use_reentrant=False)

    def loss():
        out = functools.reduce(again, model, x) if recompute else model(x)
        return criterion(out, y)

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        first = loss()
    first.backward()
    nbytes = sum(t.untyped_storage().nbytes() for key, t in seen.items() if key not in weights)
    start = time.monotonic()
    for _ in range(3):
        model.zero_grad()
        loss().backward()
    return (time.monotonic() - start) / 3, nbytes


def measure_by_steps(blocks, x, y, recompute):
    """The fastest of four steps; bytes from the last one."""
    times, total = [], 0
    own = {p.data_ptr() for b in blocks for p in b.parameters()}
    kept = {}

    def pack(t):
        kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    for _ in range(4):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            start, out = time.perf_counter(), x
            for b in blocks:
                out = checkpoint(b, out, use_reentrant=False) if recompute else b(out)
            loss = nn.functional.mse_loss(out, y)
        loss.backward()
        times.append(time.perf_counter() - start)
        total = sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in own)
    return min(times), total


def test_other_ways_to_measure():
    passes("05.1", measure_as_a_module)
    passes("05.1", measure_by_steps)


def all_subsets(blocks, x, kept_bytes, budget_bytes):
    """Every choice is tried, the smallest first; blocks that go together are one segment."""
    n = len(blocks)
    again = next(
        c
        for k in range(n + 1)
        for c in itertools.combinations(range(n), k)
        if sum(kept_bytes[i] for i in range(n) if i not in c) <= budget_bytes
    )
    for twice, numbers in itertools.groupby(range(n), key=again.__contains__):
        segment = nn.Sequential(*(blocks[i] for i in numbers))
        x = checkpoint(segment, x, use_reentrant=False) if twice else segment(x)
    return x


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters, ctx.state = block, parameters, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.block(x)
        return None, *torch.autograd.grad(out, [x, *ctx.parameters], g)


def by_own_function(blocks, x, kept_bytes, budget_bytes):
    kept = np.array(kept_bytes)
    order = np.argsort(-kept)
    left = kept.sum() - np.concatenate([[0], np.cumsum(kept[order])])
    again = set(order[: int(np.argmax(left <= budget_bytes))].tolist())
    for i, block in enumerate(blocks):
        x = OwnFunction.apply(block, x, *block.parameters()) if i in again else block(x)
    return x


def test_other_ways_to_keep_a_budget():
    passes("05.2", all_subsets)
    passes("05.2", by_own_function)


class InForward(torch.autograd.Function):
    """Gradients are made in forward, chunk by chunk, and only scaled in backward: no second run at all."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        count, total = (labels != -100).sum(), 0.0
        grads = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            p = (h @ weight.T).log_softmax(1)
            used = (y != -100).float()
            target = y.clamp(min=0)[:, None]
            total = total - (p.gather(1, target)[:, 0] * used).sum()
            p = p.exp_().scatter_add_(1, target, -torch.ones_like(h[:, :1])) * used[:, None] / count
            grads[0][start : start + chunk] = p @ weight
            grads[1].add_(p.T @ h)
        ctx.save_for_backward(*grads)
        return total / count

    @staticmethod
    def backward(ctx, g):
        return *(g * t for t in ctx.saved_tensors), None, None


def by_index(hidden, weight, labels, chunk_tokens):
    """A criterion that adds up, chunks by index, a shape of (1,)."""
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)

    def one(start):
        part = slice(start, start + chunk_tokens)
        return criterion(nn.functional.linear(hidden[part], weight), labels[part])

    sums = [checkpoint(one, start, use_reentrant=False) for start in range(0, len(hidden), chunk_tokens)]
    return (torch.stack(sums).sum() / labels.ne(-100).sum()).reshape(1)


def test_other_ways_to_chunk():
    passes("05.3", lambda *arguments: InForward.apply(*arguments))
    passes("05.3", by_index)


class AsTensors(Trainer):
    """Flat, and random states as tensors."""

    def state_dict(self):
        state = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        _, keys, *rest = np.random.get_state()
        version, words, gauss = random.getstate()
        own = {"numpy": torch.tensor(keys.astype(np.int64)), "rest": rest, "python": torch.tensor(words)}
        others = {k: copy.deepcopy(getattr(self, k).state_dict()) for k in ("optimizer", "scheduler", "scaler")}
        sampler = {"at": [self.sampler.epoch, self.sampler.position], "order": self.sampler.order.tolist()}
        generators = {"drawn": self.sampler.generator.get_state(), "torch": torch.get_rng_state()}
        return state | own | others | sampler | generators | {"version": version, "gauss": gauss}

    def load_state_dict(self, state):
        self.model.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")})
        for k in ("optimizer", "scheduler", "scaler"):
            getattr(self, k).load_state_dict(state[k])
        self.sampler.epoch, self.sampler.position = state["at"]
        self.sampler.order = torch.tensor(state["order"])
        self.sampler.generator.set_state(state["drawn"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["rest"]))
        random.setstate((state["version"], tuple(state["python"].tolist()), state["gauss"]))


class InABytesBuffer(nb05.Resumable):
    """Everything in one tensor of bytes."""

    def state_dict(self):
        return {"all": torch.frombuffer(bytearray(nb05._written(super().state_dict())), dtype=torch.uint8)}

    def load_state_dict(self, state):
        super().load_state_dict(torch.load(nb05.io.BytesIO(state["all"].numpy().tobytes()), weights_only=True))


def test_other_complete_states():
    passes("05.4", AsTensors)
    passes("05.4", InABytesBuffer)


def test_a_missing_piece_is_named():
    class WithoutNumpy(nb05.Resumable):
        def load_state_dict(self, state):
            kept = np.random.get_state()
            super().load_state_dict(state)
            np.random.set_state(kept)

    assert "NumPy's random state: expected 'as saved', got 'different'" in examine("05.4", WithoutNumpy).text


def test_stubs_are_to_do():
    class Stub(Trainer):
        def state_dict(self): ...

        def load_state_dict(self, state): ...

    assert examine("05.4", Stub).state == "to do"
