"""Checker of exercise 05.4: a state is complete if training goes on from it bit for bit, also in another process."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labs.chapters.nb05.exercise_states import described, difference, leaves, one_thread, same
from labs.chapters.nb05.exercise_trainer import Trainer
from labs.kit.check import Mistake

Maker = Callable[..., Any]
Pieces = dict[str, Any]
MORE = 12
"""Steps that both go on: two more epochs."""


def pieces(trainer: Trainer) -> Pieces:
    """All that the next steps depend on, by name, as copies; what they depend on most comes first."""
    model, sampler, kinds = trainer.model, trainer.sampler, ("state", "param_groups")
    own, moments, groups = dict(model.named_parameters()), *(trainer.optimizer.state_dict()[k] for k in kinds)
    found = {
        "the parameters": {name: p.detach() for name, p in own.items()},
        "BatchNorm's buffers": dict(model.named_buffers()),
        "the optimizer's moments": moments,
        "the scheduler": trainer.scheduler.state_dict(),
        "the optimizer's learning rate": [g["lr"] for g in groups],
        "the loss scale": trainer.scaler.state_dict(),
        "the number of the epoch": sampler.epoch,
        "the position in the epoch": sampler.position,
        "the order of this epoch's rows": sampler.order,
        "the sampler's generator": sampler.generator.get_state(),
        "torch's random state": torch.get_rng_state(),
        "NumPy's random state": _numpy_state(),
        "Python's random state": random.getstate(),
    }
    return copy.deepcopy(found)


def _numpy_state() -> list[Any]:
    _, keys, *rest = np.random.get_state()
    return [keys.tolist(), *rest]


WHY = {
    "the parameters": "load_state_dict of the model",
    "BatchNorm's buffers": "model.state_dict() has them, model.parameters() has not",
    "the optimizer's moments": "optimizer.state_dict(): AdamW without its moments takes other steps for a long while",
    "the scheduler": "scheduler.state_dict(): it counts steps, and would begin with a large learning rate again",
    "the optimizer's learning rate": "optimizer.state_dict() holds it, in param_groups",
    "the loss scale": "scaler.state_dict(): the scale, and how many good steps there were since it grew",
    "the number of the epoch": "sampler.epoch: here the noise depends on it, elsewhere set_epoch()",
    "the position in the epoch": "sampler.position: else rows that were seen come again, and others never",
    "the order of this epoch's rows": "sampler.order: a position is a place in an order; set_epoch() draws another one",
    "the sampler's generator": "sampler.generator.get_state(): it draws the order of the next epoch",
    "torch's random state": "torch.get_rng_state(): dropout draws from it",
    "NumPy's random state": "np.random.get_state(): the noise comes from it",
    "Python's random state": "random.getstate(): the choice of the feature to leave out comes from it",
}


def check_resumable(cls: Maker) -> None:
    """From the middle of an epoch, and from the end of one; into a new trainer, and into one that has gone on."""
    with _random_states_kept(), one_thread():
        for steps, steps_elsewhere in ((8, 0), (10, 3)):
            _check_at(cls, steps, steps_elsewhere)


def _check_at(cls: Maker, steps: int, steps_elsewhere: int) -> None:
    when = f"state_dict() after {steps} steps"
    trainer = cls(1)
    _check_form(trainer)
    for _ in range(steps):
        trainer.step()
    before = pieces(trainer)
    state = trainer.state_dict()
    if not trainer.model.training:
        raise Mistake(
            "state_dict() itself puts the model into evaluation mode: the training goes on without dropout",
            "look, do not change",
        )
    data = _written(state)
    if changed := _changed(before, pieces(trainer)):
        raise Mistake(f"state_dict() itself changes {changed[0]}", "look, do not draw")
    losses = [trainer.step() for _ in range(MORE)]
    after = pieces(trainer)
    if path := difference(_read(_written(state)), _read(data)):
        raise Mistake(
            f"{when} gives {path}, and {MORE} steps later that has changed: it is the live object. A state "
            "that is saved in the background, or kept to go back to, is then a mixture of steps",
            "a copy: copy.deepcopy(...)",
        )
    decoy = cls(3)
    decoy.state_dict()
    other = cls(2)
    for _ in range(steps_elsewhere):
        other.step()
    other.load_state_dict(_read(data))
    if same(list(other.model.parameters()), list(decoy.model.parameters())):
        raise Mistake(
            "load_state_dict(state) brings back what another trainer has saved last, not `state`: it is kept "
            "in the class or in a global variable, and a new process has neither",
            "all that load_state_dict() needs is in what state_dict() returns",
        )
    _check_pieces(before, pieces(other), _read(data))
    _check_going_on(other, losses, after)
    _check_going_back(cls, before, _read(data))


def _check_form(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):
        raise Mistake(f"your class makes a {type(trainer).__name__}, not a Trainer", "class Resumable(Trainer):")
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(trainer, method, None)):
            raise Mistake(f"your class has no method {method}", "state_dict(self) and load_state_dict(self, state)")


PLAIN = (Tensor, int, float, str, bytes, bool, type(None))


def _written(state: Any) -> bytes:
    """The state as a file. Mistake if torch.load(weights_only=True) would not read that."""
    if state is None:
        raise Mistake("state_dict() returns None", "does it end without `return`?")
    for path, leaf in leaves(state):
        if not isinstance(leaf, PLAIN) or isinstance(leaf, np.generic):
            kind = f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__name__}".removeprefix("builtins.")
            raise Mistake(f"{path} is of type {kind}: torch.load(file, weights_only=True) refuses that", _instead(leaf))
    try:
        torch.save(state, file := io.BytesIO())
        _read(file.getvalue())
    except Exception as error:
        raise Mistake(
            f"torch.save and torch.load(weights_only=True) refuse the state: {described(error)}",
            "tensors, numbers, text, dicts, lists and tuples",
        ) from error
    return file.getvalue()


def _instead(leaf: Any) -> str:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return "array.tolist(), or torch.from_numpy(array.copy())"
    if isinstance(leaf, torch.Generator):
        return "generator.get_state() is a tensor"
    return "its state_dict()" if hasattr(leaf, "state_dict") else "tensors, numbers, text, dicts, lists and tuples"


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _changed(before: Pieces, now: Pieces) -> list[str]:
    return [name for name in before if not same(now[name], before[name])]


def _check_pieces(before: Pieces, now: Pieces, state: Any) -> None:
    """Mistake, which names the first piece that load_state_dict has not brought back."""
    if not (changed := _changed(before, now)):
        return
    name = changed[0]
    rest = f" ({len(changed) - 1} more after it)" if len(changed) > 1 else ""
    if _holds(state, before[name]):
        what = f"{name} {_are(name)} saved, but after load_state_dict() not back{rest}"
        if "random" in name or "generator" in name:
            raise Mistake(
                f"{what}: it was not set, or something has drawn from it since",
                "set random states at the very end, when nothing is left to draw",
            )
        raise Mistake(what, "whatever state_dict() saves, load_state_dict() has to set")
    raise Mistake(
        f"after load_state_dict() {name} {_are(name)} not what {_were(name)} when state_dict() ran{rest}", WHY[name]
    )


def _are(name: str) -> str:
    return "are" if name.endswith("s") and not name.endswith("rows") else "is"


def _were(name: str) -> str:
    return "they were" if _are(name) == "are" else "it was"


def _holds(state: Any, piece: Any) -> bool:
    """Whether all large tensors or texts of a piece are somewhere in the state. Numbers prove nothing."""
    wanted = [leaf for _, leaf in leaves(piece) if isinstance(leaf, Tensor)] or [leaf for _, leaf in leaves(piece)]
    if not any(isinstance(leaf, Tensor) for leaf in wanted) and len(wanted) < 100:
        return False
    have = [leaf for _, leaf in leaves(state)]
    if isinstance(wanted[0], Tensor):
        return all(any(same(leaf, w) for leaf in have if isinstance(leaf, Tensor)) for w in wanted)
    numbers = set()
    for leaf in have:
        numbers |= set(leaf.flatten().tolist()) if isinstance(leaf, Tensor) else {leaf}
    return set(wanted) <= numbers


def _check_going_on(trainer: Any, losses: list[float], after: Pieces) -> None:
    hint = "load into the objects that are there: model.load_state_dict, not a new model"
    if not trainer.model.training:
        raise Mistake(
            "load_state_dict() leaves the model in evaluation mode: the training goes on without dropout",
            "model.train(), or no model.eval()",
        )
    for i, want in enumerate(losses):
        try:
            got = f"gives the loss {loss:.6f}, not {want:.6f}" if (loss := trainer.step()) != want else ""
        except Exception as error:
            got = f"raises {described(error)}"
        if got:
            raise Mistake(
                f"all is back as it was, and yet step {i + 1} after it {got}: something points to old "
                "objects, such as an optimizer to old parameters",
                hint,
            )
    if changed := _changed(after, pieces(trainer)):
        raise Mistake(f"the losses agree, but {MORE} steps later {changed[0]} {_are(changed[0])} different", hint)


def _check_going_back(cls: Maker, before: Pieces, state: Any) -> None:
    """A state that is kept in memory may be loaded more than once."""
    cls(4).load_state_dict(state)
    again, works_once = cls(5), "load_state_dict(state) works once: a second one from the same state"
    hint = "read from `state`, and leave it as it is"
    try:
        again.load_state_dict(state)
    except Exception as error:
        raise Mistake(f"{works_once} raises {described(error)}", hint) from error
    if changed := _changed(before, pieces(again)):
        raise Mistake(f"{works_once} does not bring back {changed[0]}", hint)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
