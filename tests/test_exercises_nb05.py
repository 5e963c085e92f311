"""Checkers of notebook 05: right answers of other kinds pass, and mistakes are told."""

from __future__ import annotations

import copy
import functools
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
from labs.chapters.nb05.exercise_states import difference, one_thread, same
from labs.chapters.nb05.exercise_trainer import Trainer
from labs.common.memory.recomputation import by_hand
from labs.kit.check import TODO, examine, get_exercise
from labs.memory_oracle.chunked_loss import chunked_cross_entropy


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


@pytest.mark.parametrize("junk", [None, object(), lambda *_: {}])
def test_junk_is_told_not_raised(junk):
    assert examine("05.4", junk).state == "not yet"


def test_the_stub_of_a_class_is_to_do():
    class Resumable(Trainer):
        def state_dict(self):
            return {"model": self.model.state_dict()}

        def load_state_dict(self, state):
            return TODO

    assert examine("05.4", Resumable).state == "to do"


def test_states_are_compared_bit_for_bit():
    assert same({"a": torch.ones(1)}, {"a": torch.ones(1)})
    assert difference({"a": {"b": torch.zeros(1)}}, {"a": {"b": torch.ones(1)}}) == "state['a']['b']"
    assert not same({"a": torch.ones(1)}, {"a": torch.ones(1).double()})
    assert not same({"a": 1}, {"a": 1, "b": 2}) and not same({"a": 1, "b": 2}, {"a": 1})
    assert not same({"a": torch.ones(2)}, {"a": 1}) and not same(None, (1, {}))


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


def test_switching_requires_grad_on_for_the_callers_x_is_told():
    def run_stack(blocks, x, kept_bytes, budget_bytes):
        return solution.run_stack(blocks, x.requires_grad_(), kept_bytes, budget_bytes)

    assert "the caller's x requires a gradient now" in examine("05.2", run_stack).text


def takes_them_out_of_kept_bytes(blocks, x, kept_bytes, budget_bytes):
    again = set()
    while sum(kept_bytes) > budget_bytes:
        again.add(largest := kept_bytes.index(max(kept_bytes)))
        kept_bytes[largest] = 0
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def first_of_this_size(blocks, x, kept_bytes, budget_bytes):
    again, left = set(), sum(kept_bytes)
    for size in sorted(kept_bytes, reverse=True):
        if left > budget_bytes:
            again.add(kept_bytes.index(size))
            left -= size
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def patched(blocks, x, kept_bytes, budget_bytes):
    left = sum(kept_bytes)
    for i in sorted(range(len(blocks)), key=lambda i: -kept_bytes[i]):
        if left > budget_bytes:
            blocks[i].forward = functools.partial(checkpoint, blocks[i].forward, use_reentrant=False)
            left -= kept_bytes[i]
    return plain(blocks, x, kept_bytes, budget_bytes)


def in_evaluation_mode(blocks, *rest):
    return solution.run_stack([block.eval() for block in blocks], *rest)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (takes_them_out_of_kept_bytes, "kept_bytes holds other numbers afterwards"),
        (first_of_this_size, "two blocks of the same size: 49 kB are kept"),
        (patched, "the caller's blocks are others afterwards"),
        (in_evaluation_mode, "a block is in another mode"),
    ],
)
def test_what_the_next_step_would_suffer_from_is_told(wrong, words):
    assert words in examine("05.2", wrong).text


@pytest.mark.parametrize("junk", [lambda *_: None, lambda *_: 3.0, lambda blocks, x, *_: x.sum()])
def test_junk_for_a_tensor_is_told(junk):
    assert "not a tensor as the last block does" in examine("05.2", junk).text


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


def test_the_labs_own_chunked_loss_is_that_of_all_logits_at_once():
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64, requires_grad=True) for n in (50, 90))
    labels = torch.randint(90, (50,), generator=draw)
    whole, parts = (chunked_cross_entropy(hidden, weight, labels, chunks) for chunks in (1, 7))
    assert torch.allclose(whole, parts, rtol=1e-12)
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (whole, parts)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


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


class InTheClass(mutants.Complete):
    def state_dict(self):
        type(self).kept = super().state_dict()
        return {"epoch": self.sampler.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(copy.deepcopy(self.kept))


def test_a_state_that_stays_in_the_class_is_told():
    assert "brings back what another trainer has saved last" in examine("05.4", InTheClass).text


def test_the_reference_leaves_the_state_as_it_was_when_the_training_goes_on_from_it():
    trainer = solution.Resumable(1)
    trainer.step()
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    trainer.load_state_dict(state)
    trainer.step()
    assert same(state, kept)


class TakesTheStateApart(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict({name: state.pop(name) for name in self.loads})


class TakesWhatIsThere(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict({name: state.pop(name) for name in list(state)})


class SavedInEvaluationMode(mutants.Complete):
    def state_dict(self):
        self.model.eval()
        return super().state_dict()


class LoadedForEvaluation(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.model.eval()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (TakesTheStateApart, "load_state_dict(state) works once: a second one from the same state raises KeyError"),
        (TakesWhatIsThere, "a second one from the same state does not bring back the parameters"),
        (SavedInEvaluationMode, "state_dict() itself puts the model into evaluation mode"),
        (LoadedForEvaluation, "load_state_dict() leaves the model in evaluation mode"),
    ],
)
def test_what_is_no_piece_of_the_state_is_told(wrong, words):
    assert words in examine("05.4", wrong).text


def test_every_piece_of_the_trainer_changes_and_matters():
    trainer = Trainer(1)
    before = pieces(trainer)
    for _ in range(8):
        trainer.step()
    after = pieces(trainer)
    assert [name for name in before if same(before[name], after[name])] == []


@pytest.mark.long
def test_a_check_leaves_random_states_and_threads_as_they_were():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    threads = torch.get_num_threads()
    for exercise_id in ("05.2", "05.3", "05.4"):
        examine(exercise_id, get_exercise(exercise_id).reference)
    drawn = torch.rand(()).item(), np.random.random(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert drawn == (torch.rand(()).item(), np.random.random(), random.random())
    assert torch.get_num_threads() == threads


def test_a_chunk_that_is_looked_up_in_backward_is_named():
    def chunked_loss(hidden, weight, labels, chunk_tokens):
        total = 0.0
        for h, y in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            total += checkpoint(
                lambda: nn.functional.cross_entropy(h @ weight.T, y, reduction="sum"),  # noqa: B023
                use_reentrant=False,
            )
        return total / (labels != -100).sum()

    assert "the gradient of the last chunk's" in examine("05.3", chunked_loss).text
