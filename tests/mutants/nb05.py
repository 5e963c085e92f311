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


def _no_grad(block, x):
    with torch.no_grad():
        return block(x)


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


class ArticleCopied(Article):
    def state_dict(self):
        return copy.deepcopy(super().state_dict())


class LiveOptimizer(Complete):
    def state_dict(self):
        return super().state_dict() | {"optimizer": self.optimizer.state_dict()}


class ParametersOnly(Complete):
    def parts(self):
        return super().parts() | {"model": {k: p.detach() for k, p in self.model.named_parameters()}}

    def load(self, name, value):
        if name == "model":
            self.model.load_state_dict(value, strict=False)
        else:
            super().load(name, value)


class NumpyAsItIs(Complete):
    def parts(self):
        return super().parts() | {"numpy": np.random.get_state()}


class GeneratorItself(Complete):
    def state_dict(self):
        return super().state_dict() | {"generator": self.sampler.generator}


class AllOfIt(Complete):
    def state_dict(self):
        return {"trainer": self}


class ModelItself(Complete):
    def state_dict(self):
        return super().state_dict() | {"model": copy.deepcopy(self.model)}


class RandomStatesFirst(Complete):
    """The generator first, then an epoch is begun, which draws from it."""

    loads = ("generator", "torch", "numpy", "python", "model", "optimizer", "scheduler", "scaler", "sampler")

    def load(self, name, value):
        if name == "sampler":
            self.sampler.set_epoch(value["epoch"])
        super().load(name, value)


class BuiltAgain(Complete):
    """A new model is built after torch's random state is back, which draws its weights."""

    loads = ("torch", "model", "optimizer", "scheduler", "scaler", "sampler", "generator", "numpy", "python")

    def load(self, name, value):
        if name == "model":
            for layer in self.model:
                if hasattr(layer, "reset_parameters"):
                    layer.reset_parameters()
        super().load(name, value)


class NotSet(Complete):
    loads = tuple(name for name in Complete.loads if name != "python")


class MomentsNotSet(Complete):
    loads = tuple(name for name in Complete.loads if name != "optimizer")


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


class Seeds(Complete):
    """Seeds in place of states."""

    def parts(self):
        torch.manual_seed(7)
        return super().parts()


class NoReturn(Complete):
    def state_dict(self):
        self.state = super().state_dict()


class NoMethod(Trainer):
    def state_dict(self):
        return {}


class NoTrainer:
    def __init__(self, seed=0):
        pass


SEGMENT = "the longest segment sets the peak"

