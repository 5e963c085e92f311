"""Shared by all probes: when to look, which line of the script called, and what its source says."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache, wraps
from typing import Any

import torch

DOCTOR = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
PATHS = {os.path.realpath(sysconfig.get_path(p)) for p in ("stdlib", "purelib", "platlib")} | {DOCTOR}
LIBRARIES = tuple(path + os.sep for path in PATHS)
WARM_UP = 5
LATER = frozenset((13, 34, 55, 89, 144, 233, 377, 610, 987, 1597))
"""Steps at which probes look, besides the first WARM_UP, which the doctor doesn't time; they get rarer."""
DONE = object()  # A handler returns it once it has seen enough of an event
PER_TENSOR = 512  # Maximum elements of a tensor to compare, evenly spaced


def looks_at(step: int) -> bool:
    """Return whether probes look at an optimizer's step of this number, from 1."""
    return step <= WARM_UP or step in LATER


class OwnLines:
    """Recognises the script's own source files, and finds their lines that led to a frame."""

    def __init__(self, folder: str) -> None:
        """`folder` holds the script."""
        self.folder = os.path.realpath(folder)
        self._own: dict[str, bool] = {}

    def owns(self, file: str) -> bool:
        """Return whether a source file lies in the script's folder and isn't an installed package's."""
        if file not in self._own:
            path = os.path.realpath(file)
            inside = path.startswith(self.folder + os.sep) and not path.startswith(LIBRARIES)
            self._own[file] = inside and "-packages" not in path[len(self.folder) :]  # where pip --user installs
        return self._own[file]

    def frames(self, frame: types.FrameType | None = None) -> Iterator[types.FrameType]:
        """Yield the script's own frames that led here, innermost first."""
        return (f for f in callers(frame or sys._getframe(1)) if self.owns(f.f_code.co_filename))

    def line(self, frame: types.FrameType | None = None) -> tuple[str, int]:
        """Return (file, line) of the script's innermost frame; ("", 0) if there is none."""
        frame, own = frame or sys._getframe(1), self._own
        while frame is not None:  # not a generator, because it's called in each step
            name = frame.f_code.co_filename
            if own[name] if name in own else self.owns(name):
                return name, frame.f_lineno
            frame = frame.f_back
        return "", 0


