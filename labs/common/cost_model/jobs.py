"""The transformer to train, and the ways to split it over GPUs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le

ASPECT = 100  # hidden size over layers; 43 to 128 in GPT-3's models, Brown et al. 2020, arXiv 2005.14165, table 2.1
VOCABULARY = 50257  # GPT-2's


@dataclass(frozen=True)
class Job:
    """A transformer and its batch."""

    parameters: float
    batch: float
    """Sequences per optimizer step, over all GPUs."""
    seq: int
    """Tokens per sequence."""
    layers: int
    hidden: int
    vocabulary: int = VOCABULARY

    @classmethod
    def of(cls, parameters: float, batch: float, seq: int, layers: int = 0, hidden: int = 0) -> Job:
        """Build a job; derive its layers and hidden size from its parameters where they are 0."""
        usual_layers, usual_hidden = shape(parameters)
        if layers and not hidden:
            usual_hidden = _hidden(parameters, layers)
        return cls(parameters, batch, seq, layers or usual_layers, hidden or usual_hidden)

    @property
    def flop(self) -> float:
        """FLOPs of a step without recomputation: 6 N + 12 L h s per token (PaLM, arXiv 2204.02311, appendix B)."""
        per_token = 6 * self.parameters + 12 * self.layers * self.hidden * self.seq
        return self.batch * self.seq * per_token


def shape(parameters: float) -> tuple[int, int]:
    """Return (layers, hidden), with 12 L h^2 parameters and h = ASPECT L; hidden is a multiple of 64."""
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    return layers, _hidden(parameters, layers)


def _hidden(parameters: float, layers: int) -> int:
    return max(64, 64 * round(math.sqrt(parameters / (12 * layers)) / 64))


@dataclass(frozen=True)
class JobConfig:
    """Options that every tool of the cost model shares."""

    params: Annotated[float, Ge(1), Le(1e14)] = 7e9
    """Parameters of the transformer."""
    batch: Annotated[int, Ge(1)] = 64
    """Sequences per optimizer step, over all GPUs."""
    seq: Annotated[int, Ge(1)] = 2048
    """Tokens per sequence."""
    layers: Annotated[int, Ge(0)] = 0
    """Layers. Default: as many as make the hidden size 100 times as large."""
    hidden: Annotated[int, Ge(0)] = 0
    """Hidden size. Default: that of a transformer with 12 x layers x hidden^2 parameters."""
    gpus_per_node: Annotated[int, Ge(1)] = 8
    """GPUs that share a node."""
    network_gb_s: Annotated[float, Gt(0)] = 25.0
    """Line rate of one GPU to other nodes, one direction, in 10^9 bytes/s. Default: 200 Gbit/s, as in a DGX A100."""

    @property
    def job(self) -> Job:
        """The model and its batch."""
        return Job.of(self.params, self.batch, self.seq, self.layers, self.hidden)


@dataclass(frozen=True)
class Plan:
    """A way to train: ranks = data x pipeline x tensor. Every plan can split the batch into micro-batches."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sharded: bool = False
    """FSDP2: data-parallel ranks divide parameters, gradients and optimizer state. Otherwise DDP replicates them."""
    micro_batches: int = 1
    """A pipeline overlaps micro-batches; every other plan accumulates their gradients one after the other."""
    recompute: bool = False
    """Each layer keeps only its input and reruns forward during backward."""
    naive: bool = False
    """Pipeline stages take turns: only one micro-batch is under way."""
    bucket_view: bool = False
    """DDP with gradient_as_bucket_view=True: .grad is a view into DDP's buckets, so gradients are in memory once."""

    @property
    def ranks(self) -> int:
        """Number of GPUs at work."""
        return self.data * self.pipeline * self.tensor

    @property
    def scheme(self) -> str:
        """The usual name, without its settings."""
        split = "naive split" if self.naive else "pipeline"
        names = [(self.data, "FSDP2" if self.sharded else "DDP"), (self.pipeline, split), (self.tensor, "tensor")]
        return " x ".join(name for n, name in names if n > 1) or "one GPU"

    def __str__(self) -> str:
        sizes = [(self.data, "data"), (self.pipeline, "stages"), (self.tensor, "tensor")]
        parts = [self.scheme, *(f"{n} {name}" for n, name in sizes if n > 1 and " x " in self.scheme)]
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += ["recomputing activations"] * self.recompute + ["gradient_as_bucket_view"] * self.bucket_view
        return ", ".join(parts)
