"""Static rules on what autograd keeps, and on the modes of a model: train, eval, without gradients."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import Found, Rule, changed, inserted, removed, replaced, rule, source_of
from labs.doctor.rules_steps import ACCUMULATE, DOCS, HEAD, HEALTHY, LOOP, losses_of
from labs.doctor.syntax import (
    Function,
    Loop,
    Program,
    above,
    constant,
    dotted,
    function_of,
    keyword,
    method,
    statement_of,
)
from labs.doctor.training_loops import Event, Section, Training


@rule(
    "loss-kept",
    "costs",
    why="A sum or a list of losses that still hold their graphs keeps a piece of each step's graph alive: memory grows "
    "with every step. Where no backward has freed it, it keeps the activations, too.",
    cure="Keep loss.detach() (does not wait for the GPU) or loss.item() (waits).",
    notebook="09",
    section="3. What grows from step to step?",
    source=DOCS + "notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    ill=(
        HEAD + changed(LOOP, ("total += loss.detach()", "total += loss  # <-")),
        HEAD + changed(LOOP, ("total += loss.detach()", "total = total + loss * len(x)  # <-")),
        HEAD
        + changed(
            LOOP, ("total = 0.0", "total = 0.0; seen = []"), ("total += loss.detach()", "seen.append(loss)  # <-")
        ),
        HEAD + changed(LOOP, ("total += loss.detach()", "total += loss.mean()  # <-")),
    ),
    healthy=(
        HEALTHY,
        ACCUMULATE,
        HEAD + changed(LOOP, ("loss.detach()", "loss.item()")),
        HEAD + changed(LOOP, ("loss.detach()", "float(loss)")),
        HEAD + changed(LOOP, ("total += loss.detach()", "loss = loss.item()\n            total += loss")),
        HEAD
        + changed(
            LOOP,
            ("            loss.backward()\n", ""),
            ("total += loss.detach()", "total += loss"),
            ("        print", "        total.backward()\n        print"),
        ),
        HEAD
        + changed(
            LOOP,
            (
                "            total += loss.detach()\n",
                "            with torch.no_grad():\n                total += loss\n",
            ),
        ),
    ),
)
def loss_kept(program: Program, training: Training) -> Iterator[Found]:
    """What backward was called on is added to, or put into, something from outside of the loop."""
    differentiated = {text for c in program.named("backward") for text in losses_of(c)}
    for section in training.sections:
        if not section.is_loop:
            continue
        losses = {
            text for e in section.of("backward") if e.node.file is section.node.file for text in losses_of(e.node)
        }
        for node in ast.walk(section.node):
            name, value = _kept(node)
            if not name or name in differentiated or value is None or _without_gradients(program, node):
                continue
            if _assigned_in(section.node, name) or function_of(node) is not function_of(section.node):
                continue
            for use in _uses_with_graph(value, losses):
                if not _made_number(section.node, use):
                    yield Found(node, replaced(use, f"{source_of(use)}.detach()"))


def _kept(node: ast.AST) -> tuple[str, ast.expr | None]:
    """What is added to, and what is added."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return dotted(node.target), node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.BinOp):
        name, value = dotted(node.targets[0]), node.value
        if name and isinstance(value.op, ast.Add) and dotted(value.left) == name:
            return name, value.right
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and method(node.value) == "append":
        call = node.value
        return (
            (dotted(call.func.value), call.args[0])
            if call.args and isinstance(call.func, ast.Attribute)
            else ("", None)
        )
    return "", None


def _uses_with_graph(value: ast.expr, losses: set[str]) -> Iterator[ast.expr]:
    """The loss itself, in arithmetic or a tuple, not what a call makes of it; `.mean()` and `.sum()` keep a graph."""
    if isinstance(value, ast.BinOp):
        yield from _uses_with_graph(value.left, losses)
        yield from _uses_with_graph(value.right, losses)
    elif isinstance(value, ast.Tuple):
        for part in value.elts:
            yield from _uses_with_graph(part, losses)
    elif isinstance(value, ast.Call) and method(value) in ("mean", "sum") and not value.args:
        yield from _uses_with_graph(value.func.value, losses)
    elif dotted(value) in losses:
        yield value


def _without_gradients(program: Program, node: ast.AST) -> bool:
    return any(
        isinstance(p, ast.With) and re.search(r"no_grad|inference_mode", ast.unparse(p.items[0])) for p in above(node)
    )


