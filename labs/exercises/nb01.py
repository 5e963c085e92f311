"""Exercises of notebook 01: a benchmark, a fair comparison, an epoch that doesn't wait for the device."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labs.kit._compat import TorchDispatchMode
from labs.kit.exercise import Exercise, KnownMistake
from labs.kit.measure import Estimate, differs, estimate

Answer = Callable[..., Any]

# -- 01.1: a benchmark of simulated devices with known times


def benchmark(
    step: Callable[[Any], object],
    make_batch: Callable[[], Any],
    synchronize: Callable[[], object],
    clock: Callable[[], float],
) -> float:
    """Return the seconds of a typical step: 40 warm-up steps, then the median of 30, each timed alone."""
    batch = make_batch()
    for _ in range(40):
        step(batch)
    seconds = []
    for _ in range(30):
        synchronize()
        start = clock()
        step(batch)
        synchronize()
        seconds.append(clock() - start)
    return statistics.median(seconds)


class SimulatedDevice:
    """An accelerator in virtual time that works through a queue while the host runs ahead.

    `step` takes about `step_s` seconds of device time. The first WARM_UP steps take far longer, and one in eight is an
    outlier. `readings` holds (seconds, steps started, batches made, steps still queued) of each clock reading.
    """

    WARM_UP = 40

    def __init__(self, step_s: float, batch_s: float, seed: int) -> None:
        self.step_s, self.batch_s = step_s, batch_s
        self.readings: list[tuple[float, int, int, int]] = []
        self._random = random.Random(seed)
        self._now = self._random.uniform(1e3, 1e4)
        self._ends: list[float] = []
        self._batches = 0

    def make_batch(self) -> object:
        """Make a batch, which takes the host `batch_s` seconds."""
        self._now += self.batch_s
        self._batches += 1
        return object()

    def step(self, batch: object) -> None:
        """Queue one step."""
        self._now += 0.004 * self.step_s  # launch overhead
        seconds = self.step_s * self._random.gauss(1, 0.03)
        if len(self._ends) < self.WARM_UP:
            seconds *= 3 + 20 / (1 + len(self._ends))
        elif self._random.random() < 1 / 8:
            seconds *= self._random.uniform(3, 8)
        self._ends.append(max([self._now, *self._ends[-1:]]) + seconds)

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._now = max([self._now, *self._ends[-1:]]) + 1e-6

    def clock(self) -> float:
        """Return virtual seconds."""
        queued = len(self._ends) - bisect_right(self._ends, self._now)
        self.readings.append((self._now, len(self._ends), self._batches, queued))
        self._now += 1e-7
        return self.readings[-1][0]


def observe_benchmark(answer: Answer) -> dict[str, Any]:
    """Return what the clock readings enclose, and how far the answer is from a typical step, on three devices."""
    seen: dict[str, Any] = {}
    for name, device in {
        "a fast device": SimulatedDevice(0.0045, 0.009, seed=3),
        "a slow device": SimulatedDevice(0.18, 0.05, seed=10),
        "a device with quick batches": SimulatedDevice(0.06, 0.003, seed=9),
    }.items():
        value = answer(device.step, device.make_batch, device.synchronize, device.clock)
        timed = [(a, b) for a, b in pairwise(device.readings) if b[1] > a[1]]
        seen[f"{name}: steps still run when the clock stops"] = any(b[3] for _, b in timed)
        seen[f"{name}: earlier steps still run when the clock starts"] = any(a[3] for a, _ in timed)
        seen[f"{name}: batches are made while the clock runs"] = any(b[2] > a[2] for a, b in timed)
        short = [b for a, b in timed if b[1] - a[1] <= 3]
        seen[f"{name}: at least 20 samples of 1 to 3 steps"] = len(short) >= 20
        seen[f"{name}: the answer"] = _told(value, device.step_s)
    return seen


def _told(value: Any, step_s: float) -> str:
    try:
        ratio = float(value) / step_s
    except (TypeError, ValueError):
        return "not a number"
    if abs(ratio - 1) < 0.06:
        return "a typical step"
    names = ((0.94, "shorter than a typical step"), (2, "up to twice a typical step"), (9, "2 to 9 typical steps"))
    return next((name for limit, name in names if ratio < limit), "over 9 typical steps")


def _not_waited_for(step: Any, make_batch: Any, synchronize: Any, clock: Any) -> float:
    return benchmark(step, make_batch, lambda: None, clock)


def _batch_in_the_clock(step: Any, make_batch: Any, synchronize: Any, clock: Any) -> float:
    return benchmark(lambda batch: step(make_batch()), make_batch, synchronize, clock)


def _not_warm(step: Any, make_batch: Any, synchronize: Any, clock: Any) -> float:
    steps: list[None] = []

    def late_step(batch: Any) -> None:
        steps.append(None)
        if len(steps) > 40:
            step(batch)

    return benchmark(late_step, make_batch, synchronize, clock)


def _mean(step: Any, make_batch: Any, synchronize: Any, clock: Any) -> float:
    with mock.patch.object(statistics, "median", statistics.fmean):
        return benchmark(step, make_batch, synchronize, clock)


# -- 01.2: a fair comparison


def fair_compare(
    a: Callable[[], object], b: Callable[[], object], seconds_of: Callable[[Callable], float], pairs: int
) -> tuple[list[float], str]:
    """Return the seconds of b over those of a, pair by pair, and what their median's interval says about b."""
    ratios = []
    for i in range(pairs):
        if i % 2 == 0:
            a_s, b_s = seconds_of(a), seconds_of(b)
        else:  # alternate, so that neither always runs first
            b_s, a_s = seconds_of(b), seconds_of(a)
        ratios.append(b_s / a_s)
    return ratios, _verdict(estimate(ratios))