MUTANTS = {
    "05.1": nb05_files.MUTANTS,
    "05.2": {
        "the block itself": (lambda block, x: block(x), "nothing is computed again"),
        "torch's own": (
            lambda block, x: checkpoint(block, x, use_reentrant=False),
            "torch.utils.checkpoint did it",
        ),
        "no_grad": (_no_grad, "the output does not require grad: what runs under no_grad"),
        "the graph is kept": (_recompute(keep_graph=True), "and your Function holds its graph"),
        "copies are kept": (_recompute(copies=True), "between forward and backward you keep"),
        "x only": (_recompute(parameters=False, give_parameters=None), "apply() is given x alone"),
        "x only, and backward() for the rest": (
            _recompute(parameters=False, add=True),
            "whose input needs no gradient: the block's parameters get no gradient then",
        ),
        "parameters get none": (_recompute(give_parameters=False), "the block's parameters get no gradient"),
        "x gets none": (_recompute(back=False), "x gets no gradient"),
        "one gradient for many": (
            _recompute(give_parameters=None),
            "the number of gradients that backward returns is 1",
        ),
        "random state not set": (_recompute(random_state=False), "another mask in the second run"),
        "random state left there": (_recompute(restore=False), "draws again what it drew after forward"),
        "draws in forward": (_recompute(draw=True), "something drew random numbers before"),
        "without enable_grad": (_recompute(enable=False), "the second run recorded nothing"),
        "x without requires_grad": (_recompute(requires=False), "x was detached, and nobody asks"),
        "backward() and return": (_recompute(add="return"), "too large: it is added more than once"),
        "backward() into the blocks before": (
            _recompute(add=True, detach=False, requires=False),
            "the gradient of x is 2 times too large",
        ),
        ".grad is replaced": (_recompute(own_add="set"), "what was in .grad is lost"),
        "without grad_output": (_recompute(grad_output=False), "cosine"),
        "grad_output twice": (_recompute(scale=0.5), "0.5 times what it should be"),
        "computed twice again": (_recompute(twice=1), "in backward the block ran 2 times, not 1"),
        "another shape": (lambda block, x: block(x)[0], "not a tensor as block(x) does"),
    },
    "05.3": {
        "square root of layers": (_sqrt(lambda q: q), "no whole number"),
        "square root, rounded": (_sqrt(round), "you take the square root of layers: that is best only"),
        "square root, rounded up": (_sqrt(math.ceil), "square root of layers, rounded up"),
        "square root, rounded down": (_sqrt(math.floor), "square root of layers, rounded down"),
        "bytes, rounded": (_ratio(round), "that is where the curve without ceil() is lowest"),
        "bytes, rounded up": (_ratio(math.ceil), "layer_bytes / input_bytes) up"),
        "bytes, rounded down": (_ratio(math.floor), "layer_bytes / input_bytes) down"),
        "bytes, not rounded": (_ratio(lambda q: q), "segments are whole"),
        "upside down": (_fit(segments=lambda n, a, i, k: math.sqrt(n * i / a)), "upside down"),
        "every layer": (_fit(segments=lambda n, a, i, k: n), "a segment of its own"),
        "one segment": (_fit(segments=lambda n, a, i, k: 1), "no byte is saved"),
        "two segments": (_fit(segments=lambda n, a, i, k: 2), "two segments save next to half"),
        "floor for ceil": (_fit(lambda k, n, a, i: k * i + n // k * a), SEGMENT),
        "the last of several": (_fit(choose=_last), "you take the largest"),
        "one too few": (_fit(segments=lambda n, a, i, k: k - 1 or 1e-9, judged=lambda *_: 1), "one too few"),
        "layers of a segment": (_fit(segments=lambda n, a, i, k: math.ceil(n / k)), "layers in a segment"),
        "no segments for the rows": (_judged(lambda k, n, a, i: n * a), "without any segments"),
        "all activations and inputs": (_judged(lambda k, n, a, i: n * a + k * i), "one segment at a time"),
        "inputs forgotten": (_judged(lambda k, n, a, i: math.ceil(n / k) * a), "you forget the inputs"),
        "segment forgotten": (_judged(lambda k, n, a, i: k * i), "you forget the segment that"),
        "one layer again": (_judged(lambda k, n, a, i: k * i + a), "not one layer"),
        "one input": (_judged(lambda k, n, a, i: i + math.ceil(n / k) * a), "you keep one input"),
        "one input too few": (_judged(lambda k, n, a, i: (k - 1) * i + math.ceil(n / k) * a), "one input too few"),
        "all inputs": (_judged(lambda k, n, a, i: n * i + math.ceil(n / k) * a), "the inputs of all layers"),
        "floor for the rows": (_judged(lambda k, n, a, i: k * i + n // k * a), "segments rounded down"),
        "fractions for the rows": (_judged(lambda k, n, a, i: k * i + n / k * a), "fractions of a layer"),
        "fixed forgotten": (_fit(fixed=False), "you forget fixed_bytes"),
        "fixed in each row": (_once_per_row, "fixed_bytes once per row"),
        "rounded up": (_fit(rows=math.ceil), "you round up"),
        "rounded": (_fit(rows=round), "you round to the nearest"),
        "not rounded": (_fit(rows=lambda q: q), "rows are whole"),
        "negative": (_fit(lowest=-math.inf), "a negative number of rows"),
        "at least one": (_fit(lowest=1), "you never go below one row"),
        "the other way round": (_fit(answer=lambda rows, k: (k, rows)), "the rows come first"),
        "rows only": (_fit(answer=lambda rows, k: rows), "not two numbers"),
        "a constant": (lambda *_: (64, 8), "layers that keep"),
    },
    "05.4": {
        "as in the article": (Article, "it is the live object"),
        "as in the article, copied": (ArticleCopied, "the scheduler"),
        "live moments": (LiveOptimizer, "gives state['optimizer']['state'][0]"),
        "parameters only": (ParametersOnly, "BatchNorm's buffers are not what they were"),
        "no model": (_without("model"), "the parameters are not what they were"),
        "no optimizer": (_without("optimizer"), "the optimizer's moments are not"),
        "no scheduler": (_without("scheduler"), "the scheduler is not"),
        "no scaler": (_without("scaler"), "the loss scale is not"),
        "no sampler": (_without("sampler"), "the number of the epoch is not"),
        "no position": (_without_key("sampler", "position"), "the position in the epoch is not"),
        "no order": (_without_key("sampler", "order"), "the order of this epoch's rows is not"),
        "a new order": (NewOrder, "the order of this epoch's rows is saved, but"),
        "no epoch": (_without_key("sampler", "epoch"), "the number of the epoch is not"),
        "no generator": (_without("generator"), "the sampler's generator is not"),
        "no torch": (_without("torch"), "torch's random state is not"),
        "no numpy": (_without("numpy"), "NumPy's random state is not"),
        "no python": (_without("python"), "Python's random state is not"),
        "numpy as it is": (NumpyAsItIs, "is of type numpy.ndarray: torch.load(file, weights_only=True) refuses"),
        "the generator itself": (GeneratorItself, "state['generator'] is of type torch"),
        "the trainer itself": (AllOfIt, "state['trainer'] is of type"),
        "the model itself": (ModelItself, "state['model'] is of type torch.Sequential"),
        "random states first": (RandomStatesFirst, "the sampler's generator is saved, but"),
        "built after the random state": (BuiltAgain, "torch's random state is saved, but"),
        "saved, not set": (NotSet, "Python's random state is saved, but"),
        "moments saved, not set": (MomentsNotSet, "the optimizer's moments are saved, but"),
        "the optimizer's old parameters": (OldParameters, "all is back as it was, and yet"),
        "state_dict draws": (Draws, "state_dict() itself changes Python's random state"),
        "state_dict seeds": (Seeds, "state_dict() itself changes torch's random state"),
        "no return": (NoReturn, "state_dict() returns None"),
        "no load_state_dict": (NoMethod, "no method load_state_dict"),
        "no Trainer": (NoTrainer, "not a Trainer"),
    },
}
