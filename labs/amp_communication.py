"""Does mixed precision halve what DDP sends?

    python -m labs.amp_communication                            # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.amp_communication --model cnn --bucket-cap-mb 25

About 4 s on 2 CPU cores. Every way takes one synchronised step on the same model and data; a communication hook counts
what travels:
  fp32                 no autocast, DDP's own all-reduce
  bf16, fp16           forward under autocast, DDP's own all-reduce
  ... compressed       fp16_compress_hook or bf16_compress_hook: buckets are cast, sent, cast back

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts import models
from labs.parts.data_parallel.replicas import nbytes
from labs.parts.data_parallel.scaling import ring_all_reduce_bytes
from labs.parts.precision import amp
from labs.parts.timing.probing import supported

Hook = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[Tensor]]
HOOKS: dict[str, Hook] = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}
WAYS = (*((p, h) for p in ("fp32", "bf16", "fp16") for h in ("none", "fp16")), ("fp32", "bf16"))
ELEMENT_BYTES = {"none": 4, "fp16": 2, "bf16": 2}  # of a gradient on its way


@dataclass(frozen=True)
class Config:
    """What to train, and how it communicates."""

    model: str = "mlp"
    """One of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 32
    """Samples per rank and step."""
    bucket_cap_mb: float = 1.0
    """Gradients travel in buckets of about this many MiB; DDP's own default is 25."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """A smaller batch."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.bucket_cap_mb > 0, f"bucket_cap_mb must be positive, not {self.bucket_cap_mb}")
        models.require_known(self.model)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built."""
    models.build(config.model)


def predict(gradient_bytes: int, hook: str, world_size: int) -> float:
    """Bytes that a rank sends in one step: a ring all-reduce of FP32 gradients, at the width of the hook's format.

    Autocast is not in it: parameters are FP32, so their gradients are.
    """
    return ring_all_reduce_bytes(gradient_bytes * ELEMENT_BYTES[hook] // 4, world_size)


@dataclass
class Traffic:
    """The buckets of one step, and what its all-reduces were given to send."""

    hook: Hook
    bucket_bytes: list[int] = field(default_factory=list)
    bucket_dtypes: set[str] = field(default_factory=set)
    wire_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes handed to all-reduces, by number format."""

    def clear(self) -> None:
        """Forget the step before this one."""
        for seen in (self.bucket_bytes, self.bucket_dtypes, self.wire_bytes):
            seen.clear()


class _Wire(TorchDispatchMode):
    """Sees the tensors that all-reduces send, below Python: what a hook does before does not matter."""

    def __init__(self, wire_bytes: Counter[str]) -> None:
        super().__init__()
        self.wire_bytes = wire_bytes

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.c10d.allreduce_.default:
            for t in args[0]:
                self.wire_bytes[_name(t.dtype)] += nbytes(t)
        return func(*args, **(kwargs or {}))


