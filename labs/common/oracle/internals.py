"""What the memory oracle asks of autograd's engine, the dispatcher and fake tensors."""

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

# What an operation raises whose result, or whose shape, depends on numbers that no fake tensor has.
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
    """`loss.backward()`, which leaves TorchFunctionModes on: what is computed again in backward is under them, too."""
    run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def in_backward() -> bool:
    """Whether autograd's engine is calling."""
    return graph_task() != -1


def only_calls_others(op: str) -> bool:
    """Whether "aten::linear", say, is put together from other operations on every device."""
    registered = operators_of_key("CompositeImplicitAutograd")
    return any(name.partition(".")[0] == op for name in registered)


def called_by_engine(frame: FrameType) -> bool:
    """Whether an operation that was seen in `frame` was called by autograd's engine, and by no Python code."""
    return frame.f_back is not None and frame.f_back.f_code is run_backward.__code__


@contextmanager
def quiet() -> Iterator[None]:
    """Without the traceback that fake tensors log before they raise the same error."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
