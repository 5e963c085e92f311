"""What all probes share: when to look, which line of the script called, and what its source says."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, wraps
from typing import Any

HERE = os.path.dirname(os.path.realpath(__file__))
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(p)) + os.sep for p in ("stdlib", "purelib", "platlib")})
WARM_UP = 5
LATER = frozenset((13, 34, 55, 89, 144, 233, 377, 610, 987, 1597))
"""Steps at which the probes look: the first WARM_UP, which the doctor doesn't time, and fewer and fewer after them."""
PER_TENSOR = 512
"""Elements of a tensor that are compared; they are spread evenly over it."""


def looks_at(step: int) -> bool:
    """Return whether the probes look at an optimizer's step of this number, counted from 1."""
    return step <= WARM_UP or step in LATER


class Scene:
    """The script's process, as the probes see it."""

    def __init__(self, folder: str, scratch: str) -> None:
        """`folder` holds the script; workers may leave files in `scratch`."""
        self.folder, self.scratch = os.path.realpath(folder), scratch
        self.torch: Any = None
        self.paused = False
        self.thread = threading.get_ident()
        self.step = 0
        """Optimizer steps so far, of all optimizers."""
        self.steps_of: dict[int, int] = {}
        """The same by id of the optimizer."""
        self.optimizers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.roots: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        """Outermost modules that the script called, by id."""
        self.undo = ExitStack()
        self._own: dict[str, bool] = {}

    def away(self) -> bool:
        """Return whether nothing may be observed: in a counterfactual, another thread, a fork or a compiler's trace."""
        if self.paused or threading.get_ident() != self.thread:
            return True
        return self.torch.compiler.is_compiling()

    def forked(self) -> None:
        """Observe nothing any more: this process is a child of the script's."""
        self.thread = -1

    def replace(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        """Put `make(original)` in the place of `owner.name` until the probes are removed."""
        original = getattr(owner, name)
        inherited = name not in vars(owner)
        setattr(owner, name, wraps(original)(make(original)))
        self.undo.callback(delattr, owner, name) if inherited else self.undo.callback(setattr, owner, name, original)

    # Lines

    def owns(self, file: str) -> bool:
        """Return whether a source file is the script's or lies in its folder, and isn't installed."""
        if file not in self._own:
            path = os.path.realpath(file)
            inside = path.startswith(self.folder + os.sep) and not path.startswith(LIBRARIES)
            ours = os.path.dirname(path) in (HERE, os.path.dirname(HERE))
            self._own[file] = inside and not ours and "-packages" not in path[len(self.folder) :]
        return self._own[file]

    def frames(self, frame: types.FrameType | None = None) -> Iterator[types.FrameType]:
        """Yield the script's own frames that led here, innermost first."""
        frame = frame or sys._getframe(1)
        while frame is not None:
            if self.owns(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back

    def line(self, frame: types.FrameType | None = None) -> tuple[str, int]:
        """Return file and line of the nearest frame of the script's own; ("", 0) without one."""
        frame = frame or sys._getframe(1)
        while frame is not None:  # no generator: it is called in each step
            if self.owns(frame.f_code.co_filename):
                return frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def sources(self) -> list[str]:
        """Return the script's own source files that have been loaded."""
        modules = [m for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)]
        files = {getattr(m, "__file__", None) for m in modules} | {f for f, own in self._own.items() if own}
        return sorted(f for f in files if isinstance(f, str) and f.endswith(".py") and self.owns(f))

    def text(self) -> str:
        """Return all of the script's own source."""
        return "".join("".join(linecache.getlines(f)) for f in self.sources())

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Yield each call in the script's own source, with its file."""
        for file in self.sources():
            yield from ((file, node) for node in ast.walk(parsed(file)) if isinstance(node, ast.Call))

    # Parameters

    def parameters(self) -> list[Any]:
        """Return the parameters of all optimizers that have stepped, each once."""
        held = [p for o in list(self.optimizers.values()) for g in o.param_groups for p in g["params"]]
        return list({id(p): p for p in held}.values())

    def name_of(self, parameter: Any) -> str:
        """Return a parameter's name in the model that holds it, or its shape."""
        for root in list(self.roots.values()):
            for name, p in root.named_parameters():
                if p is parameter:
                    return name.removeprefix("module.")
        return f"a parameter of shape {tuple(parameter.shape)}"


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this rank holds, without its history."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def some(tensor: Any) -> Any:
    """Return up to PER_TENSOR elements of a dense tensor, as a view or a copy."""
    flat = local(tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // PER_TENSOR)][:PER_TENSOR]


def tensors_in(tree: Any, torch: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth and isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value, torch, depth - 1)


@lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module:
    """Return a source file's tree; an empty one if Python can't read it."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def around(file: str, line: int, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the statements of these kinds that hold a line, innermost first."""
    holding = [n for n in ast.walk(parsed(file)) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return sorted(holding, key=lambda n: (n.end_lineno or 0) - n.lineno)


def function_text(file: str, line: int) -> str:
    """Return the source of the innermost function that holds a line; the line itself at a module's level."""
    found = around(file, line, (ast.FunctionDef, ast.AsyncFunctionDef))
    lines = linecache.getlines(file)
    return "".join(lines[found[0].lineno - 1 : found[0].end_lineno] if found else lines[line - 1 : line])


def name_in(node: ast.AST) -> str:
    """Return the last part of a name, an attribute or a constant item."""
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return str(getattr(node, "attr", getattr(node, "id", "")))


def assignments(file: str, name: str) -> Iterator[tuple[ast.Assign, ast.expr]]:
    """Yield the assignments to a name, an attribute or an item of that name, with the value that it gets."""
    last = name.rpartition(".")[2]
    for node in ast.walk(parsed(file)):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    if name_in(one) == last:
                        yield node, value
            elif name_in(target) == last:
                yield node, node.value


def planned(frames: list[types.FrameType]) -> float | None:
    """Return how many times the innermost frame's line runs by the loops around it; None if they don't say."""
    total = 1.0
    for frame in frames:
        for loop in around(frame.f_code.co_filename, frame.f_lineno, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            if isinstance(loop, ast.FunctionDef | ast.Lambda):
                break
            if loop.lineno == frame.f_lineno and not isinstance(loop, ast.While):
                continue  # the frame stands in the loop's head
            rounds = _while(loop.test, frame) if isinstance(loop, ast.While) else _rounds(loop.iter, frame)
            if rounds is None:
                return None
            if isinstance(loop, ast.While):  # `while step < STEPS` around loops over batches: they leave it
                return rounds
            total *= rounds
    return total


def _while(test: ast.expr, frame: types.FrameType) -> float | None:
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Lt | ast.LtE):
        return _value(test.comparators[0], frame)
    return None


def _rounds(over: ast.expr, frame: types.FrameType) -> float | None:
    """Return how many items a loop takes from an expression."""
    if not isinstance(over, ast.Call):
        return _length(over, frame)
    name = over.func.id if isinstance(over.func, ast.Name) else getattr(over.func, "attr", "")
    if name in ("range", "trange") and over.args:
        ends = [_value(a, frame) for a in over.args[:3]]
        if None in ends:
            return None
        ends = [int(e) for e in ends]
        return float(len(range(*ends))) if len(ends) < 3 or ends[2] else None
    if name in ("enumerate", "tqdm", "list", "reversed") and over.args:
        return _rounds(over.args[0], frame)
    if name == "islice" and len(over.args) == 2:
        return _value(over.args[1], frame)
    if name == "zip":
        known = [r for a in over.args if (r := _rounds(a, frame)) is not None]
        return min(known, default=None)
    return None


def _length(node: ast.expr, frame: types.FrameType) -> float | None:
    try:
        return float(len(_object(node, frame)))
    except (TypeError, LookupError, AttributeError, NotImplementedError):
        return None


def _value(node: ast.expr, frame: types.FrameType) -> float | None:
    """Return the number that constants, names, attributes, len() and arithmetic give; None for anything else."""
    try:
        if isinstance(node, ast.BinOp):
            left, right = _value(node.left, frame), _value(node.right, frame)
            signs = {ast.Add: "__add__", ast.Sub: "__sub__", ast.Mult: "__mul__", ast.FloorDiv: "__floordiv__"}
            sign = signs.get(type(node.op))
            return None if None in (left, right) or sign is None else getattr(left, sign)(right)
        if isinstance(node, ast.Call):
            is_len = isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1
            return _length(node.args[0], frame) if is_len else None
        found = node.value if isinstance(node, ast.Constant) else _object(node, frame)
        return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None
    except (LookupError, AttributeError, ZeroDivisionError):
        return None


def _object(node: ast.expr, frame: types.FrameType) -> Any:
    """Return what a name or a plain attribute means in a frame. LookupError or AttributeError if nothing."""
    if isinstance(node, ast.Name):
        return frame.f_locals[node.id] if node.id in frame.f_locals else frame.f_globals[node.id]
    if isinstance(node, ast.Attribute):
        owner = _object(node.value, frame)
        held = getattr(owner, "__dict__", {})
        return held[node.attr] if node.attr in held else getattr(type(owner), node.attr)
    raise LookupError
