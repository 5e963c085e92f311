"""The same peak from torch's own tracker, which takes a snapshot for each module: the check of the fast one.

torch.distributed._tools.mem_tracker takes about three times as long for ResNet-152, and one micro-batch only.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from labs.kit.errors import BadInput
from labs.parts.oracle import fake
from labs.parts.oracle.step import Model
from labs.parts.oracle.trace import CATEGORIES
from labs.parts.oracle.tracker import Tracker

# MemTracker's categories by ours. It has one for all that a forward pass makes, and one for all else of backward.
NAMES = {
    "Parameter": "parameters",
    "Buffer": "inputs/buffers",
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Activation": "activations",
    "Temp": "temporaries",
    "Other": "inputs/buffers",
}


def memtracker(source: fake.Source, rows: int, **conditions: Any) -> dict[str, int]:
    """Peak bytes by category of the second step, as MemTracker counts them; `conditions` as `oracle.step` takes.

    What it counts otherwise: all that a forward pass makes is "activations", all that is made in backward and is no
    gradient is "temporaries", what an optimizer computes on the way is with its state; a gradient that is added to
    another takes new memory, as under any mode (Tracker: sums_in_place); sizes are never rounded on a CPU.
    """
    try:
        from torch.distributed._tools.mem_tracker import MemTracker
    except ImportError as e:
        raise BadInput(
            f"MemTracker is a private part of torch that torch {torch.__version__} does not have: use the "
            "version in constraints.txt"
        ) from e
    model = Model(source, **{**conditions, "target": "cpu"})
    x, y = fake.batch_of(model.workload, rows, model.mode)
    with model.mode:
        model.first_step(x, y)
        gc.collect()
        tracker = MemTracker()
        tracker.track_external(model.module, model.optimizer, x, y)
        with tracker:
            model.run(x, y, Tracker())
        snapshot = tracker.get_tracker_snapshot("peak")
    found = dict.fromkeys(CATEGORIES, 0)
    for kind, nbytes in snapshot[torch.device("cpu")].items():
        if (name := getattr(kind, "value", kind)) in NAMES:
            found[NAMES[name]] += nbytes
    return found
