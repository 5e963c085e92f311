"""Counterfactuals: run steps without one cost, to estimate what a fix would gain. Nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from labs.doctor.hooks import Hooks
from labs.doctor.profile import Profile
from labs.kit import _compat


def why_not(mode: str, hooks: Hooks, profile: Profile) -> str:
    """Return why a mode can't be tried or would show nothing; "" if it can be tried."""
    one_rank = bool(hooks.ddp) and torch.distributed.get_world_size() == 1
    reasons = {
        "same batch again": {
            "its data comes from no DataLoader": hooks.loader is None,
            "the script writes into its batches": hooks.writes_batches,
        },
        "no exchange": {
            "its gradients are exchanged by compiled code": any(
                _compat.reduces_in_python(m) or _compat.delays_all(m) for m in hooks.ddp
            ),
            "there is no DistributedDataParallel": not hooks.ddp,
            "there is one rank": one_rank,
        },
        "no waiting line": {
            "only what is on a GPU is waited for": profile.device == "cpu",
            "no line of the script waits for a value": all(line.kind != "synchronise" for line in profile.lines),
        },
        "no buffer broadcast": {"DDP sends no buffers": not profile.training.get("buffers"), "one rank": one_rank},
    }
    return next((why for why, holds in reasons.get(mode, {}).items() if holds), "")


@contextmanager
def _no_exchange(hooks: Hooks) -> Iterator[None]:
    """Keep DDP from exchanging gradients, as `no_sync()` does, so that a step takes only the rank's own time.

    This holds even if the script sets the flag in each step, directly or by no_sync(), which restores what it read.
    """
    from torch.nn.parallel import DistributedDataParallel

    name = "require_backward_grad_sync"
    before = [(m, m.require_backward_grad_sync) for m in hooks.ddp]
    never = property(lambda ddp: False, lambda ddp, on: ddp.__dict__.__setitem__(name, on))
    DistributedDataParallel.require_backward_grad_sync = never
    try:
        yield
    finally:
        del DistributedDataParallel.require_backward_grad_sync
        for ddp, on in before:
            ddp.require_backward_grad_sync = on


@contextmanager
def _no_buffers(hooks: Hooks) -> Iterator[None]:
    before = [(m, m.broadcast_buffers) for m in hooks.ddp]
    try:
        for ddp, _ in before:
            ddp.broadcast_buffers = False
        yield
    finally:
        for ddp, on in before:
            ddp.broadcast_buffers = on


Modes = Mapping[str, Callable[[Hooks], AbstractContextManager]]  # By name: the context for steps in this mode
MODES: Modes = {
    "same batch again": lambda hooks: patch.multiple(hooks, same_batch=True),
    "no exchange": _no_exchange,  # its first forward still broadcasts buffers
    # The host may just wait later instead, at the next line or in the optimizer's step
    "no waiting line": lambda hooks: patch.multiple(hooks, known_values=True),
    "no buffer broadcast": _no_buffers,
}
"""In order of priority: if the time is short, the last ones are skipped."""
