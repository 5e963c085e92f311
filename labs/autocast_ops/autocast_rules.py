"""What torch's autocast does to an operation, on a CPU and on CUDA, asked of torch. A helper module, not a lab."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from labs.kit._compat import FakeTensorMode

LOWERED, RAISED, FOLLOWS = "cast to 16 bits", "cast to FP32", "no rule: as its input"
DEVICES = ("cpu", "cuda")

Call = Callable[[Callable[..., Tensor], torch.device], Tensor]


def _classes(device: torch.device) -> Tensor:
    return torch.empty(4, dtype=torch.int64, device=device)


# Each gets x(shape), a tensor of the format that is tried, and the device.
CALLS: dict[str, Call] = {
    "linear": lambda x, _: functional.linear(x(4, 8), x(8, 8)),
    "matmul": lambda x, _: torch.matmul(x(4, 8), x(8, 8)),
    "conv2d": lambda x, _: functional.conv2d(x(4, 3, 8, 8), x(3, 3, 3, 3)),
    "scaled_dot_product_attention": lambda x, _: functional.scaled_dot_product_attention(*(x(2, 2, 8, 8),) * 3),
    "softmax": lambda x, _: functional.softmax(x(4, 8), -1),
    "log_softmax": lambda x, _: functional.log_softmax(x(4, 8), -1),
    "layer_norm": lambda x, _: functional.layer_norm(x(4, 8), (8,)),
    "batch_norm": lambda x, _: functional.batch_norm(x(4, 8), None, None, training=True),
    "nll_loss": lambda x, device: functional.nll_loss(x(4, 8), _classes(device)),
    "mse_loss": lambda x, _: functional.mse_loss(x(4, 8), x(4, 8)),
    "sum": lambda x, _: x(4, 8).sum(),
    "mean": lambda x, _: x(4, 8).mean(),
    "exp": lambda x, _: x(4, 8).exp(),
    "add": lambda x, _: x(4, 8) + x(4, 8),
    "relu": lambda x, _: functional.relu(x(4, 8)),
    "gelu": lambda x, _: functional.gelu(x(4, 8)),
    "embedding": lambda x, device: functional.embedding(_classes(device), x(8, 8)),
}


def rule(call: Call, kind: str) -> str:
    """What autocast to FP16 for devices of `kind` ("cpu", "cuda") does to the inputs of `call`.

    Tried with inputs of FP32 and of FP16, which have a shape and no memory: a GPU is not needed.
    """
    device = torch.device(kind)
    with FakeTensorMode(), _autocast(kind):
        wide, narrow = (
            call(lambda *shape, d=d: torch.empty(shape, dtype=d, device=device), device).dtype
            for d in (torch.float32, torch.float16)
        )
    if wide == torch.float16:
        return LOWERED
    return RAISED if narrow == torch.float32 else FOLLOWS


def rules() -> dict[str, dict[str, str]]:
    """{operation: {kind of device: its rule}}."""
    return {name: {kind: rule(call, kind) for kind in DEVICES} for name, call in CALLS.items()}


@contextmanager
def _autocast(kind: str) -> Iterator[None]:
    """As torch.autocast(kind, torch.float16), which refuses where there is no such device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()
