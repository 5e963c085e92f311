"""What a step would take if one thing were gone: that estimates what a fix gives. Nothing is computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from labs.doctor.hooks import Hooks
from labs.doctor.profile import Profile
from labs.kit import _compat


@dataclass(frozen=True)
class Mode:
    """A way to take a step."""

    name: str
    why_not: Callable[[Hooks, Profile], str]  # Why it cannot be tried or would show nothing; "" if it can
    applied: Callable[[Hooks], AbstractContextManager]  # Steps within are taken so


def _why_not_same_batch(hooks: Hooks, profile: Profile) -> str:
    if hooks.loader is None:
        return "its data comes from no DataLoader"
    return "the script writes into its batches" if hooks.writes_batches else ""


def _why_not_without_waits(hooks: Hooks, profile: Profile) -> str:
    if profile.device == "cpu":
        return "only what is on a GPU is waited for"
    waits = any(line.kind == "synchronise" for line in profile.lines)
    return "" if waits else "no line of the script waits for a value of the device"


def _why_not_without_exchange(hooks: Hooks, profile: Profile) -> str:
    if any(_compat.reduces_in_python(m) or _compat.delays_all(m) for m in hooks.ddp):
        return "its gradients are exchanged by compiled code"
    if not hooks.ddp:
        return "there is no DistributedDataParallel"
    return "" if torch.distributed.get_world_size() > 1 else "there is one rank"


@contextmanager
def _no_exchange(hooks: Hooks) -> Iterator[None]:
    """DDP's gradients stay on their rank, as in `no_sync()`: what is left is what ranks need for themselves.

    Also if the script sets it in each step, by itself or by no_sync(), which puts back what it reads.
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


def _why_not_without_buffers(hooks: Hooks, profile: Profile) -> str:
    if not profile.training.get("buffers"):
        return "DDP sends no buffers"
    return "" if torch.distributed.get_world_size() > 1 else "there is one rank"


@contextmanager
def _no_buffers(hooks: Hooks) -> Iterator[None]:
    with ExitStack() as stack:
        for ddp in hooks.ddp:
            stack.enter_context(patch.object(ddp, "broadcast_buffers", False))
        yield


MODES = (
    Mode("same batch again", _why_not_same_batch, lambda hooks: patch.multiple(hooks, same_batch=True)),
    # After it, the first forward still broadcasts buffers
    Mode("no exchange", _why_not_without_exchange, _no_exchange),
    # What the host doesn't wait for here it may wait for later: at the next line, or in the optimizer's step
    Mode("no waiting line", _why_not_without_waits, lambda hooks: patch.multiple(hooks, known_values=True)),
    Mode("no buffer broadcast", _why_not_without_buffers, _no_buffers),
)
"""In the order in which they are tried. If the time is short, the last ones are left out."""
