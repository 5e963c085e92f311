"""How much memory does a training step take, of what, and does it fit a card?

    python -m labs.memory_oracle --nproc 1
    python -m labs.memory_oracle --nproc 1 --model my_package.my_module:factory --batch 32 --optimizer adam \\
        --precision bf16 --policy block --memory-gb 24                       # a report on your own model

About 14 s on 2 CPU cores. Every step of a large model is traced on tensors that have a shape and no memory, by the
rules of a GPU, which is not needed: ResNet-152 and BERT-large with and without activation checkpointing. GPT-3 is
judged by its states. Small models are traced by the rules of this machine and then really trained, to compare; on a
GPU so are large ones that fit. Not in a trace: workspace of kernels, CUDA's context, fragmentation.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from labs.kit import cli, hardware
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts import models, oracle
from labs.parts.memory.recomputation import recompute
from labs.parts.models.large_models import bert, resnet
from labs.parts.oracle.records import Steps
from labs.parts.oracle.report import report

SMALL = {
    "tiny_bert": "labs.parts.models.large_models:tiny_bert",
    "tiny_resnet": "labs.parts.models.large_models:tiny_resnet",
}
ROWS = 32  # of small models, and of yours unless you say otherwise
TIMELINE = (128, 16)  # tokens and sequences of BERT-large's: all categories can be seen
WHOLE_IN_NOTEBOOKS = True  # traced models: smaller ones would be other facts


@dataclass(frozen=True)
class Config:
    """Which steps to trace."""

    images: tuple[int, ...] = (32, 55, 60, 64)
    """Images per step of ResNet-152, with SGD and momentum."""
    policies: tuple[str, ...] = ("none", "stage", "block")
    """Of labs.parts.memory.recomputation, for ResNet-152."""
    sequences: tuple[tuple[int, int], ...] = ((128, 70), (512, 10))
    """Tokens per sequence and sequences per step of BERT-large, with Adam."""
    small: tuple[str, ...] = ("mlp", "cnn_batchnorm", "char_gpt", "tiny_bert")
    """Models that are really trained: of labs.models.MODELS, tiny_bert, tiny_resnet, or package.module:factory."""
    recomputed: tuple[str, ...] = ("char_gpt", "tiny_bert")
    """Small models that are trained with policy block, too."""
    model: str = ""
    """package.module:factory of your own model, or one of labs.models.MODELS: a report on it alone."""
    batch: int = ROWS
    """Rows per step of `model`, and of small models."""
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    """Of `model`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of `model`; 16-bit ones by autocast."""
    policy: str = "none"
    """Of `model`: none, block, stage, segments:4 (or another number) or selective."""
    micro_batches: int = 1
    """Of `model`: parts of the batch whose gradients are added up."""
    memory_gb: tuple[float, ...] = (24.0,)
    """Look for the largest batch of ResNet-152, or of `model`, that fits in these (10^9 bytes)."""
    smoke: bool = False
    """One batch, one policy, one small model."""

    def __post_init__(self) -> None:
        require(len(self.images) > 0 and min(self.images) >= 1, "images must hold positive numbers")
        require(len(self.sequences) > 0 and all(8 <= s <= 512 and b >= 1 for s, b in self.sequences),
                "sequences must hold pairs of tokens, from 8 to 512, and a batch of at least 1")  # fmt: skip
        for name in ("images", "policies", "sequences", "small", "memory_gb"):
            values = getattr(self, name)
            require(len(set(values)) == len(values), f"{name} must be different: each is a case of its own")
        require(set(self.recomputed) <= set(self.small), f"recomputed must be of small: {', '.join(self.small)}")
        require(self.micro_batches >= 1, f"micro_batches must be at least 1, not {self.micro_batches}")
        require(self.batch >= self.micro_batches, f"batch must be at least micro_batches, not {self.batch}")
        require(all(m > 0 for m in self.memory_gb), "memory_gb must hold positive numbers")
        names, option = ((self.model,), "model") if self.model else (self.small, "small")
        models.require_known(*names, besides=SMALL, option=option)

    @property
    def own(self) -> dict[str, Any]:
        """Conditions of the steps of `model`."""
        names = ("optimizer", "precision", "policy", "micro_batches")
        return {"target": "cuda", **{name: getattr(self, name) for name in names}}


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be traced or have its policy."""
    if config.model:
        oracle.step(config.model, max(2, config.micro_batches), **config.own)
        return
    usual = Config()  # known to work: no time goes into trying it
    with torch.device("meta"):
        for policy in sorted({*config.policies} - {*usual.policies}):
            recompute(resnet().module, policy)
    for name in config.small:
        policy = "block" if name in config.recomputed else "none"
        if name not in usual.small or (policy == "block" and name not in usual.recomputed):
            oracle.step(SMALL.get(name, name), 2, policy=policy)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 works alone; other ranks wait."""
    if rank.rank == 0:
        parts = [_own] if config.model else [_resnet152, _bert_large, _memory_used, _gpt3, _small]
        records = []
        for done, part in enumerate(parts):
            rank.progress(done, len(parts), part.__name__.strip("_"))
            for record in part(config, rank):
                records.append(record)
                yield record
        if config.model:
            print(report(Records(records)))
    rank.barrier()


def _own(config: Config, rank: Rank) -> Iterator[Record]:
    """Your model: a step, its timeline, the cards; the other of policies none and block; the largest batches."""
    steps = Steps(rank, "model", config.model, name=config.model, **config.own)
    trace = steps.step(config.batch)
    yield from steps.peak(config.batch, trace)
    yield from steps.timeline(trace)
    yield from steps.cards(trace)
    try:
        other = Steps(rank, "model", config.model, name=config.model,
                      **{**config.own, "policy": "block" if config.policy == "none" else "none"})  # fmt: skip
        yield from other.peak(config.batch)
    except BadInput:  # it has no chain of blocks
        pass
    for memory_gb in config.memory_gb:
        yield from steps.largest(memory_gb)


def _resnet152(config: Config, rank: Rank) -> Iterator[Record]:
    for policy in config.policies[: 1 if config.smoke else None]:
        steps = Steps(rank, "resnet152", resnet, optimizer="momentum", policy=policy, target="cuda")
        for rows in config.images[-1:] if config.smoke else config.images:
            yield from steps.peak(rows)
        for memory_gb in () if config.smoke else config.memory_gb:
            yield from steps.largest(memory_gb)


def _bert_large(config: Config, rank: Rank) -> Iterator[Record]:
    """As traced; with gradients that are kept in forward, too; a timeline without and with policy block."""
    for seq, rows in config.sequences[: 1 if config.smoke else None]:
        yield from _bert(rank, seq).peak(rows)
    seq, rows = config.sequences[0]
    yield from _bert(rank, seq, set_to_none=False).peak(rows)
    seq, rows = TIMELINE
    for policy in ("none",) if config.smoke else ("none", "block"):
        steps = _bert(rank, seq, policy=policy)
        trace = steps.step(rows)
        yield from steps.peak(rows, trace)
        yield from steps.timeline(trace)
        yield from steps.cards(trace)


def _bert(rank: Rank, seq: int, **given: Any) -> Steps:
    source = functools.partial(bert, None, seq)
    return Steps(rank, "bert_large", source, seq=seq, optimizer="adam", target="cuda", **given)


def _memory_used(config: Config, rank: Rank) -> Iterator[Record]:
    """What this process has needed at most for all these traces."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    yield rank.record("resident_bytes", "B", most, rank=0, after="large models")


def _gpt3(config: Config, rank: Rank) -> Iterator[Record]:
    """Parameters, gradients and Adam's state of GPT-3, and the memory of eight A100."""
    parameters, card = oracle.GptShape().parameters, hardware.spec("A100 80GB SXM")
    case = {"kind": "modelled", "rank": 0}
    yield rank.record("states_bytes", "B", oracle.states_bytes(parameters), model="gpt3", parameters=parameters, **case)
    if card is not None and card.memory_gb is not None:
        yield rank.record("cluster_bytes", "B", 8 * card.memory_gb * 1e9, gpu=card.gpu, cards=8, **case)


def _small(config: Config, rank: Rank) -> Iterator[Record]:
    """Traced by the rules of this device, and trained on it."""
    for name in config.small[: 1 if config.smoke else None]:
        for policy in ("none", "block") if name in config.recomputed else ("none",):
            source, target = SMALL.get(name, name), rank.device.type
            steps = Steps(rank, "small", source, name=name, policy=policy, target=target)
            yield from steps.peak(config.batch)
            yield from steps.real(config.batch) if target == "cpu" else ()


if __name__ == "__main__":
    cli.main()
