"""What fills the memory of a training step, and does the step fit a card?

    python -m labs.memory_oracle
    python -m labs.memory_oracle --model my_package.my_module:factory --batch 32 --precision bf16 --memory-gb 24

About 10 s on 2 CPU cores; needs no GPU. Traces the step by a GPU's rules on tensors that have a shape but no storage. A
trace counts tensors, not kernel workspace, CUDA's context or fragmentation. Steps that fit this device also run for
real: on a CPU a small BERT, on a GPU your model and three more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from labs.common import models, oracle
from labs.common.models.large_models import bert, resnet
from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

BERT = "bert_large"
SMALL = {"tiny_bert": "labs.common.models.large_models:tiny_bert"}
POINTS = 150  # at most, per timeline
HEADROOM = 1.2  # run a step on a GPU only if this many times its peak is free
CHECKS = (("resnet152", resnet, 0, 64, "momentum"), (BERT, bert, 128, 70, "adam"), (BERT, bert, 128, 16, "adam"))
"""Steps that a GPU runs beside their traces: model, factory, tokens, rows, optimizer."""
SMOKE = {"policies": ("none",), "tokens": 64}


@dataclass(frozen=True)
class Config:
    """Which step to trace."""

    model: str = BERT
    """bert_large, one of labs.models.MODELS, or package.module:factory."""
    tokens: Annotated[int, Ge(8)] = 512
    """Tokens per sequence of bert_large."""
    batch: Annotated[int, Ge(1)] = 8
    """Rows per step; for bert_large, sequences."""
    optimizer: Literal["adam", "fused_adam", "momentum", "sgd"] = "adam"
    """AdamW, AdamW(fused=True), or SGD with or without momentum."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """16-bit formats use autocast."""
    policies: tuple[str, ...] = ("none", "block")
    """What backward recomputes: none, block, stage, segments:4 (or another number), selective."""
    micro_batches: Annotated[int, Ge(1)] = 1
    """Parts of the batch whose gradients are accumulated."""
    memory_gb: float | None = None
    """Find the largest batch that fits in this many GB of 10^9 bytes."""
    smoke: bool = False
    """Use short sequences, without recomputation."""

    def __post_init__(self) -> None:
        require(len(self.policies) > 0, "policies must contain at least one policy, such as none")
        require(self.memory_gb is None or self.memory_gb > 0, f"memory_gb must be above 0, not {self.memory_gb}")
        models.require_known(self.model, besides=(BERT,))
        if self.model == BERT and self.tokens > 512:
            raise BadInput(f"tokens must be at most 512, BERT's longest sequence, not {self.tokens}")
        if self.batch < self.micro_batches:
            raise BadInput(f"batch must be at least micro_batches ({self.micro_batches}), not {self.batch}")

    @property
    def source(self) -> oracle.Source:
        """What the oracle traces."""
        return functools.partial(bert, None, self.tokens) if self.model == BERT else self.model


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if the model can't be traced, or doesn't support a policy."""
    if config.model != BERT:
        for policy in config.policies:
            oracle.step(config.model, max(2, config.micro_batches), policy=policy)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Trace the steps on rank 0, then run those that fit this device."""
    if rank.rank:
        return
    target = {"optimizer": config.optimizer, "precision": config.precision, "micro_batches": config.micro_batches}
    seq = config.tokens if config.model == BERT else 0
    for done, policy in enumerate(config.policies):
        rank.progress(done, len(config.policies) + 1, f"recomputed: {policy}")
        model = oracle.Model(config.source, policy=policy, target="cuda", **target)
        trace = model.step(config.batch)
        case = {"part": "model", "model": config.model, "seq": seq, "batch": config.batch, "policy": policy, **target}
        case |= {"set_to_none": True}
        yield from _peak(rank, trace, case)
        yield from _timeline(rank, trace, case)
        if policy == config.policies[0]:
            yield from _cards(rank, trace, case)
        if config.memory_gb:
            found = oracle.largest_batch(model, config.memory_gb * 1e9)
            yield rank.record("largest_batch", "1", found.rows, kind="modelled", memory_gb=config.memory_gb, **case)
        if rank.device.type == "cuda":
            yield from _measured(rank, config.source, trace, case, policy=policy, **target)
    yield from _real_steps(config, rank)


def _peak(rank: Rank, trace: oracle.Trace, case: dict) -> Iterator[Record]:
    for category, nbytes in trace.peak.items():
        yield rank.record("peak_bytes", "B", nbytes, kind="modelled", rank=0, category=category, **case)
    at = trace.peak_event
    yield rank.record("peak_op", "1", at.step, kind="modelled", rank=0, phase=at.phase, op=at.op, **case)


def _timeline(rank: Rank, trace: oracle.Trace, case: dict) -> Iterator[Record]:
    """Yield one series per phase and category: bytes over the course of the step."""
    for phase, points in itertools.groupby(trace.curve(POINTS), key=lambda p: p[1]):
        _, _, sizes = zip(*points, strict=True)
        for c in oracle.CATEGORIES:
            series = [s[c] for s in sizes]
            yield rank.record("timeline_bytes", "B", series, kind="modelled", rank=0, phase=phase, category=c, **case)


def _cards(rank: Rank, trace: oracle.Trace, case: dict) -> Iterator[Record]:
    for card in oracle.cards(trace):
        if card.margin_bytes is not None:
            margin = {"gpu": card.gpu, "memory_gb": card.memory_bytes / 1e9, "verdict": card.verdict}
            yield rank.record("margin_bytes", "B", card.margin_bytes, kind="modelled", rank=0, **margin, **case)


def _real_steps(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield peaks measured by this device's allocator, beside traces by this device's rules."""
    if rank.device.type == "cpu":
        for policy in config.policies if set(config.policies) <= {"none", "block"} else ("none",):
            yield from _real_step(rank, "tiny_bert", SMALL["tiny_bert"], 0, 32, optimizer="adam", policy=policy)
        return
    for name, factory, seq, rows, optimizer in () if config.smoke else CHECKS:
        source = functools.partial(factory, None, seq) if seq else factory
        yield from _real_step(rank, name, source, seq, rows, optimizer=optimizer, policy="none")


