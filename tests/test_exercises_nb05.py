"""Checkers of notebook 05: right answers of other kinds pass, and mistakes are told."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from mutants import nb05 as mutants
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05 import solutions as solution
from labs.chapters.nb05.exercise_recompute import SCENES, Run, kept_by, plain
from labs.chapters.nb05.exercise_resume import pieces
from labs.chapters.nb05.exercise_states import one_thread, same
from labs.chapters.nb05.exercise_trainer import Trainer
from labs.common.memory.recomputation import by_hand
from labs.kit.check import TODO, examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def test_the_stub_of_a_class_is_to_do():
    class Resumable(Trainer):
        def state_dict(self):
            return {"model": self.model.state_dict()}

        def load_state_dict(self, state):
            return TODO

    assert examine("05.4", Resumable).state == "to do"


# -- 05.2


def all_subsets(blocks, x, kept_bytes, budget_bytes):
    """Every choice is tried, the smallest first; runs of blocks that go together are one segment."""
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


def by_hooks(blocks, x, kept_bytes, budget_bytes):
    left = dict(enumerate(kept_bytes))
    while sum(left.values()) > budget_bytes:
        del left[max(left, key=left.get)]
    for i, block in enumerate(blocks):
        x = block(x) if i in left else by_hand(block, x)
    return x


@pytest.mark.parametrize("right", [all_subsets, by_own_function, by_hooks])
def test_other_ways_to_keep_a_budget_pass(right):
    passes("05.2", right)


def test_the_budget_counts_what_blocks_keep_and_nothing_else():
    for scene in SCENES:
        with one_thread():
            kept = [kept_by(h) for h in scene.hidden]
            budget = scene.budget(kept)
            all_kept, own = (Run(scene).play(f, kept, budget) for f in (plain, solution.run_stack))
        assert all_kept.kept_bytes == sum(kept) and own.kept_bytes <= budget + 8192 * max(1, scene.over)
        assert {c.block for c in own.calls if c.in_backward} == set(np.argsort(kept)[::-1][: scene.over].tolist())
        assert all(torch.equal(a, b) for a, b in zip(own.gradients, all_kept.gradients, strict=True))
        assert (own.x_grad is None) == (not scene.x_needs_grad) and own.drawn == all_kept.drawn


# -- 05.3


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


def module_per_chunk(hidden, weight, labels, chunk_tokens):
    """A criterion that adds up, chunks by index, a shape of (1,)."""
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)

    def one(start):
        part = slice(start, start + chunk_tokens)
        return criterion(nn.functional.linear(hidden[part], weight), labels[part])

    sums = [checkpoint(one, start, use_reentrant=False) for start in range(0, len(hidden), chunk_tokens)]
    return (torch.stack(sums).sum() / labels.ne(-100).sum()).reshape(1)


@pytest.mark.parametrize("right", [InForward.apply, module_per_chunk], ids=["gradients in forward", "by index"])
def test_other_ways_to_chunk_pass(right):
    passes("05.3", lambda *arguments: right(*arguments))


# -- 05.4


class AsTensors(Trainer):
    """Flat, and random states as tensors."""

    def state_dict(self):
        state = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        _, keys, *rest = np.random.get_state()
        version, words, gauss = random.getstate()
        self_state = {"numpy": torch.tensor(keys.astype(np.int64)), "rest": rest, "python": torch.tensor(words)}
        others = {k: copy.deepcopy(getattr(self, k).state_dict()) for k in ("optimizer", "scheduler", "scaler")}
        sampler = {"at": [self.sampler.epoch, self.sampler.position], "order": self.sampler.order.tolist()}
        generators = {"drawn": self.sampler.generator.get_state(), "torch": torch.get_rng_state()}
        return state | self_state | others | sampler | generators | {"version": version, "gauss": gauss}

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


@pytest.mark.parametrize("right", [AsTensors, mutants.Complete])
def test_other_complete_states_pass(right):
    passes("05.4", right)


def test_the_reference_leaves_the_state_as_it_was_when_the_training_goes_on_from_it():
    trainer = solution.Resumable(1)
    trainer.step()
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    trainer.load_state_dict(state)
    trainer.step()
    assert same(state, kept)


def test_every_piece_of_the_trainer_changes_and_matters():
    trainer = Trainer(1)
    before = pieces(trainer)
    for _ in range(8):
        trainer.step()
    after = pieces(trainer)
    assert [name for name in before if same(before[name], after[name])] == []
