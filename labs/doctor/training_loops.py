"""The loops of a program that train, as the calls of one pass in the order in which they are made.

Calls of own functions are followed: what they do is part of the loop that calls them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from labs.doctor import syntax
from labs.doctor.syntax import Function, Loop, Program, dotted, last, method

MOST_EVENTS = 4000
"""Of one loop; what comes later is not looked at."""
DEPTH = 6
"""Own functions within own functions that are followed."""
READS = ("item", "tolist", "cpu", "numpy")
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
TIMERS = ("time.time", "time.perf_counter", "time.monotonic", "timeit.default_timer")


@dataclass(frozen=True, eq=False)
class Event:
    """A call in a loop's pass."""

    kind: str
    """zero, backward, unscale, clip, step (an optimizer's), scaler.step, update, schedule, eval, train, read (waits
    for a tensor's value), print, save, synchronise, empty_cache, clock, call (of no own function)."""
    on: str
    """What it is called on, in the words of the loop's own function: "self.optimizer"."""
    node: ast.AST
    when: tuple[tuple[str, bool], ...]
    """Conditions on the way from the loop to it: test, and what it has to be."""
    tests: tuple[ast.expr, ...]
    """The same as syntax."""
    loops: tuple[ast.AST, ...]
    """Loops within the loop that it stands in."""
    functions: tuple[Function, ...]
    """Own functions that lead to it."""
    scaled: bool = False
    """Of backward: on what a GradScaler has scaled."""


def together(*events: Event) -> bool:
    """Whether one pass can hold them all: no test has to be true for one and false for another."""
    tests = {when for event in events for when in event.when}
    return not any((test, not wanted) in tests for test, wanted in tests)


@dataclass
class Section:
    """A loop that trains, the innermost one that has both backward and step; or a function that has both."""

    node: ast.AST
    events: list[Event]
    within: list[ast.AST] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        """In their order."""
        return [e for e in self.events if e.kind in kinds]

    @property
    def is_loop(self) -> bool:
        """Else it is a function."""
        return isinstance(self.node, Loop)

    @property
    def places(self) -> list[ast.AST]:
        """The loop, and own functions that it calls."""
        return [self.node, *dict.fromkeys(f for e in self.events for f in e.functions)]


class Walker:
    """Lists the events of a block of statements."""

    def __init__(self, training: Training) -> None:
        self.training, self.program, self.events = training, training.program, []

    def block(self, statements: list[ast.stmt], at: At) -> None:
        for statement in statements:
            if len(self.events) > MOST_EVENTS:
                return
            self.statement(statement, at)
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                at = at.where(statement.test, False)  # `if ...: continue`: what follows needs the opposite

    def statement(self, node: ast.stmt, at: At) -> None:
        if isinstance(node, Function | ast.ClassDef):
            return
        if isinstance(node, ast.If):
            self.expression(node.test, at)
            self.block(node.body, at.where(node.test, True))
            self.block(node.orelse, at.where(node.test, False))
        elif isinstance(node, Loop):
            self.expression(node.test if isinstance(node, ast.While) else node.iter, at)
            self.block(node.body, at.inside(node))
            self.block(node.orelse, at)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self.expression(item.context_expr, at)
            self.block(node.body, at)
        elif isinstance(node, ast.Try):
            self.block(node.body, at)
            for handler in node.handlers:
                self.block(handler.body, at.where(ast.Constant(f"except {id(handler)}"), True))
            self.block(node.orelse, at)
            self.block(node.finalbody, at)
        elif isinstance(node, ast.Match):
            self.expression(node.subject, at)
            for case in node.cases:
                self.block(case.body, at.where(ast.Constant(f"case {id(case)}"), True))
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child, at)
            if isinstance(node, ast.Assign | ast.Delete) and any(_is_grad(t) for t in node.targets):
                self.add("zero", "", node, at)  # p.grad = None

    def expression(self, node: ast.AST, at: At) -> None:
        """Its calls."""
        for call in self.training.calls_in(node):
            self.call(call, at)

    def call(self, node: ast.Call, at: At) -> None:
        kind = self.training.kind_of(node)
        if kind in ("step", "scaler.step"):
            for given in node.args:  # optimizer.step(closure)
                if isinstance(given, ast.Name) and isinstance(found := self.program.definition(given), Function):
                    self.follow(found, node, at)
        on = at.name(dotted(node.func.value)) if isinstance(node.func, ast.Attribute) else ""
        targets = [] if kind and kind != "schedule" else self.training.targets(node)
        if not targets and not kind and any(n in TIMERS for n in self.program.full(node.func)):
            kind = "clock"
        if kind:
            self.add(kind, on, node, at)
        elif not targets:
            self.add("call", at.name(dotted(node.func)), node, at)
        for function in targets[:3]:
            if function in self.training.matter:
                self.follow(function, node, at)

    def follow(self, function: Function, call: ast.Call, at: At) -> None:
        if function in at.functions or len(at.functions) >= DEPTH or len(self.events) > MOST_EVENTS:
            return
        given = {name: dotted(value) for name, value in syntax.arguments(function, call).items()}
        if isinstance(call.func, ast.Attribute):
            given["self"] = dotted(call.func.value)
        names = {name: at.name(text) for name, text in given.items() if text}
        self.block(function.body, At(at.when, at.tests, at.loops, (*at.functions, function), names))

    def add(self, kind: str, on: str, node: ast.AST, at: At) -> None:
        scaled = kind == "backward" and self.training.is_scaled(node)
        self.events.append(Event(kind, on, node, at.when, at.tests, at.loops, at.functions, scaled))