def _assigned_in(loop: ast.AST, name: str) -> bool:
    """Set anew in each pass, so that nothing grows."""
    for node in ast.walk(loop):
        sets = isinstance(node, ast.Assign) and any(dotted(t) == name for t in node.targets) and _kept(node)[0] != name
        if sets and not any(isinstance(p, ast.If) for p in _up_to(node, loop)):
            return True
    return False


def _up_to(node: ast.AST, loop: ast.AST) -> Iterator[ast.AST]:
    for parent in above(node):
        if parent is loop:
            return
        yield parent


def _made_number(loop: ast.AST, use: ast.expr) -> bool:
    """`loss = loss.item()` somewhere in the loop."""
    assigns = (n for n in ast.walk(loop) if isinstance(n, ast.Assign))
    values = (n.value for n in assigns if any(dotted(t) == dotted(use) for t in n.targets))
    return any(re.search(r"\.(item|detach|data|tolist|numpy)\b|float\(", ast.unparse(v)) for v in values)


@rule(
    "anomaly",
    "costs",
    why="Anomaly detection keeps the traceback of every operation of forward, and looks for NaN after every one of "
    "backward. It is for finding a NaN: it slows down every step, and the arithmetic is the same.",
    cure="Remove it, or switch it on by an option.",
    notebook="10",
    section="4. It is NaN: where did it begin?",
    source=DOCS + "autograd.html#anomaly-detection",
    ill=HEALTHY.replace("import torch\n", "import torch\ntorch.autograd.set_detect_anomaly(True)  # <-\n", 1),
    healthy=(
        HEALTHY,
        HEALTHY.replace("import torch\n", "import torch\ntorch.autograd.set_detect_anomaly(False)\n", 1),
        HEALTHY.replace(
            "    optimizer =", "    if debug:\n        torch.autograd.set_detect_anomaly(True)\n    optimizer =", 1
        ),
    ),
)
def anomaly(program: Program, training: Training) -> Iterator[Found]:
    """Switched on by a constant, and unconditionally."""
    for call in program.torch_calls("set_detect_anomaly", "detect_anomaly"):
        given = keyword(call, "mode", 0)
        bare = method(call) == "detect_anomaly" and given is None
        if (bare or constant(given) is True) and not any(isinstance(p, ast.If) for p in above(call)):
            alone = isinstance(call.parent, ast.Expr)
            yield Found(call, removed(call) if alone else None)


@rule(
    "train-mode",
    "wrong",
    why="After the first eval() the model stays in evaluation mode: dropout does nothing and BatchNorm uses its "
    "running averages and no longer updates them, for the rest of the training.",
    cure="model.train() at the start of each epoch, or after each validation.",
    notebook="10",
    section="4. It is NaN: where did it begin?",
    source=DOCS + "generated/torch.nn.Module.html#torch.nn.Module.eval",
    ill=(
        changed(HEALTHY, ("        model.train()\n", ""), ("model.eval()", "model.eval()  # <-")),
        changed(HEALTHY, ("        model.train()\n", ""), ("model.eval()", "model.eval()  # <-")).replace(
            "    optimizer =", "    model.train()\n    optimizer =", 1
        ),
        changed(
            HEALTHY,
            (
                "            total += loss.detach()",
                "            validate(model, held_out)\n            total += loss.detach()",
            ),
            ("model.eval()", "model.eval()  # <-"),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("        model.train()\n", ""), ("    return right", "    model.train()\n    return right")),
        changed(
            HEALTHY,
            ("    for epoch", "    teacher = torch.nn.Linear(1, 1)\n    for epoch"),
            ("        total = 0.0", "        total = 0.0\n        teacher.eval()"),
        ),
        changed(HEALTHY, ("        model.train()\n", "        model.train(True)\n")),
        changed(
            HEALTHY, ("        model.train()\n", ""), ("    for epoch", "    model.eval()  # frozen\n    for epoch")
        ),
        changed(  # another model, which its function calls by the same name
            HEALTHY,
            ("        model.train()\n", ""),
            ("validate(model, loader):", "validate(_, loader):\n    model = load()"),
        ),
    ),
)
def train_mode(program: Program, training: Training) -> Iterator[Found]:
    """A loop that trains a model, sets the same one to eval, and never back."""
    seen = set()
    for section in training.sections:
        loops = [section.node, *training.outer_loops(section)] if section.is_loop else []
        if _meant(training, section):
            continue
        for loop in loops:
            events = training.loops.get(loop, section.events)
            if any(e.kind == "train" for e in events):
                continue
            for e in events:
                if (
                    e.kind == "eval"
                    and e.on
                    and e.node not in seen
                    and _is_trained(section, e.on)
                    and not _ends(e, loop)
                ):
                    seen.add(e.node)
                    yield Found(e.node)


