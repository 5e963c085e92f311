"""A patient: a real training whose one line was drawn, with instruments in place of some of the names it uses."""

from __future__ import annotations

import functools
import linecache
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from labs.clinic import training
from labs.kit.rank import Rank

Program = Callable[[int, int, int, Path], Iterator[tuple[float, int]]]
State = tuple[int, torch.dtype, bool]


@functools.cache
def compiled(text: str) -> Any:
    """The text as code; a traceback and a profiler find its lines."""
    name = f"<patient {abs(hash(text)):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    return compile(text, name, "exec")


def program(text: str, instruments: Mapping[str, Any] | None = None) -> Program:
    """The function `train` of this text, with `instruments` in place of names that it uses."""
    names = vars(training) | dict(instruments or {})
    exec(compiled(text), names)
    return names["train"]


def process_state() -> State:
    """What a training may change for its whole process: threads, the default format, anomaly detection."""
    return torch.get_num_threads(), torch.get_default_dtype(), torch.is_anomaly_enabled()


def set_process_state(state: State) -> None:
    """Put back what `process_state` said."""
    if torch.get_num_threads() != state[0]:
        torch.set_num_threads(state[0])
    torch.set_default_dtype(state[1])
    torch.autograd.set_detect_anomaly(state[2])


class Patient:
    """A training that goes on step by step, and leaves its process as it was between two steps."""

    def __init__(self, text: str, rank: Rank, seed: int, folder: Path, **instruments: Any) -> None:
        self.steps: list[float] = []
        """Seconds of each step."""
        self.losses: list[float] = []
        self.models: list[torch.nn.Module] = []
        """The model, once it is made."""
        self.options: dict[str, Any] = {}
        """What DDP was given."""
        self.batch = 0
        wrap = functools.partial(self._wrap, instruments.pop("DistributedDataParallel", DistributedDataParallel))
        run = program(text, instruments | {"DistributedDataParallel": wrap})
        self._steps = run(rank.rank, rank.world_size, seed, folder)
        self._state: State | None = None

    def _wrap(self, wrapper: Callable[..., torch.nn.Module], module: torch.nn.Module, **options: Any) -> Any:
        self.models.append(module)
        self.options = options
        return wrapper(module, **options)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """This patient's process state inside, the state from before again outside."""
        before = process_state()
        set_process_state(self._state or before)
        try:
            yield
        finally:
            self._state = process_state()
            set_process_state(before)

    def go(self, steps: int = 1) -> None:
        """Take so many steps."""
        with self.awake():
            for _ in range(steps):
                start = time.perf_counter()
                loss, self.batch = next(self._steps)
                self.steps.append(time.perf_counter() - start)
                self.losses.append(loss)

    @property
    def state(self) -> State:
        """Threads, default format and anomaly detection of this patient, once it has taken a step."""
        assert self._state is not None
        return self._state

    def close(self) -> None:
        """End it; its files are the folder's owner's to remove."""
        self._steps.close()


@contextmanager
def patients(*all_of_them: Patient) -> Iterator[tuple[Patient, ...]]:
    """Patients that are closed at the end, however it comes."""
    try:
        yield all_of_them
    finally:
        for patient in all_of_them:
            patient.close()
