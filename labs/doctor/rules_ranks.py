"""Static rules on several ranks: DistributedDataParallel, its sampler, its exchange, saving."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import (
    Change,
    Found,
    Rule,
    changed,
    inserted,
    rule,
    without_argument,
)
from labs.doctor.rules_steps import accumulation
from labs.doctor.syntax import (
    Function,
    Program,
    above,
    constant,
    dotted,
    function_of,
    keyword,
    method,
    open_ended,
    statement_of,
)
from labs.doctor.training_loops import Training

DOCS = "https://docs.pytorch.org/docs/stable/"
DDP = DOCS + "generated/torch.nn.parallel.DistributedDataParallel.html"
SAMPLER = DOCS + "data.html#torch.utils.data.distributed.DistributedSampler"
BUGS = "5. What do the usual bugs look like from outside?"
MANAGERS = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "ignite",
    "ray",
    "composer",
    "colossalai",
    "horovod",
)
"""Packages that shard data, synchronise, scale or save by themselves."""
HEALTHY = """
import datetime
import os
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

def main(data, model, epochs, lr):
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=5))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    model = DDP(model.cuda(), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), "weights.pt")
    dist.destroy_process_group()
"""
ACCUMULATE = HEALTHY.replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):").replace(
    """            loss = cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
""",
    """            model.require_backward_grad_sync = (i + 1) % 4 == 0
            loss = cross_entropy(model(x.cuda()), y.cuda()) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
)
NO_SYNC = ACCUMULATE.replace(
    """            model.require_backward_grad_sync = (i + 1) % 4 == 0
            loss = cross_entropy(model(x.cuda()), y.cuda()) / 4
            loss.backward()
""",
    """            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():
                loss = cross_entropy(model(x.cuda()), y.cuda()) / 4
                loss.backward()
""",
).replace("import os", "import contextlib\nimport os")


RANKS = (
    r"rank|master|is_main|main_process|world_size|primary|chief|leader|is_first|coordinator"
    r"|(gpu|device)(_id)?\s*(==|%)|==\s*0"
)
"""A test that has one of these asks which rank this is."""
EVERY = r"%[^%=<>]*==\s*0|\b(\w*(step|epoch|iter|batch|count|index|idx)\w*|it?|n)\s*==\s*0"
"""But `step % 100 == 0` and `epoch == 0` ask which step this is."""


def wraps(program: Program) -> list[ast.Call]:
    """Calls of DistributedDataParallel."""
    return program.torch_calls("DistributedDataParallel")


def groups(program: Program) -> list[ast.Call]:
    """Calls of init_process_group."""
    return program.torch_calls("init_process_group")


def managed(program: Program) -> bool:
    """Whether a library does for the program what these rules look for."""
    return program.imports(*MANAGERS)


def training_loaders(program: Program, training: Training) -> list[ast.Call]:
    """DataLoaders that a loop with backward goes over, as far as they can be followed."""
    found = []
    for section in training.sections:
        loops = [section.node, *(loop for e in section.of("backward") for loop in e.loops)]
        for loop in loops:
            if isinstance(loop, ast.For | ast.AsyncFor):
                found += loaders_of(program, loop.iter)
    return list(dict.fromkeys(found))


def loaders_of(program: Program, iterated: ast.expr, depth: int = 4) -> list[ast.Call]:
    """DataLoaders behind an expression that is iterated: also in enumerate(...), tqdm(...), zip(...)."""
    found = []
    for origin in program.origins(iterated) if depth else ():
        if isinstance(origin, ast.Call):
            if program.is_torch(origin.func, "DataLoader"):
                found.append(origin)
            elif method(origin) in (
                "enumerate",
                "tqdm",
                "zip",
                "iter",
                "islice",
                "cycle",
                "track",
                "log_every",
                "trange",
            ):
                found += [loader for given in origin.args for loader in loaders_of(program, given, depth - 1)]
    return list(dict.fromkeys(found))


def reached_by_all(program: Program, node: ast.AST, depth: int = 4) -> bool:
    """Whether some way to it has no test for a rank; a function that nobody calls by name is not reached."""
    if _guarded(program, node):
        return False
    function = function_of(node)
    if function is None or not depth:
        return function is None
    calls = program.callers.get(function, [])
    if not calls:  # the script's entry, or a method that is called in a way that we do not see
        return function.file is program.files[0] and isinstance(function.parent, ast.Module | ast.If)
    return any(reached_by_all(program, call, depth - 1) for call in calls if function_of(call) is not function)


def _guarded(program: Program, node: ast.AST) -> bool:
    child = node
    for parent in above(node):
        if (
            isinstance(parent, ast.If | ast.IfExp | ast.While)
            and child is not parent.test
            and of_rank(program, parent.test)
        ):
            return True
        if isinstance(parent, ast.With) and any(of_rank(program, i.context_expr) for i in parent.items):
            return True  # with rank_0_first(rank): the others then find what it has made
        block = getattr(parent, "body", None)
        for statement in block if isinstance(block, list) else ():
            if statement is child or statement.lineno > node.lineno:
                break
            leaves = isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return | ast.Continue)
            if leaves and of_rank(program, statement.test):
                return True
        if isinstance(parent, Function):
            return any(of_rank(program, d) for d in parent.decorator_list)
        child = parent
    return False