def _meant(training: Training, section: Section) -> bool:
    """A training in eval mode, as of a layer on a frozen model: eval() stands just before the loop that trains."""
    function = function_of(section.node)
    statements = function.body if function is not None else []
    before = [c for s in statements if s.lineno < section.node.lineno for c in training.calls_in(s)]
    return any(training.kind_of(c) == "eval" for c in before)


def _is_trained(section: Section, name: str) -> bool:
    """Called in the loop as `name(...)`, before backward."""
    final = max(i for i, e in enumerate(section.events) if e.kind == "backward")
    return any(e.kind == "call" and e.on == name for e in section.events[:final])


def _ends(event: Event, loop: ast.AST) -> bool:
    """Or the loop is left after it."""
    block = statement_of(event.node).parent
    return any(isinstance(s, ast.Return | ast.Break) for s in getattr(block, "body", ())) and not isinstance(
        block, Function
    )


@rule(
    "no-grad-missing",
    "costs",
    why="Without no_grad() validation keeps the activations of every layer for a backward that never comes: memory as "
    "in training, and time to note the graph.",
    cure="`with torch.no_grad():` around the loop, or @torch.no_grad() before the function.",
    notebook="05",
    section="1. What fills the memory?",
    source=DOCS + "generated/torch.no_grad.html",
    ill=(
        changed(
            HEALTHY,
            (
                "    with torch.no_grad():\n        for x, y in loader:\n            right",
                "    for x, y in loader:  # <-\n        right",
            ),
        ),
        changed(
            HEALTHY,
            (
                "    with torch.no_grad():\n        for x, y in loader:\n            right +=",
                "    for x, y in loader:  # <-\n        output = model(x)\n        right +=",
            ),
            ("(model(x).argmax(1)", "(output.argmax(1)"),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            (
                "    with torch.no_grad():\n        for x, y in loader:\n            right",
                "    for x, y in loader:\n        right",
            ),
            ("def validate", "@torch.inference_mode()\ndef validate"),
        ),
        changed(
            HEALTHY,
            (
                "    with torch.no_grad():\n        for x, y in loader:\n            right",
                "    for x, y in loader:\n        right",
            ),
            (
                "        print(epoch, total / len(loader), validate(model, held_out))",
                "        with torch.no_grad():\n            print(validate(model, held_out))",
            ),
        ),
        changed(HEALTHY, ("    with torch.no_grad():\n", "    torch.set_grad_enabled(False)\n    if True:\n")),
    ),
)
def no_grad_missing(program: Program, training: Training) -> Iterator[Found]:
    """After a model was set to eval: a loop that calls it, and in which nothing is differentiated."""
    for call in program.named("eval"):
        function, name = function_of(call), dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if not name or training.kind_of(call) != "eval" or function is None or _shielded(program, function):
            continue
        if re.search(r"set_grad_enabled|requires_grad|enable_grad|autograd", ast.unparse(function)):
            continue
        for loop in (n for n in ast.walk(function) if isinstance(n, Loop) and n.lineno > call.lineno):
            inner = any(isinstance(p, Loop) and p.lineno > call.lineno for p in above(loop))
            used = any(isinstance(c, ast.Call) and dotted(c.func) == name for c in ast.walk(loop))
            if not used or inner or loop in training.loops or function_of(loop) is not function:
                continue
            if not WITHOUT.search(ast.unparse(loop)) and not _in_with(loop):
                alone = function not in training.leads and not function.decorator_list
                torch = "torch" in function.file.names.get("torch", ())
                yield Found(loop, inserted(function, "@torch.no_grad()") if alone and torch else None)


WITHOUT = re.compile(r"no_grad|inference_mode|set_grad_enabled|\.grad\b")


def _in_with(node: ast.AST) -> bool:
    return any(isinstance(p, ast.With) and any(WITHOUT.search(ast.unparse(i)) for i in p.items) for p in above(node))


def _shielded(program: Program, function: Function, depth: int = 3) -> bool:
    """Whether its decorators, some caller or the whole program switch gradients off."""
    if any(WITHOUT.search(ast.unparse(d)) for d in function.decorator_list):
        return True
    if any(
        isinstance(s, ast.Expr) and "set_grad_enabled" in ast.unparse(s) for f in program.files for s in f.tree.body
    ):
        return True
    for call in program.callers.get(function, ()):
        outer = function_of(call)
        if _in_with(call) or (depth and outer not in (None, function) and _shielded(program, outer, depth - 1)):
            return True
    return False


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
