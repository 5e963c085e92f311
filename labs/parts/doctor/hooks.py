"""Where a training's step goes, without a change to it: calls of torch are replaced by ones that also take the time.

Installed as soon as the script has imported torch. Each instant of the main thread belongs to one kind (facts.KINDS);
what other threads do is not counted. A step ends with the `step` of the optimizer that was the first to step.

What is replaced: DataLoader's `next`, the call of the outermost modules that hold the optimizer's parameters,
`torch.autograd.backward`, collectives of torch.distributed, `.to`, `.cuda`, calls that wait for a device (`.item()` and
others), print, torch.save. torch.compile sees none of it: modules inside of an outermost one are as they were.
"""

from __future__ import annotations

import builtins
import functools
import gc
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

from labs.parts.doctor.facts import KINDS, Facts, Line, Loader

WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
COPIES = ("to", "cuda")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter", "barrier", "broadcast",
               "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "send", "recv",
               "all_gather_object", "broadcast_object_list", "gather_object")  # fmt: skip
OPAQUE = {"optimizer", "data", "save", "copy", "synchronise", "print", "exchange", "evaluation"}
"""Kinds within which a wait or a copy is theirs, and no line of the script's."""
ON_DEVICE = {"forward", "backward", "optimizer", "exchange"}
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(p)) for p in ("stdlib", "purelib", "platlib")})


class Spans:
    """Exclusive seconds by kind, of the thread that made it: what is inside of another is not counted twice."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.calls = 0
        self.restart()

    def restart(self) -> None:
        """Begin a step now."""
        self.stack = ["prepare"]
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.begun = self.since = time.perf_counter()

    def enter(self, kind: str) -> None:
        """From here on time is of this kind."""
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now
        self.stack.append(kind)
        self.calls += 1

    def leave(self) -> None:
        """Back to what was before."""
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now
        if len(self.stack) > 1:
            self.stack.pop()

    def cut(self) -> dict[str, float]:
        """The step's seconds by kind; they sum to it."""
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now
        return self.seconds


