"""Detect losses that broadcast, micro-batches averaged regardless of their sizes, and PyTorch's serious warnings.

The first two read the graph that backward() is about to walk. It holds the shapes, the divisors and the ignored
targets, whichever library or compiler called the model.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.scene import Scene, leaves, looks_at, operands
from labs.kit import _compat

DEEPEST, MOST_NODES = 24, 120
THROUGH = frozenset(
    "ViewBackward0 UnsafeViewBackward0 ReshapeAliasBackward0 SqueezeBackward0 SqueezeBackward1 ToCopyBackward0 "
    "CloneBackward0 AliasBackward0 NegBackward0 UnsqueezeBackward0".split()
)
JOINS = frozenset("AddBackward0 SubBackward0".split())
ELEMENTWISE = THROUGH - {"UnsqueezeBackward0"} | frozenset(
    "AddBackward0 SubBackward0 MulBackward0 DivBackward0 PowBackward0 AbsBackward0 SquareBackward0 SqrtBackward0 "
    "ExpBackward0 LogBackward0 Log1PBackward0 ClampBackward0 ClampBackward1 ClampMinBackward0 WhereBackward0 "
    "ReluBackward0 MeanBackward0 SumBackward0 ExpandBackward0 MseLossBackward0 SmoothL1LossBackward0 "
    "HuberLossBackward0 SoftplusBackward0 LogSigmoidBackward0 CoshBackward0 SoftMarginLossBackward0 KlDivBackward0 "
    "BinaryCrossEntropyBackward0 BinaryCrossEntropyWithLogitsBackward0 XlogyBackward0 SumBackward1 MeanBackward1 "
    "MinimumBackward0 MaximumBackward0 TanhBackward0 SigmoidBackward0".split()
)
REDUCING = frozenset(
    "NllLossBackward0 NllLoss2DBackward0 MseLossBackward0 SmoothL1LossBackward0 HuberLossBackward0 KlDivBackward0 "
    "BinaryCrossEntropyBackward0 BinaryCrossEntropyWithLogitsBackward0 SoftMarginLossBackward0".split()
)
OPERATORS = "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ sub add mul div".split()
LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss soft_margin_loss "
    "hinge_embedding_loss margin_ranking_loss binary_cross_entropy binary_cross_entropy_with_logits"
).split()
TWICE = {
    "binary_cross_entropy_with_logits": ("BinaryCrossEntropyWithLogitsBackward0", "SigmoidBackward0", "A sigmoid"),
    "cross_entropy": ("LogSoftmaxBackward0", "SoftmaxBackward0", "A softmax"),
}
"""Losses that include an activation: {function: (graph node of the loss, that of the activation, its name)}."""
DOUBLED = {(loss, activation) for loss, activation, _ in TWICE.values()}
UNEQUAL, FEWEST = 1.25, 3  # Ratio of a step's largest to smallest weight per term; steps that must show it
EPISODES = re.compile(r"\b(episodes?|rewards?|rollouts?|advantages?)\b", re.I)
"""Words of reinforcement learning, where each episode's mean counts the same on purpose."""
SIZES = re.compile(r"target size \(torch.Size\(\[([\d, ]*)\]\)\).*input size \(torch.Size\(\[([\d, ]*)\]\)\)")
SERIOUS = {
    "an autograd kernel was not registered": "No gradient flows back through this collective: use "
    "torch.distributed.nn.functional, or keep collectives out of the loss",
    "None of the inputs have requires_grad=True": "This checkpointed part gets no gradient: use_reentrant=False",
    "that is not a leaf Tensor is being accessed": "Its .grad is always None: call retain_grad(), or read a leaf",
}
"""Texts in warnings that mean training is wrong, and the fix."""


