"""What fits on two cards, by counting bytes; and what the code of an article places where, by reading it."""

from __future__ import annotations

import ast
import inspect
import math
from typing import NamedTuple

from torch import nn

from labs.kit import hardware
from labs.parts.oracle import GptShape
from labs.parts.planning.parallel_cost import COPY_BYTES, STATE_BYTES, Cost, Job, Machine, costs, shape

GB = 1e9
CARD_GB = 80.0  # of an A100 or H100
RESERVED_GB = 1.0  # of a card that training cannot have
BETWEEN = 1.5  # cards that the training state of a model takes which one cannot hold and two can
BATCH, SEQ = 8, 2048


class Big(NamedTuple):
    """GPT-3's bytes, and the cards to hold them."""

    parameters: float
    largest_gb: float
    """Memory of the card that has most"""
    card: str

    @property
    def weights(self) -> float:
        """Bytes in 16 bits."""
        return COPY_BYTES * self.parameters

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients and Adam's moments."""
        return STATE_BYTES * self.parameters

    def cards(self, memory_gb: float) -> int:
        """How many of them hold the states, with nothing else."""
        return math.ceil(self.states / (memory_gb * GB))


def gpt3() -> Big:
    """LookupError if no card's memory is known."""
    cards = [s for s in hardware.specs() if s.memory_gb]
    if not cards:
        raise LookupError("labs/kit/gpus.toml names no card's memory")
    card = max(cards, key=lambda s: s.memory_gb or 0.0)
    return Big(GptShape().parameters, card.memory_gb or 0.0, card.gpu)


class Middle(NamedTuple):
    """A transformer between one card and two."""

    parameters: float
    alone: float
    """Least bytes that training takes on one card"""
    fits_one: bool
    fitting: list[Cost]
    """Plans for two cards that fit"""

    @property
    def split(self) -> list[Cost]:
        """Those that place different layers, or parts of layers, on different cards."""
        return [c for c in self.fitting if c.plan.pipeline * c.plan.tensor > 1]

    @property
    def ways(self) -> list[str]:
        """The schemes that fit, fastest first."""
        return list(dict.fromkeys(c.plan.scheme for c in sorted(self.fitting, key=lambda c: c.step_s)))


def middle() -> Middle:
    """By the cost model of `parallel_cost`, for two cards of CARD_GB; time at 100 TFLOP/s and 25 GB/s."""
    parameters = BETWEEN * CARD_GB * GB / STATE_BYTES
    job = Job(parameters, BATCH, SEQ, *shape(parameters), GptShape().vocabulary)
    free = (CARD_GB - RESERVED_GB) * GB
    found = costs(job, Machine(2, free, 1e14, 25e9))
    alone = min(c.memory_bytes for c in found if c.plan.ranks == 1)
    fitting = [c for c in found if c.plan.ranks == 2 and c.memory_bytes <= free]
    return Middle(parameters, alone, alone <= free, fitting)


# -- article E: its code, line by line, with the indentation that the page has lost

LISTINGS = {
    "51-53": """
for batch in dataloader:
    inputs, labels = batch
    inputs, labels = inputs.to(device), labels.to(device)
""",
    "64-66": """
model = MyModel().to(device)
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
""",
    "74-82": """
scaler = torch.cuda.amp.GradScaler()
for inputs, labels in dataloader:
    inputs, labels = inputs.to(device), labels.to(device)
    with torch.cuda.amp.autocast():
        outputs = model(inputs)
        loss = criterion(outputs, labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
""",
}


class Shown(NamedTuple):
    """What code does with devices and number formats."""

    devices: list[str]
    """Expressions that name the device of a .to() or .cuda()"""
    replicas: list[str]
    """Lines whose code wraps a model in DataParallel or DistributedDataParallel"""
    casts: list[str]
    """Lines whose code uses autocast"""

    @property
    def splits(self) -> bool:
        """Whether things are placed on more than one device by name."""
        return len(self.devices) > 1


def shown(listings: dict[str, str]) -> Shown:
    """Read, not run: a name that is computed elsewhere counts as one device."""
    devices: dict[str, None] = {}
    names: dict[str, set[str]] = {}
    for lines, code in listings.items():
        nodes = list(ast.walk(ast.parse(code)))
        names[lines] = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
        calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        devices |= {ast.unparse(c.args[0]): None for c in calls if c.func.attr in ("to", "cuda") and c.args}
    replicas = [k for k, v in names.items() if v & {"DataParallel", "DistributedDataParallel"}]
    return Shown(list(devices), replicas, [k for k, v in names.items() if "autocast" in v])


def replicates() -> str:
    """What torch says that nn.DataParallel does with a module; empty if it does not speak of replicas."""
    sentences = " ".join((inspect.getdoc(nn.DataParallel) or "").split()).split(". ")
    return next((s for s in sentences if "replicated" in s), "")
