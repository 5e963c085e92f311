"""What autograd keeps for a backward pass, counted: of a real forward pass, or of one that allocates nothing.

A helper module, not a lab.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from labs.common.models import Workload
from labs.common.precision import amp
from labs.kit._compat import FakeTensor, FakeTensorMode, efficient_attention, flash_attention, storage_key
from labs.kit.errors import require

# How a copy of a weight may reach the operation that saves it: a cast, and views that a layer makes of it.
CAST_OR_VIEW = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}

# What CUDA's autocast runs in 16 bit and in FP32, of the operations that the course's models call.
# Source: "CUDA Ops that can autocast to float16 / float32", docs.pytorch.org/docs/stable/amp.html
LOWERED = {
    "linear",
    "matmul",
    "__matmul__",
    "bmm",
    "mm",
    "addmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
}
RAISED = {
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "nll_loss",
    "mse_loss",
    "sum",
    "pow",
    "prod",
    "cumsum",
    "exp",
    "log",
    "norm",
    "softplus",
    "smooth_l1_loss",
}

Source = Workload | Callable[[], Workload]


@dataclass(frozen=True)
class Saved:
    """Bytes that one forward pass keeps for its backward pass; parameters and buffers are not in it."""

    activations: int
    """Everything but copies of weights: the input, what layers computed, dropout's masks, statistics, indices."""
    weight_copies: int
    """16-bit copies of weights that autocast made: they do not grow with the batch.

    Until its context ends, autocast also keeps copies that backward does not need, as those of biases: not counted.
    """
    by_dtype: dict[str, int]
    """Bytes of `activations` by number format."""


def count(forward: Callable[[], Tensor], states: Iterable[Tensor]) -> Saved:
    """Count what `forward()` saves. `states` are tensors that are there anyway: parameters and buffers.

    Each storage counts once and whole: a view keeps all of it alive. Workspace of kernels and what is freed on the
    way do not count, so this is what must fit, not the peak.
    """
    own = {storage_key(t.untyped_storage()) for t in states}
    kept: dict[int, tuple[str, int, bool]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage_key(storage) not in own:
            dtype = str(saved.dtype).removeprefix("torch.")
            kept.setdefault(storage_key(storage), (dtype, storage.nbytes(), _is_copied_weight(saved)))
        return saved.detach()  # must stay alive: the next storage would get the address of a freed one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = forward()
    by_dtype: Counter[str] = Counter()
    for dtype, size, copied in kept.values():
        by_dtype["copies" if copied else dtype] += size
    del loss
    copies = by_dtype.pop("copies", 0)
    return Saved(by_dtype.total(), copies, dict(by_dtype))


def _is_copied_weight(saved: Tensor) -> bool:
    """Whether `saved` is a leaf that was cast and reshaped, and nothing else."""
    node, cast = saved.grad_fn, False
    while node is not None and node.name() in CAST_OR_VIEW:
        cast |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    return cast and node is not None and node.name() == "torch::autograd::AccumulateGrad"


def of_step(workload: Workload, x: Tensor, y: Tensor, precision: str) -> Saved:
    """What a real forward pass and its loss save in `precision` (one of amp.FORMATS) on the device of `x`."""
    module = workload.module
    with amp.precision(precision, x.device):
        return count(lambda: workload.loss(module(x), y), [*module.parameters(), *module.buffers()])


def trace(source: Source, rows: int, precision: str, target: str = "cpu") -> Saved:
    """What of_step would count for `rows` rows of a model on a device of type `target`; nothing is computed.

    `source` is a workload, or a factory of one that reads no data: then nothing is allocated either. "cpu": torch's
    own rules, on tensors that have a shape but no memory. "cuda": CUDA's rules (CudaRules), which need no GPU.
    The statistics of a BatchNorm whose input is in 16 bit count as 16 bit; they are in FP32. ValueError for an unknown
    format.
    """
    if precision not in amp.FORMATS:
        raise ValueError(f"there is no format {precision!r}: take one of {', '.join(amp.FORMATS)}")
    batch = source.make_batch(rows) if isinstance(source, Workload) else None  # real data must be read outside
    with FakeTensorMode() as mode:
        made = source if isinstance(source, Workload) else source()
        workload = Workload(_without_memory(made.module, mode), made.make_batch, made.loss)
        x, y = (_fake(t, mode) for t in batch or made.make_batch(rows))
        if target == "cpu":
            return of_step(workload, x, y, precision)
        with CudaRules(amp.LOWERED.get(precision)):
            return of_step(workload, x, y, "fp32")


def _without_memory(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of `module` whose parameters and buffers have shapes only."""
    states = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): _fake(t, mode) for t in states})


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


class CudaRules(TorchFunctionMode):
    """What a GPU would keep, computed without one: autocast's rules for CUDA, and CUDA's dropout and attention.

    On a CPU autocast leaves softmax and LayerNorm in 16 bit, dropout keeps its mask in the format of its input (on a
    GPU: 1 byte), and attention with dropout is computed in parts. `lowered` is autocast's format; None: FP32.
    """

    def __init__(self, lowered: torch.dtype | None) -> None:
        super().__init__()
        self.lowered = lowered
        self.copies: dict[int, Tensor] = {}  # autocast casts a weight once and keeps the copy until its context ends

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each torch function, with this mode switched off."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if self.lowered and name in LOWERED | RAISED:
            to = self.lowered if name in LOWERED else torch.float32
            args, kwargs = [self._cast(a, to) for a in args], {k: self._cast(v, to) for k, v in kwargs.items()}
        if self.lowered and name == "cross_entropy":
            return _cross_entropy(*args, **kwargs)
        if name == "dropout":
            return _fused_dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, value: Any, to: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == to:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(to)
        if id(value) not in self.copies:
            self.copies[id(value)] = value.to(to)
        return self.copies[id(value)]


def _cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As CUDA's autocast has it: the logarithm of softmax in the format of the logits, the rest in FP32; both stay.

    cross_entropy has no rule for CUDA (it has one for CPUs), and names its input's format to log_softmax, whose rule
    then does not count. A GPU keeps as many bytes: tests/test_on_gpus.py.
    """
    known = not label_smoothing and not target.is_floating_point()
    require(known, "with CUDA's rules only class indices without label smoothing are counted: take these, or fp32")
    logs = functional.log_softmax(logits, 1 if logits.dim() > 1 else 0).float()
    return functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


def _fused_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As a GPU computes it: one kernel, and one byte per number kept."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """The kernel that torch takes on a GPU: FlashAttention in 16 bit, memory-efficient attention in FP32."""
    if query.dtype == torch.float32:
        return efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return flash_attention(query, key, value, dropout_p, is_causal)[0]