@dataclass(frozen=True)
class At:
    """Where a walk is."""

    when: tuple = ()
    tests: tuple = ()
    loops: tuple = ()
    functions: tuple = ()
    names: dict[str, str] = field(default_factory=dict)
    """Of the function's parameters: what the caller calls them."""

    def where(self, test: ast.expr, wanted: bool) -> At:
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, not wanted
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.IsNot | ast.NotEq):
            opposite = ast.Is() if isinstance(test.ops[0], ast.IsNot) else ast.Eq()
            text, wanted = ast.unparse(ast.Compare(test.left, [opposite], test.comparators)), not wanted
        else:
            text = ast.unparse(test)
        return At((*self.when, (text, wanted)), (*self.tests, test), self.loops, self.functions, self.names)

    def inside(self, loop: ast.AST) -> At:
        return At(self.when, self.tests, (*self.loops, loop), self.functions, self.names)

    def name(self, text: str) -> str:
        head, _, rest = text.partition(".")
        inside = self.functions[-1] if self.functions else None
        if head in self.names:
            head = self.names[head]
        elif inside is not None and (head in syntax.parameters(inside) or (inside, head) in inside.file.assigned):
            head = f"{head} of {inside.name}"  # not what its caller calls by the same name
        return ".".join(filter(None, (head, rest)))