def _verdict(interval: Estimate) -> str:
    if not differs(interval):
        return "no difference"
    return "b is slower" if interval.value > 1 else "b is faster"


class DriftingMachine:
    """A machine that becomes 1.5 times slower, permanently, after `quiet_runs` runs.

    Of two consecutive runs, the second takes longer by the share `second_slower`. `noise` is a run's relative standard
    deviation. `runs` holds each run's name and seconds.
    """

    def __init__(self, slower: float, quiet_runs: int, second_slower: float, noise: float, seed: int) -> None:
        self.runs: list[tuple[str, float]] = []
        self._slower, self._quiet, self._second, self._noise = slower, quiet_runs, second_slower, noise
        self._random = random.Random(seed)

    def a(self) -> None:
        """Version a; `seconds_of` runs it."""

    def b(self) -> None:
        """Version b; `seconds_of` runs it."""

    def seconds_of(self, version: Callable[[], object]) -> float:
        """Run `version` once and return its seconds."""
        name = getattr(version, "__name__", "")
        if name not in ("a", "b"):
            raise TypeError("seconds_of() takes the function a or b itself")
        seconds = 0.2 * (self._slower if name == "b" else 1) * self._random.gauss(1, self._noise)
        seconds *= (1 + self._second * (len(self.runs) % 2)) * (1.5 if len(self.runs) >= self._quiet else 1)
        self.runs.append((name, seconds))
        return seconds


MACHINES = {
    "the same version twice": (1.0, 0.03, 0.08, 24),
    "b takes 15 % longer": (1.15, 0.02, 0.05, 30),
    "b takes 16 % less": (0.84, 0.02, 0.05, 21),
    "b takes 3 % longer, on a quiet machine": (1.03, 0.002, 0.004, 20),
}
"""(b over a, noise, share by which the second run is slower, pairs)."""


def observe_compare(answer: Answer) -> dict[str, Any]:
    """Return the order in which a and b run on four machines, the ratios, and whether the verdict follows."""
    seen: dict[str, Any] = {}
    for seed, (name, (slower, noise, second, pairs)) in enumerate(MACHINES.items()):
        machine = DriftingMachine(slower, round(0.95 * pairs), second, noise, seed)
        ratios, verdict = answer(machine.a, machine.b, machine.seconds_of, pairs)
        ran = [version for version, _ in machine.runs]
        couples = list(zip(ran[::2], ran[1::2], strict=False))
        right = [dict(couple)["b"] / dict(couple)["a"] if len({*dict(couple)}) == 2 else math.nan
                 for couple in zip(machine.runs[::2], machine.runs[1::2], strict=False)]  # fmt: skip
        seen[f"{name}: runs of a and b"] = [ran.count("a"), ran.count("b")]
        seen[f"{name}: b runs right beside a in each pair"] = all(len({*couple}) == 2 for couple in couples)
        seen[f"{name}: each goes first in a quarter of the pairs or more"] = (
            min(sum(first == side for first, _ in couples) for side in "ab") >= pairs / 8
        )
        ratios = [float(ratio) for ratio in ratios]
        seen[f"{name}: number of ratios"] = len(ratios)
        close = len(ratios) == len(right) and all(map(_close, sorted(ratios), sorted(right)))
        seen[f"{name}: ratios are b over a, pair by pair"] = close
        seen[f"{name}: the verdict follows from the interval of your ratios"] = verdict == _verdict(estimate(ratios))
    return seen


def _close(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=1e-6)


def _in_blocks(a: Any, b: Any, seconds_of: Any, pairs: int) -> tuple[list[float], str]:
    a_s = [seconds_of(a) for _ in range(pairs)]
    ratios = [seconds_of(b) / x for x in a_s]
    return ratios, _verdict(estimate(ratios))


