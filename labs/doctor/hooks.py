"""Time the parts of a step in an unchanged script, by wrapping PyTorch's functions.

Installed as soon as the script has imported torch. Each instant of the main thread belongs to one kind (profile.KINDS);
other threads aren't counted. A step ends with an optimizer's `step`; with several optimizers, with the last one's.

Of the modules, only the outermost that hold an optimizer's parameters are wrapped. torch.compile sees none of this:
inner modules are unchanged, and while it traces, everything else is put back.
"""

from __future__ import annotations

import builtins
import functools
import gc
import inspect
import linecache
import math
import os
import sys
import threading
import time
import types
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from labs.doctor.bottlenecks import PARTS, TRAINERS
from labs.doctor.probes.scene import OwnLines, callers, local, replacement, tensors_in
from labs.doctor.profile import KINDS, Line, Loader, Profile
from labs.doctor.rows import by_batch_ms, whole
from labs.kit import _compat

WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
COPIES = ("to", "cuda")
COLLECTIVES = """all_reduce all_gather all_gather_into_tensor reduce reduce_scatter barrier broadcast
reduce_scatter_tensor all_to_all all_to_all_single gather scatter send recv all_gather_object broadcast_object_list
gather_object batch_isend_irecv""".split()
"""Without isend and irecv: P2POp accepts only torch's own functions. Their time is in the wait for them."""
OPAQUE = {"optimizer", "data", "save", "copy", "synchronise", "print", "exchange", "evaluation", "device", "doctor"}
"""Within these kinds, a wait or copy counts as part of them, not as a line of the script."""
WITHIN_MODELS = OPAQUE | {"forward", "backward"}
LOOKED_FOR = 6  # Steps in which we search for the modules that the script calls
SCALER = os.path.join("amp", "grad_scaler.py")
"""In torch. Its `step` reads from the device whether a gradient is infinite, which no script can avoid."""


class Spans:
    """Exclusive seconds by kind in the thread that created it: a nested kind isn't counted in the outer one."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.stack: list[str] = []  # Always the same list: others hold it
        self.restart()

    def restart(self) -> None:
        """Begin a step now."""
        self.stack[:] = ["prepare"]
        self.seconds = dict.fromkeys((*KINDS, "doctor"), 0.0)  # "doctor": the probes' time
        self.since = time.perf_counter()

    def stop(self) -> None:
        """Stop counting: this process is a fork, such as a DataLoader worker."""
        self.thread = -1

    def cut(self) -> dict[str, float]:
        """Return the step's seconds by kind up to now; they sum to its duration."""
        now = time.perf_counter()
        self.seconds[self.stack[-1]] += now - self.since
        self.since = now
        return self.seconds

    def clock(self) -> float:
        """Return a clock in s that stops while the probes work. Only differences within a step are meaningful."""
        return time.perf_counter() - self.seconds["doctor"]

    def enter(self, kind: str) -> None:
        """Count time as `kind` until `leave`."""
        self.cut()
        self.stack.append(kind)

    def leave(self) -> None:
        """Return to the kind before."""
        self.cut()
        if len(self.stack) > 1:
            self.stack.pop()


@dataclass(eq=False)
class LoaderUse:
    """What the script uses a DataLoader for."""

    loader: weakref.ref
    purpose: str = ""  # "training" or "evaluation", once a model was called with its batches
    batch: Any = None  # The last training batch
    versions: list[int] = field(default_factory=list)  # How often its tensors had been written to when it was fetched

    @property
    def kind(self) -> str:
        """The kind that the time for its batches counts as."""
        return "evaluation" if self.purpose == "evaluation" else "data"


