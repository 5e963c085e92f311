"""Copy what a counterfactual may change, and restore it bit for bit."""

from __future__ import annotations

import copy
import gc
import random
import sys
from typing import Any

import torch

from labs.doctor.hooks import Hooks
from labs.doctor.probes.scene import local
from labs.doctor.usage import free_bytes
from labs.kit import _compat

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


class StateSnapshot:
    """Copies of parameters, buffers, optimizer, scheduler, loss scale and random state at the end of a step.

    Not copied: gradients (a step begins without them), the position in the data, other models (a moving average, a
    teacher) and the script's own counters. `found`: what `of_optimizers` returns.
    """

    def __init__(self, hooks: Hooks, found: tuple[list[Any], list[Any]]) -> None:
        scalers, schedules = found
        self.device = hooks.device if hooks.on_gpu else None
        self.tensors = [*_tensors(hooks), *(t for s in scalers for t in _compat.tensors_of_scaler(s))]
        with torch.no_grad():
            self.copies = [t.detach().clone() for t in self.tensors]
        # The dicts themselves, and their contents: tensors, lists (LBFGS) and numbers
        self.dicts = [(d, _own_lists(d)) for d in _dicts(hooks)]
        plain = ({k: copy.copy(v) for k, v in vars(s).items() if isinstance(v, PLAIN)} for s in schedules)
        self.schedules = list(zip(schedules, plain, strict=True))
        self.random, self.torch_random = random.getstate(), torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.device) if self.device is not None else None
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy else None

    def restore(self) -> None:
        """Restore in place, so that every reference to a tensor sees it."""
        for holder, values in self.dicts:
            holder.clear()
            holder.update(_own_lists(values))
        with torch.no_grad():
            for tensor, copied in zip(self.tensors, self.copies, strict=True):
                tensor.detach().copy_(copied)
        for schedule, values in self.schedules:
            vars(schedule).update({k: copy.copy(v) for k, v in values.items()})
        random.setstate(self.random)
        torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            torch.cuda.set_rng_state(self.cuda_random, self.device)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)


def has_room(hooks: Hooks, local_ranks: int) -> bool:
    """Return whether the copies of this machine's ranks fit into half the free memory; a step's peak needs the rest."""
    needed = sum(t.numel() * t.element_size() for t in map(local, _tensors(hooks)))
    return needed * (1 if hooks.on_gpu else local_ranks) < free_bytes(hooks) / 2


def of_optimizers() -> tuple[list[Any], list[Any]]:
    """Return the script's gradient scalers and schedulers. The search takes tens of milliseconds."""
    from torch.amp import GradScaler
    from torch.optim.lr_scheduler import LRScheduler

    objects = gc.get_objects()
    return tuple([o for o in objects if issubclass(type(o), kind)] for kind in (GradScaler, LRScheduler))


def _dicts(hooks: Hooks) -> list[dict[str, Any]]:
    """Return the optimizers' states and parameter groups."""
    optimizers = list(hooks.optimizers.values())
    states = [s for o in optimizers for s in o.state.values() if isinstance(s, dict)]
    return states + [g for o in optimizers for g in o.param_groups]


def _tensors(hooks: Hooks) -> list[Any]:
    """Return parameters, buffers and the optimizers' tensors, each once."""
    held = [t for root in hooks.roots.values() for t in (*root.parameters(), *root.buffers())]
    dicts = _dicts(hooks)
    held += [p for d in dicts for p in d.get("params", ())]
    held += [v for d in dicts for v in d.values() if isinstance(v, torch.Tensor)]  # lr may be one
    return list({id(t): t for t in held}.values())


def _own_lists(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) and k != "params" else v for k, v in values.items()}
