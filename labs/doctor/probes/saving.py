"""Detect checkpoints that lack part of the training state, and "best" weights that are the live ones."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch

from labs.doctor.bottlenecks import Match, matched
from labs.doctor.probes.scene import (
    WARM_UP,
    Scene,
    assigned,
    assignments,
    function_text,
    listed,
    looks_at,
    name_in,
    parsed,
)
from labs.doctor.probes.schedules import Schedules, optimizer_of

NAMED = re.compile(r"best|backup|snapshot|lowest", re.I)
PLACE_IN_TRAINING = re.compile(r"epoch|step|iter", re.I)
AVERAGES = re.compile(r"(?<![a-z])(ema|swa|shadow|averaged?|avg)(?![a-z])", re.I)
"""Names of weights that are averaged over steps."""
RESUMES = re.compile(r"torch\.load\(")
WINDS_FORWARD = re.compile(r"last_epoch\s*=|for .*range\(.*:\s*\n?\s*\w*sched\w*\.step\(")
MOST_SAVES, RECENT, MOST_HELD = 3, 20, 3_000
BY_STEP = re.compile(r"step|epoch|iter|rank|idx|\bi\b")


class Saving:
    """Inspect what torch.save is given, and state dicts that the script keeps."""

    def __init__(self, scene: Scene, schedules: Schedules) -> None:
        self.scene, self.schedules = scene, schedules
        self.saves: dict[int, dict[str, Any]] = {}  # By step: kinds of state that were saved, and the line
        self.taken: dict[int, dict[str, Any]] = {}  # By id of a state dict: step and line that made it
        self.seen: dict[tuple[int, str], int] = {}
        self.aliases: list[Match] = []
        self.steps: deque[tuple[int, int]] = deque(maxlen=RECENT)  # Latest steps, and ids of their optimizers
        self.scheduler_names: set[str] = set()
        self.scalers: list[weakref.ref] = []

    def install(self) -> None:
        """Observe torch.save, state_dict() and load_state_dict()."""
        self.scene.listen(torch, "save", self._saving)
        self.scene.listen(torch.nn.Module, "state_dict", after=self._taking)
        self.scene.listen(torch.nn.Module, "load_state_dict", self._loading)

    # Aliases

    def _taking(self, state: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if not args and "destination" not in kwargs and hasattr(state, "_metadata"):
            line = self.scene.line()
            self.taken[id(state)] = {"ref": weakref.ref(state), "step": self.scene.step, "at": line, "used": False}

    def _record(self, state: Any) -> dict[str, Any] | None:
        of = self.taken.get(id(state))
        return of if of is not None and of["ref"]() is state else None

    def _loading(self, module: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        of = self._record(state)
        if of is not None and of["step"] == self.scene.step:
            of["used"] = True
        elif of is not None and _pointers(state.values()) & self._live():
            own = _pointers(module.parameters())
            if own and own <= _pointers(state.values()):
                self.aliases.append(matched("no-copy", of["at"], name="The state dict that is loaded here"))

    def _live(self) -> set[int]:
        return _pointers(self.scene.parameters())

    def after_step(self, optimizer: Any, number: int) -> None:
        """Search the script's variables for containers that have held the live weights since an earlier step."""
        self.steps.append((self.scene.step, id(optimizer)))
        if number <= WARM_UP or not looks_at(number) or self.aliases:
            return
        live = self._live()
        self.taken = {k: of for k, of in self.taken.items() if of["ref"]() is not None}
        seen: dict[tuple[int, str], int] = {}
        for frame in self.scene.frames():
            file, variables = frame.f_code.co_filename, dict(frame.f_locals)
            self.scheduler_names |= {n for n, v in variables.items() if hasattr(v, "last_epoch") and hasattr(v, "step")}
            for name, value in self.scene.objects(variables.items(), most=MOST_HELD):
                if not _holds_tensors(value):
                    continue
                key = id(value), name
                seen[key] = self.seen.get(key, number)
                of = self._record(value)
                since = of["step"] if of else seen[key]
                if since < (self.scene.step if of else number) and not (of and of["used"]):
                    pointers = _pointers(value.values() if isinstance(value, dict) else value)
                    if pointers & live and (NAMED.search(name) or _restored(file, name)):
                        self.aliases.append(
                            matched("no-copy", of["at"] if of else assigned(file, name), name=f"`{name}`")
                        )
            self._same_model(variables, file)
        self.seen = seen

    def _same_model(self, variables: dict[str, Any], file: str) -> None:
        module = torch.nn.Module
        models = {n: v for n, v in variables.items() if isinstance(v, module) and id(v) in self.scene.roots}
        for name, model in models.items():
            if NAMED.search(name) and any(m is model and not NAMED.search(n) for n, m in models.items()):
                self.aliases.append(matched("best-is-the-model", assigned(file, name), name=f"`{name}`"))

    # Checkpoints

    def _saving(self, obj: Any, *args: Any, **kwargs: Any) -> None:
        recent = {key for step, key in self.steps if step > self.scene.step - RECENT}
        of = self.saves.setdefault(
            self.scene.step, {"kinds": [], "at": self.scene.line(), "optimizers": len(recent), "held": []}
        )
        first = len(self.saves) <= MOST_SAVES
        for key, value, depth in _inside(obj):
            if (record := self._record(value)) is not None:
                record["used"] = True
            if (kind := self._kind(key, value, depth)) is not None:
                of["kinds"].append(kind)
            if first and isinstance(value, torch.nn.Module):
                of["held"] += [*value.parameters(), *value.buffers()]
            elif first and isinstance(value, torch.Tensor):
                of["held"].append(value)
        if first:
            of["lacks"] = self._not_held(of["held"], recent)
            self.scene.keep()
            scalers = [o for o in gc.get_objects() if issubclass(type(o), torch.amp.GradScaler)]
            self.scalers = [weakref.ref(s) for s in scalers if s.is_enabled()]

    def _not_held(self, held: list[Any], recent: set[int]) -> list[str]:
        """Return names of trained parameters, batch norm statistics and averages that no saved tensor can be."""
        scene = self.scene
        optimizers = [o for k in recent if (o := scene.optimizers.get(k)) is not None]
        trained = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        trained = {key: p for key, p in trained.items() if p.requires_grad}
        if any(hasattr(p, "to_local") or type(p).__name__ == "FlatParameter" for p in trained.values()):
            return []
        needed, norms = [(scene.name_of(p), p) for p in trained.values()], set()
        for root in list(scene.roots.values()):
            for name, module in root.named_modules():
                statistics = getattr(module, "running_mean", None)
                if statistics is not None and id(module) not in norms and id(module.weight) in trained:
                    norms.add(id(module))
                    needed.append((f"{name}.running_mean".removeprefix("module."), statistics))
        shapes = {tuple(p.shape) for p in trained.values()}
        for frame in scene.frames():
            for name, value in scene.objects(frame.f_locals.items()):
                if AVERAGES.search(name) and isinstance(value, torch.nn.Module | dict):
                    of = value.parameters() if isinstance(value, torch.nn.Module) else value.values()
                    of = [t for t in of if isinstance(t, torch.Tensor) and id(t) not in trained]
                    needed += [(name, t) for t in of if tuple(t.shape) in shapes]
        needed = list({id(t): (name, t) for name, t in needed}.values())
        pointers = _pointers(held)
        rest = Counter(tuple(t.shape) for t in held)
        missing = []
        for name, tensor in needed:
            rest[tuple(tensor.shape)] -= 1
            if not _pointers([tensor]) <= pointers:
                missing.append((name, tuple(tensor.shape)))
        return list(dict.fromkeys(n for n, shape in missing if rest[shape] < 0))  # else a saved one may be its copy

    def _kind(self, key: Any, value: Any, depth: int) -> str | None:
        if isinstance(value, torch.nn.Module):
            return "model"
        if isinstance(value, torch.optim.Optimizer) or (isinstance(value, dict) and "param_groups" in value):
            return "optimizer"
        if hasattr(value, "last_epoch") or (isinstance(value, dict) and {"last_epoch", "_last_lr"} & value.keys()):
            return "scheduler"
        if isinstance(value, torch.amp.GradScaler) or (isinstance(value, dict) and "growth_factor" in value):
            return "scaler"
        if isinstance(value, int) and depth < 3 and isinstance(key, str) and PLACE_IN_TRAINING.search(key):
            return "step"
        values = value.values() if isinstance(value, dict) else ()  # random states have no floating-point numbers
        weights = any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
        return "model" if weights and depth < 3 else None

    # Findings

    def findings(self) -> list[Match]:
        """Return the first alias and the first incomplete checkpoint."""
        schedulers = [s for s in (of.ref() for of in self.schedules.seen.values()) if s is not None]
        scheduled = [s for s in schedulers if id(optimizer_of(s)) in self.scene.optimizers]
        text = self.scene.text() if self.saves or scheduled else ""
        lacking = ((lacks, of["at"]) for of in self.saves.values() if (lacks := self._lacks(of, scheduled, text)))
        lacks, at = next(lacking, (["the learning rate schedule"], None))
        if scheduled and not self.saves:
            at = self._unseen_save(text)
        return [*self.aliases[:1], *([matched("checkpoint-lacks", at, lacks=" and ".join(lacks))] if at else [])]

    def _lacks(self, of: dict[str, Any], scheduled: list[Any], text: str) -> list[str]:
        """Return the parts of the training state that a checkpoint lacks."""
        kinds, names, lacks = of["kinds"], of.get("lacks", []), []
        if "optimizer" in kinds:
            if scheduled and "scheduler" not in kinds and not WINDS_FORWARD.search(text):
                lacks.append("the learning rate schedule")
            if any(ref() is not None for ref in self.scalers) and "scaler" not in kinds:
                lacks.append("the GradScaler")
            if (fewer := of["optimizers"] - kinds.count("optimizer")) > 0:
                lacks.append(f"{fewer} of {of['optimizers']} optimizers")
            elif "model" in kinds and names:
                lacks.append(listed(names))
        elif "model" in kinds and "step" in kinds and self._resumes(text):
            lacks.append("the optimizer")
        elif "model" in kinds and names and all(name.endswith("running_mean") for name in names):
            lacks.append("batch norm's running statistics")
        return lacks

    def _resumes(self, text: str) -> bool:
        """Return whether the script resumes from a loaded step or epoch, with an optimizer that has state."""
        state = any(o.state for o in self.scene.optimizers.values())
        reads = re.search(r"\[[\"'](\w*(epoch|step|iter)\w*)[\"']\]\s*(\+|\n|$|\))", text)
        return state and bool(RESUMES.search(text)) and bool(reads)

    def _unseen_save(self, text: str) -> tuple[str, int] | None:
        """Return a line, not run so far, that saves an optimizer's state; None if a line saves or skips a schedule."""
        names = "|".join([r"\w*sched\w*", *map(re.escape, sorted(self.scheduler_names))])
        if re.search(rf"\b({names})(\[\w+\])?\.state_dict\(", text) or WINDS_FORWARD.search(text):
            return None
        saves = [(f, call.lineno) for f, call in self.scene.calls() if ast.unparse(call.func) == "torch.save"]
        bodies = ((place, function_text(*place)) for place in saves)
        return next((at for at, b in bodies if re.search(r"\bopt\w*\.state_dict\(", b) and "**" not in b), None)


