"""Detect steps without effect from gradients, parameters and learning rates around a few optimizer steps."""

from __future__ import annotations

import ast
import functools
import gc
import re
import weakref
from typing import Any

import torch

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.scene import DONE, Scene, around, leaves, listed, local, looks_at, some

HALF_UNCHANGED, UNCHANGED = 0.5, 0.95
"""Limits for the share of elements with a gradient that a step leaves unchanged: 16-bit formats, other formats."""
FEWEST = 3  # Samples that must agree
FROM_THE_START = 20  # Steps at learning rate 0 from the start that count as a fault; a warm-up has one or a few
LOSS = re.compile(r"loss|percept|teacher|critic|discrim|reward|lpips|vgg", re.I)
"""Names of networks whose gradients go unused, such as a teacher or a perceptual loss."""
MOST, MOST_NODES = 16, 2_000
"""Maximum tensors to compare after the warm-up; maximum operations to search for the nearest parameter."""


class Effect:
    """Compare parameters before and after some steps."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.samples: dict[int, list[dict[str, Any]]] = {}  # By id of the optimizer
        self.places: dict[int, tuple[str, int]] = {}
        self.zero: dict[int, list[int]] = {}
        """By optimizer: longest and current run of steps at learning rate 0, steps so far, longest run's first step."""
        self.casts: list[tuple[weakref.ref, tuple[str, int]]] = []
        """Modules cast to 16 bits, and the lines that cast them."""
        self.moved_frozen: set[int] = set()  # Optimizers that change parameters with requires_grad=False
        self.missing: dict[str, Any] = {}
        self.gone: set[int] = set()  # Optimizers whose gradients existed after backward but not at the step
        self.had: dict[int, bool] = {}  # Optimizers that had gradients after backward: whether any was nonzero
        self.zeroed: set[int] = set()  # Optimizers whose gradients were all set to 0 between backward and step
        self.before: list[tuple[Any, Any]] = []
        self.canary: Any = None
        self.stale, self.stale_at = 0, ("", 0)
        self.nearest: Any = None  # The parameter that is nearest to the loss and used once
        self.made: dict[int, tuple[str, int]] = {}  # Lines that made optimizers
        self.replaced: tuple[str, int] | None = None  # Line that replaced parameters after an optimizer was made
        self.loaded: weakref.WeakSet = weakref.WeakSet()
        self.counting: Any = None
        self.calls: list[bool] = []
        """Whether gradients were enabled, for each call of `nearest`'s module during `passes` backward passes."""
        self.passes = 0

    def install(self) -> None:
        """Note lines that cast modules to 16 bits or create optimizers, and modules that load weights."""
        self.scene.listen(torch.nn.Module, "load_state_dict", self._loading)
        self.scene.listen(torch.optim.Optimizer, "__init__", self._making)
        for name in ("to", "half", "bfloat16"):
            self.scene.listen(torch.nn.Module, name, functools.partial(self._casting, name))

    def _making(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.made[id(optimizer)] = self.scene.line()

    def _loading(self, module: Any, state: Any, strict: bool = True, assign: bool = False) -> None:
        if not self.scene.step:
            self.loaded.add(module)
            self.replaced = self.scene.line() if assign and self.made else self.replaced

    def _casting(self, name: str, module: Any, *args: Any, **kwargs: Any) -> None:
        half = torch.bfloat16, torch.float16
        if name != "to" or any(a in half for a in (*args, *kwargs.values()) if not hasattr(a, "dim")):
            self.casts.append((weakref.ref(module), self.scene.line()))

    def before_backward(self, losses: list[Any]) -> object:
        """Find the parameter that is nearest to the loss."""
        if self.scene.step == 2:
            for loss in losses:
                near = list(leaves(getattr(loss, "grad_fn", None), MOST_NODES))
                self.nearest = near[0] if sum(p is near[0] for p in near) == 1 else None
        return DONE if self.scene.step > 2 else None

    def after_backward(self, losses: list[Any]) -> None:
        """Note which optimizers have gradients now, which a misplaced zero_grad() would remove."""
        self.passes += 1
        if not any(looks_at(number + 1) for number in self.scene.steps_of.values()):
            return
        for key, optimizer in list(self.scene.optimizers.items()):
            held = []
            if looks_at(self.scene.steps_of[key] + 1):
                held = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            if held:
                self.had[key] = any(bool((some(g) != 0).any()) for g in held if not g.is_sparse)

    def before_step(self, optimizer: Any, number: int) -> None:
        """Copy some elements of each parameter."""
        self.before = []
        infinite = getattr(optimizer, "found_inf", None)  # a GradScaler makes a fused optimizer skip this step
        if not looks_at(number) or (infinite is not None and bool(local(infinite).item())):
            return
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        if number > 5:
            parameters = parameters[:: len(parameters) // MOST + 1]
        self.before = [(p, some(p).clone()) for p in parameters if not p.is_sparse]

    def after_step(self, optimizer: Any, number: int) -> None:
        """Compare these elements, and note the learning rate."""
        key = id(optimizer)
        rates = [g.get("lr") for g in optimizer.param_groups]
        rates = [float(r) for r in rates if isinstance(r, int | float) or getattr(r, "is_cpu", False)]
        if key not in self.places:
            self.places[key] = self.scene.line()
        if rates:
            self._note_rate(key, max(rates), number)
        if self.before:
            self._compare(optimizer, number, max(rates, default=None))
            if number in (3, 5):
                self._look_for_missing(number)
            self._look_at_autocast(self.before[0][0].device.type, number)
        self.before = []
        self.had.pop(key, None)

    def _note_rate(self, key: int, rate: float, number: int) -> None:
        of = self.zero.setdefault(key, [0, 0, 0, 0])
        of[1] = of[1] + 1 if rate == 0 else 0
        of[2] = number
        if of[1] > of[0]:
            of[0], of[3] = of[1], number - of[1] + 1

    def _compare(self, optimizer: Any, number: int, rate: float | None) -> None:
        if any(p.grad is not None and p.grad.is_sparse for p, _ in self.before):
            return
        counts, dtypes, gradients = [], [], 0
        for p, was in self.before:
            changed = some(p) != was
            if not p.requires_grad:
                if changed.any():
                    self.moved_frozen.add(id(optimizer))
            elif p.grad is not None and some(p.grad).shape == was.shape:
                gradients += 1
                pushed = some(p.grad) != 0
                counts += [pushed.sum(), (pushed & ~changed).sum(), (~torch.isfinite(some(p.grad))).sum()]
                dtypes.append(str(p.dtype).removeprefix("torch."))
        values = iter(torch.stack([c.float().cpu() for c in counts]).tolist() if counts else [])
        sample: dict[str, Any] = {"rate": rate, "gradients": gradients, "of": len(self.before), "pushed": {}}
        finite = True
        for dtype, pushed, unchanged, infinite in zip(dtypes, values, values, values, strict=True):
            total = sample["pushed"].setdefault(dtype, [0, 0])
            total[0], total[1] = total[0] + pushed, total[1] + unchanged
            finite = finite and not infinite
        if finite:
            self.samples.setdefault(id(optimizer), []).append(sample)
        if not gradients and id(optimizer) in self.had:
            self.gone.add(id(optimizer))
        if gradients and self.had.get(id(optimizer)) and not any(n for n, _ in sample["pushed"].values()):
            self.zeroed.add(id(optimizer))

    def _look_for_missing(self, number: int) -> None:
        """Find model parameters that get gradients but belong to no optimizer."""
        scene = self.scene
        if number == 3:
            objects = gc.get_objects()
            optimizers = [o for o in objects if issubclass(type(o), torch.optim.Optimizer)]
            held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
            roots = {key: list(root.parameters()) for key, root in scene.roots.items()}
            listed = {id(p): p for r in scene.roots.values() for m in r.modules() for p in _in_plain_lists(m)}
            known = {id(p) for of in roots.values() for p in of}
            hidden = [p for key, p in listed.items() if key not in known | held and _has_gradient(p)]
            stale = [p for p in scene.parameters() if p.grad is None and p.requires_grad and id(p) not in known]
            lacking: list[Any] = []
            loaded = {id(p) for m in self.loaded for p in m.parameters()} if not stale else set()
            for of in roots.values():
                free = [p for p in of if id(p) not in held | loaded and _has_gradient(p)]
                trained = sum(p.numel() for p in of if id(p) in held and p.grad is not None)
                if free and (stale or sum(p.numel() for p in free) <= trained):
                    lacking += free
            if self.nearest is not None and id(self.nearest) not in held | known:
                modules = [m for m in objects if issubclass(type(m), torch.nn.Module) and m.training]
                last = [m for m in modules if any(p is self.nearest for p in m.parameters())]
                outer = max(last, key=lambda m: sum(1 for _ in m.parameters()), default=None)
                of = list(outer.parameters()) if outer is not None and not LOSS.search(type(outer).__name__) else []
                if of and not any(id(p) in held | loaded for p in of):
                    lacking += [p for p in of if _has_gradient(p)]
                    self.counting = outer.register_forward_hook(lambda *_: self.calls.append(torch.is_grad_enabled()))
            self.nearest, self.passes = None, 0
            both = list({id(p): p for p in (*hidden, *lacking)}.values())
            copies = [(p, some(p).clone()) for p in both]
            self.missing = {"copies": copies, "hidden": bool(hidden), "stale": len(stale)}
        elif self.missing.get("copies"):
            if self.counting is not None:
                self.counting.remove()
                if not all(self.calls) or len(self.calls) != self.passes:
                    self.missing["copies"] = []  # a loss network, because it's also called for the target
            same = [p for p, was in self.missing["copies"] if bool((some(p) == was).all()) and p.grad is not None]
            self.missing |= {"copies": [], "names": [scene.name_of(p) for p in same]}

    def _look_at_autocast(self, device: str, number: int) -> None:
        """Test with a small weight of ours, changed after each look, whether autocast's 16-bit copy outlives a step."""
        if number > 5 or not (torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()):
            return
        if self.canary is None:
            self.canary = [torch.ones(4, 4, device=device, requires_grad=True), None]
        weight, last = self.canary
        with torch.enable_grad():
            now = torch.mm(weight, weight).detach()
        if last is not None and bool((now == last).all()):
            self.stale += 1
            for frame in self.scene.frames():
                for block in around(frame.f_code.co_filename, frame.f_lineno, (ast.With, ast.AsyncWith)):
                    if any("autocast" in ast.unparse(item) for item in block.items):
                        self.stale_at = self.stale_at if self.stale_at[0] else (frame.f_code.co_filename, block.lineno)
        self.canary[1] = now
        with torch.no_grad():
            weight.add_(1)

    # Findings

    def findings(self) -> list[Match]:
        """Return the findings from the samples so far."""
        out = self._zero_rates() + self._missing()
        for key, samples in self.samples.items():
            place = self.places.get(key, ("", 0))
            used = [s for s in samples if s["rate"] is None or s["rate"] > 0]
            if len(used) < FEWEST or key not in self.scene.optimizers:
                continue
            without = sum(not s["gradients"] or not any(n for n, _ in s["pushed"].values()) for s in used)
            if without >= FEWEST and without >= 0.8 * len(used):
                out += self._no_gradients(key, place, used)
            else:
                out += self._unchanged(key, place, used)
            if key in self.moved_frozen and not self._by_others(key):
                out.append(matched("frozen-changes", place))
        if self.stale >= 2:
            place = self.stale_at if self.stale_at[0] else self._first_step()
            out.append(matched("autocast-left-open", place, steps=self.stale))
        return out

    def _first_step(self) -> tuple[str, int]:
        return next(iter(self.places.values()), ("", 0))

    def _by_others(self, key: int) -> bool:
        """Return whether the optimizer isn't PyTorch's own, or is LBFGS: its rounding and rules are unknown."""
        step = type(self.scene.optimizers[key]).step
        code = getattr(step, "__wrapped__", step)
        module = getattr(code, "__module__", "")
        return not module.startswith("torch.optim.") or module.endswith("lbfgs")

    def _no_gradients(self, key: int, place: tuple[str, int], used: list[dict[str, Any]]) -> list[Match]:
        words = {"samples": len(used), "tensors": used[0]["of"]}
        if key in self.gone:
            return [matched("gradients-removed", place, **words)]
        if key in self.zeroed:
            calls = [(f, c.lineno) for f, c in self.scene.calls() if "clip_grad" in ast.unparse(c.func)]
            return [matched("gradients-zeroed", calls[0] if len(calls) == 1 else place, **words)]
        if len(self.scene.optimizers) > 1 or self._by_others(key):
            return []  # one of several may wait for its phase of training
        if any(s["gradients"] for s in used):
            return [matched("zero-gradients", place, **words)]
        if self.replaced:
            return [matched("parameters-replaced", self.replaced, **words)]
        return [matched("no-gradients", self._optimizer_line(), **words)]

    def _unchanged(self, key: int, place: tuple[str, int], used: list[dict[str, Any]]) -> list[Match]:
        rates = [s["rate"] for s in used if s["rate"] is not None]
        if self._by_others(key) or (rates and max(rates[-1], rates[len(rates) // 2]) > rates[0]):
            return []  # unknown rounding, or a warm-up
        for dtype in sorted({d for s in used for d in s["pushed"]}):
            pushed = sum(s["pushed"].get(dtype, (0, 0))[0] for s in used)
            unchanged = sum(s["pushed"].get(dtype, (0, 0))[1] for s in used)
            short = {"bfloat16": "BF16", "float16": "FP16"}.get(dtype)
            if not pushed or unchanged < (HALF_UNCHANGED if short else UNCHANGED) * pushed:
                continue
            fix = "Raise the learning rate"
            if short:
                fix = "Keep the parameters in FP32, without this cast, and compute under torch.autocast"
                place = self._cast_of(key) or place
            words = {"percent": 100 * unchanged / pushed, "format": short or dtype, "fix": fix}
            words["rate"] = f" at learning rate {rates[-1]:.3g}" if rates else ""
            return [matched("rounded-away", place, **words)]
        return []

    def _cast_of(self, key: int) -> tuple[str, int] | None:
        """Return the last line that cast a model of this optimizer to 16 bits; None if there is none."""
        mine = {id(p) for g in self.scene.optimizers[key].param_groups for p in g["params"]}
        modules = [(ref(), place) for ref, place in reversed(self.casts) if place[0]]
        return next((at for m, at in modules if m is not None and any(id(p) in mine for p in m.parameters())), None)

    def _zero_rates(self) -> list[Match]:
        if not self.zero or any(of[0] < (FEWEST if of[3] > 1 else FROM_THE_START) for of in self.zero.values()):
            return []
        longest, _, _, first = max(self.zero.values())
        return [matched("rate-is-zero", self._first_step(), first=first, steps=longest)]

    def _missing(self) -> list[Match]:
        names = self.missing.get("names")
        if not names:
            return []
        tensors = f"{len(names)} parameter tensor{'s' * (len(names) > 1)}"
        rule = "layers-in-list" if self.missing["hidden"] else "not-in-optimizer"
        return [matched(rule, self.replaced or self._optimizer_line(), tensors=tensors, names=listed(names))]

    def _optimizer_line(self) -> tuple[str, int]:
        """Return the line that created the optimizer if there is only one, else the first line that steps."""
        made = [self.made[key] for key in self.scene.optimizers if key in self.made]
        return made[0] if len(made) == 1 and made[0][0] else self._first_step()


def _has_gradient(parameter: Any) -> bool:
    return parameter.requires_grad and parameter.grad is not None and bool((some(parameter.grad) != 0).any())


def _in_plain_lists(module: Any) -> list[Any]:
    """Return the parameters of modules that an attribute of `module` holds in a plain list, tuple or dict."""
    out: list[Any] = []
    for value in vars(module).values():
        if isinstance(value, list | tuple | dict) and value:
            items = value.values() if isinstance(value, dict) else value
            out += [p for m in items if isinstance(m, torch.nn.Module) for p in m.parameters()]
    return out