def counted(traffic: Traffic, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook: note the bucket, let `traffic.hook` send it, note what it sends."""
    traffic.bucket_bytes.append(nbytes(bucket.buffer()))
    traffic.bucket_dtypes.add(_name(bucket.buffer().dtype))
    with _Wire(traffic.wire_bytes):
        return traffic.hook(None, bucket)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Every way in turn: buckets, bytes sent, and how far its gradient is from those without compression."""
    gradients: dict[tuple[str, str], Tensor] = {}
    ways = [w for w in WAYS if supported(w[0], rank.device)]
    for done, (precision, hook) in enumerate(ways, start=1):
        if why := _impossible(precision, config, rank):
            yield rank.record("not_possible", "1", 1.0, precision=precision, hook=hook, why=why)
            continue
        refused = _refusal(hook, rank)
        yield rank.record("hook_refused", "1", float(refused != "none"), precision=precision, hook=hook, error=refused)
        if refused == "none":
            traffic, gradient = synchronised_step(precision, hook, config, rank)
            gradients[precision, hook] = gradient
            yield from _traffic(traffic, gradient, precision, hook, rank)
            yield from _errors(gradients, precision, hook, rank)
        rank.progress(done, len(ways), f"{precision}, hook: {hook}")


def _impossible(precision: str, config: Config, rank: Rank) -> str:
    """Why the model cannot be trained in `precision` here; "" if it can. The same on all ranks, which are alike."""
    if precision == "fp32":
        return ""  # as amp.impossible, without a model
    workload = models.make(config.model, config.seed)
    batch = [t.to(rank.device) for t in workload.make_batch(2)]
    return amp.impossible(workload.module.to(rank.device), workload.loss, batch, precision)


def _refusal(hook: str, rank: Rank) -> str:
    """What DDP says when `hook` is registered; "none" if it takes it. It judges by the hook's name."""
    try:
        DistributedDataParallel(nn.Linear(2, 2).to(rank.device)).register_comm_hook(None, HOOKS[hook])
    except (TypeError, ValueError, RuntimeError) as e:
        return f"{type(e).__name__}: {' '.join(str(e).split())[:150]}"
    return "none"


def synchronised_step(precision: str, hook: str, config: Config, rank: Rank) -> tuple[Traffic, Tensor]:
    """One synchronised forward and backward pass: (traffic, the gradient that the optimizer would get)."""
    workload = models.build(config.model, config.seed)
    ddp = DistributedDataParallel(workload.module.to(rank.device), bucket_cap_mb=config.bucket_cap_mb)
    traffic = Traffic(HOOKS[hook])
    ddp.register_comm_hook(traffic, counted)
    torch.manual_seed(config.seed + 1 + rank.rank)
    x, y = (t.to(rank.device) for t in workload.make_batch(4 if config.smoke else config.batch_size))
    for _ in range(2):  # the first goes in one bucket, while DDP learns the order of the gradients
        traffic.clear()
        ddp.zero_grad()
        with amp.precision(precision, rank.device):
            loss = workload.loss(ddp(x), y)
        with amp.tf32(False):
            loss.backward()
    return traffic, torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def _traffic(traffic: Traffic, gradient: Tensor, precision: str, hook: str, rank: Rank) -> Iterator[Record]:
    case = {"precision": precision, "hook": hook}
    wire, dtypes = sum(traffic.wire_bytes.values()), "+".join(sorted(traffic.wire_bytes))
    sent = ring_all_reduce_bytes(wire, rank.world_size)
    dtype = "+".join(sorted(traffic.bucket_dtypes))
    buckets = len(traffic.bucket_bytes)
    yield rank.record("bucket_bytes", "B", sum(traffic.bucket_bytes), dtype=dtype, buckets=buckets, **case)
    yield rank.record("wire_bytes", "B", wire, dtype=dtypes, **case)
    yield rank.record("sent_bytes", "B", sent, dtype=dtypes, **case)
    expected = predict(nbytes(gradient), hook, rank.world_size)
    yield rank.record("predicted_sent_bytes", "B", expected, kind="modelled", **case)


def _errors(gradients: dict[tuple[str, str], Tensor], precision: str, hook: str, rank: Rank) -> Iterator[Record]:
    """Relative errors, and the share of numbers that only compression turned into 0."""
    gradient, plain = gradients[precision, hook], gradients[precision, "none"]
    references = {"fp32": gradients["fp32", "none"], "without hook": plain}
    for name, reference in references.items():
        error = ((gradient - reference).norm() / reference.norm()).item()
        yield rank.record(
            "gradient_relative_error", "1", rank.slowest([error]), precision=precision, hook=hook, reference=name
        )
    lost = ((gradient == 0) & (plain != 0)).float().mean().item()
    yield rank.record("gradient_underflow_share", "1", rank.slowest([lost]), precision=precision, hook=hook)


def answer(run: Records) -> Iterator[str]:
    """What autocast and what a hook do to the bytes that are sent, and what the hook costs in exactness."""
    plain = run.one("wire_bytes", precision="fp32", hook="none").value
    n = run[0].layout["world_size"]
    alone = "" if n > 1 else "; one rank has nobody to send them to"
    yield f"FP32 without a hook hands {plain / 1e6:.2f} MB per step to all-reduces, on each of {n} ranks{alone}."
    for hook in HOOKS:
        found = [r for r in run.where("wire_bytes", hook=hook) if (r.case["precision"], hook) != ("fp32", "none")]
        for ratio in sorted({round(r.value / plain, 3) for r in found}):
            names = [r.case["precision"] for r in found if round(r.value / plain, 3) == ratio]
            errors = [
                run.one("gradient_relative_error", precision=p, hook=hook, reference="without hook").value
                for p in names
            ]
            told = f"; the hook changes the gradient by up to {max(errors):.2g} of its norm" if hook != "none" else ""
            named = "no hook" if hook == "none" else f"{hook.upper()} hook"
            yield f"{', '.join(p.upper() for p in names)} with {named}: {ratio:.2f} times as many bytes{told}."
    for r in run.where("hook_refused"):
        if r.value:
            yield f"DDP refuses the {r.case['hook'].upper()} hook here: {r.case['error']}."
    for r in run.where("not_possible"):
        yield f"{r.case['precision'].upper()} is not possible here: {r.case['why']}."


if __name__ == "__main__":
    cli.main()
