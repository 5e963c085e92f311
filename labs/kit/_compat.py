"""PyTorch's private API, all that the course uses of it. It changes without notice, so nothing else in labs touches it.

`from labs.kit._compat import TorchDispatchMode` imports what PLACES names, when it is asked for. Another torch that has
moved it gives one clear error. Recipes stand alone and carry their own guards.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from labs.kit.errors import BadInput

DYNAMO = "torch._dynamo"
"""The first optimizer and the first DDP of a process import it, which takes as long as torch: preload it where that
would be timed."""
C = "torch._C"

PLACES = {
    # Seeing every operation, and tensors without memory
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
    # Autograd and the profiler
    "run_backward": "torch.autograd.graph:_engine_run_backward",
    "graph_task": f"{C}:_current_graph_task_id",
    "profiler_enabled": "torch.autograd:_profiler_enabled",
    "fused_optimizer_devices": "torch.utils._foreach_utils:_get_fused_kernels_supported_devices",
    # Compilation
    "dynamo": DYNAMO,
    "CompilerFailed": f"{DYNAMO}.exc:BackendCompilerFailed",
    "compile_counters": f"{DYNAMO}.utils:counters",
    "wrap_inline": f"{DYNAMO}.external_utils:wrap_inline",
    "dynamo_callback": f"{DYNAMO}.callback",
    "dynamo_disable": f"{DYNAMO}:disable",
    "dynamo_trace_rules": f"{DYNAMO}.trace_rules",
    "compile_fx": "torch._inductor.compile_fx",
    "inductor_config": "torch._inductor:config",
    "GraphLowering": "torch._inductor.graph:GraphLowering",
    "has_triton": "torch.utils._triton:has_triton",
    # Process groups
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    "c10d": f"{C}:_distributed_c10d",
    "set_group_timeout": "torch.distributed.distributed_c10d:_set_pg_timeout",
    "default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "resolve_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    "groups": "torch.distributed.distributed_c10d:_world",
    "rendezvous": "torch.distributed.elastic.rendezvous:rendezvous_handler_registry._registry",
    # The build, and how a checkpoint is read and written
    "cuda_arch_flags": f"{C}:_cuda_getArchFlags",
    "cudnn_version": f"{C}:_cudnn.getVersionInt",
    "extension": C,
}
"""{name here: module, or module:attribute, in torch}."""


class PrivateApiChanged(BadInput):
    """This torch has no longer, or not yet, what the course uses."""


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _find(PLACES[name])
    return found


def _find(place: str) -> Any:
    module, _, attributes = place.partition(":")
    try:
        found = importlib.import_module(module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
        return found
    except (ImportError, AttributeError):
        version = importlib.import_module("torch").__version__
        raise PrivateApiChanged(
            f"torch {version} has no {place.replace(':', '.')}, which this uses: install the version in constraints.txt"
        ) from None


def preload_dynamo() -> None:
    """Import it now, so that no timed step does."""
    _find(DYNAMO)


def compiled_graphs() -> int:
    """How many graphs torch.compile has made so far in this process; 0 if it was never used. Imports nothing."""
    module = sys.modules.get(f"{DYNAMO}.utils")
    return int(module.counters["stats"]["unique_graphs"]) if module else 0


def flight_recorders() -> Iterator[Callable[..., bytes]]:
    """What dumps the flight recorders of this process, for `pickle.loads`: gloo's, and NCCL's if it is built in."""
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        with contextlib.suppress(PrivateApiChanged):
            yield _find(f"{C}:_distributed_c10d.{name}")
