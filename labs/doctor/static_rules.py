"""What no run of some steps can show, read in the source: patterns of a script and its own modules.

Nothing is imported or run. A rule is silent where the source doesn't settle the matter, or where a trainer's library
may do the thing itself. Texts are in texts.toml.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from labs.doctor.bottlenecks import Match, matched

MOST_FILES = 60
TRAINERS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")


class Program:
    """Syntax trees of the script and of what it imports from its own folder."""

    def __init__(self, script: Path) -> None:
        self.read: set[str] = set()
        self.file_of: dict[ast.AST, str] = {}
        self.modules: set[str] = set()
        waiting, folder = [script], script.resolve().parent
        while waiting and len(self.read) < MOST_FILES:
            path = waiting.pop(0)
            if str(path) not in self.read:
                waiting += [p for name in self._read(path) for p in _files(folder, path.resolve().parent, name)]
        self.calls = [n for n in self.file_of if isinstance(n, ast.Call)]
        self.words = {_last(n) for n in self.file_of if isinstance(n, ast.Name | ast.Attribute)}
        self.has_trainer = any(name.partition(".")[0] in TRAINERS for name in self.modules)

    def _read(self, path: Path) -> list[str]:
        """Names of the modules that it imports."""
        self.read.add(str(path))
        try:
            tree = ast.parse(path.read_bytes())
            self.file_of |= dict.fromkeys(ast.walk(tree), str(path))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return []  # what cannot be read is run all the same
        names = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                names += [base, *(f"{base}.{a.name}".replace("..", ".") for a in node.names)]
        self.modules.update(names)
        return names

    def named(self, *names: str) -> list[ast.Call]:
        """Calls whose last name is one of these."""
        return [c for c in self.calls if _last(c.func) in names]


def _files(folder: Path, beside: Path, module: str) -> Iterator[Path]:
    """Of a module below the script's folder."""
    for base in {folder, beside}:
        place = base.joinpath(*filter(None, module.split(".")))
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if module.strip(".") and path.is_file():
                yield path


def _last(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# Rules


def _no_set_epoch(program: Program) -> Iterator[ast.AST]:
    if "set_epoch" not in program.words:
        yield from (c for c in program.named("DistributedSampler") if not _false(_keyword(c, "shuffle")))


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
    """Return the lines that the rules find."""
    program = Program(Path(script))
    rules = {} if program.has_trainer else RULES
    return [matched(rule, (program.file_of[n], n.lineno)) for rule, find in rules.items() for n in find(program)]