class Hooks:
    """Time the script's steps once installed. `on_step(seconds by kind)` is called after each step, and may raise."""

    def __init__(self, folder: str, on_step: Callable[[dict[str, float]], None], probes: Any = None) -> None:
        """`folder` holds the script; only lines of its files are recorded. `probes`: a Probes object, if wanted."""
        self.on_step, self.probes = on_step, probes
        self.own = OwnLines(folder)
        self.own_line = self.own.line
        self.spans = Spans()
        if probes is not None:
            probes.scene.spans = self.spans
        self.recording = False  # Whether lines and device times are recorded
        self.lines: dict[tuple, list[float]] = defaultdict(lambda: [0, 0.0])
        self.ddp: list[Any] = []
        self.backwards = 0  # Backward passes in this step
        self.exchanges = 0  # Backward passes in which DDP exchanges gradients, while recording
        self.loader_starts = 0  # Iterations over a training DataLoader that began in this step
        self.restarts = 0  # Those of them that restarted its workers
        self.anomaly = False  # Whether autograd's anomaly detection was on in a backward pass
        self.optimizers: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # By id
        self.roots: dict[int, Any] = {}  # Outermost modules that hold parameters of an optimizer, by id
        self.called: set[int] = set()  # Roots that were called with gradients
        self.forwards: set[types.CodeType] = set()  # Code of the forward() of modules with parameters
        self.loader: Any = None  # The DataLoader of training batches; of several, the last
        self.writes_batches = False  # Whether the script changes tensors of a batch
        self.device: Any = None
        self.synchronised = True  # Whether a step ends only when the device has done its work
        self._looked = 0
        self._uses: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # LoaderUse by DataLoader
        self._fetched: deque[LoaderUse] = deque(maxlen=8)  # Of the latest batches, which no model was called with yet
        self._in_batches, self._in_calls = 0, defaultdict(int)
        self._undo = ExitStack()
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._adopted: list[Callable[[], None]] = []
        self._dynamo_knows = False
        self._order: set[int] = set()  # Ids of optimizers that have stepped
        self._boundary = 0  # The one whose first step came last: it ends a step
        self._stepping: dict[int, list[Any]] = {}
        self._events: list[tuple[str, Any, Any]] = []
        self._optimizer_began: Any = None
        # Set by a counterfactual while it lasts
        self.same_batch = False  # Repeat the last training batch
        self.known_values = False  # Don't wait for a value: return what the same line got in the last recorded step
        self._values: dict[tuple, list[Any]] = {}
        self._given: dict[tuple, int] = defaultdict(int)

    # Installing

    def install(self) -> None:
        """Wrap PyTorch's functions without touching the GPU driver, because the script may still want to hide GPUs."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        if self.probes is not None:  # first, so that the hooks wrap its replacements
            self.probes.install()
            self._undo.callback(self.probes.remove)
        self._undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        calls = [(torch.autograd, name, self._backward) for name in ("backward", "grad")]
        calls += [(torch, "compile", self._compiling), (DataLoader, "__iter__", self._iterating)]
        calls += [(_compat.LoaderIterator, "__init__", self._making), (_compat.LoaderIterator, "__next__", self._next)]
        noted = [(of, "synchronize", "synchronise") for of in (torch.cuda, torch.xpu, torch.mps, torch.accelerator)]
        noted += [(torch, "save", "save"), (builtins, "print", "print")]
        noted += [(torch.Tensor, name, "copy") for name in COPIES]
        dist = torch.distributed
        if dist.is_available():
            noted += [(dist, name, "exchange") for name in COLLECTIVES] + [(dist.Work, "wait", "exchange")]
        replaced = [(owner, name, functools.partial(replacement, by)) for owner, name, by in calls]
        replaced += [(owner, name, functools.partial(self._noted, kind)) for owner, name, kind in noted]
        replaced += [(torch.Tensor, name, self._waiting) for name in WAITS]
        for owner, name, by in replaced:
            original = getattr(owner, name)
            own = original if name in vars(owner) else None  # None: inherited
            self._patches.append((owner, name, own, functools.wraps(original)(by(original))))
        self.put_on()
        os.register_at_fork(after_in_child=self.spans.stop)  # can't be undone, so it must not hold self

    def remove(self) -> None:
        """Undo `install`."""
        self.take_off()
        self._undo.close()

    def put_on(self, *args: Any) -> None:
        """Put the wrappers in place."""
        for owner, name, _, ours in self._patches:
            setattr(owner, name, ours)

    def take_off(self, *args: Any) -> None:
        """Put the originals back, until `put_on`."""
        for owner, name, original, ours in self._patches:
            if vars(owner).get(name) is not ours:
                continue  # the script has replaced it, or it is off already
            if original is not None:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

    # torch.compile

    def _compiling(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._dynamo_knows:
            self._dynamo_knows = True
            callback = _compat.dynamo_callback
            _compat.dynamo_trace_rules.add("labs.doctor")  # nothing here is ever traced,
            self._end_step = torch.compiler.disable(self._end_step)  # nor what is called from here
            callback.on_compile_start(self._trace_begins)
            callback.on_compile_end(self.put_on)
            self._undo.callback(callback.callback_handler.remove_start_callback, self._trace_begins)
            self._undo.callback(callback.callback_handler.remove_end_callback, self.put_on)
        return original(*args, **kwargs)

    def _trace_begins(self, *args: Any) -> None:
        self.take_off()
        if self._adopted and not self.called and not {"forward", "evaluation"} & set(self.spans.stack):
            for undo in self._adopted:  # a compiled function calls the models, so it would include their wrappers
                undo()
            self._adopted, self._looked = [], LOOKED_FOR

    def _elsewhere(self) -> bool:
        """Return whether this is another thread than the script's, a fork, a compiler's trace, or a CUDA graph's."""
        away = threading.get_ident() != self.spans.thread or torch.compiler.is_compiling()
        return away or (self.on_gpu and torch.cuda.is_current_stream_capturing())

    # Calls

    def _timed(self, kind: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        self.spans.enter(kind)
        try:
            return function(*args, **kwargs)
        finally:
            self.spans.leave()

    def _noted(self, kind: str, function: Callable) -> Callable:
        """Wrap a function: its time counts as `kind`, and the script's line that calls it is recorded."""
        name = function.__name__
        opaque = WITHIN_MODELS if name == "wait" else OPAQUE  # FSDP waits for ranks within a model, by design

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.spans.stack[-1] in opaque or self._elsewhere():
                return function(*args, **kwargs)
            to_device = kind == "copy" and self.spans.stack[-1] not in WITHIN_MODELS and args[0].device.type == "cpu"
            begun = self.spans.clock()
            result = (self._on_device if to_device else self._timed)(kind, function, args, kwargs)
            if self.recording and not (kind == "copy" and result is args[0]):  # nothing was copied
                noted = self.lines[(kind, name, *self.own_line(sys._getframe(1)))]
                noted[0] += 1
                noted[1] += self.spans.clock() - begun
            return result

        return call

    def _waiting(self, function: Callable) -> Callable:
        """Wrap a method that waits for a GPU tensor's value. The line is recorded for a CPU tensor as well."""
        noted, stack = self._noted("synchronise", function), self.spans.stack

        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if stack[-1] in OPAQUE:  # first, for speed: Adam reads a value for each parameter
                return function(tensor, *args, **kwargs)
            if not (self.known_values or self.recording) or self._elsewhere():
                return noted(tensor, *args, **kwargs)
            if sys._getframe(1).f_code.co_filename.endswith(SCALER):
                return self._timed("synchronise", function, (tensor, *args), kwargs)
            if tensor.device.type == "cpu":  # its value is ready
                return noted(tensor, *args, **kwargs)
            key = (function.__name__, *self.own_line(sys._getframe(1)))
            place, known = self._given[key], self._values.setdefault(key, [])
            self._given[key] += 1
            if self.known_values and place < len(known):
                return _own_copy(known[place])
            value = noted(tensor, *args, **kwargs)
            if self.recording:
                known[place:] = [_own_copy(value)]
            return value

        return call

    def _backward(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._elsewhere():
            return original(*args, **kwargs)
        self.anomaly = self.anomaly or torch.is_anomaly_enabled()
        if original.__name__ != "backward":
            return self._on_device("backward", original, args, kwargs)
        self.backwards += 1
        self.exchanges += self.recording and any(m.require_backward_grad_sync for m in self.ddp)
        losses = args[0] if args else kwargs.get("tensors")
        losses = losses if isinstance(losses, list | tuple) else [losses]
        self._observed("notice", "before_backward", losses)
        result = self._on_device("backward", original, args, kwargs)
        self._observed("notice", "after_backward", losses)
        return result

    def _observed(self, event: str, *args: Any) -> None:
        """Call the probes' method `event`, outside the script's time."""
        if self.probes is not None and not self.probes.scene.paused:
            self.spans.enter("doctor")
            getattr(self.probes, event)(*args)
            self.spans.leave()

    def _on_device(self, kind: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Call a function, timed by the host's clock and, while recording on a GPU, by events on its stream."""
        if not self.marking:
            return self._timed(kind, function, args, kwargs)
        began = self.mark()
        if kind == "backward" and self._events and self._events[-1][0] == "forward":
            self._events.append(("loss", self._events[-1][2], began))
        result = self._timed(kind, function, args, kwargs)
        self._events.append((kind, began, self.mark()))
        return result

    # Data

    def _iterating(self, original: Callable, loader: Any) -> Any:
        if self._elsewhere():
            return original(loader)
        use = self._use_of(loader)
        if use.purpose == "training":
            self.loader_starts += 1
            self.restarts += bool(loader.num_workers and not loader.persistent_workers)
        return self._timed(use.kind, original, (loader,), {})

    def _use_of(self, loader: Any) -> LoaderUse:
        return self._uses.get(loader) or self._uses.setdefault(loader, LoaderUse(weakref.ref(loader)))

    def _making(self, original: Callable, iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        """Mark torch's own iterator with its loader's use: what the DataLoader returns may be a wrapper around it."""
        iterator._doctor_use = self._use_of(loader)
        original(iterator, loader, *args, **kwargs)

    def _next(self, original: Callable, iterator: Any) -> Any:
        use = getattr(iterator, "_doctor_use", None)
        if use is None or self._elsewhere():
            return original(iterator)
        training = use.purpose == "training"
        if training and use.batch is not None and self.same_batch:
            batch = _new_containers(use.batch)
        else:
            batch = self._timed(use.kind, original, (iterator,), {})
            if training:
                self.writes_batches = self.writes_batches or self._versions(use.batch) != use.versions
                use.batch, use.versions = _new_containers(batch), self._versions(batch)
        self._fetched.append(use)
        if self.loader is not None and use.loader() is self.loader:
            self._in_batches += length(batch)
        return batch

    def _versions(self, batch: Any) -> list[int]:
        return [_compat.times_written(t) for t in tensors_in(batch) if not t.is_inference()]

    def _sort(self, training: bool) -> None:
        """A model is called: mark the loaders of the batches fetched just before, as training or evaluation data."""
        fetched = [use for use in self._fetched if use.loader() is not None]
        if not training:
            for use in fetched:
                use.purpose = use.purpose or "evaluation"
        elif fetched:
            mine = [use for use in fetched if use.purpose != "evaluation"] or fetched[-1:]
            for use in mine:
                use.purpose = "training"
            self.loader = mine[-1].loader()
            self._fetched.clear()

    # Modules

    def _adopt(self, modules: Iterable[Any]) -> None:
        """Have these modules called through `_call_root`, by the mechanism of `module.compile()`."""
        for module in modules:
            if id(module) in self.roots:
                continue
            self.roots[id(module)] = module
            before = _compat.compiled_call(module)
            _compat.call_through(module, functools.partial(self._call_root, module, before))
            undo = functools.partial(_compat.call_through, module, before)
            self._adopted.append(undo)
            self._undo.callback(undo)

    def _call_root(self, module: Any, compiled: Callable | None, *args: Any, **kwargs: Any) -> Any:
        function = compiled or _compat.plain_call(module)
        if self._elsewhere() or self.spans.stack[-1] in ("forward", "evaluation"):
            return function(*args, **kwargs)
        # A reentrant checkpoint calls it without gradients, and every checkpoint calls it again in backward
        training = torch.is_grad_enabled() or any(t.requires_grad for t in tensors_in((args, kwargs)))
        again = self.spans.stack[-1] == "backward"
        self._sort(training)
        self._observed("forward", module, training, again, args, kwargs)
        if not training:
            return self._on_device("evaluation", function, args, kwargs)
        if not again:
            self._in_calls[id(module)] += length((args, kwargs))
            self.called.add(id(module))
            self.device = self.device or next((p.device for p in module.parameters()), None)
        output = function(*args, **kwargs) if again else self._on_device("forward", function, args, kwargs)
        if self.spans.stack[-1] == "prepare":
            self.spans.stack[:] = ["rest" if kind == "prepare" else kind for kind in self.spans.stack]
        return output

    @property
    def samples(self) -> int:
        """Samples in this step so far, by its batches; without a DataLoader, by the model that was given the most."""
        return self._in_batches or max(self._in_calls.values(), default=0)

    @property
    def looking(self) -> bool:
        """Whether we still search for modules that the script calls."""
        return self._looked < LOOKED_FOR

    def _discover(self) -> None:
        """Adopt the outermost modules with parameters of the optimizers, then the children of those not called."""
        self._looked += 1
        known = set(self.roots)  # of a module adopted now, no call can have been seen
        mine = {id(p) for o in self.optimizers.values() for g in o.param_groups for p in g["params"]}
        held = {id(p) for root in self.roots.values() for p in root.parameters()}
        every = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
        if mine - held:
            modules = [m for m in every if any(id(p) in mine for p in m.parameters())]
            inner = {id(c) for m in modules for c in m.modules() if c is not m}
            self._adopt(m for m in modules if id(m) not in inner)
            self._fetched.clear()  # we missed the model calls with them
        within = {id(m) for key in self.called for m in self.roots[key].modules()}
        for key, module in list(self.roots.items()):
            if key in known - within:
                self._adopt(c for c in module.children() if any(id(p) in mine for p in c.parameters()))
            wrapped = getattr(module, "module", None) if hasattr(module, "reducer") else None
            if wrapped is not None and "OptimizedModule" not in {type(m).__name__ for m in module.modules()}:
                self._adopt([wrapped])  # DDP: evaluation may call the module that it wraps
        if not self.looking:
            kinds = {type(m) for m in every if next(m.parameters(), None) is not None}
            forwards = (inspect.getattr_static(kind, "forward", None) for kind in kinds)  # ScriptModule: getattr raises
            codes = (getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards)
            self.forwards = {code for code in codes if code is not None}

    # Steps

    def _before_step(self, optimizer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._elsewhere():
            return None
        self.optimizers[id(optimizer)] = optimizer
        self.device = self.device or next((p.device for g in optimizer.param_groups for p in g["params"]), None)
        begun = self._stepping.get(id(optimizer))
        if begun and begun[0] in callers(sys._getframe(1)):  # a subclass's step that calls its parent's
            begun[1] += 1
            return None
        self._stepping[id(optimizer)] = [sys._getframe(1), 1]
        self._observed("before_step", optimizer)
        self.spans.enter("optimizer")
        self._optimizer_began = self.mark() if self.marking else None
        if not any(map(callable, (*args[1:], *kwargs.values()))):
            return None
        return (args[0], *map(self._as_own_code, args[1:])), {name: self._as_own_code(a) for name, a in kwargs.items()}

    def _as_own_code(self, argument: Any) -> Any:
        """Count the closure that an optimizer is given as the script's code, with its forward, backward and waits."""
        if not callable(argument):
            return argument

        def own(*args: Any, **kwargs: Any) -> Any:
            if self._optimizer_began is not None:
                self._events.append(("optimizer", self._optimizer_began, self.mark()))
            output = self._timed(self.spans.stack[0], argument, args, kwargs)
            self._optimizer_began = self.mark() if self.marking else None
            return output

        return own

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if self._elsewhere():
            return
        begun = self._stepping[id(optimizer)]
        begun[1] -= 1
        if begun[1]:
            return
        del self._stepping[id(optimizer)]
        self.spans.leave()
        if self._optimizer_began is not None:
            self._events.append(("optimizer", self._optimizer_began, self.mark()))
            self._optimizer_began = None
        self._observed("after_step", optimizer)
        # The last of several optimizers ends a step: before it, a graph may still need the weights as they are
        if self._boundary not in self.optimizers:  # the script dropped it
            self._order = set()
        if id(optimizer) not in self._order:
            self._order.add(id(optimizer))
            self._boundary = id(optimizer)
        if id(optimizer) == self._boundary:
            self._end_step()

    def _end_step(self) -> None:
        if self.synchronised:
            self.synchronise()
        seconds = {kind: s for kind, s in self.spans.cut().items() if kind != "doctor"}
        self.spans.stack.append("doctor")  # up to the restart
        if self.looking:
            self._discover()
        elif not self.called and self.loader is None:
            self._sort(training=True)  # no model call can be seen: take what was fetched last
        try:
            self.on_step(seconds)
        finally:
            self.backwards = self.loader_starts = self.restarts = self._in_batches = 0
            self._in_calls.clear()
            self._given.clear()
            self.spans.restart()

    def synchronise(self) -> None:
        """Wait until the device has finished its queue. Counts as "device", since the script doesn't wait here."""
        if self.device is not None and self.device.type in ("cuda", "xpu", "mps"):
            self._timed("device", torch.accelerator.synchronize, (self.device,), {})

    def mark(self) -> Any:
        """Return an event that records when the GPU has finished the work queued so far. None without a GPU."""
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a CUDA device, whose events `mark` uses."""
        return self.device is not None and self.device.type == "cuda"

    @property
    def marking(self) -> bool:
        """Whether a GPU's own times are recorded now."""
        return self.recording and self.on_gpu

    def device_seconds(self) -> dict[str, float]:
        """Return the GPU's seconds over all recorded steps, by kind. Synchronise first. Empty without a GPU."""
        found: dict[str, float] = defaultdict(float)
        for kind, begun, ended in self._events:
            found[kind] += begun.elapsed_time(ended) / 1e3
        self._events.clear()
        return found

    # Lines

    def noted_lines(self, steps: int) -> list[Line]:
        """Return the recorded lines with calls and ms per step, costliest first."""
        found = [
            Line(kind, what, file, line, linecache.getline(file, line).strip(), calls / steps, 1e3 * s / steps)
            for (kind, what, file, line), (calls, s) in self.lines.items()
        ]
        return sorted(found, key=lambda noted: -noted.ms)


def length(batch: Any) -> int:
    """Return the length of the batch's first tensor that has a dimension; 0 if there is none."""
    return next((len(t) for t in tensors_in(batch) if t.dim()), 0)


def _new_containers(batch: Any) -> Any:
    """Return the same tensors in new lists and dicts, from which a script may remove items."""
    return _compat.tree_map(lambda leaf: leaf, batch)


def _own_copy(value: Any) -> Any:
    """Copy a tensor or array, which the script may write into. Return anything else as it is."""
    if hasattr(value, "clone"):
        return value.clone()
    return value.copy() if hasattr(value, "__array__") and hasattr(value, "copy") else value


def describe(hooks: Hooks, profile: Profile) -> None:
    """Describe model, loader and trainer in `profile`. Called at a step's end, where the trainer is on the stack."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    roots = [m for key, m in hooks.roots.items() if key in hooks.called] or list(hooks.roots.values())
    modules = [m for root in roots for m in root.modules()]
    hooks.ddp = ddp = list({id(m): m for m in modules if isinstance(m, DistributedDataParallel)}.values())
    parameters = {id(p): p for root in roots for p in root.parameters()}.values()
    with torch.no_grad():
        weights = sum(float(local(p).sum(dtype=torch.float32 if p.is_mps else torch.float64)) for p in parameters)
    profile.training = {
        "forward_seen": bool(hooks.called),
        "trainer": _trainer(),
        "parameters": sum(p.numel() for p in parameters),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
        "ddp": len(ddp),
        "bucket_bytes": min((m.bucket_bytes_cap for m in ddp), default=0),
        "find_unused_parameters": any(m.find_unused_parameters for m in ddp),
        "buffers": sum(len(list(m.buffers())) for m in ddp if m.broadcast_buffers),
        "fsdp": any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in modules),
        "anomaly": hooks.anomaly or torch.is_anomaly_enabled(),
        # These two are the same on ranks that hold the same model
        "shapes": zlib.crc32(repr(sorted(tuple(p.shape) for p in parameters)).encode()),
        "weights": weights if math.isfinite(weights) else 0.0,
    }
    profile.device = hooks.device.type if hooks.device is not None else "cpu"
    if profile.device == "cuda":
        profile.device_name = torch.cuda.get_device_name(hooks.device)
    if hooks.loader is not None:
        one = hooks.loader
        batch_size = one.batch_size or getattr(one.batch_sampler, "batch_size", None)
        profile.loader = Loader(
            batch_size,
            one.num_workers,
            (one.prefetch_factor or 0) if one.num_workers else 0,
            type(one.dataset).__name__,
            by_batch_ms(one.dataset, batch_size),
            _item_line(hooks, whole(one.dataset)),
        )
    if not hooks.called:
        profile.unseen.append(f"no call of a model was seen, unless it is compiled: it is part of '{PARTS['prepare']}'")


def _trainer() -> str:
    """Return the trainer whose loop is on the stack, by its name in TRAINERS; "" for a hand-written loop."""
    modules = [f"{f.f_globals.get('__name__')}." for f in callers(sys._getframe(1))]
    return next((t for prefix, t in TRAINERS.items() if any(m.startswith(f"{prefix}.") for m in modules)), "")


def _item_line(hooks: Hooks, dataset: Any) -> str:
    """Return the last line of the dataset's __getitem__, as "file:line  code"; "" if it isn't the script's own."""
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is None or not hooks.own.owns(code.co_filename):
        return ""
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    return f"{os.path.basename(code.co_filename)}:{last}  {linecache.getline(code.co_filename, last).strip()}"