class Scene(OwnLines):
    """The script's process, as the probes see it."""

    def __init__(self, folder: str, scratch: str) -> None:
        """`folder` holds the script; workers may leave files in `scratch`."""
        super().__init__(folder)
        self.scratch = scratch
        self.paused = False
        self.thread = threading.get_ident()
        self.step = 0  # Optimizer steps so far, of all optimizers
        self.steps_of: dict[int, int] = {}  # The same by id of the optimizer
        self.optimizers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
        self.roots: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # Outermost modules called, by id
        self.undo = ExitStack()
        self.keep: Callable[[], Any] = bool
        """Saves the findings so far. Call it after what may be a script's last act before it drops its objects."""
        self.spans: Any = None  # The hooks' clock: observers' time isn't part of the script's step

    def away(self) -> bool:
        """Return whether nothing may be observed: in a counterfactual, another thread, a fork or a compiler's trace."""
        if self.paused or threading.get_ident() != self.thread:
            return True
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return capturing or torch.compiler.is_compiling()

    def forked(self) -> None:
        """Stop observing: this process was forked from the script's."""
        self.thread = -1

    def replace(self, owner: Any, name: str, by: Callable, undo: ExitStack | None = None) -> None:
        """Make `owner.name` call `by(original, *args)` until `undo` is closed or the probes are removed."""
        original, undo = getattr(owner, name), undo or self.undo
        inherited = name not in vars(owner)
        setattr(owner, name, replacement(by, original))
        undo.callback(delattr, owner, name) if inherited else undo.callback(setattr, owner, name, original)

    def listen(self, owner: Any, name: str, before: Callable | None = None, after: Callable | None = None) -> None:
        """Observe calls of `owner.name` by `before(*args)` and `after(result, *args)`, whose errors are ignored."""

        def observed(original: Callable, *args: Any, **kwargs: Any) -> Any:
            if before is not None and not self.away():
                self.guarded(before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None and not self.away():
                self.guarded(after, result, *args, **kwargs)
            return result

        self.replace(owner, name, observed)

    def guarded(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        """Call an observer outside the script's time; if it fails, the script continues."""
        if self.spans is not None:
            self.spans.enter("doctor")
        try:
            function(*args, **kwargs)
        except Exception:
            if os.environ.get("DOCTOR_PROBES_RAISE"):
                raise
        finally:
            if self.spans is not None:
                self.spans.leave()

    # Source

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
        """Return the parameters of all optimizers that have stepped, without duplicates."""
        held = [p for o in list(self.optimizers.values()) for g in o.param_groups for p in g["params"]]
        return list({id(p): p for p in held}.values())

    def objects(self, values: Any, deep: int = 3, most: int = 3_000) -> Iterator[tuple[str, Any]]:
        """Yield (name, value) of variables and of what the script's own objects and short containers hold."""
        level, seen = list(values), set()
        for _ in range(deep):
            following: list[tuple[str, Any]] = []
            for name, value in level:
                if id(value) in seen or name.startswith("__"):
                    continue
                seen.add(id(value))
                yield name, value
                if isinstance(value, dict | list | tuple) and 0 < len(value) < most:
                    pairs = list(value.items()) if isinstance(value, dict) else [(name, v) for v in value]
                    following += [(f"{name}.{k}" if isinstance(k, str) else name, v) for k, v in pairs[:200]]
                elif self._is_own(value):
                    following += [(f"{name}.{k}", v) for k, v in vars(value).items()]
            level = following

    def _is_own(self, value: Any) -> bool:
        module = sys.modules.get(type(value).__module__)
        skip = torch.nn.Module | torch.optim.Optimizer | torch.Tensor
        own = hasattr(value, "__dict__") and not isinstance(value, type) and not isinstance(value, skip)
        return own and self.owns(getattr(module, "__file__", None) or "")

    def maker_of(self, parameter: Any) -> tuple[str, tuple[str, int]]:
        """Return the name of the variable that holds a parameter or its module, and the line that assigns it."""
        for frame in self.frames():
            for name, value in self.objects(frame.f_locals.items()):
                module = isinstance(value, torch.nn.Module)
                if value is parameter or (module and any(p is parameter for p in value.parameters())):
                    return name, assigned(frame.f_code.co_filename, name)
        return "", ("", 0)

    def name_of(self, parameter: Any) -> str:
        """Return a parameter's name in the model that holds it, or its shape."""
        for root in list(self.roots.values()):
            for name, p in root.named_parameters():
                if p is parameter:
                    return name.removeprefix("module.")
        return f"a parameter of shape {tuple(parameter.shape)}"


def replacement(by: Callable, original: Callable) -> Callable:
    """Return a function like `original` that calls `by(original, *args)`."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    return call


def callers(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield a frame and those that led to it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def listed(names: list[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def operands(root: Any, most: int, through: frozenset[str] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield (operation, operand) pairs of up to `most` nodes, root first, following only operations in `through`."""
    level = deque([root])
    for _ in range(most):
        node = level.popleft() if level else None
        if node is None:
            return
        for child, _ in node.next_functions if through is None or node.name() in through else ():
            if child is not None:
                yield node, child
                level.append(child)


def leaves(root: Any, most: int) -> Iterator[Any]:
    """Yield the parameters below a node of a graph, nearest first, once for each use."""
    return (child.variable for _, child in operands(root, most) if hasattr(child, "variable"))


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor, detached."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def some(tensor: Any) -> Any:
    """Return up to PER_TENSOR elements of a dense tensor, as a view or a copy."""
    flat = local(tensor).reshape(-1)
    return flat[:: max(1, flat.numel() // PER_TENSOR)][:PER_TENSOR]


def tensors_in(tree: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif depth and isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(value, depth - 1)


@lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module:
    """Return a source file's syntax tree; an empty one if Python can't parse it."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def around(file: str, line: int, kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the statements of these kinds that hold a line, innermost first."""
    holding = [n for n in ast.walk(parsed(file)) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return sorted(holding, key=lambda n: (n.end_lineno or 0) - n.lineno)


def function_text(file: str, line: int) -> str:
    """Return the source of the innermost function around a line; outside functions, the line itself."""
    found = around(file, line, (ast.FunctionDef, ast.AsyncFunctionDef))
    lines = linecache.getlines(file)
    return "".join(lines[found[0].lineno - 1 : found[0].end_lineno] if found else lines[line - 1 : line])


def name_in(node: ast.AST) -> str:
    """Return the last part of a name, an attribute or a constant item."""
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return str(getattr(node, "attr", getattr(node, "id", "")))


def assignments(file: str, name: str) -> Iterator[tuple[ast.Assign, ast.expr]]:
    """Yield (assignment, assigned value) for each variable, attribute or item of that name."""
    last = name.rpartition(".")[2]
    for node in ast.walk(parsed(file)):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    if name_in(one) == last:
                        yield node, value
            elif name_in(target) == last:
                yield node, node.value


def assigned(file: str, name: str) -> tuple[str, int]:
    """Return the last line that assigns more than a constant to a name; the file's first line if none does."""
    lines = [n.lineno for n, value in assignments(file, name) if not isinstance(value, ast.Constant)]
    return file, max(lines, default=1)


def planned(frames: list[types.FrameType]) -> float | None:
    """Return how many times the loops in these frames run the innermost frame's line; None if that is unknown."""
    total = 1.0
    for frame in frames:
        for loop in around(frame.f_code.co_filename, frame.f_lineno, (ast.For, ast.While, ast.FunctionDef, ast.Lambda)):
            if isinstance(loop, ast.FunctionDef | ast.Lambda):
                break
            if isinstance(loop, ast.While):  # `while step < STEPS` limits the steps of all loops in it
                below = isinstance(loop.test, ast.Compare) and isinstance(loop.test.ops[0], ast.Lt | ast.LtE)
                return _number(_meaning(loop.test.comparators[0], frame)) if below else None
            if loop.lineno != frame.f_lineno:  # otherwise the frame is at the loop's own line
                rounds = _rounds(loop.iter, frame)
                if rounds is None:
                    return None
                total *= rounds
    return total


def _rounds(over: ast.expr, frame: types.FrameType) -> float | None:
    """Return how many items a loop takes from an expression."""
    name, args = (name_in(over.func), over.args) if isinstance(over, ast.Call) else ("", [])
    if name in ("range", "trange") and args:
        ends = [_number(_meaning(a, frame)) for a in args[:3]]
        return None if None in ends or 0 in ends[2:] else float(len(range(*map(int, ends))))
    if name in ("enumerate", "tqdm", "list", "reversed") and args:
        return _rounds(args[0], frame)
    if name == "islice" and len(args) == 2:
        return _number(_meaning(args[1], frame))
    if name == "zip":
        return min((r for a in args if (r := _rounds(a, frame)) is not None), default=None)
    try:
        return float(len(_meaning(over, frame)))
    except (TypeError, NotImplementedError):
        return None


PLAIN = ast.Name | ast.Attribute | ast.Constant | ast.BinOp | ast.operator | ast.expr_context


def _meaning(node: ast.expr, frame: types.FrameType) -> Any:
    """Evaluate names, attributes, constants, arithmetic and len() in a frame; return None for anything else."""
    for part in ast.walk(node):
        if not isinstance(part, PLAIN) and not (isinstance(part, ast.Call) and ast.unparse(part.func) == "len"):
            return None
    try:
        return eval(compile(ast.Expression(node), "", "eval"), frame.f_globals, dict(frame.f_locals))
    except Exception:
        return None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
