"""Typical mistakes in notebook 05: {exercise: {mistake: (function or class, words that its feedback must hold)}}."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05.exercise_trainer import Trainer
from mutants import nb05_files

# -- 05.2


def _recompute(*, grad_in_forward=False, keep_graph=False, keep=False, random_state=True, back=True, restore=True,
               detach=True, requires=True, enable=True, parameters=True, give_parameters=True, grad_output=True,
               twice=0, add=False, own_add=None, scale=1.0, extra=False, draw=False, copies=False):  # fmt: skip
    """The right function, except for what a keyword says."""

    def checkpointed(block, x):
        weights = list(block.parameters()) if parameters else []

        class Recomputed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *_):
                ctx.save_for_backward(x)
                ctx.state = torch.get_rng_state()
                if draw:
                    torch.rand(1)
                if keep_graph:
                    with torch.enable_grad():
                        ctx.x = x.detach().requires_grad_()
                        ctx.output = block(ctx.x)
                    return ctx.output.detach()
                if copies:
                    ctx.copies = [p.detach().clone() for p in block.parameters() for _ in range(4)]
                return block(x)

            @staticmethod
            def backward(ctx, g):
                x, _ = ctx.saved_tensors[0], None
                if keep_graph:
                    return torch.autograd.grad(ctx.output, [ctx.x, *weights], g)
                x = x.detach() if detach else x
                x = x.requires_grad_() if requires else x
                before = torch.get_rng_state()
                if random_state:
                    torch.set_rng_state(ctx.state)
                with torch.set_grad_enabled(enable):
                    for _ in range(twice):
                        block(x)
                        torch.set_rng_state(ctx.state)
                    output = block(x)
                if restore:
                    torch.set_rng_state(before)
                g = scale * (g if grad_output else torch.ones_like(g))
                return back_through(x, output, g)

        def back_through(x, output, g):
            if own_add == "set":
                gx, *grads = torch.autograd.grad(output, [x, *weights], g)
                for p, grad in zip(weights, grads, strict=True):
                    p.grad = grad
                return (gx, *[None] * len(weights))
            if add:
                torch.autograd.backward(output, g)
                return (x.grad, *([p.grad for p in weights] if add == "return" else [None] * len(weights)))
            grads = torch.autograd.grad(output, [x, *list(block.parameters())], g)
            if not back:
                return (None, *grads[1:])
            return grads if give_parameters else (grads[0], *[None] * len(weights) * (give_parameters is False))

        return Recomputed.apply(x, *weights)

    return checkpointed


# -- 05.3


def _fit(row=lambda k, n, a, i: k * i + math.ceil(n / k) * a, *, segments=None, rows=math.floor, lowest=0, fixed=True,
         choose=min, start=1, answer=lambda rows, k: (rows, k), judged=None):  # fmt: skip
    """The right function, except for what a keyword says. `judged`: the bytes of a row that only the rows are from."""

    def largest_batch(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
        def row_bytes(k):
            return row(k, layers, layer_bytes, input_bytes)

        k = choose(range(start, layers + 1), key=row_bytes)
        k = segments(layers, layer_bytes, input_bytes, k) if segments else k
        bytes_of_a_row = (judged or row)(k, layers, layer_bytes, input_bytes)
        return answer(max(lowest, rows((memory_bytes - fixed_bytes * fixed) / bytes_of_a_row)), k)

    return largest_batch


def _sqrt(rounded):
    return _fit(segments=lambda n, a, i, k: rounded(math.sqrt(n)))


def _ratio(rounded):
    return _fit(segments=lambda n, a, i, k: min(n, rounded(math.sqrt(n * a / i))))


def _judged(row):
    return _fit(judged=row)


def _last(candidates, key):
    return max(candidates, key=lambda k: (-key(k), k))


def _once_per_row(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
    k = _fit()(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes)[1]
    return int(memory_bytes / (fixed_bytes + k * input_bytes + math.ceil(layers / k) * layer_bytes)), k


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
            {"generator": self.sampler.generator.set_state, "torch": torch.set_rng_state,
             "numpy": np.random.set_state, "python": random.setstate}[name](value)  # fmt: skip


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


SEGMENT = "the longest segment sets the peak"

MUTANTS = {
    "05.1": nb05_files.MUTANTS,
    "05.2": {
        "torch's own": (
            lambda block, x: checkpoint(block, x, use_reentrant=False),
            "torch.utils.checkpoint did it",
        ),
        "the graph is kept": (_recompute(keep_graph=True), "and your Function holds its graph"),
        "x only": (_recompute(parameters=False, give_parameters=None), "apply() is given x alone"),
        "random state not set": (_recompute(random_state=False), "another mask in the second run"),
        "random state left there": (_recompute(restore=False), "draws again what it drew after forward"),
        "without enable_grad": (_recompute(enable=False), "the second run recorded nothing"),
        "backward() and return": (_recompute(add="return"), "too large: it is added more than once"),
        "without grad_output": (_recompute(grad_output=False), "cosine"),
    },
    "05.3": {
        "square root, rounded": (_sqrt(round), "you take the square root of layers: that is best only"),
        "bytes, rounded": (_ratio(round), "that is where the curve without ceil() is lowest"),
        "floor for ceil": (_fit(lambda k, n, a, i: k * i + n // k * a), SEGMENT),
        "the last of several": (_fit(choose=_last), "you take the largest"),
        "all activations and inputs": (_judged(lambda k, n, a, i: n * a + k * i), "one segment at a time"),
        "one layer again": (_judged(lambda k, n, a, i: k * i + a), "not one layer"),
        "fixed in each row": (_once_per_row, "fixed_bytes once per row"),
        "negative": (_fit(lowest=-math.inf), "a negative number of rows"),
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
