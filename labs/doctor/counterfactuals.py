"""What a step would take if one thing were otherwise: that estimates what a fix of it gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import psutil

from labs.doctor.hooks import Hooks, length
from labs.doctor.profile import Gone, Profile
from labs.doctor.schedule import Mode, Trial
from labs.doctor.snapshot import free_on_host
from labs.doctor.trials import OtherLoaders, PinnedMemory
from labs.kit import _compat, host

FEW_PARAMETERS = 8  # An optimizer of fewer tensors has no loop to speak of


"""What Python and torch take to call a layer, forward, backward and in the optimizer, whatever its size: about."""
POINT_TO_POINT = ("send", "recv", "batch_isend_irecv", "step")
"""Calls that are noted; the last one is that of a pipeline's schedule."""


class Counterfactual:
    """What most of them have in common (schedule.Mode)."""

    name = ""
    settle = 0
    samples_factor = 1.0
    needs_restore = True
    risky = False
    on_request = False


# Nothing is computed otherwise


class SameBatch(Counterfactual):
    """No wait for data: each batch is the one before."""

    name, settle = "same batch again", 1  # a batch that the script wrote into is fetched once more

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        return "" if hooks.loader is not None else "its data comes from no DataLoader"

    def enter(self, hooks: Hooks) -> None:
        hooks.same_batch = True

    def leave(self, hooks: Hooks) -> None:
        hooks.same_batch = False


class NoWaitingLine(Counterfactual):
    """`.item()` and others give at once what they gave in a step before.

    What the host waits for here it may wait for later: at the next line, or in the optimizer's step.
    """

    name = "no waiting line"

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if profile.device == "cpu":
            return "only what is on a GPU is waited for"
        waits = any(line.kind == "synchronise" for line in profile.lines)
        return "" if waits else Gone("no line of the script waits for a value of the device")

    def enter(self, hooks: Hooks) -> None:
        hooks.known_values = True

    def leave(self, hooks: Hooks) -> None:
        hooks.known_values = False


class NoAnomalyDetection(Counterfactual):
    """Autograd does not look for NaN in each gradient."""

    name = "no anomaly detection"

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        return "" if hooks.anomaly else Gone("it is off")

    def enter(self, hooks: Hooks) -> None:
        torch = hooks.torch
        self.was, self.undo = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), ExitStack()
        torch.set_anomaly_enabled(False)
        # A script may switch it on in each step: `with detect_anomaly():`
        self.undo.enter_context(mock.patch.object(torch, "set_anomaly_enabled", lambda *on: None))

    def leave(self, hooks: Hooks) -> None:
        self.undo.close()
        hooks.torch.set_anomaly_enabled(*self.was)


# Cores and ranks


class FewerThreads(Counterfactual):
    """Each rank computes with its share of the cores."""

    name, settle = "fewer threads", 1

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if profile.device == "cuda":
            return "the model is on a GPU"
        if profile.training["compiled"]:
            return "the model would be compiled anew"
        have, self.share = hooks.torch.get_num_threads(), fair_threads(profile.local_ranks)
        return "" if have > self.share else Gone(f"{have} of {self.share} possible threads are none too many")

    def enter(self, hooks: Hooks) -> None:
        self.before = hooks.torch.get_num_threads()
        hooks.torch.set_num_threads(self.share)

    def leave(self, hooks: Hooks) -> None:
        hooks.torch.set_num_threads(self.before)


def fair_threads(local_ranks: int) -> int:
    """Physical cores for each rank of this machine, of those that this process may use."""
    usable = host.core_count()
    physical = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, physical) // local_ranks)


