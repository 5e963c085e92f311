"""What no run of some steps can show, read in the source: five patterns of a script and its own modules.

Nothing is imported or run. A rule is silent where the source doesn't settle the matter, or where a trainer's library
may do the thing itself.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_FILES, MOST_BYTES = 60, 1_000_000
"""Files that are read; bytes of each."""
TRAINERS = ("accelerate", "deepspeed", "lightning", "pytorch_lightning", "transformers")
WRONG, AT_RISK = "wrong", "at risk"
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Match:
    """A line that a rule has found."""

    rule: str
    file: str
    line: int  # 0: the whole file
    code: str
    why: str
    fix: str
    notebook: str
    certainty: str  # WRONG: results are others than they seem to be; AT_RISK: they may be, or get lost


@dataclass(frozen=True)
class Rule:
    """What it is about, in words; `find` gives the lines."""

    name: str
    certainty: str
    why: str
    fix: str
    notebook: str
    find: Callable[[Program], Iterator[ast.AST]]


class Program:
    """Syntax trees of the script and of what it imports from its own folder."""

    def __init__(self, script: Path) -> None:
        self.lines: dict[str, list[str]] = {}
        self.file_of: dict[ast.AST, str] = {}
        self.unread: list[tuple[str, int, str]] = []
        self.nodes: list[ast.AST] = []
        self.modules: set[str] = set()
        waiting, folder = [script], script.resolve().parent
        while waiting and len(self.lines) < MOST_FILES:
            path = waiting.pop(0)
            if str(path) not in self.lines:
                waiting += [p for name in self._read(path) for p in _files(folder, path.resolve().parent, name)]
        self.calls = [n for n in self.nodes if isinstance(n, ast.Call)]
        self.words = {_last(n) for n in self.nodes if isinstance(n, ast.Name | ast.Attribute)} | {
            part for name in self.modules for part in name.split(".")
        }

    def _read(self, path: Path) -> list[str]:
        """Names of the modules that it imports."""
        self.lines[str(path)] = []
        try:
            raw = path.read_bytes()
            if len(raw) > MOST_BYTES:
                raise ValueError(f"it has more than {MOST_BYTES // 1_000_000} MB")
            tree = ast.parse(raw)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
            what = getattr(e, "msg", None) or getattr(e, "strerror", None) or str(e) or type(e).__name__
            self.unread.append((str(path), getattr(e, "lineno", 0) or 0, what))
            return []
        self.lines[str(path)] = raw.decode(errors="replace").splitlines()
        names = []
        for node in ast.walk(tree):
            self.nodes.append(node)
            self.file_of[node] = str(path)
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

    def imports(self, *packages: str) -> bool:
        """Whether any of these is imported."""
        return any(name.partition(".")[0] in packages for name in self.modules)


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
    if "set_epoch" not in program.words and not program.imports(*TRAINERS):
        yield from (c for c in program.named("DistributedSampler") if not _false(_keyword(c, "shuffle")))


def _no_zero_grad(program: Program) -> Iterator[ast.AST]:
    cleared = {"zero_grad", "manual_backward"} & program.words or any(
        isinstance(n, ast.Assign) and any(getattr(t, "attr", "") == "grad" for t in n.targets) for n in program.nodes
    )
    optimizers = ("opt", "optim", "optimizer")
    steps = [c for c in program.named("step") if _last(getattr(c.func, "value", c)).lower().endswith(optimizers)]
    scaled = [c for c in program.named("step") if any(_last(a).lower().endswith(optimizers) for a in c.args)]
    if (steps or scaled) and not cleared and not program.imports(*TRAINERS):
        yield from program.named("backward")[:1]


def _clip_before_unscale(program: Program) -> Iterator[ast.AST]:
    scaled = any(isinstance(c.func, ast.Attribute) and _is_scaled(c.func.value) for c in program.named("backward"))
    if scaled and "unscale_" not in program.words and not program.imports(*TRAINERS):
        yield from program.named("clip_grad_norm_", "clip_grad_value_")


def _is_scaled(loss: ast.expr) -> bool:
    """`scaler.scale(loss)`."""
    return isinstance(loss, ast.Call) and _last(loss.func) == "scale"


def _no_scaler(program: Program) -> Iterator[ast.AST]:
    if "GradScaler" in program.words or program.imports(*TRAINERS) or not program.named("backward"):
        return
    for call in program.named("autocast"):
        kind = _keyword(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
        on_cuda = any(isinstance(a, ast.Constant) and a.value == "cuda" for a in call.args[:1])
        old = isinstance(call.func, ast.Attribute) and ast.unparse(call.func).endswith("cuda.amp.autocast")
        fp16 = _last(kind) in ("float16", "half") if kind is not None else on_cuda or old  # its default on CUDA
        if fp16 and not _false(_keyword(call, "enabled")):
            yield call


def _not_atomic(program: Program) -> Iterator[ast.AST]:
    if {"replace", "rename", "renames", "move"} & program.words:
        return
    loaded = {ast.unparse(c.args[0]) for c in program.named("load") if c.args}
    for call in program.named("save"):
        if ast.unparse(call.func) == "torch.save" and len(call.args) > 1 and ast.unparse(call.args[1]) in loaded:
            yield call


RULES = (
    Rule(
        "set-epoch-missing",
        WRONG,
        "a DistributedSampler draws its order from seed + epoch, and the epoch stays 0 until set_epoch is called: "
        "every epoch has the same order and the same batches",
        "sampler.set_epoch(epoch) at the start of each epoch",
        "02, section 5",
        _no_set_epoch,
    ),
    Rule(
        "zero-grad-missing",
        WRONG,
        "backward adds to the gradients that are there: without zero_grad() each step follows the sum of all gradients "
        "so far",
        "optimizer.zero_grad() before backward",
        "01, section 1",
        _no_zero_grad,
    ),
    Rule(
        "clip-before-unscale",
        WRONG,
        "gradients are clipped while they are still multiplied by the loss scale (65,536 at first): a limit of 1 then "
        "shrinks nearly all of them to nothing",
        "scaler.unscale_(optimizer) before clipping",
        "04, section 3",
        _clip_before_unscale,
    ),
    Rule(
        "scaler-missing",
        AT_RISK,
        "FP16 has no numbers below 6e-8: without a GradScaler small gradients become 0",
        "a torch.amp.GradScaler, or torch.bfloat16, which needs none",
        "04, section 2",
        _no_scaler,
    ),
    Rule(
        "save-not-atomic",
        AT_RISK,
        "the checkpoint that the script resumes from is overwritten in place: a job that is killed while it saves has "
        "none",
        'torch.save(state, path + ".part"), then os.replace(path + ".part", path)',
        "05, section 6",
        _not_atomic,
    ),
)


def check(script: Path) -> list[Match]:
    """Wrong ones first. What cannot be read is a match that says so: the training is measured all the same."""
    try:
        program = Program(Path(script))
        found = [_match(rule, program, node) for rule in RULES for node in rule.find(program)]
    except RecursionError:  # an expression of a thousand terms
        return [_unread(str(script), 0, "it is nested too deeply")]
    return [*sorted(found, key=lambda m: m.certainty != WRONG), *(_unread(*row) for row in program.unread)]


def _match(rule: Rule, program: Program, node: ast.AST) -> Match:
    file = program.file_of[node]
    code = program.lines[file][node.lineno - 1].strip()
    return Match(rule.name, file, node.lineno, code, rule.why, rule.fix, rule.notebook, rule.certainty)


def _unread(file: str, line: int, what: str) -> Match:
    return Match(UNREADABLE, file, line, "", f"this file was not read for patterns: {what}", "", "", AT_RISK)