class Hooks:
    """Installed by `install`. `on_step(seconds by kind)` is called at the end of each step, and may raise."""

    def __init__(self, folder: str, on_step: Callable[[dict[str, float]], None]) -> None:
        """`folder`: of the script; only lines of files in it are noted."""
        self.folder, self.on_step = os.path.realpath(folder), on_step
        self.spans = Spans()
        self.recording = False
        """Whether lines and device times are noted."""
        self.lines: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
        self.backwards, self.samples = 0, 0
        self.optimizers: dict[int, Any] = {}
        self.roots: dict[int, Any] = {}
        """Outermost modules that hold parameters of an optimizer, by id."""
        self.called: set[int] = set()
        """Roots that were called with gradients."""
        self.precision: dict[str, str] = {}
        self.loader: Any = None
        """The DataLoader that batches of the training came from."""
        self.device: Any = None
        self.unseen: set[str] = set()
        self._own: dict[str, bool] = {}
        self._boundary: int | None = None
        self._last_loader: Any = None
        self._undo = ExitStack()
        self._events: list[tuple[str, Any, Any]] = []
        # What a counterfactual changes, for as long as it lasts
        self.same_batch = False
        """Each batch of the training is the one before."""
        self.of_batch: Callable[[Any], Any] | None = None
        """What becomes of a batch of the training."""
        self.muted: set[str] = set()
        """Kinds that do nothing: "print", "save"."""
        self.around_forward: Callable[[], Any] = nullcontext
        """A context in which outermost modules are called."""
        self.instead: dict[int, Callable[..., Any]] = {}
        """By root: what is called in its place."""
        self.known_values = False
        """A wait gives the value that the same line had before, at once."""
        self._values: dict[tuple, Any] = {}
        self._batch: Any = None

    # Installing

    def install(self) -> None:
        """Once torch has been imported. Nothing of it calls the device."""
        import torch
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader, dataloader

        self.torch = torch
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._replace(torch.autograd, "backward", self._backward)
        for name in WAITS:
            self._replace(torch.Tensor, name, self._waiting)
        for name in COPIES:
            self._replace(torch.Tensor, name, functools.partial(self._noted, "copy"))
        if torch.cuda.is_available():  # asks the driver, and makes no context
            self._replace(torch.cuda, "synchronize", functools.partial(self._noted, "synchronise"))
        if dist.is_available():
            for name in COLLECTIVES:
                if hasattr(dist, name):
                    self._replace(dist, name, functools.partial(self._noted, "exchange"))
        self._replace(torch, "save", functools.partial(self._mutable, "save"))
        self._replace(builtins, "print", functools.partial(self._mutable, "print"))
        self._replace(DataLoader, "__iter__", self._iterating)
        self._replace(dataloader._BaseDataLoaderIter, "__next__", self._next)

    def remove(self) -> None:
        """All is as it was before."""
        for module in self.roots.values():
            module.__dict__.pop("_compiled_call_impl", None)
        self._undo.close()

    def _replace(self, owner: Any, name: str, by: Callable[[Callable], Callable]) -> None:
        original = getattr(owner, name)
        self._undo.enter_context(mock.patch.object(owner, name, functools.wraps(original)(by(original))))

    def _elsewhere(self) -> bool:
        """In a thread that is not the script's, in a fork, or while torch.compile reads the program."""
        return threading.get_ident() != self.spans.thread or self.torch.compiler.is_compiling()

    # Calls

    def _timed(self, kind: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        self.spans.enter(kind)
        try:
            return function(*args, **kwargs)
        finally:
            self.spans.leave()

    def _noted(self, kind: str, function: Callable) -> Callable:
        """Time is of `kind`, and the line of the script that calls is noted."""
        name = function.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere() or self.spans.stack[-1] in OPAQUE:
                return function(*args, **kwargs)
            begun = time.perf_counter()
            try:
                return self._timed(kind, function, args, kwargs)
            finally:
                if self.recording:
                    noted = self.lines[(kind, name, *self._line())]
                    noted[0] += 1
                    noted[1] += time.perf_counter() - begun

        return call

    def _mutable(self, kind: str, function: Callable) -> Callable:
        noted = self._noted(kind, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            if kind in self.muted and not self._elsewhere():
                return None
            return noted(*args, **kwargs)

        return call

    def _waiting(self, function: Callable) -> Callable:
        """Of a tensor that is on a GPU the value is waited for; the line is noted for any tensor."""
        noted = self._noted("synchronise", function)

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.known_values or self._elsewhere() or self.spans.stack[-1] in OPAQUE:
                return noted(tensor, *args, **kwargs)
            key = (function.__name__, *self._line())
            if key not in self._values:
                self._values[key] = noted(tensor, *args, **kwargs)
            return self._values[key]

        return call

    def _backward(self, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._elsewhere():
                return function(*args, **kwargs)
            self.backwards += 1
            return self._on_device("backward", function, args, kwargs)

        return call

    def _on_device(self, kind: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Timed by the host's clock, and on a GPU by events on its stream."""
        events = None
        if self.recording and self.device is not None and self.device.type == "cuda":
            events = [self.torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        try:
            return self._timed(kind, function, args, kwargs)
        finally:
            if events:
                events[1].record()
                self._events.append((kind, *events))

    # Data

    def _iterating(self, function: Callable) -> Callable:
        def call(loader: Any) -> Any:
            if self._elsewhere():
                return function(loader)
            iterator = self._timed(self._kind_of(loader), function, (loader,), {})
            iterator._doctor_loader = loader
            return iterator

        return call

    def _next(self, function: Callable) -> Callable:
        def call(iterator: Any) -> Any:
            if self._elsewhere():
                return function(iterator)
            loader = getattr(iterator, "_doctor_loader", None)
            training = loader is not None and loader is self.loader
            if training and self.same_batch and self._batch is not None:
                batch = self._batch
            else:
                batch = self._timed(self._kind_of(loader), function, (iterator,), {})
                self._last_loader = loader
                if training:
                    self._batch = batch
            return self.of_batch(batch) if training and self.of_batch else batch

        return call

    def _kind_of(self, loader: Any) -> str:
        return "data" if self.loader is None or loader is self.loader else "evaluation"

    # Modules

    def _adopt(self, modules: Iterator[Any]) -> None:
        """Have these modules called through `_call_root`, which is what torch does with a module that is compiled."""
        for module in modules:
            if id(module) not in self.roots:
                self.roots[id(module)] = module
                module._compiled_call_impl = functools.partial(self._call_root, module, module._compiled_call_impl)

    def _call_root(self, module: Any, compiled: Callable | None, *args: Any, **kwargs: Any) -> Any:
        function = compiled or module._call_impl
        if self._elsewhere() or self.spans.stack[-1] in ("forward", "evaluation"):
            return function(*args, **kwargs)
        if not self.torch.is_grad_enabled():
            return self._timed("evaluation", function, args, kwargs)
        self._seen(module, args, kwargs)
        with self.around_forward():
            output = self._on_device("forward", self.instead.get(id(module), function), args, kwargs)
        if self.spans.stack == ["prepare"]:
            self.spans.stack[0] = "rest"
        return output

    def _seen(self, module: Any, args: tuple, kwargs: dict) -> None:
        """At each call: how many samples. At the first one: loader, device, precision."""
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, self.torch.Tensor) and v.dim()]
        self.samples += len(tensors[0]) if tensors else 0
        if id(module) in self.called:
            return
        self.called.add(id(module))
        if self.loader is None and self._last_loader is not None:
            self.loader = self._last_loader
        first = next(module.parameters(), None)
        self.device = self.device or (None if first is None else first.device)
        kind = self.device.type if self.device is not None else "cpu"
        self.precision["autocast"] = (
            str(self.torch.get_autocast_dtype(kind)).removeprefix("torch.")
            if self.torch.is_autocast_enabled(kind)
            else ""
        )

    def _discover(self) -> None:
        """Outermost modules that hold parameters of the optimizers; once more below those that are never called."""
        mine = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        if not self.roots:
            modules = [m for m in gc.get_objects() if issubclass(type(m), self.torch.nn.Module)]
            modules = [m for m in modules if any(id(p) in mine for p in m.parameters())]
            inner = {id(c) for m in modules for c in m.modules() if c is not m}
            self._adopt(m for m in modules if id(m) not in inner)
            return
        for key, module in list(self.roots.items()):
            if key not in self.called:
                self._adopt(c for c in module.children() if any(id(p) in mine for p in c.parameters()))

    # Steps

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self._elsewhere():
            return
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self._boundary = self._boundary or id(optimizer)
        self.spans.enter("optimizer")

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self._elsewhere():
            return
        self.spans.leave()
        if id(optimizer) != self._boundary:
            return
        if self.device is not None and self.device.type == "cuda":
            self.spans.enter("synchronise")
            self.torch.cuda.synchronize(self.device)
            self.spans.leave()
        seconds = self.spans.cut()
        if not self.called:
            self._discover()
        try:
            self.on_step(seconds)
        finally:
            self.backwards = self.samples = 0
            self.spans.restart()

    def device_seconds(self) -> dict[str, float]:
        """Since it was asked last, by kind; after a synchronisation. Empty without a GPU."""
        found: dict[str, float] = defaultdict(float)
        for kind, begun, ended in self._events:
            found[kind] += begun.elapsed_time(ended) / 1e3
        self._events.clear()
        return found

    # Lines

    def _line(self) -> tuple[str, int]:
        """The nearest line of the script's own that has led here; ("", 0) if there is none."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._own:
                path = os.path.realpath(name)
                inside = path.startswith(self.folder + os.sep) and not path.startswith(LIBRARIES)
                self._own[name] = inside
            if self._own[name]:
                return name, frame.f_lineno
            frame = frame.f_back
        return "", 0

    def noted_lines(self, steps: int) -> list[Line]:
        """Costliest first."""
        found = [
            Line(kind, what, file, line, linecache.getline(file, line).strip(), calls / steps, 1e3 * s / steps)
            for (kind, what, file, line), (calls, s) in self.lines.items()
        ]
        return sorted(found, key=lambda noted: -noted.ms)


def describe(hooks: Hooks, facts: Facts) -> None:
    """Write into `facts` what the training consists of."""
    torch = hooks.torch
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    roots = [m for key, m in hooks.roots.items() if key in hooks.called] or list(hooks.roots.values())
    modules = [m for root in roots for m in root.modules()]
    ddp = [m for m in modules if isinstance(m, DistributedDataParallel)]
    parameters = {id(p): p for root in roots for p in root.parameters()}.values()
    facts.training = {
        "models": [type(m).__name__ for m in roots],
        "forward_seen": bool(hooks.called),
        "parameters": sum(p.numel() for p in parameters),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "autocast": hooks.precision.get("autocast", ""),
        "optimizers": [
            {"kind": type(o).__name__, "fused": bool(o.defaults.get("fused")), "foreach": o.defaults.get("foreach")}
            for o in hooks.optimizers.values()
        ],
        "ddp": len(ddp),
        "find_unused_parameters": any(m.find_unused_parameters for m in ddp),
        "static_graph": any(getattr(m, "static_graph", False) for m in ddp),
        "data_parallel": any(isinstance(m, DataParallel) for m in modules),
        "fsdp": any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in modules),
        "compiled": any(type(m).__name__ == "OptimizedModule" for m in modules)
        or any(m._compiled_call_impl.args[1] is not None for m in roots),
        "anomaly": torch.is_anomaly_enabled(),
    }
    facts.device = hooks.device.type if hooks.device is not None else "cpu"
    if facts.device == "cuda":
        facts.device_name = torch.cuda.get_device_name(hooks.device)
    if hooks.loader is not None:
        one = hooks.loader
        facts.loader = Loader(
            one.batch_size, one.num_workers, (one.prefetch_factor or 0) if one.num_workers else 0,
            bool(one.pin_memory), bool(one.persistent_workers), type(one.dataset).__name__, type(one.sampler).__name__,
            0.0,
        )  # fmt: skip
    if not hooks.called:
        facts.unseen.append("no module was called that holds the optimizer's parameters: forward is part of 'rest'")