class NoExchange(Counterfactual):
    """DDP's gradients stay on their rank, as in `no_sync()`: what is left is what ranks need for themselves.

    Collectives that the script itself calls are made as ever.
    """

    name, settle = "no exchange", 1  # the first forward still broadcasts buffers

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if any(_compat.reduces_in_python(m) or _compat.delays_all(m) for m in _ddp(hooks)):
            return "its gradients are exchanged by compiled code"
        if _ddp(hooks):
            return "" if hooks.torch.distributed.get_world_size() > 1 else "there is one rank"
        if profile.training.get("fsdp"):
            return "FSDP gathers parameters in forward and backward: without that there is nothing to compute with"
        return "there is no DistributedDataParallel"

    def enter(self, hooks: Hooks) -> None:
        from torch.nn.parallel import DistributedDataParallel

        # Also if the script sets it in each step, by itself or by no_sync(), which puts back what it reads
        self.before = [(m, m.require_backward_grad_sync) for m in _ddp(hooks)]
        never = property(lambda ddp: False, lambda ddp, on: ddp.__dict__.__setitem__(NAME, on))
        DistributedDataParallel.require_backward_grad_sync = never

    def leave(self, hooks: Hooks) -> None:
        from torch.nn.parallel import DistributedDataParallel

        del DistributedDataParallel.require_backward_grad_sync
        for ddp, on in self.before:
            ddp.require_backward_grad_sync = on


NAME = "require_backward_grad_sync"


class NoBufferBroadcast(Counterfactual):
    """DDP sends no buffers (running means of BatchNorm) before a forward."""

    name, settle = "no buffer broadcast", 1

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if not profile.training.get("buffers"):
            return Gone("DDP sends no buffers" if _ddp(hooks) else "there is no DistributedDataParallel")
        return "" if hooks.torch.distributed.get_world_size() > 1 else "there is one rank"

    def enter(self, hooks: Hooks) -> None:
        self.changed = [m for m in _ddp(hooks) if m.broadcast_buffers]
        for ddp in self.changed:
            ddp.broadcast_buffers = False

    def leave(self, hooks: Hooks) -> None:
        for ddp in self.changed:
            ddp.broadcast_buffers = True


class NoSearch(Counterfactual):
    """DDP takes for granted that all parameters are used. It then hangs or fails in a step where one is not."""

    name, settle, risky = "no search for unused parameters", 2, True  # two: buckets are built anew after the first

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        searching = [m for m in _ddp(hooks) if m.find_unused_parameters and not m.static_graph]
        if not searching:
            return Gone("DDP does not search" if _ddp(hooks) else "there is no DistributedDataParallel")
        if any(_compat.comm_hooks(m) or m.mixed_precision or _compat.delayed_parameters(m) for m in searching):
            return "DDP has a communication hook, which would be lost"
        return "some parameters are not used in some steps: it is needed" if hooks.unused_seen else ""

    def enter(self, hooks: Hooks) -> None:
        self.changed = [m for m in _ddp(hooks) if m.find_unused_parameters and not m.static_graph]
        self._search(False)

    def leave(self, hooks: Hooks) -> None:
        self._search(True)

    def _search(self, on: bool) -> None:
        for ddp in self.changed:
            ddp.find_unused_parameters = on
            _compat.rebuild_reducer(ddp)


def _ddp(hooks: Hooks) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    found = {id(m): m for root in hooks.roots.values() for m in root.modules()}
    return [m for m in found.values() if isinstance(m, DistributedDataParallel)]


# Something is computed otherwise: a script may not be made for it


class FusedOptimizer(Counterfactual):
    """One kernel for all parameters."""

    name, settle, risky = "fused optimizer", 1, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        able = self._able(hooks)
        if any(o.defaults.get("fused") for o in hooks.optimizers.values()):
            return Gone("it is fused")
        if not able:
            return "torch has no fused form of " + ", ".join(type(o).__name__ for o in hooks.optimizers.values())
        parameters = [p for o in able for g in o.param_groups for p in g["params"]]
        if len(parameters) < FEW_PARAMETERS:
            return "it has few parameters to go through"
        if any(p.device.type not in _compat.fused_optimizer_devices() or not p.is_floating_point() for p in parameters):
            return "its parameters are not all floating point numbers on a device with fused kernels"
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            return "its gradients are sparse"
        return "it is differentiable" if any(g.get("differentiable") for o in able for g in o.param_groups) else ""

    def _able(self, hooks: Hooks) -> list[Any]:
        optim = hooks.torch.optim
        return [o for o in hooks.optimizers.values() if type(o) in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad)]

    def enter(self, hooks: Hooks) -> None:
        # Groups and states are put back by StateSnapshot; where the fused kernels are on a GPU they count steps there
        for optimizer in self._able(hooks):
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = True, False
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    if hooks.torch.is_tensor(state.get("step")):
                        state["step"] = state["step"].to(parameter.device, hooks.torch.float32, copy=True)

    def leave(self, hooks: Hooks) -> None:
        pass


