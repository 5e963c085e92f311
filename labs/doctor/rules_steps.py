"""Static rules on the order and the state of a training loop."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import Change, Found, Rule, changed, inserted, moved, replaced, rule, source_of
from labs.doctor.syntax import (
    Program,
    above,
    constant,
    dotted,
    function_of,
    last,
    method,
    statement_of,
)
from labs.doctor.training_loops import Event, Section, Training, together

DOCS = "https://docs.pytorch.org/docs/stable/"
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader

def validate(model, loader):
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum()
    return right / len(loader.dataset)

def train(model, loader, held_out, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
"""
LOOP = """
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(epoch, total / len(loader), validate(model, held_out))
        scheduler.step()
"""
HEALTHY = HEAD + LOOP
IN_CLASS = """
import torch as t

class Trainer:
    def __init__(self, model):
        self.model, self.optimizer = model, t.optim.Adam(model.parameters())

    def one_step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = t.nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self, loader):
        for x, y in loader:
            self.one_step(x, y)
"""
ACCUMULATE = """
import torch
from torch import nn

def train(model, loader, every):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(x), y) / every
        loss.backward()
        if (i + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
MICRO = """
import torch

class Run:
    def train(self, model, batches, parts):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        while batches:
            for part in range(parts):
                x, y = next(batches)
                loss = ((model(x) - y) ** 2).mean() / parts
                loss.backward()
            opt.step()
            opt.zero_grad()
"""
GAN = """
def train(netD, netG, loader, optimizerD, optimizerG, criterion, noise):
    for real in loader:
        netD.zero_grad()
        criterion(netD(real), 1).backward()
        fake = netG(noise())
        criterion(netD(fake.detach()), 0).backward()
        optimizerD.step()
        netG.zero_grad()
        criterion(netD(fake), 1).backward()
        optimizerG.step()
