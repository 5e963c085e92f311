"""The complete state of a training run: leave out one part, and a resumed run differs without any error."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from labs.kit.errors import require


def training_state(
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    *,
    random: list[dict] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return the state of everything that training depends on, as tensors and plain values for `save`.

    A part is anything with `state_dict` and `load_state_dict`, or a random generator of torch or NumPy; `more` holds
    your own parts. Skips parts that are None. `data` is the position in the data (`ResumableLoader`). `random` holds
    all ranks' random states, from `rank.gather(random_state())`; by default, only this process's.

    Tensors aren't copied, so save them before the next step changes them. With several ranks, only one saves.
    """
    parts = _parts(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data, **more)
    return {name: _state_of(part) for name, part in parts.items()} | {"random": random or [random_state()]}


def restore(
    state: dict[str, Any],
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    *,
    rank: int = 0,
    **more: Any,
) -> None:
    """Load a state into parts built as at the start of training. Call it last: building may draw random numbers.

    A rank that the saved job didn't have keeps its own random state. BadInput if the state lacks a part, or holds one
    that you don't pass: both would otherwise go unnoticed.
    """
    parts = _parts(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data, **more)
    needed = parts.keys() | {"random"}
    lacking, left = needed - state.keys(), state.keys() - needed
    require(not lacking, f"the checkpoint lacks {', '.join(sorted(lacking))}: it holds {', '.join(state)}")
    require(not left, f"the checkpoint also holds {', '.join(sorted(left))}: pass it to restore() as well")
    for name, part in parts.items():
        _set_state(part, state[name])
    if rank < len(state["random"]):
        set_random_state(state["random"][rank])  # last, because loading parts may draw random numbers


def random_state() -> dict[str, Any]:
    """Return this process's random states (torch's on CPU and current GPU, NumPy's, Python's) as plain values."""
    name, key, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(key.astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(words), next_gauss],
    }
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states that `random_state` returned. Skips a GPU's state if no GPU is available."""
    torch.set_rng_state(state["torch"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _parts(**parts: Any) -> dict[str, Any]:
    return {name: part for name, part in parts.items() if part is not None}


def _state_of(part: Any) -> Any:
    if isinstance(part, torch.Generator):
        return part.get_state()
    if isinstance(part, np.random.Generator):
        return _converted(part.bit_generator.state, np.ndarray, torch.from_numpy)  # all but PCG64 hold arrays
    return _bare(part).state_dict()


def _set_state(part: Any, state: Any) -> None:
    if isinstance(part, torch.Generator):
        part.set_state(state)
    elif isinstance(part, np.random.Generator):
        part.bit_generator.state = _converted(state, torch.Tensor, torch.Tensor.numpy)
    else:  # a copy: an optimizer keeps the tensors it is given, and its next step would change them in `state`
        _bare(part).load_state_dict(copy.deepcopy(state))


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return nested dicts with `convert` applied to every leaf of type `kind`."""
    if isinstance(state, dict):
        return {name: _converted(value, kind, convert) for name, value in state.items()}
    return convert(state) if isinstance(state, kind) else state


def _bare(part: Any) -> Any:
    """Unwrap DDP, whose names all begin with "module.", so that a checkpoint fits any number of ranks."""
    return part.module if isinstance(part, DistributedDataParallel) else part
