"""Faults of one changed line each, named as the doctor names what it finds, and variants without a fault."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from functools import cache

from labs.kit.errors import BadInput, did_you_mean
from labs.slow_training import script


@dataclass(frozen=True)
class Fault:
    """One changed line of `train`."""

    name: str
    what: str
    old: str
    new: str


HISTORY = "history.append(loss.detach())"
FAULTS = (
    Fault("slow_loader", "each image is decoded whenever it is asked for",
          "TensorDataset(normalized(images), labels)", "DecodedOnDemand(images, labels)"),
    Fault("tiny_batches", "batches of 4 images",
          "batch_size=64", "batch_size=4"),
    Fault("float64", "everything is computed in 64 bits", "torch.float32", "torch.float64"),
    Fault("anomaly", "autograd's anomaly detection was left on", "anomaly(False)", "anomaly(True)"),
    Fault("validation", "it validates after each step", "save_every = 500, 1000", "save_every = 1, 1000"),
    Fault("checkpoint", "it saves a checkpoint after each step", "save_every = 500, 1000", "save_every = 500, 1"),
    Fault("own_code", "it computes medians of all weights in each step",
          HISTORY, "history.append(medians(model))"),
    Fault("growing", "it keeps and sorts the outputs of all steps",
          HISTORY, "history = all_distances(history, output)"),
    Fault("weight_averaging", "the ranks average their weights after each step",
          HISTORY, "history.append(average_weights(model))"),
    Fault("tiny_buckets", "a bucket for each gradient", "bucket_cap_mb=25", "bucket_cap_mb=0.0001"),
    Fault("straggler", "the last rank computes something in each step",
          HISTORY, "history.append(singular_values(model) if rank == ranks - 1 else 0)"),
)  # fmt: skip
HEALTHY = (
    Fault("healthy", "nothing: it is as it should be", "", ""),
    Fault("healthy", "nothing: its model is larger", "width=8", "width=16"),
    Fault("healthy", "nothing: three `.item()` in a step cost a CPU next to nothing",
          HISTORY, "history.append([loss.item(), output.max().item(), x.mean().item()])"),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(fault.name for fault in FAULTS + HEALTHY))


def draw(seed: int) -> Fault:
    """Return a seed's fault. With n = len(FAULTS + HEALTHY), seeds k * n to k * n + n - 1 draw each one once."""
    kinds = FAULTS + HEALTHY
    turn, place = divmod(seed, len(kinds))
    return random.Random(turn).sample(kinds, len(kinds))[place]


def require_name(name: str) -> None:
    """Raise BadInput if there is no fault of this name."""
    if name not in NAMES:
        raise BadInput(f"there is no fault {name!r}: {did_you_mean(name, NAMES)}there are {', '.join(NAMES)}")


@cache
def fixed() -> str:
    """Return the source of `train` without any fault."""
    return inspect.getsource(script.train)


def source(fault: Fault) -> str:
    """Return the source of `train` with the fault. ValueError unless the old text occurs exactly once."""
    if fault.old and fixed().count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.old!r} must occur in train exactly once")
    return fixed().replace(fault.old, fault.new) if fault.old else fixed()


def difference(fault: Fault) -> str:
    """Return the changed line, with (-) and without (+) the fault."""
    pairs = zip(source(fault).splitlines(), fixed().splitlines(), strict=True)
    return "\n".join(f"- {a.strip()}\n+ {b.strip()}" for a, b in pairs if a != b)