def of_rank(program: Program, test: ast.expr) -> bool:
    """Whether a test asks which rank this is, itself or in what its names were made from."""
    return _asks_for_rank(ast.unparse(test)) or _asks_for_rank(program.behind(test, 2))


def _asks_for_rank(text: str) -> bool:
    return re.search(RANKS, re.sub(EVERY, "", text), re.IGNORECASE) is not None


@rule(
    "set-epoch-missing",
    "wrong",
    why="The sampler draws its order from seed + epoch, and the epoch stays 0 until it is told: every epoch has the "
    "same order and the same batches.",
    cure="sampler.set_epoch(epoch) at the start of each epoch, before the loop over the loader.",
    notebook="03",
    section=BUGS,
    source=SAMPLER,
    ill=(
        changed(
            HEALTHY,
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DistributedSampler(data)", "DistributedSampler(data)  # <-"),
        ),
        changed(
            HEALTHY,
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DistributedSampler(data)", "DistributedSampler(data)  # <-\n    sampler.set_epoch(0)"),
        ),
        changed(  # of two samplers the one for training
            HEALTHY,
            (
                "        sampler.set_epoch(epoch)\n",
                "        validate(model, DataLoader([], 1, sampler=DistributedSampler([])))\n",
            ),
            ("    sampler = DistributedSampler(data)", "    sampler = DistributedSampler(data)  # <-"),
        )
        + "\ndef validate(model, loader):\n    with torch.no_grad():\n"
        + "        for x, y in loader:\n            model(x)\n",
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)"),
        ),
        changed(HEALTHY, ("        sampler.set_epoch(epoch)\n", "        loader.sampler.set_epoch(epoch)\n")),
        changed(
            HEALTHY,
            ("        sampler.set_epoch(epoch)\n", ""),
            ("    for epoch in range(epochs):", "    for epoch in [0]:"),
        ),
    ),
)
def set_epoch_missing(program: Program, training: Training) -> Iterator[Found]:
    """A shuffling DistributedSampler for training, epochs, and no set_epoch that follows them."""
    told = [c for c in program.named("set_epoch") if c.args and not isinstance(c.args[0], ast.Constant)]
    epochs = [loop for s in training.sections for loop in training.outer_loops(s) if not _one_pass(loop)]
    if told or not epochs or managed(program):
        return
    loaders = training_loaders(program, training)
    used = {o for c in loaders for k in ("sampler", "batch_sampler") for o in program.origins(keyword(c, k))}
    for call in program.torch_calls("DistributedSampler"):
        ordered = constant(keyword(call, "shuffle", 3)) is False or _is_super(call)
        if not ordered and (call in used or (not used and len(program.torch_calls("DistributedSampler")) == 1)):
            yield Found(call, _told_epoch(call, epochs))


def _is_super(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call)


def _one_pass(loop: ast.AST) -> bool:
    given = loop.iter if isinstance(loop, ast.For) else None
    if isinstance(given, ast.Call) and method(given) == "range":
        return constant(given.args[-1]) == 1
    return isinstance(given, ast.List | ast.Tuple) and len(given.elts) < 2


def _told_epoch(call: ast.Call, epochs: list[ast.AST]) -> Change | None:
    statement = statement_of(call)
    name = dotted(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    for loop in epochs:
        plain = (
            isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) and function_of(loop) is function_of(call)
        )
        if plain and name and statement.value is call and loop.lineno > call.lineno:
            return inserted(loop.body[0], f"{name}.set_epoch({loop.target.id})")
    return None


@rule(
    "sampler-missing",
    "wrong",
    why="Without a DistributedSampler each rank goes over the whole data set: an epoch takes as long as on one "
    "GPU, and with the same seed on all ranks they even compute the same batches.",
    cure="DataLoader(..., sampler=DistributedSampler(dataset)) in place of shuffle=True, and set_epoch in the loop.",
    notebook="03",
    section="1. How much faster do two devices train?",
    source=SAMPLER,
    ill=changed(
        HEALTHY,
        ("sampler=sampler)", "shuffle=True)  # <-"),
        ("    sampler = DistributedSampler(data)\n", ""),
        ("        sampler.set_epoch(epoch)\n", ""),
        ("DataLoader, DistributedSampler", "DataLoader"),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("sampler=sampler)", "shuffle=True)"),
            (
                "    sampler = DistributedSampler(data)\n",
                "    data = torch.utils.data.Subset(data, range(rank, len(data), 2))\n",
            ),
            ("        sampler.set_epoch(epoch)\n", ""),
            ("DataLoader, DistributedSampler", "DataLoader"),
        ),
    ),
)
def sampler_missing(program: Program, training: Training) -> Iterator[Found]:
    """DDP, a shuffling training loader, and nothing that knows of samplers or ranks near its data."""
    if not wraps(program) or managed(program) or any("sampler" in w.lower() for w in program.words):
        return
    for call in training_loaders(program, training):
        if constant(keyword(call, "shuffle", 2)) is True and not open_ended(call):
            data = program.origins(keyword(call, "dataset", 0))
            told = " ".join(ast.unparse(o) for o in data)
            if not re.search(r"rank|world|shard|split|num_replicas|process_index", told) and not _conditional(call):
                yield Found(call)


