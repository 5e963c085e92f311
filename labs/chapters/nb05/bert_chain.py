"""A BERT as a chain of layers, by hand: what segments that are computed again keep, without tracing anything."""

from __future__ import annotations

from labs.activation_checkpointing.splitting import Chain
from labs.common.memory.bert_memory import layer_bytes, predict, sequence_bytes
from labs.common.models.large_models import BertShape
from labs.common.oracle.fits import states_bytes


def bert_chain(batch: int, seq: int, precision: str, shape: BertShape | None = None, optimizer: str = "adam") -> Chain:
    """`batch` sequences of `seq` tokens on a GPU, from the closed form of labs.common.memory.bert_memory.

    Autocast's 16-bit copies of a layer's matrices are made when it runs, so a layer that is dropped drops them, too.
    Between layers activations are FP32 in every format: LayerNorm returns that.
    """
    shape = shape or BertShape()
    whole = predict(batch, seq, precision, shape, optimizer)
    lowered = bool(whole.weight_copies)
    matrices = 12 * shape.hidden**2
    kept = batch * layer_bytes(seq, precision if lowered else "fp32", shape) + 2 * matrices * lowered
    around = sequence_bytes(seq, precision if lowered else "fp32", shape)
    around -= shape.layers * layer_bytes(seq, precision if lowered else "fp32", shape)
    copies = whole.weight_copies - 2 * matrices * shape.layers * lowered
    edge = 4 * batch * seq * shape.hidden
    return Chain(
        kept=(kept,) * shape.layers,
        inputs=(edge,) * shape.layers,
        gradients=(4 * (matrices + 13 * shape.hidden),) * shape.layers,
        outside=batch * around + copies,
        fixed=whole.parameters + whole.optimizer,
        borrowed=(edge * lowered,) * (shape.layers + 1),
    )


def optimizer_step_bytes(parameters: int, optimizer: str) -> int:
    """Peak of the optimizer's own step, when all activations are gone, as torch takes it on a GPU.

    It has parameters, gradients and its state. AdamW's foreach version, which takes all parameters at once, also
    needs the denominators of all of them for a moment, 4 bytes each.
    """
    return states_bytes(parameters, optimizer) + 4 * parameters * (optimizer == "adam")
