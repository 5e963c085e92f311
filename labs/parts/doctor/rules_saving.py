"""Static rules on saving: by whom, how often, and what is left when a save is interrupted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.parts.doctor.hits import Change, Found, Rule, changed, inserted, replaced, rule, source_of
from labs.parts.doctor.rules_ranks import HEALTHY, groups, managed, wraps
from labs.parts.doctor.syntax import Function, Loop, Program, above, dotted, function_of, keyword, method
from labs.parts.doctor.training_loops import Training

RANKS = (
    r"rank|master|is_main|main_process|world_size|primary|chief|leader|is_first|coordinator"
    r"|(gpu|device)(_id)?\s*==|==\s*0"
)
"""A test that has one of these asks which rank this is."""


@rule(
    "save-all-ranks",
    "wrong",
    why="Every rank writes the same file at the same time: the bytes of several writers can mix, and a network disk "
    "gets n times the load.",
    cure="Save by one rank: `if dist.get_rank() == 0:`. With a barrier only if the others read the file.",
    notebook="05",
    section="5. What if a rank dies?",
    source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints",
    ill=changed(
        HEALTHY, ("    if rank == 0:\n        torch.save", "    torch.save"), ('"weights.pt")', '"weights.pt")  # <-')
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("    if rank == 0:\n        torch.save", "    torch.save"),
            ('"weights.pt"', 'f"weights-{rank}.pt"'),
        ),
        changed(
            HEALTHY,
            ("    if rank == 0:\n        torch.save", ("    first = rank == 0\n    if first:\n        torch.save")),
        ),
        changed(HEALTHY, ("    if rank == 0:\n        torch.save(", "    if rank == 0:\n        write("))
        + ("\ndef write(state, path):\n    torch.save(state, path)\n"),
        changed(HEALTHY, ("    if rank == 0:\n        torch.save(", "    write(rank, "))
        + ("\ndef write(rank, state, path):\n    if rank:\n        return\n    torch.save(state, path)\n"),
    ),
)
def save_all_ranks(program: Program, training: Training) -> Iterator[Found]:
    """No test for a rank on any way to torch.save, no rank in the file's name."""
    if (
        not groups(program)
        or not wraps(program)
        or managed(program)
        or program.mentions("fully_shard", "FullyShardedDataParallel")
    ):
        return
    for call in program.torch_calls("save"):
        if any(n != "torch.save" for n in program.full(call.func)) or not _reached_by_all(program, call):
            continue
        target = keyword(call, "f", 1)
        if target is None or re.search(
            r"rank|Bytes|buffer|gpu", " ".join(ast.unparse(o) for o in program.origins(target))
        ):
            continue
        yield Found(call, _by_rank_0(call))


def _by_rank_0(call: ast.Call) -> Change | None:
    dist = next((local for local, full in call.file.names.items() if "torch.distributed" in full), "")
    if not dist or not isinstance(call.parent, ast.Expr) or call.lineno != call.end_lineno:
        return None
    indent = " " * (call.parent.col_offset + 4)
    return replaced(call.parent, f"if {dist}.get_rank() == 0:\n{indent}{source_of(call)}")


def _reached_by_all(program: Program, node: ast.AST, depth: int = 4) -> bool:
    """Whether some way to it has no test for a rank; a function that nobody calls by name is not reached."""
    if _guarded(program, node):
        return False
    function = function_of(node)
    if function is None or not depth:
        return function is None
    calls = program.callers.get(function, [])
    if not calls:  # the script's entry, or a method that is called in a way that we do not see
        return function.file is program.files[0] and isinstance(function.parent, ast.Module | ast.If)
    return any(_reached_by_all(program, call, depth - 1) for call in calls if function_of(call) is not function)


def _guarded(program: Program, node: ast.AST) -> bool:
    child = node
    for parent in above(node):
        if (
            isinstance(parent, ast.If | ast.IfExp | ast.While)
            and child is not parent.test
            and _of_rank(program, parent.test)
        ):
            return True
        if isinstance(parent, ast.With) and any(_of_rank(program, i.context_expr) for i in parent.items):
            return True  # with rank_0_first(rank): the others then find what it has made
        block = getattr(parent, "body", None)
        for statement in block if isinstance(block, list) else ():
            if statement is child or statement.lineno > node.lineno:
                break
            leaves = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Continue)
            if leaves and _of_rank(program, statement.test):
                return True
        if isinstance(parent, Function):
            return any(_of_rank(program, d) for d in parent.decorator_list)
        child = parent
    return False


def _of_rank(program: Program, test: ast.expr) -> bool:
    if re.search(RANKS, ast.unparse(test), re.IGNORECASE):
        return True
    names = (n for n in ast.walk(test) if isinstance(n, ast.Name | ast.Attribute) and dotted(n) and hasattr(n, "file"))
    return any(re.search(RANKS, ast.unparse(o), re.IGNORECASE) for n in names for o in program.origins(n, 3)[1:])