class HalfPrecision(Counterfactual):
    """Forward and backward under autocast; what comes after the model is computed in the precision it had."""

    name, settle, risky = "half precision", 1, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if profile.training["autocast"]:
            return Gone(f"it runs under autocast ({profile.training['autocast']})")
        if not set(profile.training["dtypes"]) <= {"float32", "float64"}:
            return "parameters are not all FP32 or FP64"
        if "float32" not in profile.training["dtypes"]:
            return "autocast leaves FP64 as it is"
        if profile.training["compiled"]:
            return "the model would be compiled anew"
        if not hooks.called:
            return "no forward of a model was seen"
        if any(isinstance(o, hooks.torch.optim.LBFGS) for o in hooks.optimizers.values()):
            return "LBFGS ends a step as soon as the loss hardly changes: in 16 bits after more or fewer passes"
        profile.training["half"] = str(self._dtype(hooks)).removeprefix("torch.")  # its cure names it
        return ""

    @staticmethod
    def _dtype(hooks: Hooks) -> Any:
        torch, device = hooks.torch, hooks.device.type
        bf16 = device != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16

    def enter(self, hooks: Hooks) -> None:
        torch, device = hooks.torch, hooks.device.type
        dtype = self._dtype(hooks)
        hooks.around_forward = lambda: torch.autocast(device, dtype)
        before = torch.float64 if "float64" in hooks_dtypes(hooks) else torch.float32
        hooks.of_output = lambda output: _cast(output, (torch.bfloat16, torch.float16), before, torch)

    def leave(self, hooks: Hooks) -> None:
        hooks.around_forward, hooks.of_output = nullcontext, None


class SinglePrecision(Counterfactual):
    """FP32 in place of FP64: parameters, what the optimizers hold, and what goes into a model."""

    name, settle, risky = "single precision", 1, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if "float64" not in profile.training["dtypes"]:
            return Gone("nothing is computed in FP64")
        if profile.training["compiled"] or _ddp(hooks) or profile.training["fsdp"]:
            return "buckets or compiled code are made for FP64"
        states = [v for o in hooks.optimizers.values() for s in o.state.values() for v in s.values()]
        if any(isinstance(v, list | tuple | dict) for v in states):
            return "its optimizer keeps a history in FP64"
        return "" if hooks.called else "no forward of a model was seen"

    def enter(self, hooks: Hooks) -> None:
        torch = hooks.torch
        tensors = [t for root in hooks.roots.values() for t in (*root.parameters(), *root.buffers())]
        tensors += [
            v for o in hooks.optimizers.values() for s in o.state.values() for v in s.values() if torch.is_tensor(v)
        ]
        self.before = [(t, t.data) for t in {id(t): t for t in tensors}.values() if t.dtype == torch.float64]
        for tensor, data in self.before:
            _become(tensor, data.float())
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        hooks.of_input = lambda given: _cast(given, (torch.float64,), torch.float32, torch)

    def leave(self, hooks: Hooks) -> None:
        hooks.of_input = None
        hooks.torch.set_default_dtype(self.default)
        for tensor, data in self.before:
            _become(tensor, data)


def _become(tensor: Any, data: Any) -> None:
    """Other data, of another dtype. Its gradient goes along: lines after the step may read it."""
    gradient, tensor.grad = tensor.grad, None  # torch allows no other dtype while there is one
    tensor.data = data
    if gradient is not None:
        tensor.grad = gradient.to(data.dtype)


def hooks_dtypes(hooks: Hooks) -> set[str]:
    """Of the models' parameters."""
    return {str(p.dtype).removeprefix("torch.") for root in hooks.roots.values() for p in root.parameters()}


