"""Static rules on saving: by whom, how often, and what is left when a save is interrupted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import Change, Found, Rule, changed, inserted, replaced, rule, source_of
from labs.doctor.rules_ranks import HEALTHY, groups, managed, of_rank, reached_by_all, wraps
from labs.doctor.syntax import Loop, Program, above, dotted, function_of, keyword, method
from labs.doctor.training_loops import Training


@rule(
    "save-all-ranks",
    "wrong",
    why="Every rank writes the same file at the same time: the bytes of several writers can mix, and a network disk "
    "gets n times the load.",
    cure="Save by one rank: `if dist.get_rank() == 0:`. With a barrier only if the others read the file.",
    notebook="05",
    section="5. What if a rank dies?",
    source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints",
    ill=(
        changed(
            HEALTHY,
            ("    if rank == 0:\n        torch.save", "    torch.save"),
            ('"weights.pt")', '"weights.pt")  # <-'),
        ),
        changed(HEALTHY, ("    if rank == 0:\n", "    if epoch % 2 == 0:\n"), ('"weights.pt")', '"weights.pt")  # <-')),
        changed(HEALTHY, ("    if rank == 0:\n", "    if epoch == 0:\n"), ('"weights.pt")', '"weights.pt")  # <-')),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("    if rank == 0:\n", "    r = dist.get_rank()\n    if epoch % 2 == 0 and r == 0:\n")),
        changed(
            HEALTHY,
            ("    if rank == 0:\n        torch.save", "    torch.save"),
            ('"weights.pt"', 'f"weights-{rank}.pt"'),
        ),
        changed(
            HEALTHY,
            ("    if rank == 0:\n        torch.save", "    first = rank == 0\n    if first:\n        torch.save"),
        ),
        changed(HEALTHY, ("    if rank == 0:\n        torch.save", "    with first_come(rank):\n        torch.save")),
        changed(HEALTHY, ("    if rank == 0:\n        torch.save(", "    if rank == 0:\n        write("))
        + "\ndef write(state, path):\n    torch.save(state, path)\n",
        changed(HEALTHY, ("    if rank == 0:\n        torch.save(", "    write(rank, "))
        + "\ndef write(rank, state, path):\n    if rank:\n        return\n    torch.save(state, path)\n",
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
        if any(n != "torch.save" for n in program.full(call.func)) or not reached_by_all(program, call):
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


VARYING = r"epoch|step|iter|\bit\b|\bi\b|global|count|best|time|date|rank|part|te?mp|buffer|Bytes|open\(|%|\{|format\("
"""In the name of a file that is another one each time, or none that the next start goes on from."""
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
        changed(CHECKPOINTED, ("        save(state, path)\n", "        torch.save(state, f'{path}/last.pt')  # <-\n")),
        changed(
            CHECKPOINTED,
            ("save(state, path)\n", "torch.save(state, path)  # <-\n"),
        ),
        changed(
            CHECKPOINTED,
            (
                '    part = path + ".part"\n    torch.save(state, part)\n    os.replace(part, path)\n',
                "    torch.save(state, path)  # <-\n",
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        CHECKPOINTED,
        changed(CHECKPOINTED, ("        save(state, path)\n", "        torch.save(state, f'{path}-{epoch}')\n")),
        changed(CHECKPOINTED, ("        save(state, path)\n", "        torch.save(state, f'{path}-{len(x):06d}')\n")),
        changed(CHECKPOINTED, ("        save(state, path)\n", "    torch.save(state, path)\n")),
        changed(
            CHECKPOINTED,
            ("        save(state, path)\n", "        name = path % epoch\n        torch.save(state, name)\n"),
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
        where = re.sub(r"\{[^{}]*\}/", "", program.behind(target))  # f"{folder}/last.pt"
        counted = "|".join(re.escape(name) for name in _counted(outer)) or "(?!)"
        varies = re.search(rf"{VARYING}|\b({counted})\b", where, re.IGNORECASE)
        whole = " ".join(ast.unparse(o) for o in program.origins(state))
        if "optim" in whole and not varies:
            yield Found(call, _atomic(call, target))


def _counted(loops: list[ast.AST]) -> set[str]:
    targets = [loop.target for loop in loops if isinstance(loop, ast.For)]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


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


@rule(
    "load-too-early",
    "wrong",
    why="The other ranks do not wait for rank 0: they open the file before it is written, or while it is.",
    cure="dist.barrier() between saving and loading, called by all ranks.",
    notebook="10",
    section="1. It hangs: which rank, which line?",
    source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints",
    ill=changed(HEALTHY, ("    dist.destroy", "    state = torch.load('weights.pt')  # <-\n    dist.destroy")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("    dist.destroy", "    dist.barrier()\n    torch.load('weights.pt')\n    dist.destroy")),
        changed(HEALTHY, ("    dist.destroy", "    state = torch.load('others.pt')\n    dist.destroy")),
    ),
)
def load_too_early(program: Program, training: Training) -> Iterator[Found]:
    """In one block: `if rank == 0: torch.save(x, path)`, then torch.load(path), and no collective between them."""
    for save in program.torch_calls("save") if groups(program) else ():
        block = next((p for p in above(save) if isinstance(p, ast.If)), None)
        target = keyword(save, "f", 1)
        if block is None or target is None or not of_rank(program, block.test):
            continue
        later = [s for s in getattr(block.parent, "body", []) if s.lineno > block.lineno]
        for call in (n for s in later for n in ast.walk(s) if isinstance(n, ast.Call)):
            if method(call) in ("barrier", "all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"):
                break
            same = program.is_torch(call.func, "load") and ast.unparse(target) == ast.unparse(
                keyword(call, "f", 0) or call
            )
            if same and not _under(call, block.parent):
                dist = next((local for local, full in call.file.names.items() if "torch.distributed" in full), "")
                yield Found(call, inserted(call, f"{dist}.barrier()") if dist else None)
                break


def _under(node: ast.AST, block: ast.AST) -> bool:
    """In a further condition within the block."""
    for parent in above(node):
        if parent is block:
            return False
        if isinstance(parent, ast.If):
            return True
    return False


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
