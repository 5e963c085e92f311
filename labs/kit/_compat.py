"""All of PyTorch's private API that the course uses. It changes without notice, so nothing else in labs touches it.

`from labs.kit._compat import TorchDispatchMode` imports a name in PLACES on demand. Names in ATTRIBUTES are functions
that read an object's attribute. If torch has moved something, you get one clear error. Recipes have their own guards.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from labs.kit.errors import BadInput

DYNAMO = "torch._dynamo"
"""Imported by a process's first optimizer or DDP; it takes as long as torch: preload it where that would be timed."""
C = "torch._C"
DDP = "torch.nn.parallel:DistributedDataParallel"
LOADING = "torch.utils.data.dataloader"

PLACES = {
    # Operator interception, and tensors without memory
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "UnsupportedOperatorException": "torch._subclasses.fake_tensor:UnsupportedOperatorException",
    "DeviceContext": "torch.utils._device:DeviceContext",
    "function_modes": "torch.overrides:_get_current_function_mode_stack",
    "operators_of_key": f"{C}:_dispatch_get_registrations_for_dispatch_key",
    "flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention.default",
    "flash_attention_on_cpu": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "efficient_attention": "torch:ops.aten._scaled_dot_product_efficient_attention.default",
    "cudnn_attention": "torch:ops.aten._scaled_dot_product_cudnn_attention.default",
    "script_type": "torch:ScriptObject._type",
    # Autograd and the profiler
    "run_backward": "torch.autograd.graph:_engine_run_backward",
    "graph_task": f"{C}:_current_graph_task_id",
    "profiler_enabled": "torch.autograd:_profiler_enabled",
    # The CUDA allocator's history: private, but the documented way
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "memory_snapshot": "torch.cuda.memory:_snapshot",
    # Compilation
    "dynamo_callback": f"{DYNAMO}.callback",
    "dynamo_trace_rules": f"{DYNAMO}.trace_rules",
    "inductor_config": "torch._inductor:config",
    "has_triton": "torch.utils._triton:has_triton",
    # Process groups
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "set_group_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "resolve_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "groups": "torch.distributed.distributed_c10d:_world",
    "rendezvous": "torch.distributed.elastic.rendezvous:rendezvous_handler_registry._registry",
    "source_rank": "torch.distributed:Work._source_rank",
    # Modules and loaders
    "Normalisation": "torch.nn.modules.batchnorm:_NormBase",
    "fetchers": "torch.utils.data._utils:fetch",
    "LoaderIterator": f"{LOADING}:_BaseDataLoaderIter",
    # The build
    "cuda_arch_flags": f"{C}:_cuda_getArchFlags",
    "cudnn_version": f"{C}:_cudnn.getVersionInt",
}
"""{our name: module or module:attribute in torch}."""

ATTRIBUTES = {
    "storage_key": "torch:UntypedStorage._cdata",  # unique among live storages, including those without memory
    "times_written": "torch:Tensor._version",
    "plain_call": "torch.nn:Module._call_impl",
    "compiled_call": "torch.nn:Module._compiled_call_impl",
    "comm_hooks": f"{DDP}._comm_hooks",
    "delays_all": f"{DDP}._delay_all_reduce_all_params",
    "reduces_in_python": f"{DDP}._use_python_reducer",
}
"""{our name: module:class.attribute}; `our_name(object)` reads the attribute."""


class PrivateApiChanged(BadInput):
    """The installed torch lacks a private name that the course uses."""


def __getattr__(name: str) -> Any:
    if name in PLACES:
        found = _find(PLACES[name])
    elif name in ATTRIBUTES:
        found = _reader(ATTRIBUTES[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _find(place: str) -> Any:
    module, _, attributes = place.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
        return found
    except (ImportError, AttributeError):
        raise _changed(place) from None


def _reader(place: str) -> Callable[[Any], Any]:
    """Return a function that reads an attribute. If the class itself has it, a call costs no extra check."""
    owner, _, attribute = place.rpartition(".")
    plain = operator.attrgetter(attribute)
    if hasattr(_find(owner), attribute):
        return plain

    def read(of: Any) -> Any:
        try:
            return plain(of)
        except AttributeError:
            raise _changed(place) from None

    return read


def _changed(place: str) -> PrivateApiChanged:
    version = importlib.import_module("torch").__version__
    return PrivateApiChanged(
        f"torch {version} has no {place.replace(':', '.')}: install the version in constraints.txt"
    )


def preload_dynamo() -> None:
    """Import torch._dynamo now, so that no timed step does."""
    _find(DYNAMO)


def compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process; 0 if it was never used. Imports nothing."""
    module = sys.modules.get(f"{DYNAMO}.utils")
    return int(module.counters["stats"]["unique_graphs"]) if module else 0


def flight_recorders() -> Iterator[Callable[..., bytes]]:
    """Yield the functions that dump this process's flight recorders as a pickle: gloo's, and NCCL's if built in."""
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        with contextlib.suppress(PrivateApiChanged):
            yield _find(f"{C}:_distributed_c10d.{name}")


def flight_recorders_in_json() -> list[Callable[..., bytes]]:
    """Return the functions that dump them as JSON, if torch is already loaded and has them. Imports nothing."""
    c10d = getattr(sys.modules.get(C), "_distributed_c10d", None)
    return [getattr(c10d, n) for n in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, n)]


def loaded_loader_iterator() -> Any:
    """Return the base class of DataLoader iterators, or None until torch has loaded its module. Imports nothing."""
    module = sys.modules.get(LOADING)
    return getattr(module, "_BaseDataLoaderIter", None) if hasattr(module, "_MultiProcessingDataLoaderIter") else None


def end_workers(batches: Any) -> None:
    """Stop the workers of a DataLoader iterator now, if it has any, instead of waiting for the garbage collector."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()


def call_through(module: Any, function: Callable | None) -> None:
    """Make `module(...)` call `function`, as `module.compile()` does. With None, it calls its forward again.

    Not by setattr, which an OptimizedModule passes on to the module it wraps.
    """
    if function is not None:
        module.__dict__["_compiled_call_impl"] = function
    else:
        module.__dict__.pop("_compiled_call_impl", None)


def tensors_of_scaler(scaler: Any) -> list[Any]:
    """Return a GradScaler's scale and its count of good steps; an empty list if it is disabled or hasn't been used."""
    found = (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker"))
    return [t for t in found if t is not None]