def _cast(tree: Any, of: tuple, to: Any, torch: Any) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(to) if isinstance(leaf, torch.Tensor) and leaf.dtype in of else leaf

    return _compat.tree_map(cast, tree)


class LargerBatch(Counterfactual):
    """Each batch twice over, in one step."""

    name, settle, samples_factor, risky = "larger batch", 1, 2.0, True

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if hooks.loader is None:
            return "its data comes from no DataLoader"
        if profile.training["compiled"]:
            return "the model would be compiled anew"
        if any(line.kind == "exchange" and line.what in POINT_TO_POINT for line in profile.lines):
            return "ranks send each other tensors of the shapes that they have now"
        batch = hooks.last_batch()
        try:
            twice(batch, hooks.torch)
        except TypeError as e:
            return f"its batches are not understood: {e}"
        return "" if self._fits(hooks, profile.local_ranks) else "there is no memory for it"

    @staticmethod
    def _fits(hooks: Hooks, local_ranks: int) -> bool:
        """Whether a step's activations fit once more, besides what is there at its peak."""
        if hooks.device is not None and hooks.device.type == "cuda":
            cuda = hooks.torch.cuda
            peak = cuda.max_memory_allocated(hooks.device)
            free = cuda.mem_get_info(hooks.device)[0] + cuda.memory_reserved(hooks.device) - peak
            return 1.2 * (peak - cuda.memory_allocated(hooks.device)) < free
        return 1.2 * psutil.Process().memory_info().rss < free_on_host(local_ranks)

    def enter(self, hooks: Hooks) -> None:
        hooks.of_batch = lambda batch: twice(batch, hooks.torch)

    def leave(self, hooks: Hooks) -> None:
        hooks.of_batch = None


def twice(batch: Any, torch: Any) -> Any:
    """All its samples twice. TypeError if it is not lists, tuples and dicts of tensors with one row for each sample."""
    rows = length(batch, torch.Tensor)

    def doubled(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if part.layout != torch.strided or not part.dim() or len(part) != rows:
                raise TypeError(f"a tensor of shape {tuple(part.shape)} among those of {rows} samples")
            return torch.cat([part, part])
        if isinstance(part, dict) and type(part) is dict:
            return {key: doubled(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(doubled, part))
        if type(part) in (list, tuple):
            if len(part) == rows and all(isinstance(value, str | int | float) for value in part):
                return type(part)([*part, *part])
            return type(part)([doubled(value) for value in part])
        raise TypeError(f"there is a {type(part).__name__} in them")

    if not rows:
        raise TypeError("there is no tensor in them")
    return doubled(batch)


class Compiled(Counterfactual):
    """Outermost modules are called through torch.compile. Only on request: it may take minutes to begin."""

    name, settle, risky, on_request = "compiled", 3, True, True

    def __init__(self) -> None:
        self.calls: dict[int, Callable] = {}

    def why_not(self, hooks: Hooks, profile: Profile) -> str:
        if profile.training["compiled"]:
            return Gone("it is compiled")
        if profile.training["data_parallel"] or profile.training["fsdp"]:
            return "its model is wrapped: compile what is within"
        return "" if hooks.called else "no forward of a model was seen"

    def enter(self, hooks: Hooks) -> None:
        wrap_inline = _compat.wrap_inline  # without it torch's own modules are not traced
        self.calls = self.calls or {
            key: hooks.torch.compile(wrap_inline(_compat.plain_call(hooks.roots[key]))) for key in hooks.called
        }
        hooks.instead = self.calls

    def leave(self, hooks: Hooks) -> None:
        hooks.instead = {}


MODES: dict[str, Mode | Trial] = {
    mode.name: mode
    for mode in (
        SameBatch(),
        NoExchange(),
        NoWaitingLine(),
        FewerThreads(),
        NoBufferBroadcast(),
        NoAnomalyDetection(),
        SinglePrecision(),
        HalfPrecision(),
        FusedOptimizer(),
        LargerBatch(),
        NoSearch(),
        Compiled(),
        OtherLoaders(),
        PinnedMemory(),
    )
}
"""In the order in which they are tried, harmless ones first. If the time is short, the last ones are left out."""
