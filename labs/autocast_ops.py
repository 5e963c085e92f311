"""In which number format does autocast run each operation, on a CPU and on CUDA?

    python -m labs.autocast_ops --nproc 1

About 1 s. Calls each operation under autocast with FP32 and with 16-bit inputs. The tensors have a shape but no
storage, so CUDA's rules need no GPU. The result's dtype shows what autocast did. `cross_entropy` runs two kernels, so a
dispatch mode below autocast records the dtype of the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from labs.kit import cli
from labs.kit._compat import FakeTensorMode, TorchDispatchMode, tree_leaves
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

LOWERED, RAISED, FOLLOWS, REFUSED = "16 bits", "FP32", "as its input", "raises"
RULES = (LOWERED, RAISED, FOLLOWS, REFUSED)
DEVICES = ("cpu", "cuda")
Make = Callable[..., Tensor]


def _labels(x: Tensor) -> Tensor:
    return torch.empty(4, dtype=torch.int64, device=x.device)


# Each call gets x(shape), which returns a new tensor of the dtype under test.
CALLS: dict[str, Callable[[Make], Tensor]] = {
    "linear": lambda x: functional.linear(x(4, 8), x(8, 8)),
    "conv2d": lambda x: functional.conv2d(x(4, 3, 8, 8), x(3, 3, 3, 3)),
    "scaled_dot_product_attention": lambda x: functional.scaled_dot_product_attention(*(x(2, 2, 8, 8),) * 3),
    "softmax": lambda x: functional.softmax(x(4, 8), -1),
    "log_softmax": lambda x: functional.log_softmax(x(4, 8), -1),
    "cross_entropy": lambda x: functional.cross_entropy(t := x(4, 8), _labels(t)),
    "log_softmax inside cross_entropy": lambda x: functional.cross_entropy(t := x(4, 8), _labels(t)),
    "nll_loss": lambda x: functional.nll_loss(t := x(4, 8), _labels(t)),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(x(4, 8), x(4, 8)),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x(4, 8), x(4, 8)),
    "mse_loss": lambda x: functional.mse_loss(x(4, 8), x(4, 8)),
    "layer_norm": lambda x: functional.layer_norm(x(4, 8), (8,)),
    "sum": lambda x: x(4, 8).sum(),
    "exp": lambda x: x(4, 8).exp(),
    "gelu": lambda x: functional.gelu(x(4, 8)),
    "add": lambda x: x(4, 8) + x(4, 8),
}


@dataclass(frozen=True)
class Config:
    """The 16-bit format to test."""

    format: Literal["bf16", "fp16"] = "bf16"
    """The 16-bit format."""
    smoke: bool = False
    """Has no effect: the run is short anyway."""


class _FirstKernel(TorchDispatchMode):
    """Records the dtype returned by the first floating-point kernel, ignoring casts and views."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype: torch.dtype | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` and record its result's dtype."""
        out = func(*args, **(kwargs or {}))
        floats = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        if floats and not func.is_view and func.overloadpacket.__name__ not in ("_to_copy", "empty"):
            self.dtype = self.dtype or floats[0].dtype
        return out


def runs_in(op: str, kind: str, given: torch.dtype, lowered: torch.dtype) -> str | None:
    """ "FP32" or "16 bits": the format in which autocast runs operation `op` of CALLS; None if autocast refuses it."""
    device = torch.device(kind)
    with FakeTensorMode(), _autocast(kind, lowered), _FirstKernel() as first:
        try:
            out = CALLS[op](lambda *shape: torch.empty(shape, dtype=given, device=device))
        except RuntimeError as error:
            if "unsafe to autocast" not in str(error):
                raise
            return None
    return "FP32" if (first.dtype if " inside " in op else out.dtype) == torch.float32 else "16 bits"


@contextmanager
def _autocast(kind: str, dtype: torch.dtype) -> Iterator[None]:
    """Act as torch.autocast(kind, dtype), which refuses to run on a machine without such a device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.clear_autocast_cache()


def rule(wide: str | None, narrow: str | None) -> str:
    """Return autocast's rule, given the formats in which an operation runs with FP32 and with 16-bit inputs."""
    if wide is None:
        return REFUSED
    return wide if wide == narrow else FOLLOWS


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield a record per operation and device; its value is the rule's index in RULES."""
    lowered = torch.bfloat16 if config.format == "bf16" else torch.float16
    for done, op in enumerate(CALLS, start=1):
        for kind in DEVICES:
            wide, narrow = (runs_in(op, kind, given, lowered) for given in (torch.float32, lowered))
            found = rule(wide, narrow)
            yield rank.record("rule", "1", RULES.index(found), op=op, device=kind, runs_in=found)
        rank.progress(done, len(CALLS), op)


def answer(records: Records) -> Iterator[str]:
    """Yield each operation's rule on both devices, and where the devices differ."""
    found = {(r.case["op"], r.case["device"]): r.case["runs_in"] for r in records.where("rule")}
    ops = list(dict.fromkeys(op for op, _ in found))
    other = [op for op in ops if found[op, "cpu"] != found[op, "cuda"]]
    yield f"{len(other)} of {len(ops)} operations run in another format on CUDA than on a CPU: {', '.join(other)}."
    for kind in DEVICES:
        said = (f"{name}: {', '.join(op for op in ops if found[op, kind] == name) or 'none'}" for name in RULES)
        yield f"On {kind}, {'; '.join(said)}."


if __name__ == "__main__":
    cli.main()
