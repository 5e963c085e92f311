"""The memory oracle's access to autograd's engine, the dispatcher and fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from labs.common.memory.saved_tensors import CudaRules
from labs.kit._compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedOperatorException,
    graph_task,
    operators_of_key,
    run_backward,
)

# Raised by operations whose result, or its shape, depends on values that fake tensors lack.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = [
    "NEEDS_VALUES",
    "CudaRules",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "backward",
    "called_by_engine",
    "in_backward",
    "only_calls_others",
    "quiet",
]


def backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()` with TorchFunctionModes left on, so that recomputation in backward is also under them."""
    run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def in_backward() -> bool:
    """Return whether autograd's engine is running."""
    return graph_task() != -1


def only_calls_others(op: str) -> bool:
    """Return whether an operation such as "aten::linear" is composed of other operations on every device."""
    registered = operators_of_key("CompositeImplicitAutograd")
    return any(name.partition(".")[0] == op for name in registered)


def called_by_engine(frame: FrameType) -> bool:
    """Return whether autograd's engine, not Python code, called an operation seen in `frame`."""
    return frame.f_back is not None and frame.f_back.f_code is run_backward.__code__


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the traceback that fake tensors log before they raise the same error."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
