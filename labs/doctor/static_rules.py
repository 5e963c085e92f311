"""Find faults that a run of a few steps can't show, by reading the source of a script and its own modules.

Nothing is imported or run. A rule reports nothing if the source is ambiguous, or if a trainer's library may do the work
itself. Texts are in texts.toml.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from labs.doctor.bottlenecks import Match, matched

MOST_FILES = 60
TRAINERS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")


class Program(ModuleFinder):
    """Syntax trees of the script and of what it imports from its own folder."""

    def __init__(self, script: Path) -> None:
        super().__init__([str(script.resolve().parent)])
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # the script runs anyway
            self.run_script(str(script))
        self.file_of: dict[ast.AST, str] = {}
        for file in [m.__file__ for m in self.modules.values() if (m.__file__ or "").endswith(".py")][:MOST_FILES]:
            with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                self.file_of |= dict.fromkeys(ast.walk(ast.parse(Path(file).read_bytes())), file)
        self.calls = [n for n in self.file_of if isinstance(n, ast.Call)]
        self.words = {_last(n) for n in self.file_of if isinstance(n, ast.Name | ast.Attribute)}
        self.has_trainer = any(name.partition(".")[0] in TRAINERS for name in (*self.modules, *self.badmodules))

    def load_module(self, *args: Any) -> Any:
        """Read a module. Raises ImportError beyond MOST_FILES modules."""
        if len(self.modules) > MOST_FILES:
            raise ImportError
        return super().load_module(*args)

    def named(self, *names: str) -> list[ast.Call]:
        """Return the calls whose last name is one of these."""
        return [c for c in self.calls if _last(c.func) in names]


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


# Rules


def _no_set_epoch(program: Program) -> Iterator[ast.AST]:
    if "set_epoch" not in program.words:
        for call in program.named("DistributedSampler"):
            if "shuffle=False" not in map(ast.unparse, call.keywords):
                yield call


def _no_zero_grad(program: Program) -> Iterator[ast.AST]:
    assigned = [t for n in program.file_of if isinstance(n, ast.Assign) for t in n.targets]
    cleared = "zero_grad" in program.words or any(_last(t) == "grad" for t in assigned)
    stepped = [n for c in program.named("step") for n in (getattr(c.func, "value", c), *c.args)]
    if not cleared and any(_last(n).lower().endswith(("opt", "optim", "optimizer")) for n in stepped):
        yield from program.named("backward")[:1]


def _clip_before_unscale(program: Program) -> Iterator[ast.AST]:
    losses = [c.func.value for c in program.named("backward") if isinstance(c.func, ast.Attribute)]
    scaled = any(isinstance(loss, ast.Call) and _last(loss.func) == "scale" for loss in losses)
    if scaled and "unscale_" not in program.words:
        yield from program.named("clip_grad_norm_", "clip_grad_value_")


RULES: dict[str, Callable[[Program], Iterator[ast.AST]]] = {
    "set-epoch-missing": _no_set_epoch,
    "zero-grad-missing": _no_zero_grad,
    "clip-before-unscale": _clip_before_unscale,
}


def check(script: Path) -> list[Match]:
    """Return a match for each line that a rule finds."""
    program = Program(Path(script))
    rules = {} if program.has_trainer else RULES
    return [matched(rule, (program.file_of[n], n.lineno)) for rule, find in rules.items() for n in find(program)]
