"""Static rules on half precision: autocast and the GradScaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from labs.doctor.hits import (
    Change,
    Found,
    Rule,
    changed,
    inserted,
    moved,
    replaced,
    rule,
    source_of,
    with_argument,
)
from labs.doctor.syntax import (
    Function,
    Program,
    above,
    constant,
    dotted,
    keyword,
    last,
    method,
    open_ended,
)
from labs.doctor.training_loops import Event, Section, Training, together

AMP = "https://docs.pytorch.org/docs/stable/amp.html"
EXAMPLES = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
SCALER, FORMATS = "2. What does the scaler do?", "1. What do fewer bits leave?"
OLD = {"torch.cuda.amp": "cuda", "torch.cpu.amp": "cpu"}
HEAD = """
import torch
from torch import nn

def train(model, loader, epochs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
"""
STEP = """
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""
HEALTHY = HEAD + STEP
WITHOUT = HEAD.replace('    scaler = torch.amp.GradScaler("cuda")\n', "")


def _without(line: str, mark: str) -> str:
    """The healthy step without a line, and another one marked."""
    return HEAD + STEP.replace(f"            {line}\n", "").replace(mark, f"{mark}  # <-")


def autocasts(program: Program) -> list[ast.Call]:
    """Calls of autocast, old and new."""
    return program.torch_calls("autocast")


def dtype_of(program: Program, call: ast.Call) -> str:
    """What an autocast computes in: "float16", "bfloat16", "" if that is not certain."""
    old = any(n.startswith(tuple(OLD)) for n in program.full(call.func))
    given = keyword(call, "dtype", 1)
    if open_ended(call):
        return ""
    if given is not None:
        names = {last(n) for o in program.origins(given) for n in program.full(o)} & {
            "float16",
            "half",
            "bfloat16",
            "float32",
        }
        unknown = [o for o in program.origins(given) if not dotted(o) and not isinstance(o, ast.IfExp)]
        plain = dotted(given) and len(names) == 1 and not unknown
        return names.pop().replace("half", "float16") if plain else ""
    kind = "cuda" if old else constant(keyword(call, "device_type", 0))
    return {"cuda": "float16"}.get(kind, "") if not any("cpu" in n for n in program.full(call.func)) else ""


def on(program: Program, call: ast.Call) -> bool:
    """Whether nothing can switch it off: no `enabled`, or True."""
    old = any(n.startswith(tuple(OLD)) for n in program.full(call.func))
    given = keyword(call, "enabled", 0 if old and method(call) == "autocast" else None)
    return (given is None or constant(given) is True) and not open_ended(call)


@rule(
    "amp-old",
    "outdated",
    why="torch.cuda.amp and torch.cpu.amp warn with a FutureWarning and are to go; torch.amp is the same for every "
    "device, whose name is then the first argument.",
    cure='Take it from torch.amp, with the device "cuda" as its first argument.',
    notebook="04",
    section=SCALER,
    source=AMP,
    ill=(
        "import torch\nscaler = torch.cuda.amp.GradScaler()  # <-\n",
        (
            "import torch as t\n"
            "def f(m, x):\n"
            "    with t.cuda.amp.autocast(dtype=t.bfloat16):  # <-\n"
            "        return m(x)\n"
        ),
        (
            "import torch\n"
            "from torch.cuda.amp import autocast as ac\n"
            "def f(m, x):\n"
            "    with ac(False):  # <-\n"
            "        return m(x)\n"
        ),
        "from torch.cuda import amp\nscaler = amp.GradScaler(enabled=False)  # <-\n",
    ),
    healthy=(
        'import torch\nscaler = torch.amp.GradScaler("cuda")\n',
        (
            "try:\n"
            "    from torch.amp import GradScaler\n"
            "except ImportError:\n"
            "    from torch.cuda.amp import GradScaler\n"
            "scaler = GradScaler()\n"
        ),
        (
            "import torch\n"
            'if hasattr(torch.amp, "GradScaler"):\n'
            '    scaler = torch.amp.GradScaler("cuda")\n'
            "else:\n"
            "    scaler = torch.cuda.amp.GradScaler()\n"
        ),
        "from mine import autocast\nwith autocast():\n    pass\n",
    ),
)
def amp_old(program: Program, training: Training) -> Iterator[Found]:
    """A call or decorator whose name can only be the old one, and that is no fallback for an old torch."""
    for node in program.nodes(ast.Name, ast.Attribute):
        call = node.parent if isinstance(node.parent, ast.Call) and node.parent.func is node else None
        decorates = isinstance(node.parent, Function) and node in node.parent.decorator_list
        names = program.full(node)
        if not (call or decorates) or not names or not all(n.startswith(tuple(OLD)) for n in names):
            continue
        if last(names[0]) not in ("autocast", "GradScaler", "custom_fwd", "custom_bwd") or _is_fallback(program, node):
            continue
        device = next(OLD[o] for o in OLD if names[0].startswith(o))
        torch = next((local for local, fulls in node.file.names.items() if fulls == ["torch"] * len(fulls)), "")
        change = _renamed(call, f"{torch}.amp.{last(names[0])}", device) if call is not None and torch else None
        yield Found(node, change)


def _renamed(call: ast.Call, new: str, device: str) -> Change | None:
    if method(call) in ("custom_fwd", "custom_bwd"):
        return None
    given = [source_of(a) for a in call.args]
    if method(call) == "autocast" or new.endswith("autocast"):
        given = [f"{k}={v}" for k, v in zip(("enabled", "dtype", "cache_enabled"), given, strict=False)]
    given += [source_of(k) for k in call.keywords]
    return replaced(call, f"{new}({', '.join([repr(device).replace(chr(39), chr(34)), *given])})")


def _is_fallback(program: Program, node: ast.AST) -> bool:
    """In an except, or in a branch whose other branch takes the new one."""
    for parent in above(node):
        if isinstance(parent, ast.ExceptHandler):
            return True
        if isinstance(parent, ast.If | ast.IfExp) and "torch.amp." in ast.unparse(parent):
            return True
    return False


@rule(
    "scaler-missing",
    "wrong",
    why="FP16 has no numbers below 6e-8: gradients that are smaller become 0, and layers stop learning without any "
    "error. A GradScaler multiplies the loss so that they stay above.",
    cure='Scale the loss: scaler = torch.amp.GradScaler("cuda"); scaler.scale(loss).backward(); scaler.step(optimizer);'
    " scaler.update(). Or take dtype=torch.bfloat16, which needs none.",
    notebook="04",
    section=SCALER,
    source=AMP + "#gradient-scaling",
    ill=(
        changed(WITHOUT, ("float16):", "float16):  # <-"))
        + "            loss.backward()\n            optimizer.step()\n",
        changed(WITHOUT, ('"cuda", dtype=torch.float16):', '"cuda"):  # <-'))
        + "            loss.backward()\n            optimizer.step()\n",
    ),
    healthy=(
        HEALTHY,
        changed(WITHOUT, ("float16", "bfloat16")) + "            loss.backward()\n            optimizer.step()\n",
        changed(WITHOUT, ("dtype=torch.float16", "enabled=False"))
        + "            loss.backward()\n            optimizer.step()\n",
        (
            "import torch\n"
            "def predict(model, x):\n"
            "    with torch.no_grad(), torch.autocast('cuda'):\n"
            "        return model(x)\n"
        ),
    ),
)
def scaler_missing(program: Program, training: Training) -> Iterator[Found]:
    """FP16 for certain, around what is then differentiated, in a program that knows no scaler at all."""
    if any("scaler" in w.lower() or "loss_scale" in w.lower() for w in program.words):
        return
    if program.imports("apex", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "ignite"):
        return
    for call in autocasts(program):
        if dtype_of(program, call) != "float16" or not on(program, call):
            continue
        if any(_holds(section, call) for section in training.sections):
            yield Found(call, None)


def _holds(section: Section, node: ast.AST) -> bool:
    return any(place is parent for place in section.places for parent in above(node))


@rule(
    "scaler-needless",
    "costs",
    why="BF16 has the range of FP32, so there is nothing to scale. An enabled scaler still looks through all gradients "
    "in each step, and its step() waits for the GPU to read whether one was infinite.",
    cure="Leave the scaler out, or give it enabled=False.",
    notebook="04",
    section=FORMATS,
    source=AMP + "#gradient-scaling",
    ill=changed(HEALTHY, ("torch.float16", "torch.bfloat16"), ('GradScaler("cuda")', 'GradScaler("cuda")  # <-')),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("torch.float16", "torch.bfloat16"), ('("cuda")', '("cuda", enabled=False)')),
        changed(HEALTHY, ("dtype=torch.float16", "dtype=torch.float16 if old else torch.bfloat16")).replace(
            "epochs):", "epochs, old):", 1
        ),
    ),
)
def scaler_needless(program: Program, training: Training) -> Iterator[Found]:
    """Every autocast is BF16 for certain, and the scaler cannot be off."""
    kinds = {dtype_of(program, c) for c in autocasts(program)}
    if kinds == {"bfloat16"}:
        for call in program.torch_calls("GradScaler"):
            if on(program, call):
                old = any(n.startswith(tuple(OLD)) for n in program.full(call.func))
                yield Found(call, None if old else with_argument(call, "enabled", "False"))


