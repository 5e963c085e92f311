"""How much memory does a training step take, of what, and does it fit a card?

    python -m labs.memory_oracle
    python -m labs.memory_oracle --nproc 1 --model my_package.my_module:factory --batch 32 --optimizer adam \\
        --precision bf16 --policy block --memory-gb 24                       # a report on your own model

About 15 s on 2 CPU cores. Every step of a large model is traced on tensors that have a shape and no memory, by the
rules of a GPU, which is not needed: ResNet-152 and BERT-large with and without activation checkpointing, GPT-2 with its
loss whole and in chunks. Small models are traced by the rules of this machine and then really trained, to compare; on a
GPU so are large ones that fit. Not in a trace: workspace of kernels, CUDA's context, fragmentation. A trace is the work
of one process: ResNet's are those of the last rank, all others of the first.
"""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from labs.common import models, oracle
from labs.common.memory.recomputation import recompute
from labs.common.models.large_models import bert, resnet
from labs.common.oracle.fits import memory_bytes
from labs.kit.errors import BadInput, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.memory_oracle.chunked_loss import gpt2
from labs.memory_oracle.records import Steps
from labs.memory_oracle.text import checked, peak, relative_error, report, workspace

SMALL = {
    "tiny_bert": "labs.common.models.large_models:tiny_bert",
    "tiny_resnet": "labs.common.models.large_models:tiny_resnet",
}
ROWS = 32  # of small models, and of yours unless you say otherwise
TIMELINE = (128, 16)  # tokens and sequences of BERT-large's: all categories can be seen
CARD = "RTX 4090"  # whose memory a largest batch is looked for, unless you say how many GB
CHUNKS = (1, 16)  # of GPT-2's loss
SEQUENCES = 8  # of 1,024 tokens, of GPT-2's step
WHOLE_IN_NOTEBOOKS = True  # traced models: smaller ones would be other facts
SMOKE = {"images": (32,), "sequences": (), "small": ("mlp",), "recomputed": ()}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Which steps to trace."""

    images: tuple[int, ...] = (32, 60, 64)
    """Images per step of ResNet-152, with SGD and momentum."""
    policies: tuple[str, ...] = ("none", "stage", "block")
    """Of labs.common.memory.recomputation, for ResNet-152."""
    sequences: tuple[tuple[int, int], ...] = ((128, 70), (512, 10))
    """Tokens per sequence and sequences per step of BERT-large, with Adam; none leaves that model out."""
    small: tuple[str, ...] = ("mlp", "cnn_batchnorm", "char_gpt", "tiny_bert")
    """Models that are really trained: of labs.models.MODELS, tiny_bert, tiny_resnet, or package.module:factory."""
    recomputed: tuple[str, ...] = ("char_gpt", "tiny_bert")
    """Small models that are trained with policy block, too."""
    model: str = ""
    """package.module:factory of your own model, or one of labs.models.MODELS: a report on it alone."""
    batch: int = ROWS
    """Rows per step of `model`, and of small models."""
    optimizer: Literal["adam", "fused_adam", "momentum", "sgd"] = "adam"
    """Of `model`."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of `model`; 16-bit ones by autocast."""
    policy: str = "none"
    """Of `model`: none, block, stage, segments:4 (or another number) or selective."""
    micro_batches: int = 1
    """Of `model`: parts of the batch whose gradients are added up."""
    memory_gb: tuple[float, ...] = (round(memory_bytes(CARD) / 1e9, 2),)
    """Look for the largest batch of ResNet-152, or of `model`, that fits in these (10^9 bytes). By default all of an
    RTX 4090: it is sold as 24 GB, and nvidia-smi prints 24,564 MiB, of 2^20 bytes."""
    smoke: bool = False
    """One batch, one policy, one small model."""

    def __post_init__(self) -> None:
        require(len(self.images) > 0 and min(self.images) >= 1, "images must hold positive numbers")
        require(
            all(8 <= s <= 512 and b >= 1 for s, b in self.sequences),
            "sequences must hold pairs of tokens, from 8 to 512, and a batch of at least 1",
        )
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
    """ResNet-152, which takes half of the time, on the last rank; all others on the first, as `model` is."""
    large, rest = ([_own], []) if config.model else ([_bert_large, _gpt2], [_small])
    if rank.rank != 0:
        large, rest = [], []
    if rank.rank == rank.world_size - 1 and not config.model:
        large = [_resnet152, *large]
    resident_bytes = 0
    for done, part in enumerate([*large, *rest]):
        rank.progress(done, len(large) + len(rest), part.__name__.strip("_"))
        yield from part(config, rank)
        resident_bytes = _resident_bytes() if part in large else resident_bytes
    (most,) = rank.slowest([resident_bytes])
    if rest:
        yield rank.record("resident_bytes", "B", most, rank=0, after="large models")


