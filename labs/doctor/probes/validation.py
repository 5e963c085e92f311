"""Detect validation in train mode, with gradients or with padded samples, and training that stays in eval mode."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.data import Data
from labs.doctor.probes.scene import Scene, around, function_text
from labs.kit import _compat

SAYS_SO = re.compile(r"(?<![a-z])(val|valid|validate|validation|eval|evaluate|evaluation|x_test|test_x)(?![a-z])", re.I)
ON_PURPOSE = re.compile(r"mc_?drop|monte|uncertain|dropout|update_bn|recalibrat", re.I)
DROPOUTS = dict.fromkeys("dropout dropout1d dropout2d dropout3d alpha_dropout".split(), "input p training inplace") | {
    "scaled_dot_product_attention": "query key value attn_mask dropout_p"
}
"""Functions that drop values regardless of the model's mode, with their parameters."""
STUCK = 3  # Training steps in eval mode after an evaluation
LEAST_PADDED = 1e-3


class Validation:
    """Follow how the trained model is called."""

    def __init__(self, scene: Scene, data: Data) -> None:
        self.scene, self.data = scene, data
        self.passes: dict[int, dict[str, Any]] = {}
        """By number of a loader's iterator: calls of the trained model on its batches."""
        self.by_name: dict[tuple[str, int], int] = {}
        """By line: calls in train mode that are validation, according to the script's own names."""
        self.pending: list[tuple[int, bool]] = []
        self.was_training = self.evaluated = False
        self.stuck = 0
        self.eval_at = ("", 0)
        self.kinds: dict[int, tuple[bool, list[Any]]] = {}
        self.known = 0  # Number of optimizers when `kinds` was built
        self.padded: tuple[tuple[str, int], dict[str, Any]] | None = None
        self.watching: ExitStack | None = None  # Open while functional dropouts are watched
        self.dropping: dict[tuple[str, int], int] = {}
        """Calls of a functional dropout while a model in eval mode computed without gradients, by line."""

    def install(self) -> None:
        """Observe eval(), and what the script sums up or gathers over the ranks."""
        self.scene.listen(torch.nn.Module, "eval", self._evaluating)
        if torch.distributed.is_available():
            self.scene.listen(torch.distributed, "all_reduce", after=self._summing)
            for name in ("all_gather", "all_gather_into_tensor", "all_gather_object"):
                self.scene.listen(torch.distributed, name, after=self._gathering)

    def _evaluating(self, module: Any) -> None:
        if (place := self.scene.line())[0]:
            self.eval_at = place

    def _dropout(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        frame, names = sys._getframe(2), DROPOUTS[original.__name__].split()
        owner, place = frame.f_locals.get("self"), (frame.f_code.co_filename, frame.f_lineno)
        if self.scene.owns(place[0]) and getattr(owner, "training", True) is False and not self.scene.away():
            given = {"training": True} | dict(zip(names, args, strict=False)) | kwargs
            if given["training"] and given.get("dropout_p", given.get("p", 0.5 * ("p" in names))):
                self.dropping[place] = self.dropping.get(place, 0) + 1
                if self.dropping[place] == 1:
                    self.scene.guarded(self.scene.keep)
        return original(*args, **kwargs)

    def _of(self, module: Any) -> tuple[bool, list[Any]]:
        """Return whether an optimizer trains a module, and which of its layers depend on the mode."""
        if self.known != len(self.scene.optimizers):
            self.kinds, self.known = {}, len(self.scene.optimizers)
        if id(module) not in self.kinds:
            mine = {id(p) for p in self.scene.parameters()}
            parts = [m for m in module.modules() if _depends_on_mode(m)]
            self.kinds[id(module)] = any(id(p) in mine for p in module.parameters()), parts
        return self.kinds[id(module)]

    def forward(self, module: Any, training: bool, again: bool, *rest: Any) -> None:
        """Note a call of the trained model: with or without gradients, in which mode, on which loader's batch."""
        if again or not self.scene.step:
            return
        trained, parts = self._of(module)
        if not trained:
            return
        active = module.training and any(m.training for m in parts)
        number, place = self.data.last, self.scene.line()
        of = self.passes.setdefault(number, {"no grad": 0, "grad": 0, "active": 0, "backward": 0, "at": place})
        of["grad" if training else "no grad"] += 1
        of["active"] += active
        if training:
            if self.watching is not None:
                self.watching.close()
                self.watching = None if len(self.dropping) == 0 and self.scene.step < 1000 else self.watching
            self.pending.append((number, active or not parts))
            return
        if not module.training and self.watching is None and not _compat.compiled_graphs():
            self.watching = ExitStack()
            for name in DROPOUTS:
                self.scene.replace(torch.nn.functional, name, self._dropout, self.watching)
        self.evaluated = self.evaluated or not module.training
        if active and SAYS_SO.search(self._words(place)) and not ON_PURPOSE.search(function_text(*place)):
            self.by_name[place] = self.by_name.get(place, 0) + 1

    def _words(self, place: tuple[str, int]) -> str:
        """Return a line's text, and its function's name unless that contains "train"."""
        functions = [f.name for f in around(*place, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return " ".join([linecache.getline(*place), *(f for f in functions[:1] if "train" not in f.lower())])

    def resumed(self) -> None:
        """Forget the calls that a counterfactual interrupted."""
        self.pending = []

    def before_backward(self, losses: list[Any]) -> None:
        """Count the last call before this backward pass as training."""
        for number, active in self.pending[-1:]:
            self.passes[number]["backward"] += 1
            if self.was_training and not active and self.evaluated:
                self.stuck += 1
            elif active:
                self.was_training, self.stuck, self.evaluated = True, 0, False
        self.pending = []

    def _summing(self, work: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if work is None and self.scene.step and self.padded is None:
            self._look_at_sum(lambda: tensor.flatten().tolist() if tensor.numel() <= 16 else [])

    def _look_at_sum(self, read: Callable[[], list[float]]) -> None:
        of = self.data.loaders.get(self.data.last)
        loader = of["loader"]() if of else None
        sampler = getattr(loader, "sampler", None)
        if sampler is None or of["training"] or not hasattr(sampler, "__len__") or of["n"] < len(loader):
            return
        size, place, code = len(loader.dataset), self.scene.line(), getattr(type(sampler).__iter__, "__code__", None)
        if type(sampler).__name__ == "DistributedSampler":
            padded = sampler.total_size
        elif code is not None and self.scene.owns(code.co_filename) and len(sampler) < size:
            padded = len(sampler) * torch.distributed.get_world_size()
            place = code.co_filename, code.co_firstlineno
        else:
            return
        values = read()  # a GPU's script waits here, so only once it's certain that this is validation
        if type(sampler).__name__ != "DistributedSampler" and len(values) == 1:
            values = []
        counted = any(abs(v - padded) < 0.5 for v in values)
        mean = len(values) == 1 and not re.search(r"\[:|mask|valid_|unique", function_text(*place))
        if padded - size > LEAST_PADDED * size and (counted or mean):
            self.padded = place, {"samples": size, "counted": padded, "by": type(sampler).__name__}
            self.scene.keep()

    def _gathering(self, work: Any, to: Any, given: Any, *args: Any, **kwargs: Any) -> None:
        of = self.data.loaders.get(self.data.last)
        sampler = getattr(of["loader"]() if of else None, "sampler", None)
        if self.padded is not None or type(sampler).__name__ != "DistributedSampler" or not hasattr(given, "__len__"):
            return
        if getattr(given, "shape", True) and len(given) == sampler.num_samples:
            texts = [function_text(f.f_code.co_filename, f.f_lineno) for f in self.scene.frames()]
            if not any(re.search(r"\[:|mask|unique|set\(", text) for text in texts):
                self._look_at_sum(lambda: [sampler.total_size])

    # Findings

    def findings(self) -> list[Match]:
        """Return what is certain so far."""
        out = [m for number, of in self.passes.items() for m in self._of_loader(number, of)]
        out += [matched("validates-in-train-mode", place, calls=calls) for place, calls in self.by_name.items()]
        for place, calls in self.dropping.items():
            purpose = ON_PURPOSE.search(function_text(*place).replace("dropout", ""))
            if not purpose and not re.search(r"training\s*=\s*True", linecache.getline(*place)):
                out.append(matched("dropout-in-eval-mode", place, calls=calls))
        if self.stuck >= STUCK:
            out.append(matched("trains-in-eval-mode", self.eval_at))
        if self.padded:
            out.append(matched("padded-samples", self.padded[0], **self.padded[1]))
        return list({(m.file, m.line, m.fix): m for m in out}.values())

    def _of_loader(self, number: int, of: dict[str, Any]) -> Iterator[Match]:
        """Yield what is wrong with the calls on one loader's batches, if they are validation."""
        loader, calls = self.data.loaders.get(number), of["no grad"] + of["grad"]
        source = loader["loader"]() if loader else None
        if source is None or of["backward"] or calls < 2 or self.data.training(source):
            return
        if not any(o["training"] for o in self.data.loaders.values()) or ON_PURPOSE.search(function_text(*of["at"])):
            return
        if of["active"] == calls:
            yield matched("validates-in-train-mode", of["at"], calls=calls)
        if of["grad"] == calls and loader["n"] > calls - 1 and self.data.last != number:
            yield matched("graph-in-validation", of["at"], wrong=False, calls=calls)


def _depends_on_mode(module: Any) -> bool:
    """Return whether a layer is a dropout with p > 0, or a norm that tracks running statistics."""
    if isinstance(module, _compat.Normalisation):
        return module.track_running_stats
    return "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0