"""


@rule(
    "zero-grad-missing",
    "wrong",
    why="backward adds to the gradients that are there: without zero_grad() each step follows the sum of all gradients "
    "since the start. A GradScaler hides it: it divides the old ones by its scale in each step, so that what they do "
    "depends on the scale.",
    cure="optimizer.zero_grad() once per step, before backward.",
    notebook="03",
    section="6. How do you get a large batch when it does not fit?",
    source=DOCS + "generated/torch.optim.Optimizer.zero_grad.html",
    ill=(
        HEAD + changed(LOOP, ("            optimizer.zero_grad()\n", ""), ("backward()", "backward()  # <-")),
        changed(
            IN_CLASS, ("        self.optimizer.zero_grad(set_to_none=True)\n", ""), ("backward()", "backward()  # <-")
        ),
    ),
    healthy=(
        HEALTHY,
        IN_CLASS,
        ACCUMULATE,
        MICRO,
        GAN,
        changed(
            HEALTHY,
            (
                "            optimizer.zero_grad()",
                "            for p in model.parameters():\n                p.grad = None",
            ),
        ),
        changed(HEALTHY, ("            optimizer.zero_grad()\n", ""), ("optimizer.step()", "update(optimizer)")),
    ),
)
def zero_grad_missing(program: Program, training: Training) -> Iterator[Found]:
    """Nothing in the loop nor anywhere in its files sets gradients back."""
    for section in training.sections:
        if not section.is_loop or section.of("zero") or _zeroes(program, section):
            continue
        first = section.of("backward")[0]
        steps = section.of("step", "scaler.step")
        base = dotted(steps[0].node.func.value) if steps[0].kind == "step" and len({s.on for s in steps}) == 1 else ""
        same = base and function_of(steps[0].node) is function_of(first.node)
        yield Found(first.node, inserted(first.node, f"{base}.zero_grad()") if same else None)


def _zeroes(program: Program, section: Section) -> bool:
    """Or calls a function of the program that we cannot find, and that may."""
    files = {e.node.file for e in section.events}
    names = [n for f in files for n in f.nodes if isinstance(n, ast.Attribute)]
    return any(n.attr in ("zero_grad", "zero_grad_buffer", "set_to_none") for n in names) or any(
        (n.attr == "grad" and isinstance(n.ctx, ast.Store)) or method_of(n) == "zero_" for n in names
    )


def method_of(node: ast.AST) -> str:
    """ "zero_" of p.grad in `p.grad.zero_()`."""
    parent = node.parent
    return parent.attr if isinstance(parent, ast.Attribute) and isinstance(parent.parent, ast.Call) else ""


@rule(
    "zero-grad-order",
    "wrong",
    why="The gradients are gone before the optimizer sees them: the step changes nothing, or only what momentum and "
    "weight decay do.",
    cure="zero_grad() before backward, or after the step.",
    notebook="03",
    section="3. Is it the same training?",
    source=DOCS + "generated/torch.optim.Optimizer.zero_grad.html",
    ill=(
        HEAD
        + changed(
            LOOP,
            ("            optimizer.zero_grad()\n", ""),
            ("backward()\n", "backward()\n            optimizer.zero_grad()  # <-\n"),
        ),
        changed(
            IN_CLASS,
            ("        self.optimizer.zero_grad(set_to_none=True)\n", ""),
            ("backward()\n", "backward()\n        self.model.zero_grad()  # <-\n"),
        ),
    ),
    healthy=(
        HEALTHY,
        IN_CLASS,
        ACCUMULATE,
        MICRO,
        GAN,
        HEAD
        + changed(
            LOOP,
            ("            optimizer.zero_grad()\n", ""),
            ("step()\n            total", "step()\n            optimizer.zero_grad()\n            total"),
        ),
    ),
)
def zero_grad_order(program: Program, training: Training) -> Iterator[Found]:
    """backward, zero_grad, step, with no other backward or step between them, of the only optimizer or the same one."""
    for section in training.sections:
        one = section.of("zero", "backward", "step", "scaler.step")
        order = [*one, *one, *one] if section.is_loop else one  # what follows a zero_grad may be in the next pass
        only = len({e.on for e in section.of("step")} | {_first(e) for e in section.of("scaler.step")}) == 1
        for i in range(len(one), 2 * len(one)) if section.is_loop else range(len(one)):
            zero = order[i]
            if zero.kind != "zero":
                continue
            before = [e for e in order[:i] if e.kind != "zero" and together(e, zero)]
            after = [e for e in order[i:] if e.kind != "zero" and together(e, zero)]
            if not before or not after or before[-1].kind != "backward" or after[0].kind == "backward":
                continue
            mine = after[0].on if after[0].kind == "step" else _first(after[0])
            one_pass = zero.loops == before[-1].loops == after[0].loops and together(before[-1], zero, after[0])
            if one_pass and (only or zero.on == mine):
                same = zero.node.file is before[-1].node.file and isinstance(zero.node, ast.Call)
                yield Found(zero.node, moved(zero.node, before[-1].node) if same else None)


def _first(event: Event) -> str:
    return dotted(event.node.args[0]) if event.node.args else ""


def losses_of(backward: ast.Call) -> list[str]:
    """Names that it is called on: "loss" in `loss.backward()`, `scaler.scale(loss).backward()`."""
    base = backward.func.value if isinstance(backward.func, ast.Attribute) else None
    inner = base.args[0] if isinstance(base, ast.Call) and method(base) == "scale" and base.args else base
    given = backward.args[0] if backward.args and "accelerator" in dotted(base) else None
    return [t for t in (dotted(inner), dotted(given)) if t and "accelerator" not in t]


def accumulation(training: Training, section: Section) -> tuple[Event, Event, str] | None:
    """A backward and a step that comes only after several of them, and by how many, in words."""
    steps, backwards = section.of("step", "scaler.step"), section.of("backward")
    inner = [loop for b in backwards for loop in b.loops]
    for b in backwards:
        step = next((s for s in steps if together(b, s)), None)
        if step is None:
            continue
        if b.loops and not any(b.loops[-1] in s.loops for s in steps) and _counts(b.loops[-1]):
            given = b.loops[-1].iter.args
            return b, step, dotted(given[-1]) or str(constant(given[-1]) or "")
        tests = [(t, w) for t, w in zip(step.tests, step.when, strict=True) if w not in b.when]
        modulus = next((m for t, _ in tests if (m := _modulus(training.program, t))), "")
        if modulus and all(len(s.when) > 0 for s in steps) and not inner and step.when[-1][1] is not None:
            return b, step, modulus
    return None


def _counts(loop: ast.AST) -> bool:
    given = loop.iter if isinstance(loop, ast.For) else None
    return isinstance(given, ast.Call) and method(given) == "range" and bool(given.args)


def _modulus(program: Program, test: ast.expr, depth: int = 3) -> str:
    """ "every" of `(i + 1) % every == 0`, also by way of a name."""
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return dotted(node.right) or ast.unparse(node.right)
        if depth and isinstance(node, ast.Name) and hasattr(node, "file"):
            for origin in program.origins(node, 2)[1:]:
                if found := _modulus(program, origin, 0):
                    return found
    return ""


@rule(
    "accumulated-loss",
    "wrong",
    why="Gradients of several batches add up before the step: without dividing they are as many times too large. SGD "
    "then takes a step that is as many times longer, and clipping bites sooner; Adam hides it.",
    cure="Divide the loss by the number of batches per step before backward.",
    notebook="03",
    section="6. How do you get a large batch when it does not fit?",
    source=DOCS + "notes/amp_examples.html#gradient-accumulation",
    ill=(
        changed(ACCUMULATE, (" / every", ""), ("backward()", "backward()  # <-")),
        changed(MICRO, (" / parts", ""), ("backward()", "backward()  # <-")),
        changed(
            ACCUMULATE,
            (" / every", ""),
            ("backward()", "backward()  # <-"),
            (
                "        if (i + 1) % every == 0:\n            optimizer.step()\n            optimizer.zero_grad()",
                (
                    "        if (i + 1) % every:\n"
                    "            continue\n"
                    "        optimizer.step()\n"
                    "        optimizer.zero_grad()"
                ),
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        ACCUMULATE,
        MICRO,
        GAN,
        changed(ACCUMULATE, (" / every", ""), ("loss.backward()", "(loss / every).backward()")),
        changed(ACCUMULATE, (" / every", ""), ("loss.backward()", "loss /= every\n        loss.backward()")),
        changed(ACCUMULATE, ("y) / every", "y, reduction='sum')")),
        changed(
            GAN,
            ("    for real in loader:", "    for i, real in enumerate(loader):"),
            ("        optimizerG.step()", "        if i % 5 == 0:\n            optimizerG.step()"),
        ),
    ),
)
def accumulated_loss(program: Program, training: Training) -> Iterator[Found]:
    """No division of what is differentiated, and none by the number of batches anywhere."""
    for section in training.sections:
        found = accumulation(training, section)
        if not found or program.imports("accelerate"):
            continue
        b, _, number = found
        if _divides(program, section, b, number) or not _plain_mean(program, b):
            continue
        name = (losses_of(b.node) or [""])[0]
        base = b.node.func.value
        plain = name and dotted(base) == name and number and re.fullmatch(r"[\w.]+", number)
        same = plain and number.split(".")[0] in {n.id for n in ast.walk(_of(b.node)) if isinstance(n, ast.Name)}
        yield Found(b.node, replaced(base, f"({source_of(base)} / {number})") if same else None)


def _of(node: ast.AST) -> ast.AST:
    return function_of(node) or node.file.tree


def _divides(program: Program, section: Section, backward: Event, number: str) -> bool:
    short = last(number)
    for node in program.nodes(ast.BinOp, ast.AugAssign, ast.Call):
        if isinstance(node, ast.Call):
            if method(node) in ("div", "div_", "true_divide", "mul_") and _within(section, node):
                return True
            continue
        right = node.value if isinstance(node, ast.AugAssign) else node.right
        scales = isinstance(node.op, ast.Div) or (isinstance(node.op, ast.Mult) and "/" in ast.unparse(right))
        if scales and re.search(rf"\b{re.escape(short)}\b", ast.unparse(right)):
            return True
        losses = losses_of(backward.node)
        if isinstance(node.op, ast.Div | ast.Mult) and _within(section, node) and _feeds(node, losses, backward.node):
            return True
    return False


def _within(section: Section, node: ast.AST) -> bool:
    return any(place is parent for place in section.places for parent in above(node))


def _feeds(node: ast.AST, losses: list[str], backward: ast.AST) -> bool:
    """Whether a division goes into the loss: in its assignment, or in the call of backward."""
    statement = statement_of(node)
    if statement is statement_of(backward):
        return True
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(dotted(t) in losses for t in targets if t is not None)


def _plain_mean(program: Program, backward: Event) -> bool:
    """The loss is computed here by something that averages over the batch: then accumulating changes its scale."""
    base = backward.node.func.value
    given = base.args[0] if isinstance(base, ast.Call) and base.args else base
    text = " ".join(ast.unparse(o) for o in program.origins(given, 4))
    names = re.findall(r"cross_entropy|nll_loss|mse_loss|l1_loss|criterion|loss_fn|loss_func|\.mean\(|model\(", text)
    return bool(names) and "sum" not in text and "reduction" not in text


@rule(
    "scheduler-order",
    "wrong",
    why="Since torch 1.1 the scheduler goes after the optimizer: the other way round, the first value of the "
    "schedule is never used, and torch warns only once.",
    cure="scheduler.step() after optimizer.step().",
    notebook="01",
    section="4. What does a larger batch buy?",
    source=DOCS + "optim.html#how-to-adjust-learning-rate",
    ill=(
        HEAD
        + changed(
            LOOP,
            ("        scheduler.step()\n", ""),
            ("        model.train()\n", "        scheduler.step()  # <-\n        model.train()\n"),
        ),
        HEAD
        + changed(
            LOOP,
            ("        scheduler.step()\n", ""),
            ("            optimizer.step()", "            scheduler.step()  # <-\n            optimizer.step()"),
        ),
    ),
    healthy=(
        HEALTHY,
        HEAD
        + changed(
            LOOP,
            ("        scheduler.step()\n", ""),
            ("        model.train()\n", "        if epoch:\n            scheduler.step()\n        model.train()\n"),
        ),
        changed(
            HEALTHY, ("        scheduler.step()\n", ""), ("optimizer.step()", "optimizer.step(); scheduler.step()")
        ),
    ),
)
def scheduler_order(program: Program, training: Training) -> Iterator[Found]:
    """In some loop the first unconditional step of a torch scheduler, without an epoch, comes before every step."""
    loops = [(s.node, s.events) for s in training.sections] + list(training.loops.items())
    seen = set()
    for _, events in loops:
        first = next((i for i, e in enumerate(events) if e.kind in ("step", "scaler.step")), None)
        for event in events[:first] if first is not None else ():
            fresh = event.kind == "schedule" and not event.when and not event.node.args and not event.node.keywords
            if fresh and event.node not in seen:
                seen.add(event.node)
                yield Found(event.node, _moved_behind(event.node, events[first].node))


def _moved_behind(call: ast.Call, step: ast.AST) -> Change | None:
    """The scheduler's call behind the statement of its own block that holds the optimizer's step."""
    block = statement_of(call).parent
    holder = next((n for n in (step, *above(step)) if isinstance(n, ast.stmt) and n.parent is block), None)
    return moved(call, holder, after=True) if holder is not None else None


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