def _a_always_first(a: Any, b: Any, seconds_of: Any, pairs: int) -> tuple[list[float], str]:
    ratios = []
    for _ in range(pairs):
        a_s = seconds_of(a)
        ratios.append(seconds_of(b) / a_s)
    return ratios, _verdict(estimate(ratios))


def _upside_down(a: Any, b: Any, seconds_of: Any, pairs: int) -> tuple[list[float], str]:
    ratios, verdict = fair_compare(a, b, seconds_of, pairs)
    return [1 / ratio for ratio in ratios], verdict


def _by_the_median(a: Any, b: Any, seconds_of: Any, pairs: int) -> tuple[list[float], str]:
    ratios, _ = fair_compare(a, b, seconds_of, pairs)
    return ratios, "b is slower" if statistics.median(ratios) > 1 else "b is faster"


# -- 01.3: an epoch that doesn't wait


def train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    device: torch.device,
) -> tuple[float, float]:
    """Return (mean loss, accuracy) over an epoch's samples. The host runs ahead and waits once, at the end."""
    total, right = torch.zeros((), device=device), torch.zeros((), device=device)
    for x, y in batches:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        output = model(x)
        loss = loss_of(output, y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(y)  # detached, so the sum doesn't keep every step's graph
        right += (output.argmax(1) == y).sum()
    samples = sum(len(y) for _, y in batches)  # the host knows the lengths
    return total.item() / samples, right.item() / samples


ROWS = (16, 16, 16, 16, 5)
"""Samples of each batch. The last one is smaller, as in most epochs."""
READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__array__", "__repr__", "__format__")
"""Tensor methods that need its numbers on the host."""
SIZED = ("nonzero", "masked_select", "_unique2", "equal", "_local_scalar_dense")
"""Operators whose result has a size or a truth value that only the device knows."""


class Watch(TorchDispatchMode):
    """Notes, by optimizer step, when tensors are read and copies block; and how many old graphs are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.reads: list[int] = []
        self.blocking: list[int] = []
        self.copies = 0
        self.graphs: list[weakref.ref[_Token]] = []
        self.kept = 0
        self._quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run instead of each operation, with this mode switched off."""
        name = func.overloadpacket.__name__
        mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if (name in SIZED or mask) and not self._quiet:
            self.reads.append(self.steps)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self, optimizer: Optimizer) -> Iterator[None]:
        """Make tensors report reads and copies within the block, except those by `optimizer` itself."""
        optimizer.register_step_pre_hook(lambda *_: setattr(self, "_quiet", True))
        optimizer.register_step_post_hook(self._stepped)
        with contextlib.ExitStack() as stack:
            for name in READS:
                stack.enter_context(mock.patch.object(Tensor, name, self._reading(getattr(Tensor, name))))
            stack.enter_context(mock.patch.object(Tensor, "to", self._copying(Tensor.to)))
            stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda tensor, *_: tensor))  # already pinned
            for module in (torch.cuda, torch.cpu, torch.accelerator):
                stack.enter_context(mock.patch.object(module, "synchronize", lambda *_: self.reads.append(self.steps)))
            stack.enter_context(self)
            yield

    def _stepped(self, *_: Any) -> None:
        self.steps, self._quiet = self.steps + 1, False

    def _reading(self, method: Answer) -> Answer:
        def reading(tensor: Tensor, *args: Any, **options: Any) -> Any:
            outermost, self._quiet = not self._quiet, True  # print() reads with item() and tolist()
            if outermost:
                self.reads.append(self.steps)
            try:
                return method(tensor, *args, **options)
            finally:
                self._quiet = not outermost

        return reading

    def _copying(self, method: Answer) -> Answer:
        def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            where = options.get("device", (*args, None)[0])
            if isinstance(where, torch.device | str | Tensor):
                self.copies += 1
                if not (options.get("non_blocking") or True in args[1:3]):
                    self.blocking.append(self.steps)
            return method(tensor, *args, **options)

        return to


class _Token:
    """Lives as long as the graph that holds it."""


