"""Which part of a transformer's memory grows with the square of the sequence, and what each remedy does to it."""

from __future__ import annotations

import torch
from torch import nn

from labs.common.activation_memory.allocator import Live, Storages
from labs.common.memory.bert_memory import LAYER, layer_bytes
from labs.common.memory.recomputation import recompute
from labs.common.memory.saved_tensors import CudaRules
from labs.common.models.large_models import BertLayer, BertShape
from labs.kit._compat import FakeTensorMode

ROWS = 64  # so many that activations outweigh the gradients of parameters, which the difference of two batches drops


def deep(shape: BertShape, seq: int, policy: str) -> Live:
    """Bytes per sequence of `shape.layers` BERT layers in FP32 with CUDA's kernels, from one of them.

    Activations and their gradients. While one layer is in work, each of the others keeps what forward left.
    """
    one, two = (_one_layer(shape, seq, policy, rows) for rows in (ROWS, 2 * ROWS))
    kept, peak = (two.after_forward - one.after_forward) // ROWS, (two.peak - one.peak) // ROWS
    return Live(shape.layers * kept, (shape.layers - 1) * kept + peak)


def _one_layer(shape: BertShape, seq: int, policy: str, rows: int) -> Live:
    with FakeTensorMode(), CudaRules(None):
        module = recompute(nn.Sequential(BertLayer(shape)), policy)
        x = torch.randn(rows, seq, shape.hidden, requires_grad=True)  # its gradient goes to the layer before
        with Storages(module) as storages:
            # What comes in is kept by this layer, what goes out by the next one: count the first.
            loss = module(x.clone()).sum()
            after_forward = storages.now
            loss.backward()
    return Live(after_forward, storages.peak)


def square_share(shape: BertShape, seq: int) -> float:
    """Part of what a layer keeps without checkpointing that grows with the square of the length, by hand."""
    square = sum(term.fp32 for term in LAYER if term.unit == "ass") * shape.heads * seq**2
    return square / layer_bytes(seq, "fp32", shape) if shape.attention == "eager" else 0.0
