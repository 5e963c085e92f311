"""Static rules on the processes of several ranks: which GPU, which group, how they begin and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from labs.doctor.hits import Found, Rule, changed, rule, with_argument, without_argument
from labs.doctor.rules_ranks import (
    BUGS,
    DDP,
    DOCS,
    HEALTHY,
    groups,
    managed,
    reached_by_all,
    training_loaders,
    wraps,
)
from labs.doctor.syntax import (
    Program,
    above,
    constant,
    function_of,
    keyword,
    method,
    open_ended,
    statement_of,
)
from labs.doctor.training_loops import Training


@rule(
    "data-parallel",
    "outdated",
    why="nn.DataParallel copies the weights to all GPUs in each forward, from one Python process: torch's "
    "documentation recommends DistributedDataParallel even on one machine.",
    cure="One process per GPU with torchrun, and DistributedDataParallel.",
    notebook="03",
    section="2. What does each way move?",
    source=DOCS + "generated/torch.nn.DataParallel.html",
    ill=(
        "import torch.nn as nn\ndef f(net):\n    return nn.DataParallel(net)  # <-\n",
        "from torch.nn.parallel import DataParallel as P\nnet = P(None)  # <-\n",
    ),
    healthy=(
        HEALTHY,
        "from mine import DataParallel\nnet = DataParallel(None)\n",
    ),
)
def data_parallel(program: Program, training: Training) -> Iterator[Found]:
    """Any use of it; beside DDP it may be the way for one process."""
    other = bool(wraps(program))
    for call in program.torch_calls("DataParallel"):
        yield Found(call, None, certainty="look at it" if other else "")


@rule(
    "find-unused",
    "look at it",
    why="find_unused_parameters=True walks the graph of every forward to find parameters without gradients. Needed "
    "only if there are such; torch warns once if there are none.",
    cure="Leave it out, and put it back if DDP then complains of parameters that were not used.",
    notebook="03",
    section="4. When does splitting pay?",
    source=DOCS + "notes/ddp.html#internal-design",
    ill=changed(HEALTHY, ("device_ids=[local_rank])", "device_ids=[local_rank], find_unused_parameters=True)  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("device_ids=[local_rank])", "find_unused_parameters=lr > 1)")),
    ),
)
def find_unused(program: Program, training: Training) -> Iterator[Found]:
    """A constant True."""
    for call in wraps(program):
        if constant(keyword(call, "find_unused_parameters")) is True:
            yield Found(call, without_argument(call, "find_unused_parameters"))


@rule(
    "fixed-gpu",
    "look at it",
    why="Every rank uses the first GPU that it sees. That is right if each sees one alone, as with srun "
    "--gpus-per-task=1. Under torchrun all see the same: it holds the models of all, and the other GPUs idle.",
    cure='Under torchrun torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything is put on a GPU, and '
    '"cuda" without a number.',
    notebook="03",
    section=BUGS,
    source=DDP,
    ill=(
        changed(HEALTHY, ("    torch.cuda.set_device(local_rank)\n", ""), (", device_ids=[local_rank])", ")  # <-")),
        changed(
            HEALTHY,
            ("x.cuda()", 'x.to("cuda:0")'),
            ("            loss = cross", "            loss = cross"),
            ("y.cuda())", "y.cuda())  # <-"),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("    torch.cuda.set_device(local_rank)\n", ""),
            (".cuda()", ".to(torch.device('cuda', local_rank))"),
        ),
        changed(
            HEALTHY,
            ("import torch\n", "os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\nimport torch\n"),
            ("    torch.cuda.set_device(local_rank)\n", ""),
            ("model.cuda(), device_ids=[local_rank]", "model.to('cuda:0'), device_ids=[0]"),
        ),
        changed(
            HEALTHY, ("    torch.cuda.set_device(local_rank)\n", "    torch.accelerator.set_device_index(local_rank)\n")
        ),
        changed(HEALTHY, ("    dist.destroy", "    if rank == 0:\n        model.to('cuda:0')\n    dist.destroy")),
    ),
)
def fixed_gpu(program: Program, training: Training) -> Iterator[Found]:
    """`cuda:0` beside a process group; `.cuda()` or "cuda" without a number where nobody sets the device."""
    if not groups(program) or managed(program):
        return
    words = (n.value for n in program.nodes(ast.Constant) if isinstance(n.value, str))
    if any("CUDA_VISIBLE_DEVICES" in word for word in words):
        return  # each rank may see one GPU alone
    places = {"set_device", "set_device_index", "default_device", "device_id", "set_default_device"}
    free = program.mentions(*places)
    for call in program.calls:
        place = _device(call)
        if not place or function_of(call) not in training.path:
            continue
        chosen = any(c.func.attr == "device" for c in _withs(call)) or _chosen(call)
        if chosen or (place != "cuda:0" and (free or place != "cuda")):
            continue
        if not reached_by_all(program, call) or "map_location" in ast.unparse(statement_of(call)):
            continue
        yield Found(call)
        if place == "cuda":
            return  # once is enough: the cure is one line


def _chosen(node: ast.AST) -> bool:
    """In a branch that asks for more than whether there is a GPU."""
    tests = [p.test for p in above(node) if isinstance(p, ast.If | ast.IfExp)]
    return any(not re.search(r"is_available|__main__", ast.unparse(t)) for t in tests)


def _withs(node: ast.AST) -> list[ast.Call]:
    items = [i.context_expr for p in above(node) if isinstance(p, ast.With) for i in p.items]
    return [i for i in items if isinstance(i, ast.Call) and isinstance(i.func, ast.Attribute)]


def _device(call: ast.Call) -> str:
    """ "cuda:0" or "cuda", where a call says so by a constant."""
    if method(call) == "cuda" and isinstance(call.func, ast.Attribute):
        given = [a for a in call.args] + [k.value for k in call.keywords if k.arg == "device"]
        return "cuda" if not given else "cuda:0" if constant(given[0]) == 0 and constant(given[0]) is not False else ""
    if (method(call) == "to" and isinstance(call.func, ast.Attribute)) or method(call) == "device":
        value = constant(keyword(call, "device", 0))
        if method(call) == "device" and len(call.args) > 1:
            return ""
        return value if value in ("cuda", "cuda:0") else ""
    return ""


@rule(
    "destroy-missing",
    "look at it",
    why="Without destroy_process_group() NCCL's threads and memory are ended in whatever order Python ends: torch "
    "warns, and the end of a job can hang.",
    cure="dist.destroy_process_group() at the end of each rank.",
    notebook="10",
    section="1. It hangs: which rank, which line?",
    source=DOCS + "distributed.html#shutdown",
    ill=changed(HEALTHY, ("    dist.destroy_process_group()\n", ""), ("minutes=5))", "minutes=5))  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("    dist.destroy_process_group()\n", "    stop()\n"))
        + "\nfrom torch.distributed import destroy_process_group as stop\n",
    ),
)
def destroy_missing(program: Program, training: Training) -> Iterator[Found]:
    """No mention of it in the whole program."""
    if not program.mentions("destroy_process_group") and not managed(program):
        for call in groups(program)[:1]:
            yield Found(call)


@rule(
    "timeout-missing",
    "look at it",
    why="When a rank dies or goes another way, the others wait: 10 minutes with NCCL, 30 with gloo, unless a "
    "timeout is given. A shorter one tells sooner; it must be longer than your longest validation or save on "
    "one rank.",
    cure="init_process_group(..., timeout=datetime.timedelta(minutes=5)).",
    notebook="10",
    section="1. It hangs: which rank, which line?",
    source=DOCS + "distributed.html#torch.distributed.init_process_group",
    ill=changed(HEALTHY, ('"nccl", timeout=datetime.timedelta(minutes=5))', '"nccl")  # <-')),
    healthy=HEALTHY,
)
def timeout_missing(program: Program, training: Training) -> Iterator[Found]:
    """Where the first process group is made."""
    for call in groups(program)[:1]:
        if keyword(call, "timeout", 2) is None and not open_ended(call):
            known = any("datetime" in v for v in call.file.names.values())
            yield Found(call, with_argument(call, "timeout", "datetime.timedelta(minutes=5)") if known else None)


@rule(
    "uneven-ranks",
    "look at it",
    why="Ranks that split the data by themselves can have unequal numbers of batches: DDP's exchange then waits "
    "for ever in the last step of the longer one. DistributedSampler makes them equal.",
    cure="Equal numbers on all ranks: DistributedSampler, as many steps on each, or `with model.join():`.",
    notebook="10",
    section="1. It hangs: which rank, which line?",
    source=DDP + "#torch.nn.parallel.DistributedDataParallel.join",
    ill=changed(
        HEALTHY,
        ("sampler=sampler)", "shuffle=True)  # <-"),
        (
            "    sampler = DistributedSampler(data)\n",
            "    data = torch.utils.data.Subset(data, range(rank, len(data), 2))\n",
        ),
        ("        sampler.set_epoch(epoch)\n", ""),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("for x, y in loader", "for x, y in itertools.islice(loader, 100)")),
    ),
)
def uneven_ranks(program: Program, training: Training) -> Iterator[Found]:
    """A training loader over a part that was cut by rank with a stride, without join."""
    if not wraps(program) or managed(program) or program.mentions("join", "Join"):
        return
    for call in training_loaders(program, training):
        for origin in program.origins(keyword(call, "dataset", 0)):
            cut = isinstance(origin, ast.Call) and program.is_torch(origin.func, "Subset") and len(origin.args) > 1
            if (
                cut
                and re.search(r"range\(\w*rank\w*,.*,", ast.unparse(origin.args[1]))
                and "//" not in ast.unparse(origin)
            ):
                yield Found(call)


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
