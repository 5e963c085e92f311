"""A model and its batch with shapes, formats and aliases, but no storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from labs.common import models
from labs.common.models import Workload
from labs.common.oracle.internals import FakeTensorMode
from labs.kit.errors import BadInput, require

Source = Workload | Callable[[], Workload] | str


def name_of(source: Source) -> str:
    """Return a model's name for messages and tables."""
    return source if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)


def made(source: Source, seed: int = 0) -> Workload:
    """Build the workload of a factory, or of a name as in `labs.models.build`, with its parameters on the meta device.

    Reads the factory's real data. A factory that needs its parameters' values gets real parameters, which take their
    memory. BadInput says in one line what is wrong with it.
    """
    if isinstance(source, Workload):
        return source
    factory = (lambda: models.make(source, seed)) if isinstance(source, str) else source
    try:
        try:
            with _parameters_on_meta():
                workload = factory()
        except Exception:  # a factory may read its parameters, which meta tensors refuse; then it gets real memory
            workload = factory()
    except BadInput:
        raise
    except Exception as e:
        raise BadInput(f"model {name_of(source)!r} cannot be built: {one_line(e)}") from e
    require(
        isinstance(workload, Workload),
        f"model {name_of(source)!r} returned {type(workload).__name__}, not a labs.models.Workload",
    )
    return workload


def real(source: Source, seed: int = 0) -> Workload:
    """Build the workload with all its memory."""
    if isinstance(source, Workload):
        return source
    return models.make(source, seed) if isinstance(source, str) else source()


def one_line(error: BaseException) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Drop a parameter's storage as soon as a module gets it, so that initialising it costs nothing either."""
    register, known = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.device.type == "meta" or isinstance(param, UninitializedParameter):
            return
        if param not in known:  # a parameter shared with a second module stays the same one
            known[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, known[param])

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def without_memory(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy of `module` whose parameters, buffers and other tensors have no storage."""
    with mode:
        memo: dict[int, object] = {id(p): nn.Parameter(_like(p), p.requires_grad) for p in module.parameters()}
        memo |= {id(t): _like(t) for t in other_tensors(module)}
        return copy.deepcopy(module, memo)


def other_tensors(module: nn.Module) -> list[Tensor]:
    """Return buffers, and tensors that are plain attributes of a module."""
    plain = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return [*module.buffers(), *plain]


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")


def batch_of(workload: Workload, rows: int, mode: FakeTensorMode) -> tuple[Tensor, Tensor]:
    """Return input and target of `rows` rows without storage, shaped like a real batch of 2."""
    small = workload.make_batch(2)
    require(
        all(isinstance(t, Tensor) and t.dim() > 0 and len(t) == 2 for t in small) and len(small) == 2,
        "make_batch(2) must return two tensors of 2 rows",
    )
    with mode:
        x, y = (_with_rows(t, rows) for t in small)
    return x, y


def _with_rows(t: Tensor, rows: int) -> Tensor:
    """Make a dense tensor with the memory order of `t` (channels last, for instance)."""
    order = sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))
    return torch.empty_permuted((rows, *t.shape[1:]), order, dtype=t.dtype, device="cpu")
