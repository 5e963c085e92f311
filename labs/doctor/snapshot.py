"""Copies of what a counterfactual may change: put back after it, bit for bit."""

from __future__ import annotations

import copy
import gc
import random
import sys
from typing import Any

import psutil

from labs.doctor.hooks import Hooks
from labs.kit import _compat, host

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


class StateSnapshot:
    """Parameters, buffers, optimizer, learning rate schedule, loss scale and random state, at the end of a step.

    Not: gradients (a step begins without), the place in the data, other models (a moving average, a teacher) and what
    else the script counts.
    """

    def __init__(self, hooks: Hooks, found: ScriptObjects) -> None:
        torch = self.torch = hooks.torch
        self.device = hooks.device if hooks.device is not None and hooks.device.type == "cuda" else None
        to_host = self.device is not None and not _fits(hooks, self.device)
        self.tensors = [*_tensors(hooks), *(t for s in found.scalers for t in _compat.tensors_of_scaler(s))]
        with torch.no_grad():
            self.copies = [_copied(t, to_host) for t in self.tensors]
        optimizers = list(hooks.optimizers.values())
        # The dicts themselves, and what was in them: tensors, lists (LBFGS) and numbers
        dicts = [
            *(s for o in optimizers for s in o.state.values() if isinstance(s, dict)),
            *(g for o in optimizers for g in o.param_groups),
        ]
        self.dicts = [(d, _own_lists(d)) for d in dicts]
        self.schedules = [
            (s, {k: copy.copy(v) for k, v in vars(s).items() if isinstance(v, PLAIN)}) for s in found.schedules
        ]
        self.random, self.torch_random = random.getstate(), torch.get_rng_state()
        self.cuda_random = torch.cuda.get_rng_state(self.device) if self.device is not None else None
        numpy = sys.modules.get("numpy")
        self.numpy_random = numpy.random.get_state() if numpy else None

    @staticmethod
    def room(hooks: Hooks, local_ranks: int) -> bool:
        """Whether there is memory for the copies, on the device or on the host. All ranks of a machine ask at once."""
        bytes_ = sum(_bytes(t) for t in _tensors(hooks))
        on_gpu = hooks.device is not None and hooks.device.type == "cuda"
        return (on_gpu and _fits(hooks, hooks.device)) or 2 * bytes_ < free_on_host(local_ranks)

    def restore(self) -> None:
        """In place, so that whoever holds a tensor sees it, too."""
        for holder, values in self.dicts:
            holder.clear()
            holder.update(_own_lists(values))
        with self.torch.no_grad():
            for tensor, copied in zip(self.tensors, self.copies, strict=True):
                tensor.detach().copy_(copied)
        for schedule, values in self.schedules:
            vars(schedule).update({k: copy.copy(v) for k, v in values.items()})
        random.setstate(self.random)
        self.torch.set_rng_state(self.torch_random)
        if self.cuda_random is not None:
            self.torch.cuda.set_rng_state(self.cuda_random, self.device)
        if self.numpy_random is not None:
            sys.modules["numpy"].random.set_state(self.numpy_random)


def free_on_host(local_ranks: int) -> float:
    """Bytes of the host's memory for each rank of this machine: its part of what is free on it and within the limit.

    The limit is that of the control group, Slurm's of a job for instance, which kills what exceeds it. Each rank is
    taken to use as much of it as this one; workers are not counted.
    """
    free, limit = psutil.virtual_memory().available, host.memory_limit_bytes()
    if limit is not None:
        free = min(free, limit - local_ranks * psutil.Process().memory_info().rss)
    return free / local_ranks


def _tensors(hooks: Hooks) -> list[Any]:
    """Parameters, buffers and what the optimizers hold, each once."""
    optimizers = list(hooks.optimizers.values())
    held = [t for root in hooks.roots.values() for t in (*root.parameters(), *root.buffers())]
    held += [p for o in optimizers for g in o.param_groups for p in g["params"]]
    for values in (
        *(s for o in optimizers for s in o.state.values()),
        *(g for o in optimizers for g in o.param_groups),
    ):
        if isinstance(values, dict):
            held += [v for v in values.values() if isinstance(v, hooks.torch.Tensor)]  # lr may be one
    return list({id(t): t for t in held}.values())


def _copied(tensor: Any, to_host: bool) -> Any:
    tensor = tensor.detach()
    return tensor.to("cpu", copy=True) if to_host else tensor.clone()


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of FSDP2, this rank's part
    return local.numel() * local.element_size()


def _fits(hooks: Hooks, device: Any) -> bool:
    """Into half of what the driver has left: torch holds on to what a step needs at its peak."""
    free, _ = hooks.torch.cuda.mem_get_info(device)
    return sum(_bytes(t) for t in _tensors(hooks)) < free // 2


def _own_lists(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) and k != "params" else v for k, v in values.items()}


class ScriptObjects:
    """Objects of the script that belong to its optimizers. Looking for them takes tens of milliseconds."""

    def __init__(self, hooks: Hooks) -> None:
        from torch.amp import GradScaler
        from torch.optim.lr_scheduler import LRScheduler

        objects = gc.get_objects()
        self.scalers = [o for o in objects if issubclass(type(o), GradScaler)]
        self.schedules = [o for o in objects if issubclass(type(o), LRScheduler)]
