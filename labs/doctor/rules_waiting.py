"""Static rules on waiting: a GPU works through a queue, and these calls make the script wait for its end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import Found, Rule, changed, removed, rule
from labs.doctor.rules_steps import losses_of
from labs.doctor.syntax import Program, dotted, function_of, statement_of
from labs.doctor.training_loops import TIMERS, Event, Section, Training

DOCS = "https://docs.pytorch.org/docs/stable/"
CUDA = DOCS + "notes/cuda.html#asynchronous-execution"
HEALTHY = """
import time
import torch
from torch.nn.functional import cross_entropy

def main(loader, model, every):
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        loss = cross_entropy(model(x.cuda()), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % every == 0:
            print(i, loss.item())
"""
TIMED = """
import time
import torch

def measure(model, x):
    model, x = model.cuda().eval(), x.cuda()
    with torch.no_grad():
        for _ in range(10):
            model(x)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(100):
            model(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 100
"""


def _every_step(training: Training, event: Event) -> bool:
    """No test on the way but for a rank or a device."""
    tests = [training.conditions(event)] if event.tests else []
    plain = all(re.search(r"rank|master|main_process|cuda|device|gpu", t) and "%" not in t for t in tests)
    handlers = any(isinstance(t, ast.Constant) for t in event.tests)
    return plain and not handlers


def _uses_gpu(program: Program) -> bool:
    """Whether a GPU is spoken of at all."""
    return program.mentions("cuda", "gpu", "device") or any(
        isinstance(n.value, str) and n.value.startswith("cuda") for n in program.nodes(ast.Constant)
    )


@rule(
    "reads-each-step",
    "look at it",
    why="The value is on the GPU: reading it waits until the GPU has done all that was queued, in every step. It "
    "matters where the GPU then runs dry, with short steps; the measured lines above tell how long each waits.",
    cure="Read it every so many steps, or keep loss.detach() and read all at once at the end of the epoch.",
    notebook="01",
    section="1. What does an article's loop measure?",
    source=CUDA,
    ill=(
        changed(
            HEALTHY,
            ("        if i % every == 0:\n            print(i, loss.item())", "        print(i, loss.item())  # <-"),
        ),
        changed(
            HEALTHY,
            ("        if i % every == 0:\n            print(i, loss.item())", "        seen = loss.cpu()  # <-"),
        ),
        changed(
            HEALTHY,
            ("        if i % every == 0:\n            print(i, loss.item())", "        print(i, loss)  # <-"),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, (".cuda()", "")),
        changed(HEALTHY, ("        if i % every == 0:\n            print(i, loss.item())", "        print(i)")),
    ),
)
def reads_each_step(program: Program, training: Training) -> Iterator[Found]:
    """`.item()`, `.cpu()`, `.tolist()`, `.numpy()`, print(loss) in each pass of a training loop."""
    if not _uses_gpu(program):
        return
    seen = set()
    for section in training.sections:
        losses = {name for e in section.of("backward") for name in losses_of(e.node)}
        for event in section.of("read", "print"):
            if event.kind == "print" and losses.isdisjoint(dotted(a) for a in event.node.args):
                continue
            statement = statement_of(event.node)
            fresh = section.is_loop and not event.loops and statement not in seen
            if fresh and _every_step(training, event) and (event.kind == "print" or _is_tensor(event)):
                seen.add(statement)
                yield Found(event.node)


def _is_tensor(event: Event) -> bool:
    """Not of what is an array or on the CPU for certain."""
    return not re.search(r"np\.|numpy|\.cpu\(\)\.|lens|length", ast.unparse(event.node.func.value))


@rule(
    "empties-cache",
    "costs",
    why="empty_cache() gives memory back to the driver, and waits for the GPU to do it; the next step has to ask "
    "for it again. PyTorch reuses its own cache: the training gets no more memory by it.",
    cure="Leave it out of the loop.",
    notebook="05",
    section="3. What else empties the memory?",
    source=DOCS + "generated/torch.cuda.memory.empty_cache.html",
    ill=changed(HEALTHY, ("        if i %", "        torch.cuda.empty_cache()  # <-\n        if i %")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("print(i, loss.item())", "torch.cuda.empty_cache()")),
        HEALTHY + "    torch.cuda.empty_cache()\n",
    ),
)
def empties_cache(program: Program, training: Training) -> Iterator[Found]:
    """In each pass of a training loop."""
    for section in training.sections:
        for event in section.of("empty_cache"):
            if section.is_loop and _every_step(training, event):
                yield Found(event.node, removed(event.node) if isinstance(event.node.parent, ast.Expr) else None)


@rule(
    "synchronises",
    "costs",
    why="synchronize() waits until the GPU has done everything. Meanwhile nothing new is queued: the GPU is idle "
    "from then on until the next step's first kernel has arrived. A training needs none: what reads a value "
    "waits by itself.",
    cure="Leave it out; to take times, use torch.cuda.Event or the profiler.",
    notebook="01",
    section="1. What does an article's loop measure?",
    source=CUDA,
    ill=changed(HEALTHY, ("        if i %", "        torch.cuda.synchronize()  # <-\n        if i %")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("print(i, loss.item())", "torch.cuda.synchronize()")),
        TIMED,
    ),
)
def synchronises(program: Program, training: Training) -> Iterator[Found]:
    """In each pass of a training loop; if the loop takes times, it may be what they need."""
    for section in training.sections:
        for event in section.of("synchronise"):
            if section.is_loop and _every_step(training, event):
                timed = bool(section.of("clock"))
                alone = isinstance(event.node.parent, ast.Expr)
                yield Found(event.node, removed(event.node) if alone else None, certainty="look at it" if timed else "")


@rule(
    "times-launches",
    "wrong",
    why="Calls return as soon as the GPU has them in its queue: without torch.cuda.synchronize() before the clock "
    "is read, it measures how long Python takes to queue them.",
    cure="torch.cuda.synchronize() before both readings of the clock, or torch.cuda.Event(enable_timing=True).",
    notebook="01",
    section="1. What does an article's loop measure?",
    source=CUDA,
    ill=(
        changed(
            TIMED,
            ("        torch.cuda.synchronize()\n        return (time", "        return (time"),
            ("begun) / 100", "begun) / 100  # <-"),
        ),
        changed(
            HEALTHY,
            ("        loss = cross", "        begun = time.time()\n        loss = cross"),
            ("        if i %", "        took = time.time() - begun  # <-\n        if i %"),
        ),
    ),
    healthy=(
        HEALTHY,
        TIMED,
        changed(TIMED, (".cuda()", ""), ("        torch.cuda.synchronize()\n", "")),
        changed(
            TIMED, ("        torch.cuda.synchronize()\n        return", "        model(x).sum().item()\n        return")
        ),
        changed(HEALTHY, ("    for i,", "    end = time.time()\n    for i,"))
        + "        took = time.time() - end\n        end = time.time()\n",
        changed(
            HEALTHY,
            ("        loss = cross", "        begun = time.time()\n        loss = cross"),
            ("        if i %", "        took = loss.item() + time.time() - begun\n        if i %"),
        ),
    ),
)
def times_launches(program: Program, training: Training) -> Iterator[Found]:
    """`clock() - begun` in one block: between the two a model is called, and nothing waits for the GPU."""
    if not (program.mentions("cuda") or any(str(n.value).startswith("cuda") for n in program.nodes(ast.Constant))):
        return
    for node in program.nodes(ast.BinOp):
        if not isinstance(node.op, ast.Sub) or not _is_clock(program, node.left) or not dotted(node.right):
            continue
        begun = _begun(program, node)
        if begun is None:
            continue
        events = _between(training, begun, node)
        kinds = {e.kind for e in events}
        called = (
            any(e.kind == "call" and e.on.rpartition(".")[2] in training.models for e in events) or "backward" in kinds
        )
        if called and not kinds & {"read", "synchronise", "print", "scaler.step"} and not _waits(events):
            yield Found(node)


def _is_clock(program: Program, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(n in TIMERS for n in program.full(node.func))


def _begun(program: Program, node: ast.BinOp) -> ast.stmt | None:
    """Where this clock was started: in the same block before it, and in no other place."""
    statement, name = statement_of(node), dotted(node.right)
    function = function_of(node)
    starts = [
        n
        for n in node.file.nodes
        if isinstance(n, ast.Assign)
        and function_of(n) is function
        and any(dotted(t) == name for t in n.targets)
        and _is_clock(program, n.value)
    ]
    same = [s for s in starts if s.parent is statement.parent and s.lineno < statement.lineno]
    return same[0] if len(starts) == 1 and same else None


def _between(training: Training, begun: ast.stmt, until: ast.AST) -> list[Event]:
    blocks = (getattr(begun.parent, part, []) for part in ("body", "orelse", "finalbody"))
    block = next(b for b in blocks if begun in b)
    last = statement_of(until)
    section = Section(begun.parent, [])
    part = block[block.index(begun) + 1 : block.index(last) + 1] if last in block else []
    holder = ast.Module(body=part, type_ignores=[])
    section.events = training.events(holder)
    return section.events


def _waits(events: list[Event]) -> bool:
    """What may wait without our seeing it: a call of something unknown, a collective, a value as a float."""
    words = r"item|sync|wait|barrier|elapsed|reduce|float|int|isfinite|isnan|step|meter|log|save|generate|append|update"
    return any(e.kind == "call" and re.search(words, e.on.rpartition(".")[2]) for e in events)


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