def _inside(obj: Any) -> Iterator[tuple[Any, Any, int]]:
    """Yield (key, value, depth) of a saved object, to depth 3, without the contents of optimizer states."""
    level: list[tuple[Any, Any]] = [("", obj)]
    for depth in range(4):
        following: list[tuple[Any, Any]] = []
        for key, value in level:
            yield key, value, depth
            if isinstance(value, dict) and "param_groups" not in value:
                following += list(value.items())[:1000]
            elif isinstance(value, list | tuple):
                following += [(key, v) for v in value[:100]]
        level = following


def _pointers(values: Any) -> set[int]:
    """Return the addresses of dense tensors' memory."""
    dense = [v for v in values if isinstance(v, torch.Tensor) and v.layout == torch.strided and v.numel()]
    return {v.data_ptr() for v in dense if not hasattr(v, "to_local")} - {0}


def _holds_tensors(value: Any) -> bool:
    if not isinstance(value, dict | list | tuple) or len(value) >= MOST_HELD:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(v, torch.Tensor) and not isinstance(v, torch.nn.Parameter) for v in items)


def _restored(file: str, name: str) -> bool:
    """Return whether `name` keeps a state dict if a comparison such as < holds, or is loaded back into its model."""
    tree = parsed(file)
    inside = [
        n
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and not BY_STEP.search(ast.unparse(test.test))
        for c in ast.walk(test.test)
        if isinstance(c, ast.Compare) and isinstance(c.ops[0], ast.Lt | ast.Gt | ast.LtE | ast.GtE)
        for n in ast.walk(test)
    ]
    loads = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and getattr(c.func, "attr", "") == "load_state_dict"]
    back = {ast.unparse(c.func.value) for c in loads if c.args and name_in(c.args[0]) == name.rpartition(".")[2]}
    for node, value in assignments(file, name):
        calls = [c for c in ast.walk(value) if isinstance(c, ast.Call) and getattr(c.func, "attr", "") == "state_dict"]
        if calls and (node in inside and "torch.save" not in function_text(file, node.lineno)):
            return True
        if any(ast.unparse(c.func.value) in back for c in calls):
            return True
    return False
