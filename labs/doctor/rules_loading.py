"""Static rules on the way from the data set to the device."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from labs.doctor.hits import Found, Rule, changed, rule, with_argument
from labs.doctor.rules_ranks import groups, loaders_of, managed, training_loaders
from labs.doctor.syntax import (
    Function,
    Program,
    constant,
    dotted,
    keyword,
    last,
    method,
    open_ended,
)
from labs.doctor.training_loops import Section, Training

DOCS = "https://docs.pytorch.org/docs/stable/"
TRAPS = "5. What goes wrong silently?"
COPIES = "https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html"
HEALTHY = """
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = torch.from_numpy(np.array(Image.open(self.paths[index])))
        return image + torch.rand(()) + np.random.rand(), index % 10

def main(paths, model, epochs, device):
    loader = DataLoader(Pictures(paths), 32, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

main([], torch.nn.Linear(1, 1), 9, torch.device("cuda"))
"""


def workers(program: Program, call: ast.Call) -> bool | None:
    """Whether a DataLoader has workers; None if the source does not tell."""
    given = keyword(call, "num_workers", 5)
    if given is None:
        return None if open_ended(call) else False
    values = [o.value for o in program.origins(given) if isinstance(o, ast.Constant)]
    return bool(values[0]) if len(values) == 1 else None


def datasets(program: Program) -> Iterator[ast.ClassDef]:
    """Own classes that give samples."""
    for node in program.nodes(ast.ClassDef):
        if any((node, name) in node.file.defined for name in ("__getitem__", "__iter__")):
            yield node


@rule(
    "worker-generator",
    "wrong",
    why="Each worker gets a copy of this generator in the same state, and all draw the same numbers; without "
    "persistent workers they do so again in each epoch. What the DataLoader seeds in every worker, in another "
    "way, are torch's, NumPy's (since torch 1.9) and random's global generators.",
    cure="Use torch.rand, np.random or random inside of __getitem__, or seed the generator in worker_init_fn from "
    "torch.initial_seed().",
    notebook="02",
    section=TRAPS,
    source=DOCS + "data.html#randomness-in-multi-process-data-loading",
    ill=(
        changed(
            HEALTHY,
            ("self.paths = paths", "self.paths = paths\n        self.rng = np.random.default_rng(0)  # <-"),
            ("np.random.rand()", "self.rng.random()"),
        ),
        changed(
            HEALTHY,
            ("self.paths = paths", "self.paths = paths\n        self.rng = torch.Generator()  # <-"),
            ("np.random.rand()", "self.draw()"),
            (
                "    def __len__",
                "    def draw(self):\n        return torch.rand((), generator=self.rng)\n\n    def __len__",
            ),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            ("self.paths = paths", "self.paths = paths\n        self.rng = np.random.default_rng(0)"),
            ("np.random.rand()", "self.rng.random()"),
            ("num_workers=4, pin_memory=True, persistent_workers=True", "pin_memory=True"),
        ),
        changed(
            HEALTHY,
            (
                "self.paths = paths",
                (
                    "self.paths = paths\n"
                    "        self.rng = np.random.default_rng(0)\n"
                    "        self.order = self.rng.permutation(9)"
                ),
            ),
        ),
        changed(
            HEALTHY,
            ("self.paths = paths", "self.paths = paths\n        self.rng = np.random.default_rng(0)"),
            ("np.random.rand()", "self.rng.random()"),
            ("shuffle=True", "shuffle=True, worker_init_fn=print"),
        ),
    ),
)
def worker_generator(program: Program, training: Training) -> Iterator[Found]:
    """A generator of a data set's own, made in __init__ and drawn from in __getitem__, and workers for certain."""
    loaders = [
        c for c in program.torch_calls("DataLoader") if workers(program, c) and keyword(c, "worker_init_fn") is None
    ]
    for owner in datasets(program):
        made = owner.file.defined.get((owner, "__init__"))
        draw = owner.file.defined.get((owner, "__getitem__"))
        mine = [c for c in loaders if _is_over(program, c, owner)]
        if made is None or draw is None or not mine or "get_worker_info" in ast.unparse(owner):
            continue
        for node in ast.walk(made):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_generator(program, node.value):
                name = dotted(node.targets[0])
                if name.startswith("self.") and name in _used(owner, draw):
                    yield Found(node)


def _is_generator(program: Program, call: ast.Call) -> bool:
    names = program.full(call.func)
    wanted = {"numpy.random.default_rng", "numpy.random.RandomState", "random.Random", "torch.Generator"}
    return any(n in wanted for n in names)


def _is_over(program: Program, loader: ast.Call, owner: ast.ClassDef) -> bool:
    made = program.origins(keyword(loader, "dataset", 0))
    return any(isinstance(o, ast.Call) and program.definition(o.func) is owner for o in made)


def _used(owner: ast.ClassDef, function: Function, depth: int = 3) -> set[str]:
    """Attributes that a method and the methods that it calls use."""
    found = {dotted(n) for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    for name in list(found):
        other = owner.file.defined.get((owner, name.removeprefix("self.")))
        if depth and isinstance(other, Function) and other is not function:
            found |= _used(owner, other, depth - 1)
    return found


@rule(
    "worker-seed-fixed",
    "wrong",
    why="Workers start anew in each epoch, and this seeds them in the same way each time: every epoch draws the same "
    "augmentations from NumPy and random. The DataLoader's own seed is another one in each epoch.",
    cure="Leave it out (torch seeds NumPy's and random's generators, too, since 1.9), or seed from "
    "torch.initial_seed().",
    notebook="02",
    section=TRAPS,
    source=DOCS + "notes/randomness.html#dataloader",
    ill=(
        changed(
            HEALTHY,
            (", persistent_workers=True)", ", worker_init_fn=seed)"),
            ("def main", "def seed(worker):\n    np.random.seed(7 + worker)  # <-\n\ndef main"),
        ),
        changed(HEALTHY, (", persistent_workers=True)", ", worker_init_fn=lambda w: np.random.seed(w))  # <-")),
    ),
    healthy=(
        HEALTHY,
        changed(
            HEALTHY,
            (", persistent_workers=True)", ", worker_init_fn=seed)"),
            ("def main", "def seed(worker):\n    np.random.seed(torch.initial_seed() % 2**32)\n\ndef main"),
        ),
        changed(
            HEALTHY,
            ("persistent_workers=True)", "persistent_workers=True, worker_init_fn=lambda w: np.random.seed(w))"),
        ),
        changed(
            HEALTHY,
            ("np.random.rand()", "0"),
            (", persistent_workers=True)", ", worker_init_fn=lambda w: np.random.seed(w))"),
        ),
    ),
)
def worker_seed_fixed(program: Program, training: Training) -> Iterator[Found]:
    """worker_init_fn seeds NumPy or random from constants and the worker's number, where samples draw from them."""
    draws = [owner for owner in datasets(program) if _draws(program, owner)]
    for call in training_loaders(program, training):
        given = keyword(call, "worker_init_fn")
        if given is None or constant(keyword(call, "persistent_workers")) is True or workers(program, call) is False:
            continue
        function = given if isinstance(given, ast.Lambda) else program.definition(given)
        if not isinstance(function, Function | ast.Lambda) or not any(_is_over(program, call, o) for o in draws):
            continue
        names = {a.arg for a in function.args.args}
        for seed in ast.walk(function):
            if isinstance(seed, ast.Call) and program.full(seed.func)[:1] in (["numpy.random.seed"], ["random.seed"]):
                used = {n.id for a in seed.args for n in ast.walk(a) if isinstance(n, ast.Name)}
                if used <= names and not any(isinstance(n, ast.Call) for a in seed.args for n in ast.walk(a)):
                    yield Found(seed)


def _draws(program: Program, owner: ast.ClassDef) -> bool:
    """From NumPy's or random's global generator, in its __getitem__."""
    get = owner.file.defined.get((owner, "__getitem__"))
    calls = [n for n in ast.walk(get) if isinstance(n, ast.Call)] if isinstance(get, Function) else []
    return any(n.startswith(("numpy.random.", "random.")) for c in calls for n in program.full(c.func))


LINES = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        info = get_worker_info()
        with open(self.path) as file:
            for number, line in enumerate(file):
                if info is None or number % info.num_workers == info.id:
                    yield torch.tensor([float(x) for x in line.split()])

def main(path, model, epochs):
    loader = DataLoader(Lines(path), batch_size=32, num_workers=4, persistent_workers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        for x in loader:
            optimizer.zero_grad()
            mse_loss(model(x), x).backward()
            optimizer.step()

main("numbers.txt", torch.nn.Linear(8, 8), 9)
"""
NOT_SHARED = changed(
    LINES,
    (", get_worker_info", ""),
    ("        info = get_worker_info()\n", ""),
    ("if info is None or number % info.num_workers == info.id", "if number"),
    ("__iter__(self):", "__iter__(self):  # <-"),
)
HEALTHY_LINES = NOT_SHARED.replace("  # <-", "")
ONE_PROCESS = ("num_workers=4, persistent_workers=True", "num_workers=0")
JOINED = (
    "    loader =",
    """    torch.distributed.init_process_group("gloo")
    loader =""",
)
LEFT = ('main("n', 'import atexit\natexit.register(torch.distributed.destroy_process_group)\nmain("n')
FINITE = re.compile(r"\b(open|iglob|glob|listdir|read_csv|readlines|splitlines|loadtxt)\(|(iter\(|yield from )range\(")
"""What gives the same samples to each process that reads it. A queue, or a client of a server, may give others."""
DRAWS = {
    "rand",
    "randn",
    "randint",
    "random",
    "choice",
    "choices",
    "sample",
    "normal",
    "uniform",
    "integers",
    "shuffle",
    "permutation",
    "randperm",
}
"""Of these, each worker gets others: an endless stream in an order of its own in each is as good as a shared one."""
SHARES = {"get_worker_info", "split_dataset_by_node", "DistributedSampler"}
SHARING = ("datasets", "webdataset", "torchdata", "streaming", "litdata", "dali", "ffcv", "tensorflow_datasets")
"""Packages whose data sets share their samples by themselves."""


@rule(
    "iterable-not-shared",
    "wrong",
    why="An IterableDataset has no sampler: each worker of each rank has a copy and runs all of __iter__, so that "
    "every sample comes as often in an epoch as there are workers in all ranks.",
    cure="Let __iter__ give this process's share: torch.utils.data.get_worker_info() tells the worker and their number "
    "(None in the training's own process), torch.distributed the rank.",
    notebook="02",
    section="Exercises",
    source=DOCS + "data.html#torch.utils.data.IterableDataset",
    ill=(
        NOT_SHARED,
        changed(NOT_SHARED, ONE_PROCESS, JOINED, LEFT),
        changed(
            NOT_SHARED,
            ("        with open(self.path) as file:\n            for number, line in enumerate(file):\n", ""),
            (
                "                if number:\n                    yield torch.tensor([float(x) for x in line.split()])",
                "        return iter(range(9))",
            ),
        ),
    ),
    healthy=(
        LINES,
        changed(HEALTHY_LINES, ONE_PROCESS),
        changed(HEALTHY_LINES, ("num_workers=4", "num_workers=1")),
        changed(HEALTHY_LINES, ("persistent_workers=True", "persistent_workers=True, worker_init_fn=share")),
        changed(HEALTHY_LINES, ("enumerate(file)", "islice(file, self.worker, None, self.workers)")),
        changed(HEALTHY_LINES, ("float(x)", "float(x) + torch.rand(())")),
        changed(HEALTHY_LINES, ("        with open", "        random.shuffle(self.files)\n        with open")),
        changed(HEALTHY_LINES, ("import torch\n", "import torch\nfrom datasets import load_dataset\n")),
        changed(HEALTHY_LINES, ONE_PROCESS, JOINED, LEFT, ("if number", "if number % 2 == self.rank")),
        changed(HEALTHY_LINES, ONE_PROCESS, JOINED, LEFT, ("Lines(path)", 'Lines(f"{path}.{get_rank()}")')),
        changed(
            HEALTHY_LINES,
            ONE_PROCESS,
            JOINED,
            LEFT,
            ("Lines(path)", "split_dataset_by_node(Lines(path), 0, 2)"),
        ),
    ),
)
def iterable_not_shared(program: Program, training: Training) -> Iterator[Found]:
    """A class that reads something finite, knows of no worker and draws nothing; and several processes for certain."""
    if program.mentions(*SHARES) or program.imports(*SHARING) or managed(program):
        return
    loaders = [c for c in training_loaders(program, training) if keyword(c, "worker_init_fn") is None]
    for owner in datasets(program):
        text = ast.unparse(owner)
        calls = {method(n) for n in ast.walk(owner) if isinstance(n, ast.Call)}
        gives = owner.file.defined.get((owner, "__iter__"))
        iterable = any(program.is_torch(base, "IterableDataset") for base in owner.bases)
        if gives is None or not iterable or calls & DRAWS or "worker" in text or not FINITE.search(text):
            continue
        if any(_is_over(program, c, owner) and _several(program, c, text) for c in loaders):
            yield Found(gives)


def _several(program: Program, loader: ast.Call, text: str) -> bool:
    """Whether several processes read the data set: workers, or ranks of which nothing near it knows."""
    counts = [o.value for o in program.origins(keyword(loader, "num_workers", 5)) if isinstance(o, ast.Constant)]
    if len(counts) == 1 and isinstance(counts[0], int) and counts[0] > 1:
        return True
    told = text + program.behind(keyword(loader, "dataset", 0))
    return bool(groups(program)) and not re.search(r"rank|world|shard|replica|node|process", told, re.IGNORECASE)


def _batch_names(section: Section) -> dict[str, ast.AST]:
    """Names that the section's own loop gives to what its loader yields: "x", "y"."""
    loop = section.node
    if not isinstance(loop, ast.For):
        return {}
    target = loop.target
    if isinstance(loop.iter, ast.Call) and method(loop.iter) == "enumerate" and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    return {n.id: n for n in ast.walk(target) if isinstance(n, ast.Name)}


def _copies(program: Program, section: Section) -> Iterator[tuple[ast.Call, ast.expr | None]]:
    """`x.to(device)`, `x.cuda()` of what the loader gives, and its non_blocking."""
    names = _batch_names(section)
    for node in ast.walk(section.node):
        if isinstance(node, ast.Call) and method(node) in ("to", "cuda") and isinstance(node.func, ast.Attribute):
            base = node.func.value
            base = base.value if isinstance(base, ast.Subscript) else base  # batch["x"], batch[0]
            if dotted(base) not in names or (method(node) == "to" and not _to_device(program, node)):
                continue
            yield node, keyword(node, "non_blocking", 1 if method(node) == "cuda" else None)


def _to_device(program: Program, call: ast.Call) -> bool:
    given = keyword(call, "device", 0)
    words = " ".join(ast.unparse(o) for o in program.origins(given))
    return given is not None and re.search(r"device|cuda|gpu|rank", words, re.IGNORECASE) is not None


def _section_loaders(program: Program, section: Section) -> list[ast.Call]:
    return loaders_of(program, section.node.iter) if isinstance(section.node, ast.For) else []


@rule(
    "copy-blocks",
    "costs",
    why="The batch is in pinned memory, so that the GPU could fetch it by itself; without non_blocking=True the script "
    "waits until the copy is done. It matters where copies are a part of the step that one can measure.",
    cure=".to(device, non_blocking=True)",
    notebook="02",
    section="6. Tune your own",
    source=COPIES,
    ill=(
        changed(HEALTHY, ("x = x.to(device, non_blocking=True)", "x = x.to(device)  # <-")),
        changed(HEALTHY, ("y = y.to(device, non_blocking=True)", "y = y.cuda()  # <-")),
        changed(
            HEALTHY,
            ("for x, y in loader:", "for i, (x, y) in enumerate(loader):"),
            ("x.to(device, non_blocking=True)", "x.to(device=device)  # <-"),
        ),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, (", non_blocking=True", ""), ("pin_memory=True, ", "")),
        changed(
            HEALTHY,
            ("x.to(device, non_blocking=True)", "x.to(device, None, True)"),
            ("x.to(device, None, True)", "x.cuda(device, True)"),
        ),
        changed(
            HEALTHY, ("            optimizer.zero", "            y = y.to(torch.float32)\n            optimizer.zero")
        ),
    ),
)
def copy_blocks(program: Program, training: Training) -> Iterator[Found]:
    """In a training loop over a loader that pins for certain."""
    for section in training.sections:
        loaders = _section_loaders(program, section)
        if loaders and all(constant(keyword(c, "pin_memory", 7)) is True for c in loaders):
            for copy, how in _copies(program, section):
                if how is None and not open_ended(copy):
                    yield Found(copy, with_argument(copy, "non_blocking", "True"))


@rule(
    "copy-not-pinned",
    "costs",
    why="Of a batch that is not in pinned memory non_blocking=True saves a part of the wait: the script does not wait "
    "for the device after each copy, but while the driver first copies the batch into a pinned buffer of its own.",
    cure="DataLoader(..., pin_memory=True)",
    notebook="02",
    section="6. Tune your own",
    source=COPIES,
    ill=changed(HEALTHY, ("pin_memory=True, ", ""), ("persistent_workers=True)", "persistent_workers=True)  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("pin_memory=True", "pin_memory=device.type == 'cuda'")),
        changed(HEALTHY, ("pin_memory=True, ", ""), ("x.to(", "x.pin_memory().to(")),
    ),
)
def copy_not_pinned(program: Program, training: Training) -> Iterator[Found]:
    """A constant True over a loader that does not pin, and nothing pinned by hand."""
    pinned_by_hand = any(isinstance(c.func, ast.Attribute) for c in program.named("pin_memory"))
    for section in training.sections if not pinned_by_hand else ():
        for loader in _section_loaders(program, section):
            pins = keyword(loader, "pin_memory", 7)
            none = (pins is None or constant(pins) is False) and not open_ended(loader)
            asked = any(constant(how) is True for _, how in _copies(program, section))
            if none and asked and keyword(loader, "collate_fn") is None:
                yield Found(loader, with_argument(loader, "pin_memory", "True"))


DECODES = {
    "open",
    "imread",
    "imdecode",
    "read_image",
    "decode_image",
    "decode_jpeg",
    "ImageFolder",
    "read_video",
    "VideoReader",
    "torchaudio.load",
    "RandomResizedCrop",
    "ColorJitter",
    "RandAugment",
}


@rule(
    "no-workers",
    "look at it",
    why="Samples are decoded in the training's own process, and the device waits meanwhile. With workers they are "
    "ready when the step asks; the measurement above tells how long it waits.",
    cure="num_workers: as many as the cores that are free for this rank, then measure.",
    notebook="02",
    section="3. How many workers?",
    source=DOCS + "data.html#single-and-multi-process-data-loading",
    ill=changed(HEALTHY, ("num_workers=4, ", ""), (", persistent_workers=True)", ")  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("num_workers=4, ", ""), (", persistent_workers=True", ""), ("Image.open", "np.load")),
    ),
)
def no_workers(program: Program, training: Training) -> Iterator[Found]:
    """A training loader without workers, and images that are decoded or changed for each sample."""
    for call in training_loaders(program, training):
        if workers(program, call) is False:
            data = [o for o in program.origins(keyword(call, "dataset", 0)) if isinstance(o, ast.Call)]
            if any(_decodes(program, o) for o in data):
                yield Found(call)


def _decodes(program: Program, made: ast.Call) -> bool:
    owner = program.definition(made.func)
    inside = ast.walk(owner) if isinstance(owner, ast.ClassDef) else ast.walk(made)
    for node in inside:
        if isinstance(node, ast.Call):
            names = program.full(node.func)
            if any(last(n) in DECODES and n.startswith(("PIL.", "cv2.", "torchvision.", "imageio.")) for n in names):
                return True
    return False


@rule(
    "workers-restart",
    "look at it",
    why="Workers are started anew at each epoch, each with its imports and its copy of the data set. It matters where "
    "epochs are short.",
    cure="persistent_workers=True",
    notebook="02",
    section=TRAPS,
    source=DOCS + "data.html#torch.utils.data.DataLoader",
    ill=changed(HEALTHY, (", persistent_workers=True)", ")  # <-")),
    healthy=(
        HEALTHY,
        changed(HEALTHY, (", persistent_workers=True)", ")"), ("    for epoch in range(epochs):", "    if epochs:")),
    ),
)
def workers_restart(program: Program, training: Training) -> Iterator[Found]:
    """A training loader with workers for certain, in a loop over epochs."""
    for section in training.sections:
        if not any(True for _ in training.outer_loops(section)):
            continue
        for call in _section_loaders(program, section):
            if workers(program, call) and keyword(call, "persistent_workers") is None and not open_ended(call):
                yield Found(call, with_argument(call, "persistent_workers", "True"))


@rule(
    "cudnn-benchmark",
    "look at it",
    why="cudnn.benchmark tries all algorithms for each new shape: batches that are padded to another length each time "
    "pay for it in every step.",
    cure="Pad to few lengths, or leave benchmark off.",
    notebook="02",
    section=TRAPS,
    source=DOCS + "backends.html#torch.backends.cudnn.torch.backends.cudnn.benchmark",
    ill=changed(
        HEALTHY,
        ("def main", "def pad(samples):\n    return torch.nn.utils.rnn.pad_sequence(samples)\n\ndef main"),
        ("shuffle=True", "shuffle=True, collate_fn=pad"),
        ("    optimizer =", "    torch.backends.cudnn.benchmark = True  # <-\n    optimizer ="),
    ),
    healthy=(
        HEALTHY,
        changed(HEALTHY, ("    optimizer =", "    torch.backends.cudnn.benchmark = True\n    optimizer =")),
    ),
)
def cudnn_benchmark(program: Program, training: Training) -> Iterator[Found]:
    """Switched on by a constant, and a collate that pads to the longest."""
    padded = [c for c in program.torch_calls("pad_sequence") if "collate" in c.file.text]
    for node in program.nodes(ast.Assign):
        names = [n for t in node.targets for n in program.full(t)]
        if padded and constant(node.value) is True and "torch.backends.cudnn.benchmark" in names:
            yield Found(node)


@rule(
    "too-many-threads",
    "costs",
    why="More threads than cores take turns on them: each operation waits for the last of its threads. With several "
    "ranks on a machine they share the cores, and so do the loader's workers.",
    cure="At most the cores of the machine, divided by its ranks.",
    notebook="02",
    section="3. How many workers?",
    source=DOCS + "generated/torch.set_num_threads.html",
    ill=(
        "import os\nimport torch\ntorch.set_num_threads(2 * os.cpu_count())  # <-\n",
        "import torch\ntorch.set_num_threads(4096)  # <-\n",
        'import os\nos.environ["OMP_NUM_THREADS"] = "4096"  # <-\nimport torch\n',
    ),
    healthy=(
        "import os\nimport torch\ntorch.set_num_threads(max(1, os.cpu_count() // 2))\n",
        "import torch\ntorch.set_num_threads(1)\n",
        'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\n',
    ),
)
def too_many_threads(program: Program, training: Training) -> Iterator[Found]:
    """A constant above the cores of this machine, or a multiple of cpu_count()."""
    for call in program.torch_calls("set_num_threads"):
        if call.args and _beyond(call.args[0]):
            yield Found(call)
    for node in program.nodes(ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and constant(target.slice) in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                value = constant(node.value)
                if isinstance(value, str) and value.isdigit() and int(value) > (os.cpu_count() or 1):
                    yield Found(node)


def _beyond(node: ast.expr) -> bool:
    value = constant(node)
    if isinstance(value, int):
        return value > (os.cpu_count() or 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [n for n in (node.left, node.right) if isinstance(constant(n), int | float)]
        counts = any(isinstance(n, ast.Call) and method(n) == "cpu_count" for n in (node.left, node.right))
        return counts and any(constant(f) > 1 for f in factors)
    return False


RULES = [found for found in list(globals().values()) if isinstance(found, Rule)]
