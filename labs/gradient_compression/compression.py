"""Gradients made smaller before they are sent: DDP's hooks for 16 bits and PowerSGD, and top-k with error feedback.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from labs.common.communication import delay, wire
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.kit.errors import require

ONE_BUCKET_MB = 1e6
"""A bucket that no model fills. PowerSGD over gloo needs it: with several buckets, the chained collectives of one
mix with those of another in an order that differs between ranks, and the job dies."""


@dataclass
class TopK:
    """What top-k keeps between steps: of each parameter, the gradient that was not sent yet."""

    share: float
    """Of all numbers, those largest in magnitude that are sent."""
    error: dict[Tensor, Tensor] = field(default_factory=dict)
    """By parameter, not by bucket: after its first step DDP puts the parameters in another order."""


def top_k_hook(state: TopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send the largest numbers and their places; add what was left out to the next step's gradient.

    Without that error feedback small gradients would never arrive (Stich et al., NeurIPS 2018; Karimireddy et al.,
    ICML 2019). The two all-gathers wait: nothing of them is hidden behind backward.
    """
    gradient, ranks = bucket.buffer(), dist.get_world_size()
    parameters, views = bucket.parameters(), bucket.gradients()  # views: adding to them adds to the buffer
    for p, view in zip(parameters, views, strict=True):
        view.add_(state.error.get(p, 0.0))  # error feedback: what earlier steps did not send
    places = gradient.abs().topk(max(1, round(state.share * len(gradient)))).indices
    values = gradient[places]
    left_out = gradient.index_fill(0, places, 0.0).split([view.numel() for view in views])
    state.error.update((p, left.view_as(p)) for p, left in zip(parameters, left_out, strict=True))
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    all_places = [torch.empty_like(places, dtype=torch.int32) for _ in range(ranks)]
    dist.all_gather(all_values, values)  # k x 4 bytes to each other rank
    dist.all_gather(all_places, places.int())  # k x 4 bytes to each other rank
    gradient.zero_().index_add_(0, torch.cat(all_places), torch.cat(all_values).div_(ranks))
    done = torch.futures.Future[Tensor]()
    done.set_result(gradient)
    return done


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients in bfloat16, over gloo as well.

    DDP refuses torch's own bf16_compress_hook, by its name, where torch is built without CUDA (_check_comm_hook in
    torch/nn/parallel/distributed.py). gloo adds bfloat16 numbers all the same.
    """
    small = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(small, async_op=True).get_future()  # starts; backward goes on
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


@dataclass(frozen=True)
class Way:
    """A way to send gradients."""

    about: str
    sent_bytes: Callable[[Iterable[nn.Parameter], int], float]
    """Bytes that each of `ranks` ranks sends per step, by closed form: (parameters, ranks)."""
    hook: Callable | None = None
    """DDP's communication hook; None: its own all-reduce."""
    state: Callable[[], object] = lambda: None
    """Makes what the hook keeps between steps."""
    one_bucket: bool = False


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def _power_sgd(rank: int) -> Way:
    def state() -> powerSGD_hook.PowerSGDState:
        # Two plain steps first: torch asks for more than one before it starts from the last step's matrices.
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)

    def sent(parameters: Iterable[nn.Parameter], ranks: int) -> float:
        # A matrix of n x m is sent as P (n x r) and Q (r x m), if that is at least half as few numbers.
        numbers = 0
        for p in parameters:
            n, m = p.shape[0], p.numel() // max(1, p.shape[0])
            small = rank * (n + m)
            numbers += small if p.dim() > 1 and 2 * small < n * m else p.numel()
        return ring_all_reduce_bytes(4 * numbers, ranks)

    about = f"PowerSGD, rank {rank}: two thin matrices for each"
    return Way(about, sent, powerSGD_hook.powerSGD_hook, state, one_bucket=True)


def _top_k(share: float) -> Way:
    def sent(parameters: Iterable[nn.Parameter], ranks: int) -> float:
        return (ranks - 1) * 8 * round(share * _numbers(parameters))  # 4 bytes a value, 4 a place, to every other rank

    about = f"the largest {share:.0%} of all, with error feedback"
    return Way(about, sent, top_k_hook, lambda: TopK(share), one_bucket=True)


def _plain(bytes_each: int, hook: Callable | None, about: str) -> Way:
    return Way(about, lambda ps, ranks: ring_all_reduce_bytes(bytes_each * _numbers(ps), ranks), hook)


WAYS: dict[str, Way] = {
    "fp32": _plain(4, None, "DDP as it is"),
    "fp16": _plain(2, default_hooks.fp16_compress_hook, "half precision on the wire"),
    "bf16": _plain(2, bf16_hook, "bfloat16 on the wire"),
    "powersgd_1": _power_sgd(1),
    "powersgd_4": _power_sgd(4),
    "powersgd_16": _power_sgd(16),
    "top_1%": _top_k(0.01),
}


def require_way(name: str) -> None:
    """BadInput for a way that there is none."""
    require(name in WAYS, f"unknown way to send gradients {name!r}: choose from {', '.join(WAYS)}")


def wrapped(module: nn.Module, name: str, bucket_cap_mb: float = 25.0) -> DistributedDataParallel:
    """`module` in DDP, which sends its gradients in the way `name`. A collective: parameters are broadcast."""
    way = WAYS[name]
    ddp = DistributedDataParallel(module, bucket_cap_mb=ONE_BUCKET_MB if way.one_bucket else bucket_cap_mb)
    if not wire.can_pace():  # a slow wire is acted out, by a hook that waits
        sent = partial(_bucket_bytes, way)
        ddp.register_comm_hook(way.state(), delay.holding(way.hook or default_hooks.allreduce_hook, sent))
    elif way.hook:
        ddp.register_comm_hook(way.state(), way.hook)
    return ddp


def _bucket_bytes(way: Way, bucket: dist.GradBucket) -> float:
    return way.sent_bytes(bucket.parameters(), dist.get_world_size())
