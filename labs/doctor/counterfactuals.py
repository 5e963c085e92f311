"""What a step would take if one thing were otherwise: that estimates what a fix of it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import psutil

from labs.doctor.hooks import Hooks, length
from labs.doctor.profile import Profile
from labs.doctor.snapshot import free_on_host
from labs.kit import _compat, host

POINT_TO_POINT = ("send", "recv", "batch_isend_irecv", "wait")
NO_LOADER, COMPILED = "its data comes from no DataLoader", "the model would be compiled anew"


@dataclass(frozen=True)
class Mode:
    """A way to take a step."""

    name: str
    why_not: Callable[[Hooks, Profile], str]  # Why it cannot be tried or would show nothing; "" if it can
    applied: Callable[[Hooks], AbstractContextManager]  # Steps within are taken so
    settle: int = 1  # Steps after its start that are not counted
    samples_factor: float = 1.0  # Samples in one of its steps, in those of a step as it is
    risky: bool = False  # Whether a script may not survive it


# Nothing is computed otherwise


def _why_not_same_batch(hooks: Hooks, profile: Profile) -> str:
    return NO_LOADER if hooks.loader is None else "the script writes into its batches" * hooks.writes_batches


def _why_not_without_waits(hooks: Hooks, profile: Profile) -> str:
    if profile.device == "cpu":
        return "only what is on a GPU is waited for"
    waits = any(line.kind == "synchronise" for line in profile.lines)
    return "" if waits else "no line of the script waits for a value of the device"


def _why_not_fewer_threads(hooks: Hooks, profile: Profile) -> str:
    if profile.device != "cpu":
        return "the model is on a GPU"
    have, share = hooks.torch.get_num_threads(), fair_threads(profile.local_ranks)
    return COMPILED if profile.training["compiled"] else "" if have > share else f"{have} threads are none too many"


@contextmanager
def _fewer_threads(hooks: Hooks) -> Iterator[None]:
    before = hooks.torch.get_num_threads()
    hooks.torch.set_num_threads(fair_threads(hooks.local_ranks))
    try:
        yield
    finally:
        hooks.torch.set_num_threads(before)


def fair_threads(local_ranks: int) -> int:
    """Physical cores for each rank of this machine, of those that this process may use."""
    usable = host.core_count()
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) // local_ranks)


def _why_not_without_exchange(hooks: Hooks, profile: Profile) -> str:
    if any(_compat.reduces_in_python(m) or _compat.delays_all(m) for m in hooks.ddp):
        return "its gradients are exchanged by compiled code"
    if not hooks.ddp:
        return "there is no DistributedDataParallel"
    return "" if hooks.torch.distributed.get_world_size() > 1 else "there is one rank"


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
    return "" if hooks.torch.distributed.get_world_size() > 1 else "there is one rank"


@contextmanager
def _no_buffers(hooks: Hooks) -> Iterator[None]:
    with ExitStack() as stack:
        for ddp in hooks.ddp:
            stack.enter_context(patch.object(ddp, "broadcast_buffers", False))
        yield


# Something is computed otherwise: a script may not be made for it


def _why_not_half(hooks: Hooks, profile: Profile) -> str:
    of = profile.training
    if of["autocast"]:
        return f"it runs under autocast ({of['autocast']})"
    if of["dtypes"] != ["float32"]:
        return "parameters are not all FP32"
    if of["compiled"]:
        return COMPILED
    if any(isinstance(o, hooks.torch.optim.LBFGS) for o in hooks.optimizers.values()):
        return "LBFGS ends a step as soon as the loss hardly changes: in 16 bits after more or fewer passes"
    of["half"] = str(_half(hooks)).removeprefix("torch.")  # its fix names it
    return "" if hooks.called else "no forward of a model was seen"


def _half(hooks: Hooks) -> Any:
    torch = hooks.torch
    bf16 = hooks.device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bf16 else torch.float16


def _half_precision(hooks: Hooks) -> AbstractContextManager:
    """Forward and backward under autocast; what comes after the model is computed in the precision it had."""
    torch, device, half = hooks.torch, hooks.device.type, _half(hooks)

    def cast(leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == half else leaf

    return patch.multiple(
        hooks,
        around_forward=lambda: torch.autocast(device, half),
        of_output=lambda output: _compat.tree_map(cast, output),
    )


def _why_not_larger_batch(hooks: Hooks, profile: Profile) -> str:
    if hooks.loader is None:
        return NO_LOADER
    if profile.training["compiled"]:
        return COMPILED
    if any(line.kind == "exchange" and line.what in POINT_TO_POINT for line in profile.lines):
        return "ranks send each other tensors of the shapes that they have now"
    try:
        twice(hooks.last_batch(), hooks.torch)
    except TypeError as e:
        return f"its batches are not understood: {e}"
    if profile.device == "cuda":
        fits = 2 * hooks.torch.cuda.max_memory_allocated(hooks.device) < hooks.torch.cuda.mem_get_info(hooks.device)[1]
    else:
        fits = 1.2 * psutil.Process().memory_info().rss < free_on_host(profile.local_ranks)
    return "" if fits else "there is no memory for it"


def twice(batch: Any, torch: Any) -> Any:
    """All its samples twice. TypeError if it is not lists, tuples and dicts of tensors with one row for each sample."""
    rows = length(batch, torch.Tensor)

    def doubled(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided or not leaf.dim() or len(leaf) != rows:
            raise TypeError(f"there is a {type(leaf).__name__} that does not have {rows} rows")
        return torch.cat([leaf, leaf])

    return _compat.tree_map(doubled, batch)


MODES = (
    Mode("same batch again", _why_not_same_batch, lambda hooks: patch.multiple(hooks, same_batch=True)),
    # After it, the first forward still broadcasts buffers
    Mode("no exchange", _why_not_without_exchange, _no_exchange),
    # What the host doesn't wait for here it may wait for later: at the next line, or in the optimizer's step
    Mode("no waiting line", _why_not_without_waits, lambda hooks: patch.multiple(hooks, known_values=True)),
    Mode("fewer threads", _why_not_fewer_threads, _fewer_threads),
    Mode("no buffer broadcast", _why_not_without_buffers, _no_buffers),
    Mode("half precision", _why_not_half, _half_precision, risky=True),
    Mode(
        "larger batch",
        _why_not_larger_batch,
        lambda hooks: patch.multiple(hooks, of_batch=lambda batch: twice(batch, hooks.torch)),
        samples_factor=2.0,
        risky=True,
    ),
)
"""In the order in which they are tried, harmless ones first. If the time is short, the last ones are left out."""
