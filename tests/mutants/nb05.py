"""Typical mistakes in notebook 05: {exercise: {mistake: (function or class, words that its feedback must hold)}}."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import math
import os
import random
import re
from pathlib import Path

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05.exercise_trainer import Trainer

# -- 05.1


class Files:
    """Right, in parts that the mistakes below exchange."""

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep

    def save(self, step, state):
        unfinished = self.unfinished()
        try:
            self.write(unfinished, self.packed(step, state))
            os.replace(unfinished, self.folder / self.name(step))
            self.sync_folder()
        finally:
            unfinished.unlink(missing_ok=True)
        self.delete_old()

    def load(self):
        paths = self.newest_first()
        for path in paths:
            if (data := self.checked(path.read_bytes())) is not None:
                return self.unpacked(data)
        if paths:
            raise RuntimeError("all damaged")
        return None

    def unfinished(self):
        return self.folder / "unfinished"

    def name(self, step):
        return f"step-{step}.pt"

    def packed(self, step, state):
        torch.save({"step": step, "state": state}, buffer := io.BytesIO())
        return self.checksum(buffer.getvalue()) + buffer.getvalue()

    def checksum(self, data):
        return hashlib.sha256(data).digest()

    def checked(self, data):
        return data[32:] if self.checksum(data[32:]) == data[:32] else None

    def unpacked(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=True)
        return saved["step"], saved["state"]

    def write(self, path, data):
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync_folder(self):
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def delete_old(self):
        for old in self.newest_first()[self.keep :]:
            old.unlink()

    def newest_first(self):
        found = [(re.fullmatch(r"step-(\d+)\.pt", p.name), p) for p in self.folder.iterdir()]
        return [p for m, p in sorted(((m, p) for m, p in found if m), key=lambda f: -int(f[0][1]))]


class AsInTheArticle(Files):
    def save(self, step, state):
        torch.save({"step": step, "state": state}, self.folder / self.name(step))
        self.delete_old()

    def load(self):
        paths = self.newest_first()
        return self.unpacked(paths[0].read_bytes()) if paths else None


class NeverSynced(Files):
    def write(self, path, data):
        path.write_bytes(data)


class FolderNotSynced(Files):
    def sync_folder(self):
        pass


class OldOnesFirst(Files):
    def save(self, step, state):
        for old in self.newest_first()[self.keep - 1 :]:
            old.unlink()
        super().save(step, state)


class NoChecksum(Files):
    def load(self):
        paths = self.newest_first()
        for path in paths:
            with contextlib.suppress(Exception):
                return self.unpacked(path.read_bytes()[32:])
        if paths:
            raise RuntimeError("all damaged")
        return None


class AllDamagedIsNone(Files):
    def load(self):
        with contextlib.suppress(RuntimeError):
            return super().load()


class RunsCode(Files):
    def unpacked(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=False)
        return saved["step"], saved["state"]


class Swallows(Files):
    def save(self, step, state):
        try:
            super().save(step, state)
        except OSError as error:
            print(f"warning: could not save: {error}")


# -- 05.2


def _recompute(*, keep_graph=False, random_state=True, restore=True, enable=True, x_only=False, grad_output=True,
               backward_adds=False):  # fmt: skip
    """The right function, except for what a keyword says."""

    def checkpointed(block, x):
        weights = [] if x_only else list(block.parameters())

        class Recomputed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, *_):
                ctx.save_for_backward(x)
                ctx.state = torch.get_rng_state()
                if not keep_graph:
                    return block(x)
                with torch.enable_grad():
                    ctx.x = x.detach().requires_grad_()
                    ctx.output = block(ctx.x)
                return ctx.output.detach()

            @staticmethod
            def backward(ctx, g):
                if keep_graph:
                    return torch.autograd.grad(ctx.output, [ctx.x, *weights], g)
                x, before = ctx.saved_tensors[0].detach().requires_grad_(), torch.get_rng_state()
                if random_state:
                    torch.set_rng_state(ctx.state)
                with torch.set_grad_enabled(enable):
                    output = block(x)
                if restore:
                    torch.set_rng_state(before)
                g = g if grad_output else torch.ones_like(g)
                if backward_adds:
                    output.backward(g)
                    return (x.grad, *[p.grad for p in weights])
                return torch.autograd.grad(output, [x, *weights], g)

        return Recomputed.apply(x, *weights)

    return checkpointed


# -- 05.3


def _fit(row=lambda k, n, a, i: k * i + math.ceil(n / k) * a, *, segments=None, lowest=0, choose=min, judged=None):
    """The right function, except for what a keyword says. `judged`: the bytes of a row that only the rows are from."""

    def largest_batch(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
        k = choose(range(1, layers + 1), key=lambda k: row(k, layers, layer_bytes, input_bytes))
        k = segments(layers, layer_bytes, input_bytes) if segments else k
        bytes_of_a_row = (judged or row)(k, layers, layer_bytes, input_bytes)
        return max(lowest, math.floor((memory_bytes - fixed_bytes) / bytes_of_a_row)), k

    return largest_batch


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
    "05.1": {
        "as in the article": (AsInTheArticle, "straight onto its final name, and it is never synced"),
        "never synced": (NeverSynced, "nothing has made sure that its bytes are on the disk"),
        "folder not synced": (FolderNotSynced, "the folder is never synced"),
        "old ones deleted first": (OldOnesFirst, "step-9.pt is deleted before the new checkpoint has its name"),
        "no checksum": (NoChecksum, "keep a checksum"),
        "None if all are damaged": (AllDamagedIsNone, "as if there had never been one"),
        "weights_only=False": (RunsCode, "and torch.load in load() ran it"),
        "a full disk is no error": (Swallows, "returns as if all were well"),
    },
    "05.2": {
        "torch's own": (
            lambda block, x: checkpoint(block, x, use_reentrant=False),
            "torch.utils.checkpoint did it",
        ),
        "the graph is kept": (_recompute(keep_graph=True), "and your Function holds its graph"),
        "x only": (_recompute(x_only=True), "apply() is given x alone"),
        "random state not set": (_recompute(random_state=False), "another mask in the second run"),
        "random state left there": (_recompute(restore=False), "draws again what it drew after forward"),
        "without enable_grad": (_recompute(enable=False), "the second run recorded nothing"),
        "backward() and return": (_recompute(backward_adds=True), "too large: it is added more than once"),
        "without grad_output": (_recompute(grad_output=False), "cosine"),
    },
    "05.3": {
        "square root, rounded": (
            _fit(segments=lambda n, a, i: round(math.sqrt(n))),
            "you take the square root of layers: that is best only",
        ),
        "bytes, rounded": (
            _fit(segments=lambda n, a, i: min(n, round(math.sqrt(n * a / i)))),
            "that is where the curve without ceil() is lowest",
        ),
        "floor for ceil": (_fit(lambda k, n, a, i: k * i + n // k * a), SEGMENT),
        "the last of several": (_fit(choose=_last), "you take the largest"),
        "all activations and inputs": (_fit(judged=lambda k, n, a, i: n * a + k * i), "one segment at a time"),
        "one layer again": (_fit(judged=lambda k, n, a, i: k * i + a), "not one layer"),
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
