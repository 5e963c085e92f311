"""Typical mistakes in notebook 05: {exercise: {mistake: (function or class, words that its feedback must hold)}}."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05.exercise_trainer import Trainer

# -- 05.2


def _stack(choose=None, *, fits=lambda left, budget: left <= budget, run=None):
    """The right function, except for what a keyword says. `choose`: the order in which blocks are given up."""

    def run_stack(blocks, x, kept_bytes, budget_bytes):
        order = (choose or (lambda kept: sorted(range(len(kept)), key=lambda i: -kept[i])))(kept_bytes)
        again = []
        for i in order:
            if fits(sum(kept_bytes) - sum(kept_bytes[k] for k in again), budget_bytes):
                break
            again.append(i)
        for i, block in enumerate(blocks):
            x = (run or _again)(block, x) if i in again else block(x)
        return x

    return run_stack


def _again(block, x):
    return checkpoint(block, x, use_reentrant=False)


def _late_binding(blocks, x, kept_bytes, budget_bytes):
    order, again = sorted(range(len(blocks)), key=lambda i: -kept_bytes[i]), []
    for i in order:
        if sum(kept_bytes) - sum(kept_bytes[k] for k in again) > budget_bytes:
            again.append(i)
    for i, block in enumerate(blocks):
        x = checkpoint(lambda x: block(x), x, use_reentrant=False) if i in again else block(x)  # noqa: B023
    return x


def _without_gradients(block, x):
    with torch.no_grad():
        return block(x)


# -- 05.3


def _loss(*, mean=False, keep=False, whole=False, drop=False, all_tokens=False, detach=False, number=False):
    """The right function, except for what a keyword says."""

    def chunked_loss(hidden, weight, labels, chunk_tokens):
        weight = weight.detach() if detach else weight
        if whole:
            logits = hidden @ weight.T
            parts = zip(logits.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
            total = sum(cross_entropy(part, y, reduction="sum") for part, y in parts)
            return total / (labels != -100).sum()

        def one(h, y):
            return cross_entropy(h @ weight.T, y, reduction="mean" if mean else "sum")

        pairs = list(zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True))
        if drop:
            pairs = [(h, y) for h, y in pairs if len(y) == chunk_tokens]
        sums = [one(h, y) if keep else checkpoint(one, h, y, use_reentrant=False) for h, y in pairs]
        total = sum(sums) if sums else hidden.sum() * 0
        if number:
            total = total.item()
        if mean:
            return total / len(sums)
        return total / (len(labels) if all_tokens else max(1, sum(int((y != -100).sum()) for _, y in pairs)))

    return chunked_loss


# -- 05.4


def _numpy_state():
    state = np.random.get_state(legacy=False)
    return state | {"state": state["state"] | {"key": state["state"]["key"].tolist()}}


class Complete(Trainer):
    """Right, in parts that the mistakes below leave out."""

    without = ()
    loads = ("model", "optimizer", "scheduler", "scaler", "sampler", "generator", "torch", "numpy", "python")

    def parts(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": {k: getattr(self.sampler, k) for k in ("epoch", "position", "order")},
            "generator": self.sampler.generator.get_state(),
            "torch": torch.get_rng_state(),
            "numpy": _numpy_state(),
            "python": random.getstate(),
        }

    def state_dict(self):
        return copy.deepcopy({k: v for k, v in self.parts().items() if k not in self.without})

    def load_state_dict(self, state):
        for name in self.loads:
            if name in state:
                self.load(name, state[name])

    def load(self, name, value):
        if name in ("model", "optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(value)
        elif name == "sampler":
            for key, item in value.items():
                setattr(self.sampler, key, item)
        else:
            {
                "generator": self.sampler.generator.set_state,
                "torch": torch.set_rng_state,
                "numpy": np.random.set_state,
                "python": random.setstate,
            }[name](value)


def _without(*names):
    return type("Incomplete", (Complete,), {"without": names})


def _without_key(part, *keys):
    class Incomplete(Complete):
        def parts(self):
            parts = super().parts()
            parts[part] = {k: v for k, v in parts[part].items() if k not in keys}
            return parts

    return Incomplete


class Article(Trainer):
    def state_dict(self):
        return {"epoch": self.sampler.epoch, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.epoch = state["epoch"]


class NumpyAsItIs(Complete):
    def parts(self):
        return super().parts() | {"numpy": np.random.get_state()}


class RandomStatesFirst(Complete):
    """The generator first, then an epoch is begun, which draws from it."""

    loads = ("generator", "torch", "numpy", "python", "model", "optimizer", "scheduler", "scaler", "sampler")

    def load(self, name, value):
        if name == "sampler":
            self.sampler.set_epoch(value["epoch"])
        super().load(name, value)


class OldParameters(Complete):
    def load(self, name, value):
        if name == "model":
            self.model = copy.deepcopy(self.model)
        super().load(name, value)


class NewOrder(Complete):
    """The epoch is begun anew, and the position set."""

    def load(self, name, value):
        if name == "sampler":
            self.sampler.set_epoch(value["epoch"])
            self.sampler.position = value["position"]
        else:
            super().load(name, value)


class Draws(Complete):
    def state_dict(self):
        state = super().state_dict()
        random.random()
        return state


MUTANTS = {
    "05.2": {
        "nothing again": (_stack(lambda kept: []), "the budget is"),
        "everything again": (_stack(fits=lambda left, budget: False), "every block runs a second time, and"),
        "the first ones first": (_stack(lambda kept: range(len(kept))), "2 blocks run a second time, and 1 would be"),
        "less than the budget": (
            _stack(fits=lambda left, budget: left < budget),
            "A budget that is met exactly is met",
        ),
        "a lambda in the loop": (_late_binding, "backward runs another block than forward did"),
        "use_reentrant=True": (
            _stack(run=lambda block, x: checkpoint(block, x, use_reentrant=True)),
            "parameters get no gradient: use_reentrant=True",
        ),
        "random state not kept": (
            _stack(run=lambda block, x: checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)),
            "another mask in the second run",
        ),
        "under no_grad": (_stack(run=_without_gradients), "what runs under no_grad, or detached, is cut off"),
    },
    "05.3": {
        "all logits at once": (_loss(whole=True), "tokens are there at once"),
        "no checkpoint": (_loss(keep=True), "every chunk's logits wait for backward"),
        "a mean of means": (_loss(mean=True), "the mean of a chunk in which no token counts is 0 / 0"),
        "the last chunk left out": (_loss(drop=True), "the last, shorter chunk is left out"),
        "over all tokens": (_loss(all_tokens=True), "the ignored ones among them"),
        "weight detached": (_loss(detach=True), "weight gets no gradient"),
        "a number": (_loss(number=True), "not a tensor with one number"),
    },
    "05.4": {
        "as in the article": (Article, "it is the live object"),
        "no scaler": (_without("scaler"), "the loss scale is not"),
        "no position": (_without_key("sampler", "position"), "the position in the epoch is not"),
        "a new order": (NewOrder, "the order of this epoch's rows is saved, but"),
        "numpy as it is": (NumpyAsItIs, "is of type numpy.ndarray: torch.load(file, weights_only=True) refuses"),
        "random states first": (RandomStatesFirst, "the sampler's generator is saved, but"),
        "the optimizer's old parameters": (OldParameters, "all is back as it was, and yet"),
        "state_dict draws": (Draws, "state_dict() itself changes Python's random state"),
    },
}