def _scaled(section: Section) -> list[Event]:
    return [e for e in section.of("backward") if e.scaled]


@rule(
    "clip-before-unscale",
    "wrong",
    why="The gradients are still multiplied by the scale (65,536 at first): clipping them to a norm of 1 shrinks the "
    "true gradients by as much, and differently whenever the scale changes.",
    cure="Call scaler.unscale_(optimizer) between backward and clipping.",
    notebook="04",
    section=SCALER,
    source=EXAMPLES + "#gradient-clipping",
    ill=(
        _without("scaler.unscale_(optimizer)", "clip_grad_norm_(model.parameters(), 1.0)"),
        HEAD
        + changed(
            STEP,
            ("            scaler.unscale_(optimizer)\n", ""),
            (
                "clip_grad_norm_(model.parameters(), 1.0)\n",
                "clip_grad_norm_(model.parameters(), 1.0)  # <-\n            scaler.unscale_(optimizer)\n",
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("            scaler.unscale_(optimizer)\n", "            scaler.unscale_(self.o)\n")),
    ),
)
def clip_before_unscale(program: Program, training: Training) -> Iterator[Found]:
    """A scaled backward, then a clip, and no unscale_ between them."""
    for section in training.sections:
        order = section.events
        for b in _scaled(section):
            for clip in section.of("clip"):
                between = order[order.index(b) : order.index(clip)]
                if (
                    not between
                    or not together(b, clip)
                    or any(e.kind == "unscale" and together(e, clip) for e in between)
                ):
                    continue
                late = [e for e in section.of("unscale") if order.index(e) > order.index(clip)]
                name = dotted(late[0].node.func.value) if late else _scaler_name(b)
                optimizer = next((_argument(e.node) for e in section.of("scaler.step") if _argument(e.node)), "")
                if late and late[0].node.file is clip.node.file:
                    yield Found(clip.node, moved(late[0].node, clip.node))
                elif name and optimizer:
                    yield Found(clip.node, inserted(clip.node, f"{name}.unscale_({optimizer})"))
                else:
                    yield Found(clip.node)


def _argument(call: ast.Call) -> str:
    return dotted(call.args[0]) if call.args else ""


def _scaler_name(backward: Event) -> str:
    base = backward.node.func.value
    return dotted(base.func.value) if isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) else ""