def _conditional(node: ast.AST) -> bool:
    """In a branch that asks whether there are several ranks."""
    tests = [p.test for p in above(node) if isinstance(p, ast.If | ast.IfExp)]
    return any(re.search(r"dist|ddp|rank|world|parallel|gpu", ast.unparse(t), re.IGNORECASE) for t in tests)


@rule(
    "shuffle-beside-sampler",
    "wrong",
    why="DataLoader raises a ValueError: a sampler gives the order, so that there is nothing left to shuffle.",
    cure="Leave shuffle=True out: DistributedSampler shuffles by itself.",
    notebook="03",
    section="Exercises",
    source=DOCS + "data.html#torch.utils.data.DataLoader",
    ill=changed(HEALTHY, ("sampler=sampler)", "sampler=sampler, shuffle=True)  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("sampler=sampler)", "sampler=sampler, shuffle=sampler is None)")),
        changed(HEALTHY, ("sampler=sampler)", "sampler=None, shuffle=True)"), ("shuffle=True", "shuffle=rank < 0")),
    ),
)
def shuffle_beside_sampler(program: Program, training: Training) -> Iterator[Found]:
    """Both, and the sampler is made by a call for certain."""
    for call in program.torch_calls("DataLoader"):
        sampler = keyword(call, "sampler")
        if constant(keyword(call, "shuffle", 2)) is True and sampler is not None:
            made = [
                o for o in program.origins(sampler) if isinstance(o, ast.Call | ast.Constant | ast.IfExp | ast.BoolOp)
            ]
            if made and all(isinstance(o, ast.Call) for o in made):
                yield Found(call, without_argument(call, "shuffle"))


@rule(
    "no-sync-missing",
    "costs",
    why="DDP exchanges all gradients in every backward; of several batches per step only the last one needs it. The "
    "others' exchange is time on the wire for nothing.",
    cure="All but the last forward and backward of a step under `with model.no_sync():` (forward, too, or it has no "
    "effect).",
    notebook="03",
    section="6. How do you get a large batch when it does not fit?",
    source=DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ill=changed(
        ACCUMULATE,
        ("            model.require_backward_grad_sync = (i + 1) % 4 == 0\n", ""),
        ("loss.backward()", "loss.backward()  # <-"),
    ),
    healthy=(
        HEALTHY,
        ACCUMULATE,
        NO_SYNC,
    ),
)
def no_sync_missing(program: Program, training: Training) -> Iterator[Found]:
    """Accumulation and DDP, and none of the ways to leave the exchange out."""
    ways = ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync", "register_comm_hook")
    if not wraps(program) or managed(program) or program.mentions(*ways):
        return
    for section in training.sections:
        if found := accumulation(training, section):
            yield Found(found[0].node)


@rule(
    "no-sync-forward",
    "costs",
    why="DDP decides in forward whether the backward that follows will exchange gradients: no_sync() around backward "
    "alone changes nothing, and every batch is exchanged.",
    cure="Take forward and loss into the `with model.no_sync():`, too.",
    notebook="03",
    section="6. How do you get a large batch when it does not fit?",
    source=DDP + "#torch.nn.parallel.DistributedDataParallel.no_sync",
    ill=changed(
        NO_SYNC,
        (
            (
                "            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():\n"
                "                loss = cross_entropy(model(x.cuda()), y.cuda()) / 4\n"
            ),
            (
                "            loss = cross_entropy(model(x.cuda()), y.cuda()) / 4\n"
                "            with model.no_sync() if (i + 1) % 4 else contextlib.nullcontext():  # <-\n"
            ),
        ),
    ),
    healthy=(
        NO_SYNC,
        ACCUMULATE,
    ),
)
def no_sync_forward(program: Program, training: Training) -> Iterator[Found]:
    """A `with no_sync` around a backward and nothing that could be a forward."""
    if not wraps(program) or program.mentions("fully_shard", "FullyShardedDataParallel"):
        return
    for node in program.nodes(ast.With):
        items = [o for i in node.items for o in (i.context_expr, *program.origins(i.context_expr, 2))]
        if not any("no_sync" in ast.unparse(o) for o in items):
            continue
        calls = [c for s in node.body for c in ast.walk(s) if isinstance(c, ast.Call)]
        if any(method(c) == "backward" for c in calls) and all(method(c) in ("backward", "scale") for c in calls):
            yield Found(node)


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
