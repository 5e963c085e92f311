"""Count what autograd keeps for backward, in a real forward pass, or in one that allocates nothing."""

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

# How a copy of a weight may reach the operation that saves it: through a cast, and views that a layer makes of it.
CAST_OR_VIEW = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}

# What CUDA's autocast runs in 16 bits and in FP32, among operations that the course's models call. Source: "CUDA Ops
# that can autocast to float16 / float32", docs.pytorch.org/docs/stable/amp.html
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
    """Bytes that one forward pass keeps for its backward pass, without parameters and buffers."""

    activations: int
    """Everything but copies of weights: the input, layer results, dropout masks, statistics, indices."""
    weight_copies: int
    """16-bit copies of weights that autocast made; they don't grow with the batch.

    Autocast also keeps copies that backward doesn't need, such as those of biases, until its context ends. These don't
    count.
    """
    by_dtype: dict[str, int]
    """Bytes of `activations` by number format."""


def count(forward: Callable[[], Tensor], states: Iterable[Tensor]) -> Saved:
    """Count what `forward()` saves. `states` are tensors that exist anyway: parameters and buffers.

    Each storage counts once and in full, because a view keeps all of it alive. Kernel workspace and tensors freed on
    the way don't count, so this is what must fit, not the peak.
    """
    own = {storage_key(t.untyped_storage()) for t in states}
    kept: dict[int, tuple[str, int, bool]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage_key(storage) not in own:
            dtype = str(saved.dtype).removeprefix("torch.")
            kept.setdefault(storage_key(storage), (dtype, storage.nbytes(), _is_copied_weight(saved)))
        return saved.detach()  # keeps it alive, or the next storage could get the address of a freed one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = forward()
    by_dtype: Counter[str] = Counter()
    for dtype, size, copied in kept.values():
        by_dtype["copies" if copied else dtype] += size
    del loss
    copies = by_dtype.pop("copies", 0)
    return Saved(by_dtype.total(), copies, dict(by_dtype))


def _is_copied_weight(saved: Tensor) -> bool:
    """Return whether `saved` is a leaf that was only cast and reshaped."""
    node, cast = saved.grad_fn, False
    while node is not None and node.name() in CAST_OR_VIEW:
        cast |= node.name() == "ToCopyBackward0"
        node = node.next_functions[0][0]
    return cast and node is not None and node.name() == "torch::autograd::AccumulateGrad"


def of_step(workload: Workload, x: Tensor, y: Tensor, precision: str) -> Saved:
    """Count what a real forward pass and its loss save in `precision` (one of amp.FORMATS) on the device of `x`."""
    module = workload.module
    with amp.precision(precision, x.device):
        return count(lambda: workload.loss(module(x), y), [*module.parameters(), *module.buffers()])


def trace(source: Source, rows: int, precision: str, target: str = "cpu") -> Saved:
    """Count what of_step would for `rows` rows of a model on a device of type `target`, without computing anything.

    `source` is a workload, or a factory that reads no data; then nothing is allocated either. "cpu": torch's rules, on
    tensors with a shape but no storage. "cuda": CUDA's rules (CudaRules), without a GPU. Statistics of a BatchNorm with
    a 16-bit input count as 16 bits, although they are FP32. ValueError for an unknown format.
    """
    if precision not in amp.FORMATS:
        raise ValueError(f"there is no format {precision!r}: take one of {', '.join(amp.FORMATS)}")
    batch = source.make_batch(rows) if isinstance(source, Workload) else None  # real data must be read outside the mode
    with FakeTensorMode() as mode:
        made = source if isinstance(source, Workload) else source()
        workload = Workload(_without_memory(made.module, mode), made.make_batch, made.loss)
        x, y = (_fake(t, mode) for t in batch or made.make_batch(rows))
        if target == "cpu":
            return of_step(workload, x, y, precision)
        with CudaRules(amp.LOWERED.get(precision)):
            return of_step(workload, x, y, "fp32")


def _without_memory(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of `module` whose parameters and buffers have only shapes."""
    states = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): _fake(t, mode) for t in states})


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


class CudaRules(TorchFunctionMode):
    """What a GPU would keep, computed without one: CUDA's rules for autocast, dropout and attention.

    On a CPU, autocast leaves softmax and LayerNorm in 16 bits, dropout keeps its mask in its input's format (on a GPU:
    1 byte), and attention with dropout isn't fused. `lowered` is autocast's format; None: FP32.
    """

    def __init__(self, lowered: torch.dtype | None) -> None:
        super().__init__()
        self.lowered = lowered
        self.copies: dict[int, Tensor] = {}  # autocast casts a weight once and keeps the copy until its context ends

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handle each torch function; PyTorch calls this with the mode switched off."""
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
    """Compute as CUDA's autocast does: log-softmax in the logits' format, the rest in FP32; both are kept.

    CUDA has no autocast rule for cross_entropy (CPUs have one). It passes its input's format to log_softmax, whose rule
    then doesn't apply. A GPU keeps as many bytes: tests/test_on_gpus.py.
    """
    known = not label_smoothing and not target.is_floating_point()
    require(known, "with CUDA's rules only class indices without label smoothing are counted: take these, or fp32")
    logs = functional.log_softmax(logits, 1 if logits.dim() > 1 else 0).float()
    return functional.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)


def _fused_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute as on a GPU: one kernel that keeps one byte per number."""
    return torch.native_dropout(x, p, training)[0] if training and p > 0 else x


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: None = None, dropout_p: float = 0.0, is_causal: bool = False
) -> Tensor:
    """Run the kernel that torch picks on a GPU: FlashAttention in 16 bits, memory-efficient attention in FP32."""
    if query.dtype == torch.float32:
        return efficient_attention(query, key, value, attn_mask, True, dropout_p, is_causal)[0]
    return flash_attention(query, key, value, dropout_p, is_causal)[0]