def _real_step(rank: Rank, name: str, source: oracle.Source, seq: int, rows: int, **given: str) -> Iterator[Record]:
    trace = oracle.step(source, rows, target=rank.device.type, **given)
    case = {"part": "real", "model": name, "seq": seq, "batch": rows, "set_to_none": True, **given}
    yield from _peak(rank, trace, case)
    yield from _measured(rank, source, trace, case, **given)


def _measured(rank: Rank, source: oracle.Source, trace: oracle.Trace, case: dict, **given: str) -> Iterator[Record]:
    """Run the traced step for real if this device has room for it, and yield its memory."""
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()  # cached blocks of earlier models wouldn't count as free
        if trace.peak_bytes * HEADROOM > torch.cuda.mem_get_info(rank.device)[0]:
            return
    found = oracle.measured(source, trace.rows, rank.device, **given)
    tensors = found.peak_bytes if found.tensor_bytes is None else found.tensor_bytes
    yield rank.record("measured_bytes", "B", tensors, rank=0, **case)
    if found.tensor_bytes is not None:
        yield rank.record("workspace_bytes", "B", found.peak_bytes - tensors, rank=0, **case)
    if found.allocated_bytes is not None and found.reserved_bytes is not None:
        yield rank.record("allocated_bytes", "B", found.allocated_bytes, rank=0, **case)
        yield rank.record("reserved_bytes", "B", found.reserved_bytes, rank=0, **case)


def errors(records: Records) -> dict[str, float]:
    """Return each real step's trace error, relative to the measurement."""
    found = {}
    for r in records.where("measured_bytes"):
        traced = sum(p.value for p in records.where("peak_bytes", **r.case))
        found[f"{r.case['model']}, {r.case['batch']} rows, policy {r.case['policy']}"] = traced / r.value - 1
    return found


def answer(records: Records) -> Iterator[str]:
    """Yield the peak and its parts, the cards that fit, the largest batch, and the oracle's error."""
    for at in records.where("peak_op", part="model"):
        case = {k: v for k, v in at.case.items() if k not in ("phase", "op")}
        parts = {r.case["category"]: r.value for r in records.where("peak_bytes", **case)}
        total = sum(parts.values())
        shares = ", ".join(f"{c} {v / total:.0%}" for c, v in sorted(parts.items(), key=lambda p: -p[1]) if v)
        yield f"Policy {case['policy']}: {total / 1e9:.2f} GB at the peak, in {at.case['phase']}: {shares}."
    for verdict in ("fits", "tight", "does not fit"):
        if gpus := [r.case["gpu"] for r in records.where("margin_bytes", verdict=verdict)]:
            yield f"{verdict.capitalize()}: {', '.join(gpus)}."
    for r in records.where("largest_batch"):
        yield f"The largest batch in {r.case['memory_gb']:g} GB is {r.value:.0f} with policy {r.case['policy']}."
    if found := errors(records):
        worst = max(found, key=lambda name: abs(found[name]))
        yield f"Of {len(found)} steps that really ran, the trace is off by {found[worst]:+.2%} at most ({worst})."


if __name__ == "__main__":
    cli.main()