@rule(
    "clip-order",
    "wrong",
    why="Clipping after the step, or before backward, changes gradients that nobody uses: the step takes them as they "
    "are.",
    cure="Clip between backward (with a scaler: unscale_) and the step.",
    notebook="04",
    section=SCALER,
    source=EXAMPLES + "#gradient-clipping",
    ill=(
        HEAD
        + "            scaler.scale(loss).backward()\n            scaler.unscale_(optimizer)\n"
        + "            scaler.step(optimizer)\n            scaler.update()\n"
        + "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-\n"
    ),
    healthy=HEALTHY,
)
def clip_order(program: Program, training: Training) -> Iterator[Found]:
    """In a pass with one backward, one step and one clip: the clip is not between the other two."""
    for section in training.sections:
        kinds = section.of("backward", "step", "scaler.step", "clip")
        single = len(section.of("backward")) == len(section.of("step", "scaler.step")) == len(section.of("clip")) == 1
        after = [(a.kind, b.kind) for a, b in zip(kinds, [*kinds[1:], *kinds[:1]], strict=True)]  # round and round
        if single and ("backward", "clip") not in after and together(*kinds):
            clip, step = section.of("clip")[0].node, section.of("step", "scaler.step")[0].node
            yield Found(clip, moved(clip, step) if clip.file is step.file else None)


OVERFLOW = (
    "unscale_() has divided the gradients, but a step whose gradients have overflowed has to be left out: "
    "does that, optimizer.step() writes infinities into the weights."
)


@rule(
    "scaler-step-missing",
    "wrong",
    why="The loss was scaled, so the gradients are too large by the scale; optimizer.step() takes them as they are, "
    "infinities among them. scaler.step(optimizer) divides first and leaves out a step that overflowed.",
    cure="scaler.step(optimizer) in place of optimizer.step().",
    notebook="04",
    section=SCALER,
    source=EXAMPLES,
    ill=HEAD
    + "            scaler.scale(loss).backward()\n            optimizer.step()  # <-\n            scaler.update()\n",
    healthy=(
        HEALTHY,
        changed(HEAD, ("train(model", "train(amp, model"))
        + (
            "            if amp:\n"
            "                scaler.scale(loss).backward()\n"
            "                scaler.step(optimizer)\n"
            "                scaler.update()\n"
            "            else:\n"
            "                loss.backward()\n"
            "                optimizer.step()\n"
        ),
    ),
)
def scaler_step_missing(program: Program, training: Training) -> Iterator[Found]:
    """A scaled backward and a step of the optimizer itself, and no scaler.step at all in the loop."""
    for section in training.sections:
        if section.of("scaler.step"):
            continue
        why = "" if not section.of("unscale") else OVERFLOW
        for step in section.of("step"):
            before = [b for b in _scaled(section) if section.events.index(b) < section.events.index(step)]
            if before and together(before[-1], step):
                name, base = _scaler_name(before[-1]), dotted(step.node.func.value)
                plain = name and base and not step.node.args and step.node.file is before[-1].node.file
                yield Found(step.node, replaced(step.node, f"{name}.step({base})") if plain else None, why)


