"""Memory of a training step of BERT, by hand: what each layer keeps for backward, in FP32 and under autocast.

A helper module, not a lab.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from labs.common.models.large_models import BertShape, masked_places

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "weight copies")
STATE_BYTES = {"sgd": 0, "momentum": 4, "adam": 8}  # of the optimizer, per parameter


@dataclass(frozen=True)
class Term:
    """Something that a BERT layer keeps for backward, in bytes per `unit` and sequence."""

    what: str
    unit: str
    """ "sh": seq x hidden numbers; "ass": heads x seq x seq; "as": heads x seq; "s": seq."""
    fp32: int
    autocast: int


MASK = "dropout's mask"
LAYER = (
    Term("input of query, key and value", "sh", 4, 6),  # autocast casts it three times, once for each
    Term("query, key and value", "sh", 12, 6),
    Term("softmax", "ass", 4, 4),  # autocast computes it in FP32
    Term(MASK, "ass", 1, 1),
    Term("softmax after dropout", "ass", 4, 2),
    Term("input of the output projection", "sh", 4, 2),
    Term(MASK, "sh", 1, 1),
    Term("input of the first LayerNorm", "sh", 4, 4),  # in FP32 too
    Term("input of the perceptron", "sh", 4, 2),
    Term("input of GELU", "sh", 16, 8),
    Term("output of GELU", "sh", 16, 8),
    Term(MASK, "sh", 1, 1),
    Term("input of the second LayerNorm", "sh", 4, 4),
    Term("mean and deviation of both LayerNorms", "s", 16, 16),
)
# Fused attention computes softmax again in backward, from one number per row of it.
SDPA_LAYER = (*(t for t in LAYER if t.unit != "ass"), Term("softmax's log-sum-exp", "as", 4, 4))


@dataclass(frozen=True)
class Memory:
    """Bytes that a training step holds at once, if the last step's gradients are still there in forward."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    weight_copies: int = 0

    @property
    def total(self) -> int:
        """Bytes of all categories: what must fit, without workspace of kernels and fragmentation."""
        return sum(asdict(self).values())

    def by_category(self) -> dict[str, int]:
        """The same, by CATEGORIES."""
        return dict(zip(CATEGORIES, asdict(self).values(), strict=True))


def layer_bytes(seq: int, precision: str, shape: BertShape) -> int:
    """Bytes that one layer keeps for one sequence: the terms of LAYER, added up.

    With everything in 16 bit this is s h (34 + 5 a s / h): Korthikanti et al. 2022, arXiv 2205.05198, equation 2.
    """
    units = {"sh": seq * shape.hidden, "ass": shape.heads * seq**2, "as": shape.heads * seq, "s": seq}
    terms = LAYER if shape.attention == "eager" else SDPA_LAYER
    return sum((t.fp32 if precision == "fp32" else t.autocast) * units[t.unit] for t in terms)


def sequence_bytes(seq: int, precision: str, shape: BertShape) -> int:
    """Bytes of activations that one sequence adds: embedding, layers, and the head on the masked tokens."""
    h, m = shape.hidden, masked_places(seq)
    embedding = 8 * seq + 4 * seq * h + 8 * seq + seq * h  # tokens; LayerNorm's input, statistics; dropout's mask
    wide = 16 if precision == "fp32" else 10  # inputs of transform, GELU and the last matrix; LayerNorm's in FP32
    logs = 4 if precision == "fp32" else 6  # of log-softmax; autocast keeps it in 16 bit and in FP32
    head = wide * m * h + 8 * m + logs * m * shape.vocabulary + 8 * m  # statistics; targets
    return embedding + shape.layers * layer_bytes(seq, precision, shape) + head


def parameter_count(shape: BertShape) -> int:
    """Parameters of large_models.Bert: 335,174,458 for BERT-large."""
    h = shape.hidden
    embedding = (shape.vocabulary + shape.places + 2) * h + 2 * h
    layer = 12 * h * h + 13 * h  # 4 + 4 + 4 matrices of h x h; their biases and two LayerNorms
    return embedding + shape.layers * layer + h * h + 3 * h + shape.vocabulary


def predict(
    batch: int, seq: int, precision: str = "fp32", shape: BertShape | None = None, optimizer: str = "adam"
) -> Memory:
    """Closed form for BERT on a GPU: `batch` sequences of `seq` tokens; any 16-bit format of autocast is the same."""
    shape = shape or BertShape()
    fixed = 8 * seq + 8 * masked_places(seq) + 4  # places, which tokens are masked, the loss's weight
    matrices = shape.layers * 12 * shape.hidden**2 + shape.hidden**2 + shape.vocabulary * shape.hidden
    copies = 0 if precision in ("fp32", "tf32") else 2 * matrices
    row = sequence_bytes(seq, "fp32" if not copies else precision, shape)
    return states(parameter_count(shape), optimizer, fixed + batch * row, copies)


def states(parameters: int, optimizer: str, activations: int, weight_copies: int = 0) -> Memory:
    """Memory of a model with this many parameters, all trained, whose states are in FP32."""
    return Memory(4 * parameters, 4 * parameters, STATE_BYTES[optimizer] * parameters, activations, weight_copies)


def saved_share(batch: int, seq: int, shape: BertShape | None = None, optimizer: str = "adam") -> float:
    """Share of a step's memory that autocast saves, by the closed form; negative where its copies cost more."""
    fp32, lowered = (predict(batch, seq, p, shape, optimizer).total for p in ("fp32", "fp16"))
    return 1 - lowered / fp32


def largest_saved_share(seq: int, shape: BertShape | None = None) -> float:
    """What saved_share tends to as the batch grows: the share of the activations."""
    fp32, lowered = (sequence_bytes(seq, p, shape or BertShape()) for p in ("fp32", "fp16"))
    return 1 - lowered / fp32


def largest_batch(
    memory_bytes: float, seq: int, precision: str = "fp32", shape: BertShape | None = None, optimizer: str = "adam"
) -> int:
    """Sequences of `seq` tokens that fit in `memory_bytes`, by the closed form; 0 if none does."""
    none, one = (predict(b, seq, precision, shape, optimizer).total for b in (0, 1))
    return max(0, math.floor((memory_bytes - none) / (one - none)))