def _stem(node: ast.AST) -> ast.AST:
    """ "model" of `model.cuda().eval()`."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Continue | ast.Return | ast.Break | ast.Raise)


def _is_grad(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "grad"


class Training:
    """What of a program trains."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._kinds: dict[ast.Call, str] = {}
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._targets: dict[ast.Call, list[Function]] = {}

    def kind_of(self, call: ast.Call) -> str:
        """`kind`, found once."""
        if call not in self._kinds:
            self._kinds[call] = self.kind(call)
        return self._kinds[call]

    def targets(self, call: ast.Call) -> list[Function]:
        """`program.targets`, found once."""
        if call not in self._targets:
            self._targets[call] = self.program.targets(call)
        return self._targets[call]

    def calls_in(self, node: ast.AST) -> list[ast.Call]:
        """Of an expression, in the order in which they are made: what a call needs, then the call."""
        if node not in self._calls:
            inner = [] if isinstance(node, ast.Lambda) else list(ast.iter_child_nodes(node))
            found = [call for child in inner for call in self.calls_in(child)]
            self._calls[node] = [*found, node] if isinstance(node, ast.Call) else found
        return self._calls[node]

    @cached_property
    def path(self) -> set[ast.AST | None]:
        """Functions that lead to a training loop or that it calls, methods of their classes; None: code of a file."""
        found: set[ast.AST | None] = {None}
        for section in self.sections:
            newest = {syntax.function_of(section.node), *section.places} - {None}
            while newest:
                found |= newest
                calls = (c for f in newest for c in self.program.callers.get(f, ()))
                newest = {syntax.function_of(c) for c in calls} - found
        owners = {f.parent for f in found if f is not None and isinstance(f.parent, ast.ClassDef)}
        return found | {m for owner in owners for m in owner.body if isinstance(m, Function)}

    @cached_property
    def leads(self) -> set[Function]:
        """Own functions in which something is differentiated or stepped, and all that call them."""
        return self._callers_of(lambda call: self.kind_of(call) in ("backward", "step", "scaler.step"), 99)

    @cached_property
    def matter(self) -> set[Function]:
        """Own functions that hold any kind of event, or call one that does."""
        clocks = {last(n) for n in TIMERS}
        return self.leads | self._callers_of(lambda call: bool(self.kind_of(call)) or method(call) in clocks, 3)

    def _callers_of(self, wanted: Callable[[ast.Call], bool], depth: int) -> set[Function]:
        found = {f for call in self.program.calls if wanted(call) and (f := syntax.function_of(call)) is not None}
        newest = found
        while newest and depth:
            calls = (c for f in newest for c in self.program.callers.get(f, ()))
            newest = {f for c in calls if (f := syntax.function_of(c)) is not None} - found
            found, depth = found | newest, depth - 1
        return found

    # Roles, by what a name was assigned or, where that is not to be seen, by the name itself

    def is_optimizer(self, node: ast.AST) -> bool:
        """Of torch.optim, or so called."""
        if re.search(r"sched|scaler", dotted(node), re.IGNORECASE):
            return False
        calls = [o for o in self.program.origins(node) if isinstance(o, ast.Call)]
        if any(n.startswith("torch.optim.") and "sched" not in n for o in calls for n in self.program.full(o.func)):
            return True
        return re.search(r"optim|(^|_)opt(_|\d|$)", last(dotted(node)), re.IGNORECASE) is not None

    def is_scaler(self, node: ast.AST) -> bool:
        """A GradScaler."""
        known = [o for o in self.program.origins(node) if isinstance(o, ast.Call)]
        if any(self.program.is_torch(o.func, "GradScaler") for o in known):
            return True
        return (
            not known and re.search(r"^_?(grad_?|amp_?|fp16_?)?scaler$", last(dotted(node)), re.IGNORECASE) is not None
        )

    def is_scheduler(self, node: ast.AST) -> bool:
        """Of torch.optim.lr_scheduler, as far as is known."""
        calls = [o for o in self.program.origins(node) if isinstance(o, ast.Call)]
        return any("torch.optim.lr_scheduler." in n for o in calls for n in self.program.full(o.func))

    @cached_property
    def models(self) -> set[str]:
        """Last names of what has parameters: `.parameters()`, `.eval()` or `.train()` is called on it."""
        calls = self.program.named("parameters", "eval", "train", "state_dict", "named_parameters")
        names = {last(dotted(_stem(c))) for c in calls if isinstance(c.func, ast.Attribute)}
        return {n for n in names if n and not re.search(r"optim|sched|scaler|^opt$|^self$|meter", n, re.IGNORECASE)}

    def kind(self, call: ast.Call) -> str:
        """Of an event; "" if it is no kind that matters."""
        name, func = method(call), call.func
        base = func.value if isinstance(func, ast.Attribute) else None
        if name == "backward":
            return "backward" if base is not None else ""
        if name == "zero_grad":
            return "zero"
        if name in CLIPS:
            return "clip"
        if name in READS and base is not None and not call.args:
            return "read"
        if name == "print" and base is None:
            return "print"
        if name == "save" and self.program.is_torch(func, "save"):
            return "save"
        if name in ("synchronize", "empty_cache") and self.program.is_torch(func, name):
            return {"synchronize": "synchronise"}.get(name, name)
        if base is None:
            return ""
        if name in ("eval", "train") and len(call.args) <= 1 and dotted(base) != "self":
            wanted = syntax.constant(syntax.keyword(call, "mode", 0)) is not False
            model = isinstance(self.program.definition(func), Function)
            return "" if model else "train" if name == "train" and wanted else "eval"
        if name == "unscale_":
            return "unscale"
        if name == "update" and self.is_scaler(base):
            return "update"
        if name == "step":
            if self.is_scaler(base):
                return "scaler.step"
            if self.is_scheduler(base):
                return "schedule"
            return "step" if self.is_optimizer(base) else ""
        return ""

    def is_scaled(self, call: ast.Call) -> bool:
        """Of `scaler.scale(loss).backward()`, or of what was assigned from scale."""
        origins = self.program.origins(call.func.value, 2) if isinstance(call.func, ast.Attribute) else []
        return any(
            isinstance(o, ast.Call) and method(o) == "scale" and self.is_scaler(o.func.value)
            for o in origins
            if isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute)
        )

    # Loops

    def events(self, node: ast.AST) -> list[Event]:
        """Of a loop's pass, or of a function."""
        walker = Walker(self)
        walker.block(node.body, At())
        return walker.events

    @cached_property
    def loops(self) -> dict[ast.AST, list[Event]]:
        """All loops that lead to a backward or a step, with their events."""
        found, wanted = {}, ("backward", "step", "scaler.step")
        leading = [c for f in self.leads for c in self.program.callers.get(f, ())]
        leading += [c for c in self.program.calls if self.kind_of(c) in wanted]
        for node in dict.fromkeys(n for c in leading for n in syntax.above(c) if isinstance(n, Loop)):
            events = self.events(node)
            if any(e.kind in ("backward", "step", "scaler.step") for e in events):
                found[node] = events
        return found

    @cached_property
    def sections(self) -> list[Section]:
        """What trains: innermost loops with backward and step, then functions that no such loop leads to."""
        found: list[Section] = []
        for node, events in self.loops.items():
            inner = dict.fromkeys(loop for e in events for loop in e.loops)
            if _trains(events) and not any(_trains([e for e in events if loop in e.loops]) for loop in inner):
                found.append(Section(node, events))
        covered = {f for s in found for f in s.places} | {
            f for es in self.loops.values() for e in es for f in e.functions
        }
        for node in self.leads:
            if node not in covered and not any(n in self.loops for n in ast.walk(node)):
                events = self.events(node)
                if _trains(events) and not any(node is not f and f in covered for e in events for f in e.functions):
                    found.append(Section(node, events))
        return found

    def outer_loops(self, section: Section) -> Iterator[ast.AST]:
        """Loops that lead to it: over epochs."""
        for node, events in self.loops.items():
            if node is not section.node and (
                any(section.node in e.loops for e in events)
                or any(section.node is f for e in events for f in e.functions)
                or any(section.node is n for n in ast.walk(node))
            ):
                yield node

    def conditions(self, event: Event) -> str:
        """The tests on the way to it, with what their names were assigned: in words, to look for a word in."""
        found = [ast.unparse(t) for t in event.tests]
        for test in event.tests:
            for name in ast.walk(test):
                if isinstance(name, ast.Name | ast.Attribute) and hasattr(name, "file"):
                    found += [ast.unparse(o) for o in self.program.origins(name, 3)[1:]]
        return " ".join(found)


def _trains(events: list[Event]) -> bool:
    kinds = {e.kind for e in events}
    return "backward" in kinds and bool(kinds & {"step", "scaler.step"})
