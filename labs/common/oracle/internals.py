"""The parts of torch that the oracle stands on and that torch does not promise to keep: imported here only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from labs.kit.errors import BadInput

try:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedOperatorException,
    )
    from torch.autograd.graph import _engine_run_backward
    from torch.utils._python_dispatch import TorchDispatchMode

    from labs.common.memory.saved_tensors import CudaRules
except ImportError as e:
    raise BadInput(
        f"the memory oracle uses private parts of torch that torch {torch.__version__} has moved "
        f"({e.name}): use the version in constraints.txt"
    ) from e

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
    _engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def in_backward() -> bool:
    """Whether autograd's engine is calling."""
    return torch._C._current_graph_task_id() != -1


def only_calls_others(op: str) -> bool:
    """Whether "aten::linear", say, is put together from other operations on every device."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return any(name.partition(".")[0] == op for name in registered)


def called_by_engine(frame: FrameType) -> bool:
    """Whether an operation that was seen in `frame` was called by autograd's engine, and by no Python code."""
    return frame.f_back is not None and frame.f_back.f_code is _engine_run_backward.__code__


@contextmanager
def quiet() -> Iterator[None]:
    """Without the traceback that fake tensors log before they raise the same error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