@rule(
    "save-wrapped",
    "look at it",
    why="The names in the state dict of a wrapped model begin with `module.`: they fit no model that is not wrapped.",
    cure="Save model.module.state_dict().",
    notebook="05",
    section="4. Can the job be killed?",
    source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints",
    ill=(
        changed(
            HEALTHY,
            ('torch.save(model.module.state_dict(), "weights.pt")', "torch.save(model.state_dict(), 'w.pt')  # <-"),
        ),
        changed(
            HEALTHY, ('torch.save(model.module.state_dict(), "weights.pt")', "torch.save({'m': model}, 'w.pt')  # <-")
        ),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("model = DDP(", "wrapped = DDP("),
            ("model.module.state_dict", "model.state_dict"),
            ("cross_entropy(model(", "cross_entropy(wrapped("),
        ),
    ),
)
def save_wrapped(program: Program, training: Training) -> Iterator[Found]:
    """torch.save of what the same name was wrapped as, or of its state dict."""
    for call in program.torch_calls("save"):
        given = keyword(call, "obj", 0)
        parts = [v for o in program.origins(given, 3) for v in (o.values if isinstance(o, ast.Dict) else [o])]
        for part in parts:
            states = (
                isinstance(part, ast.Call) and method(part) == "state_dict" and isinstance(part.func, ast.Attribute)
            )
            model = part.func.value if states else part
            if dotted(model) and _is_wrapped(program, model):
                change = replaced(model, f"{dotted(model)}.module") if states else None
                yield Found(part if part.file is call.file and part.lineno == call.lineno else call, change)


def _is_wrapped(program: Program, name: ast.AST) -> bool:
    """Directly assigned from DDP or DataParallel, and from nothing else after it."""
    values = [v for v, i in program._values(name, dotted(name)) if i is None]
    return (
        bool(values)
        and isinstance(values[-1], ast.Call)
        and program.is_torch(values[-1].func, "DistributedDataParallel", "DataParallel")
        and not any(isinstance(p, ast.If | ast.IfExp) for p in above(values[-1]))
    )


CHECKPOINTED = """
import os
import torch

def save(state, path):
    part = path + ".part"
    torch.save(state, part)
    os.replace(part, path)

def main(loader, model, epochs, path):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(epochs):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(state, path)
"""


@rule(
    "save-not-atomic",
    "wrong",
    why="The only checkpoint is overwritten in place: a job that is killed while it saves (a full disk does the same) "
    "has lost the old one and has not yet the new one.",
    cure="Save under another name in the same folder, then os.replace(that, path), which is atomic.",
    notebook="05",
    section="4. Can the job be killed?",
    source="https://docs.python.org/3/library/os.html#os.replace",
    ill=(
        changed(
            CHECKPOINTED,
            ("save(state, path)\n", "torch.save(state, path)  # <-\n"),
        ),
        changed(
            CHECKPOINTED,
            (
                ('    part = path + ".part"\n    torch.save(state, part)\n    os.replace(part, path)\n'),
                "    torch.save(state, path)  # <-\n",
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        CHECKPOINTED,
        changed(CHECKPOINTED, ("        save(state, path)\n", "        torch.save(state, f'{path}-{epoch}')\n")),
        changed(CHECKPOINTED, ("        save(state, path)\n", "    torch.save(state, path)\n")),
        changed(
            CHECKPOINTED,
            ("        save(state, path)\n", ("        name = path % epoch\n        torch.save(state, name)\n")),
        ),
    ),
)
def save_not_atomic(program: Program, training: Training) -> Iterator[Found]:
    """In a loop, with the optimizer's state, to a name that does not change, by a program that loads again."""
    if not program.torch_calls("load") or managed(program):
        return
    outer = [loop for s in training.sections for loop in (s.node, *training.outer_loops(s)) if isinstance(loop, Loop)]
    inside = {e.node for loop in outer for e in training.loops.get(loop, ()) if e.kind == "save"}
    for call in program.torch_calls("save"):
        target, state = keyword(call, "f", 1), keyword(call, "obj", 0)
        if call not in inside or target is None or _replaces(program, call):
            continue
        whole = " ".join(ast.unparse(o) for o in program.origins(state))
        where = " ".join(ast.unparse(o) for o in program.origins(target))
        varies = re.search(
            r"epoch|step|iter|\bit\b|\bi\b|global|count|best|time|date|rank|part|te?mp|buffer|Bytes|open\(|%", where
        )
        if "optim" in whole and not varies and not any(n in _counted(outer) for n in _names(program, target)):
            yield Found(call, _atomic(call, target))


def _counted(loops: list[ast.AST]) -> set[str]:
    targets = [loop.target for loop in loops if isinstance(loop, ast.For)]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def _names(program: Program, target: ast.expr) -> set[str]:
    return {n.id for o in program.origins(target) for n in ast.walk(o) if isinstance(n, ast.Name)}


def _replaces(program: Program, call: ast.Call) -> bool:
    """The function that saves also renames."""
    place = function_of(call) or call.file.tree
    for other in (n for n in ast.walk(place) if isinstance(n, ast.Call)):
        full = program.full(other.func)
        if any(n in ("os.replace", "os.rename", "shutil.move", "os.renames") for n in full):
            return True
        if method(other) in ("replace", "rename") and len(other.args) == 1:
            return True
    return False


def _atomic(call: ast.Call, target: ast.expr) -> Change | None:
    if "os" not in call.file.names or not isinstance(call.parent, ast.Expr):
        return None
    part = f'str({source_of(target)}) + ".part"'
    after = inserted(call, f"os.replace({part}, {source_of(target)})", after=True)
    return replaced(target, part) + after if after else None


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