class _Marked(torch.autograd.Function):
    """The identity, with a token in its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
        """Return a copy of `x`, of any shape."""
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Model(nn.Module):
    """A linear layer, (rows, 6) to (rows, 3), that counts how many of its earlier graphs are alive."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.layer, self.watch = nn.Linear(6, 3), watch

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) -> (rows, 3)."""
        self.watch.kept = max(self.watch.kept, sum(graph() is not None for graph in self.watch.graphs))
        token = _Token()
        self.watch.graphs.append(weakref.ref(token))
        return _Marked.apply(self.layer(x), token)


def observe_epoch(answer: Answer) -> dict[str, Any]:
    """Return what one epoch of a small model waits for, and what the answer returns."""
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)) for n in ROWS]
    batches[-1] = (batches[-1][0], torch.zeros(ROWS[-1], dtype=torch.long))  # so its mean loss differs from the others'
    watch = Watch()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = _Model(watch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    with watch.watching(optimizer):
        loss, accuracy = answer(model, optimizer, nn.functional.cross_entropy, batches, torch.device("cpu"))
    last = len(ROWS)
    return {
        "optimizer steps": watch.steps,
        "weights after the epoch": nn.utils.parameters_to_vector(model.parameters()).detach().tolist(),
        "a tensor's number is needed before the last step": any(step < last for step in watch.reads),
        "tensors copied to the device, at least": min(watch.copies, 2 * last),
        "a copy blocks while a step is queued": any(0 < step < last for step in watch.blocking),
        "graphs of more than 2 former steps are kept": watch.kept > 2,
        "mean loss": float(loss),
        "accuracy": float(accuracy),
    }


def _read_in_every_step(model: Any, optimizer: Any, loss_of: Any, batches: Any, device: Any) -> tuple[float, float]:
    def read(output: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(output, y)
        loss.item()
        return loss

    return train_epoch(model, optimizer, read, batches, device)


def _gradients_not_cleared(model: Any, optimizer: Any, loss_of: Any, batches: Any, device: Any) -> tuple[float, float]:
    with mock.patch.object(optimizer, "zero_grad", lambda: None):
        return train_epoch(model, optimizer, loss_of, batches, device)


def _blocking_copies(model: Any, optimizer: Any, loss_of: Any, batches: Any, device: Any) -> tuple[float, float]:
    to = Tensor.to
    with mock.patch.object(Tensor, "to", lambda tensor, device, non_blocking=False: to(tensor, device)):
        return train_epoch(model, optimizer, loss_of, batches, device)


def _mean_of_means(model: Any, optimizer: Any, loss_of: Any, batches: Any, device: Any) -> tuple[float, float]:
    losses: list[Tensor] = []

    def noted(output: Tensor, y: Tensor) -> Tensor:
        losses.append((loss := loss_of(output, y)).detach())
        return loss

    _, accuracy = train_epoch(model, optimizer, noted, batches, device)
    return float(torch.stack(losses).mean()), accuracy


EXERCISES = {
    "01.1": Exercise(
        "01.1",
        25,
        "repair a benchmark",
        observe_benchmark,
        benchmark,
        (
            KnownMistake(
                "`step()` returns at once, and you read the clock while its work is still in the queue.",
                "Call `synchronize()` before each reading of the clock.",
                _not_waited_for,
            ),
            KnownMistake(
                "You make batches while the clock runs.",
                "Make the batch before the first reading: the question is how long a step takes.",
                _batch_in_the_clock,
            ),
            KnownMistake(
                "You time the first steps, which are far slower on this device.",
                "Run 40 steps before you time any, or drop their samples.",
                _not_warm,
            ),
            KnownMistake(
                "Your answer is about the mean, and a few outliers pull it up.",
                "Return the median of your samples.",
                _mean,
            ),
        ),
    ),
    "01.2": Exercise(
        "01.2",
        20,
        "compare two versions fairly",
        observe_compare,
        fair_compare,
        (
            KnownMistake(
                "All runs of one version come before all runs of the other, and in between the machine gets slower.",
                "Run a and b in turn, so that both see the same machine.",
                _in_blocks,
            ),
            KnownMistake(
                "One version always runs second, and the second run of a pair is slower on this machine.",
                "Let them take turns: a b, b a, a b, ...",
                _a_always_first,
            ),
            KnownMistake(
                "Your ratios are upside down, or not of runs in the same pair.",
                "Divide the seconds of b by the seconds of a in the same pair, whichever ran first.",
                _upside_down,
            ),
            KnownMistake(
                "Your verdict doesn't follow from the interval: a median is never exactly 1.",
                'Only an interval without 1 is a difference. Otherwise return "no difference".',
                _by_the_median,
            ),
        ),
    ),
    "01.3": Exercise(
        "01.3",
        25,
        "train an epoch without waiting",
        observe_epoch,
        train_epoch,
        (
            KnownMistake(
                "The gradients are never cleared, so each step adds to the gradients of all steps before it.",
                "Call `optimizer.zero_grad()` in every step.",
                _gradients_not_cleared,
            ),
            KnownMistake(
                "You need a tensor's number in the loop, so the host waits until the device has emptied its queue.",
                "Add up tensors on the device, and read the sum once, after the loop.",
                _read_in_every_step,
            ),
            KnownMistake(
                "A copy blocks while a step is in the queue, so the host waits for that step.",
                "The batches are in pinned memory: use `.to(device, non_blocking=True)` for x and y.",
                _blocking_copies,
            ),
            KnownMistake(
                "You return the mean of the batches' mean losses, and the last batch is smaller.",
                "Weigh the mean loss of each batch by its number of samples.",
                _mean_of_means,
            ),
        ),
    ),
}