def _own(config: Config, rank: Rank) -> Iterator[Record]:
    """Your model: a step, its timeline, the cards; the other of policies none and block; the largest batches."""
    steps = Steps(rank, "model", config.model, name=config.model, **config.own)
    trace = steps.step(config.batch)
    yield from steps.peak(config.batch, trace)
    yield from steps.timeline(trace)
    yield from steps.cards(trace)
    try:
        other = Steps(
            rank,
            "model",
            config.model,
            name=config.model,
            **{**config.own, "policy": "block" if config.policy == "none" else "none"},
        )
        yield from other.peak(config.batch)
    except BadInput:  # it has no chain of blocks
        pass
    for memory_gb in config.memory_gb:
        yield from steps.largest(memory_gb)


def _resnet152(config: Config, rank: Rank) -> Iterator[Record]:
    """Under each policy the batches, and how large one may be."""
    for policy in config.policies[: 1 if config.smoke else None]:
        steps = Steps(rank, "resnet152", resnet, optimizer="momentum", policy=policy, target="cuda")
        for rows in sorted(config.images)[-1 if config.smoke else 0 :]:
            yield from steps.peak(rows)
        for memory_gb in () if config.smoke else config.memory_gb:
            yield from steps.largest(memory_gb)


def _bert_large(config: Config, rank: Rank) -> Iterator[Record]:
    """As traced; with gradients that are kept in forward, too; a timeline without and with policy block."""
    if not config.sequences:
        return
    steps_of = functools.cache(functools.partial(_bert, rank))  # building a model takes as long as a trace
    for seq, rows in config.sequences[: 1 if config.smoke else None]:
        yield from steps_of(seq, policy="none").peak(rows)
    seq, rows = config.sequences[0]
    yield from _bert(rank, seq, set_to_none=False).peak(rows)
    seq, rows = TIMELINE
    for policy in ("none",) if config.smoke else ("none", "block"):
        steps = steps_of(seq, policy=policy)
        trace = steps.step(rows)
        yield from steps.peak(rows, trace)
        yield from steps.timeline(trace)
        yield from steps.cards(trace)

    if not config.smoke:  # without the copy of all parameters that Adam makes in its own step
        yield from _bert(rank, seq, policy="block", optimizer="fused_adam").peak(rows)


def _bert(rank: Rank, seq: int, **given: Any) -> Steps:
    source = functools.partial(bert, None, seq)
    return Steps(rank, "bert_large", source, seq=seq, target="cuda", **{"optimizer": "adam", **given})


def _gpt2(config: Config, rank: Rank) -> Iterator[Record]:
    """GPT-2 small with its blocks recomputed, the logits of all tokens at once and in chunks."""
    for chunks in () if config.smoke else CHUNKS:
        source = functools.partial(gpt2, chunks)
        steps = Steps(rank, "gpt2", source, optimizer="fused_adam", policy="block", target="cuda")
        trace = steps.step(SEQUENCES)
        for category, nbytes in trace.peak.items():
            yield steps.record("peak_bytes", "B", nbytes, batch=SEQUENCES, category=category, chunks=chunks)
        yield steps.record("trace_s", "s", steps.trace_s, "measured", batch=SEQUENCES, chunks=chunks)


def _resident_bytes() -> int:
    """What this process has needed at most up to now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _small(config: Config, rank: Rank) -> Iterator[Record]:
    """Traced by the rules of this device, and trained on it."""
    for name in config.small[: 1 if config.smoke else None]:
        for policy in ("none", "block") if name in config.recomputed else ("none",):
            source, target = SMALL.get(name, name), rank.device.type
            steps = Steps(rank, "small", source, name=name, policy=policy, target=target)
            yield from steps.peak(config.batch)
            yield from steps.real(config.batch) if target == "cpu" else ()


def answer(run: Records) -> Iterator[str]:
    """For a model of your own what it takes, of what, and where it fits; otherwise the models of the notebook."""
    if run[0].config["model"]:
        yield from report(run)
        return
    found = {
        (r.case["policy"], r.case["batch"]): peak(run, part="resnet152", policy=r.case["policy"], batch=r.case["batch"])
        for r in run.where("peak_op", part="resnet152")
    }
    rows = max(batch for _, batch in found)
    said = [f"{size / 1e9:.1f} GB with policy {policy}" for (policy, batch), size in found.items() if batch == rows]
    yield f"A step of ResNet-152 on {rows} images takes {', '.join(said)} (modelled: FP32, SGD with momentum)."
    for r in run.where("largest_batch", part="resnet152"):
        yield f"The largest batch in {r.case['memory_gb']:g} GB is {r.value:.0f} with policy {r.case['policy']}."
    real = [(relative_error(run, **c), workspace(run, **c), c["model"]) for c in checked(run)]
    if real:
        error, most = max(real, key=lambda r: abs(r[0])), max(real, key=lambda r: r[1])
        yield (
            f"On this machine {len(real)} small step(s) were really run: the traces are off by at most "
            f"{100 * abs(error[0]):.2g} % of the bytes of tensors ({error[2]}); workspace of kernels, which "
            f"no trace "
            f"knows, took up to {100 * most[1]:.0f} % on top ({most[2]})."
        )