def pairs(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether shapes with equally many elements broadcast to more, so that each element meets several."""
    longest = max(len(a), len(b))
    wide = [max(x, y) for x, y in zip((1,) * (longest - len(a)) + a, (1,) * (longest - len(b)) + b, strict=True)]
    return math.prod(a) == math.prod(b) > 1 and math.prod(wide) > math.prod(a)


class Losses:
    """Read the autograd graphs of some steps."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.suspects = 0
        self.undo: ExitStack | None = None
        self.shapes: list[Match] = []
        self.squares: dict[tuple[int, ...], tuple[Any, Any, tuple[str, int]]] = {}
        """By shape: the two shapes that arithmetic broadcast to it in the watched step, and where."""
        self.window: list[tuple[tuple, dict[tuple, tuple[float, float]]]] = []
        """This step's backward passes: line and id of the nearest parameter; (weight, terms) by path in the graph."""
        self.ratios: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
        """By line of backward(): the ratio of weights, the fewest and the most terms of each step."""

    def before_backward(self, losses: list[Any]) -> None:
        """Read the graphs of these losses."""
        if not looks_at(self.scene.step + 1):
            return
        for loss in losses:
            node = getattr(loss, "grad_fn", None)
            if node is None:
                continue
            if not self.shapes and self.undo is None:
                arithmetic = operands(node, MOST_NODES, ELEMENTWISE)
                self.suspects += any(self._squared(child, of) for of, child in arithmetic)
                self.suspects += any((of.name(), _below(child)) in DOUBLED for of, child in operands(node, DEEPEST))
            with torch.no_grad():
                weights = dict(self._weights(node, 1.0, (), DEEPEST))
            if weights and len(self.window) < 256:
                nearest = id(next(leaves(node, MOST_NODES), None))  # another head is another task
                self.window.append(((*self.scene.line(), nearest), weights))

    def before_step(self, optimizer: Any, step: int) -> None:
        """Compare the micro-batches of this step."""
        by_line: dict[tuple, list[dict[tuple, tuple[float, float]]]] = {}
        for key, weights in self.window:
            by_line.setdefault(key, []).append(weights)
        self.window = []
        for (file, number, _), of in by_line.items():
            for path in of[0]:
                seen = [w[path] for w in of if path in w]
                if len(seen) > 1:
                    each, terms = zip(*seen, strict=True)
                    ratio = max(each) / min(each)
                    self.ratios.setdefault((file, number), []).append((ratio, min(terms), max(terms)))

    def after_step(self, optimizer: Any, number: int) -> None:
        """Watch the next step's arithmetic if this one's graph is suspicious, to find the line."""
        if self.undo is not None:
            self.undo.close()
            self.undo, self.squares = None, {}
        elif self.suspects and not self.shapes and looks_at(self.scene.step + 1) and not _compat.compiled_graphs():
            self._watch()
        self.suspects = 0

    def resumed(self) -> None:
        """Forget the step that a counterfactual interrupted."""
        self.window = []

    # Shapes

    def _squared(self, child: Any, of: Any) -> bool:
        """Return whether an operation turns n of the model's values into n x n, or pairs each row with every row."""
        inner, outer = _shape(child), _shape(of)
        if inner is None or outer is None or child.name() in ("UnsqueezeBackward0", "torch::autograd::AccumulateGrad"):
            return False
        few, many = math.prod(inner), math.prod(outer)
        rows = len(inner) > 1 and inner[0] > 1 and outer == (inner[0], *inner)
        return few > 1 and (rows or many == few**2 or many**2 == few**3)

    def _watch(self) -> None:
        self.undo = ExitStack()
        owners = [(torch.Tensor, name) for name in OPERATORS]
        owners += [(torch.nn.functional, name) for name in (*LOSSES, "cross_entropy")]
        for owner, name in [*owners, (torch, "broadcast_tensors"), (torch, "sub"), (torch, "mul")]:
            self.scene.replace(owner, name, self._checked, self.undo)

    def _checked(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        if not self.scene.away():
            place = self.scene.line()
            if name in TWICE and _below(getattr(args[0] if args else None, "grad_fn", None)) == TWICE[name][1]:
                self.shapes.append(matched("activated-twice", place, activation=TWICE[name][2], loss=name))
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            self._check(tensors, name, kwargs.get("reduction"), place)
        return original(*args, **kwargs)

    def _check(self, tensors: list[Any], name: str, reduction: str | None, place: tuple[str, int]) -> None:
        loss = name in LOSSES or name == "broadcast_tensors"
        for other in tensors[1:]:
            a, b = (tuple(t.shape) for t in (tensors[0], other))
            one = tensors[0].requires_grad != other.requires_grad
            with_grad, without = (a, b) if tensors[0].requires_grad else (b, a)
            if (one or loss) and without in self.squares and math.prod(with_grad) ** 2 == math.prod(without):
                first, second, made_at = self.squares[without]
                self._note(first, second, "this line", made_at)
            if not pairs(a, b):
                continue
            if len(a) != len(b) and not (one or loss):
                self.squares.setdefault(tuple(torch.broadcast_shapes(a, b)), (a, b, place))
            elif (one or loss) and (len(a) != len(b) or (loss and reduction == "none")):
                self._note(a, b, name if loss and name != "broadcast_tensors" else "this line", place)

    def _note(self, a: tuple[int, ...], b: tuple[int, ...], called: str, place: tuple[str, int]) -> None:
        others = f"{math.prod(b)} pairs" if len(a) < 3 and len(b) < 3 else "several targets"
        match = matched("broadcast", place, called=called, first=a, second=b, values=math.prod(a), others=others)
        meant = re.search(r"unsqueeze|\bNone\b", match.code)  # pairs on purpose
        if not meant and match.file and all((match.file, match.line) != (m.file, m.line) for m in self.shapes):
            self.shapes.append(match)

    def warned(self, message: str, place: tuple[str, int]) -> bool:
        """Note the shapes in PyTorch's warning about a loss. Return whether it is one and any broadcast is noted."""
        if (sizes := SIZES.search(message)) is None:
            return False
        target, given = (tuple(int(n) for n in part.split(",") if n.strip()) for part in sizes.groups())
        if pairs(given, target):
            self._note(given, target, "The loss", place)
        return bool(self.shapes)

    # Accumulation

    def _weights(self, node: Any, factor: float, path: tuple, deep: int) -> Iterator[tuple[tuple, tuple[float, float]]]:
        """Yield (path, (weight of each term, number of terms)) of the losses below a node."""
        if node is None or not deep:
            return
        name, nexts = node.name(), [child for child, _ in node.next_functions]
        path = (*path, name)
        if name in THROUGH:
            yield from self._weights(nexts[0], factor, path, deep - 1)
        elif name in JOINS:
            for i, child in enumerate(nexts):
                yield from self._weights(child, factor, (*path, i), deep - 1)
        elif name in ("MulBackward0", "DivBackward0"):
            first = nexts[0] is not None
            if len([n for n in nexts if n is not None]) != 1:
                return
            other = node._saved_other if first or name == "DivBackward0" else node._saved_self
            if other is not None and other.numel() == 1 and not (name == "DivBackward0" and not first):
                by = float(other)
                if by and math.isfinite(by):
                    factor = abs(factor * by if name == "MulBackward0" else factor / by)
                    yield from self._weights(nexts[0] if first else nexts[1], factor, path, deep - 1)
        elif name == "SumBackward0":
            yield path, (factor, float(math.prod(node._saved_self_sym_sizes)))
        elif name == "MeanBackward0":
            terms = _terms(tuple(node._saved_self_sym_sizes))
            if terms:
                yield path, (factor / terms, terms)
        elif name in REDUCING and getattr(node, "_saved_reduction", 0):
            terms = self._terms_of(node, name)
            if terms:
                yield path, (factor / terms if node._saved_reduction == 1 else factor, terms)

    def _terms_of(self, node: Any, name: str) -> float:
        if not name.startswith("NllLoss"):
            return _terms(tuple(node._saved_self.shape))
        ignored, target = node._saved_ignore_index, node._saved_target
        terms = float((target != (ignored - 2**64 if ignored >= 2**63 else ignored)).sum())
        return terms / math.prod(target.shape[1:]) if target.dim() > 1 else terms  # count images, not pixels

    # Findings

    def findings(self) -> list[Match]:
        """Return findings about shapes and about micro-batches."""
        out = list(self.shapes)
        for place, steps in self.ratios.items() if not EPISODES.search(self.scene.text()) else ():
            unequal = [(low, high) for ratio, low, high in steps if ratio >= UNEQUAL]
            if len(unequal) >= FEWEST and 2 * len(unequal) >= len(steps):
                low, high = min(n for n, _ in unequal), max(n for _, n in unequal)
                which = f"with {low:.0f} to {high:.0f} trained terms" if low < high else "that are masked differently"
                ratio = statistics.median(r for r, _, _ in steps)
                out.append(matched("unequal-means", place, which=which, ratio=ratio, steps=len(steps)))
        return out


def _below(node: Any) -> str:
    """Return the name of the operation below a node's views and copies; "" if there is none."""
    for _ in range(DEEPEST):
        if node is None or node.name() not in THROUGH:
            break
        node = node.next_functions[0][0]
    return node.name() if node is not None else ""


def _terms(shape: tuple[int, ...]) -> float:
    """Return how many samples or tokens a mean covers; of images only their number, as their sizes may differ."""
    return float(math.prod(shape) if len(shape) < 3 else shape[0])


def _shape(node: Any) -> tuple[int, ...] | None:
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[0].shape) if metadata and len(metadata) == 1 and metadata[0] is not None else None


class Warnings:
    """Keep PyTorch's serious warnings, with the script's line. Python still shows them."""

    def __init__(self, scene: Scene, losses: Losses) -> None:
        self.scene, self.losses = scene, losses
        self.seen: dict[tuple[str, int], Match] = {}

    def install(self) -> None:
        """Observe warnings.showwarning."""
        self.scene.listen(warnings, "showwarning", self._showing)

    def _showing(self, warning: Any, category: Any, filename: str, *args: Any, **kwargs: Any) -> None:
        text = " ".join(str(warning).partition("(Triggered internally")[0].split())
        place = self.scene.line(sys._getframe(4))  # skips `guarded`, `listen` and `replacement`
        fix = next((fix for part, fix in SERIOUS.items() if part in text), "")
        if not self.losses.warned(text, place) and fix:
            self.seen[place] = matched("torch-warned", place, text=text[:300].rstrip("."), fix=fix)

    def findings(self) -> list[Match]:
        """Return the serious warnings so far."""
        return list(self.seen.values())