@rule(
    "scaler-update",
    "wrong",
    why="update() halves the scale after an overflow, lets it grow again, and readies the scaler for the next step. "
    "Without it the next step() raises a RuntimeError; before step() it makes step() divide the gradients once more, "
    "or raises an AssertionError.",
    cure="scaler.update() once per step, after scaler.step(optimizer).",
    notebook="04",
    section=SCALER,
    source=EXAMPLES,
    ill=(
        HEAD + changed(STEP, ("            scaler.update()\n", ""), ("step(optimizer)", "step(optimizer)  # <-")),
        HEAD
        + changed(
            STEP,
            ("            scaler.update()\n", ""),
            (
                "            scaler.step(optimizer)",
                "            scaler.update()\n            scaler.step(optimizer)  # <-",
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        HEAD + changed(STEP, ("scaler.update()", "if epoch >= 0:\n                scaler.update()")),
    ),
)
def scaler_update(program: Program, training: Training) -> Iterator[Found]:
    """The last scaler.step of a pass has no update after it."""
    for section in training.sections:
        steps = section.of("scaler.step")
        if not steps or (not section.of("update") and _updates_elsewhere(program)):
            continue
        final, order = steps[-1], section.events
        if any(order.index(u) > order.index(final) for u in section.of("update")):
            continue
        name = dotted(final.node.func.value)
        early = [u for u in section.of("update") if together(u, final) and u.node.file is final.node.file]
        if early:
            yield Found(final.node, moved(early[-1].node, final.node, after=True))
        elif name:
            yield Found(final.node, inserted(final.node, f"{name}.update()", after=True))


def _updates_elsewhere(program: Program) -> bool:
    return any("scaler" in dotted(c.func).lower() for c in program.named("update"))


@rule(
    "unscale-late",
    "wrong",
    why="scaler.step() has divided the gradients already and has taken its step: unscale_() after it raises a "
    "RuntimeError, and comes too late for what it is meant for.",
    cure="scaler.unscale_(optimizer) before clipping and before scaler.step(optimizer).",
    notebook="04",
    section=SCALER,
    source=EXAMPLES + "#working-with-unscaled-gradients",
    ill=HEAD
    + (
        "            scaler.scale(loss).backward()\n"
        "            scaler.step(optimizer)\n"
        "            scaler.unscale_(optimizer)  # <-\n"
        "            scaler.update()\n"
    ),
    healthy=HEALTHY,
)
def unscale_late(program: Program, training: Training) -> Iterator[Found]:
    """Of the same optimizer: step, then unscale_, and no update or backward between them."""
    for section in training.sections:
        done: list[Event] = []
        for event in section.events:
            if event.kind in ("update", "backward"):
                done = [] if event.kind == "update" else done
            elif event.kind == "scaler.step":
                done.append(event)
            elif event.kind == "unscale":
                for step in done:
                    if _argument(step.node) == _argument(event.node) and together(step, event):
                        same = step.node.file is event.node.file
                        yield Found(event.node, moved(event.node, step.node) if same else None)


@rule(
    "backward-in-autocast",
    "look at it",
    why="Backward takes each operation's format from forward, so that it needs no autocast; torch's documentation "
    "advises against it, for custom functions and second derivatives would then compute in half precision.",
    cure="Leave the `with` before backward: only forward and the loss belong in it.",
    notebook="04",
    section="3. Which operations change?",
    source=AMP + "#torch.autocast",
    ill=HEAD
    + changed(
        STEP,
        (
            "            scaler.scale(loss).backward()",
            (
                "            with torch.autocast('cuda', dtype=torch.float16):\n"
                "                loss = nn.functional.cross_entropy(model(x), y)\n"
                "                scaler.scale(loss).backward()  # <-"
            ),
        ),
    ),
    healthy=HEALTHY,
)
def backward_in_autocast(program: Program, training: Training) -> Iterator[Found]:
    """In the `with` itself, not in a function that it calls."""
    for call in program.named("backward"):
        if training.kind(call) != "backward":
            continue
        for parent in above(call):
            if isinstance(parent, Function):
                break
            if isinstance(parent, ast.With) and any(
                isinstance(o, ast.Call) and program.is_torch(o.func, "autocast") and on(program, o)
                for item in parent.items
                for o in program.origins(item.context_expr, 2)
            ):
                yield Found(call)
                break


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
