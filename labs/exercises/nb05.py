"""Exercises of notebook 05: the cost of recomputing, a memory budget, a loss in chunks, a complete training state."""

from __future__ import annotations

import copy
import gc
import io
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labs.kit._compat import TorchDispatchMode, storage_key
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread. Small operations run no faster on more, and a forked process lacks its parent's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Allocated(TorchDispatchMode):
    """Tracks each storage that an operation makes, the largest one, and the peak of bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run instead of each operation, with this mode switched off."""
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self.storages[storage_key(storage)] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.alive())
        self.largest = max([self.largest, *(n for _, n in self.storages.values())])
        return result

    def alive(self, but: Sequence[Tensor] = ()) -> int:
        """Return the bytes of storages that still exist, except those of the tensors in `but`."""
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        left_out = {storage_key(t.untyped_storage()) for t in but}
        return sum(n for key, (_, n) in self.storages.items() if key not in left_out)


# -- 05.1


def measure_step(blocks: Sequence[nn.Module], x: Tensor, y: Tensor, recompute: bool) -> tuple[float, int]:
    """Return the seconds of a training step without its optimizer, and the bytes that forward keeps for backward."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def forward() -> Tensor:
        out = x
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False) if recompute else block(out)
        return functional.mse_loss(out, y)

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = forward()
    loss.backward()  # warm-up
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        forward().backward()  # on a GPU, call torch.cuda.synchronize() before each clock reading
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), sum(kept.values())


class _Pause(torch.autograd.Function):
    """Sleeps PAUSE_S in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return grad


PAUSE_S, COLD_S, BLOCKS = 0.01, 0.6, 3


class _Timed(nn.Module):
    """A block with a known time. The first block's first call takes COLD_S longer."""

    def __init__(self, cold: bool) -> None:
        super().__init__()
        self.up, self.down, self.cold = nn.Linear(32, 64), nn.Linear(64, 32), cold

    def forward(self, x: Tensor) -> Tensor:
        if self.cold:
            time.sleep(COLD_S)
            self.cold = False
        return x + self.down(torch.tanh(self.up(_Pause.apply(x))))


def observe_measure_step(answer: Answer) -> dict[str, Any]:
    """Return which passes were timed, judged by their known time, and the bytes, with and without recomputation."""
    seen: dict[str, Any] = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        blocks = [_Timed(cold=i == 0) for i in range(BLOCKS)]
        x, y = torch.randn(64, 32), torch.randn(64, 32)
        with _one_thread():
            seconds, nbytes = answer(blocks, x, y, recompute)
        passes = float(seconds) / (PAUSE_S * BLOCKS)
        name = "recomputed" if recompute else "plain"
        seen[f"{name}: kB that forward keeps"] = round(int(nbytes) / 1000)
        seen[f"{name}: what you timed"] = (
            "forward only" if passes < 1.5
            else "forward and backward" if passes < 2.5
            else "forward, forward again and backward" if passes < 4
            else "more than one step, perhaps including the slow first one"
        )  # fmt: skip
    return seen


def _forward_only(blocks: Any, x: Tensor, y: Tensor, recompute: bool) -> tuple[float, int]:
    def forward() -> None:
        out = x
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False) if recompute else block(out)
        functional.mse_loss(out, y)

    nbytes = measure_step(blocks, x, y, recompute)[1]
    start = time.perf_counter()
    forward()
    return time.perf_counter() - start, nbytes


def _cold(blocks: Any, x: Tensor, y: Tensor, recompute: bool) -> tuple[float, int]:
    start = time.perf_counter()
    nbytes = measure_step(blocks, x, y, recompute)[1]
    return (time.perf_counter() - start) / 6, nbytes


def _never_recomputed(blocks: Any, x: Tensor, y: Tensor, recompute: bool) -> tuple[float, int]:
    return measure_step(blocks, x, y, False)


def _parameters_counted(blocks: Any, x: Tensor, y: Tensor, recompute: bool) -> tuple[float, int]:
    seconds, nbytes = measure_step(blocks, x, y, recompute)
    weights = sum(p.nbytes for block in blocks for p in block.parameters() if p.dim() > 1)
    return seconds, nbytes + (0 if recompute else weights)


# -- 05.2


def run_stack(blocks: Sequence[nn.Module], x: Tensor, kept_bytes: Sequence[int], budget_bytes: int) -> Tensor:
    """Run the blocks in order; backward recomputes as few as possible so that what is kept fits the budget."""
    again: set[int] = set()
    for i in sorted(range(len(blocks)), key=lambda i: -kept_bytes[i]):  # largest first frees most with fewest
        if sum(kept for k, kept in enumerate(kept_bytes) if k not in again) <= budget_bytes:
            break
        again.add(i)
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def _all_again(blocks: Any, x: Tensor, kept_bytes: Any, budget_bytes: int) -> Tensor:
    return run_stack(blocks, x, kept_bytes, -1)


def _budget_not_used_up(blocks: Any, x: Tensor, kept_bytes: Any, budget_bytes: int) -> Tensor:
    return run_stack(blocks, x, kept_bytes, budget_bytes - 1)


def _other_mask(blocks: Any, x: Tensor, kept_bytes: Any, budget_bytes: int) -> Tensor:
    again = _chosen(kept_bytes, budget_bytes)
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if i in again else block(x)
    return x


def _late(blocks: Any, x: Tensor, kept_bytes: Any, budget_bytes: int) -> Tensor:
    again = _chosen(kept_bytes, budget_bytes)
    for i, block in enumerate(blocks):
        x = checkpoint(lambda x: block(x), x, use_reentrant=False) if i in again else block(x)  # noqa: B023
    return x


def _chosen(kept_bytes: Sequence[int], budget_bytes: int) -> set[int]:
    order, again = sorted(range(len(kept_bytes)), key=lambda i: -kept_bytes[i]), set()
    while sum(kept for k, kept in enumerate(kept_bytes) if k not in again) > budget_bytes:
        again.add(order[len(again)])
    return again


ROWS, WIDTH = 64, 32
SLACK = 8192  # bytes per recomputed block: its random state takes about 5,000
STACKS = {
    "three blocks, a large one in the middle": ((64, 256, 128), 1, 0.25),
    "a budget that two of five must free exactly": ((192, 64, 256, 96, 32), 2, 0.0),
    "a budget with room for all": ((64, 128, 96), 0, 0.5),
}
"""(hidden widths, blocks to recompute, unused budget as a share of the smallest of those blocks)."""


class _Block(nn.Module):
    """Two linear layers with dropout between them. Notes when it runs, and its inputs and outputs."""

    def __init__(self, number: int, hidden: int, notes: dict[str, Any]) -> None:
        super().__init__()
        self.up, self.down, self.number, self.notes = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), number, notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes["ran"].append(self.number)
        out = self.down(functional.dropout(torch.tanh(self.up(x)), 0.5, self.training))
        self.notes["between"] += [x.detach(), out.detach()]
        return out


def _play(answer: Answer, hidden: Sequence[int], kept: Sequence[int], budget: int) -> dict[str, Any]:
    notes: dict[str, Any] = {"ran": [], "between": []}
    torch.manual_seed(0)
    blocks = [_Block(i, h, notes) for i, h in enumerate(hidden)]
    parameters = [p for block in blocks for p in block.parameters()]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with Allocated() as allocated:
        y = answer(blocks, x, list(kept), budget)
    gc.collect()
    seen = {"forward": list(notes["ran"]), "kept": allocated.alive([*parameters, *notes["between"], x, y])}
    notes["ran"].clear()
    try:
        y.square().sum().backward()
        seen["backward"] = "ends"
    except RuntimeError as e:
        seen["backward"] = f"raises {type(e).__name__}"
    gradients = [g.norm().item() for g in (x.grad, *(p.grad for p in parameters)) if g is not None]
    return seen | {"again": sorted(notes["ran"]), "gradients": gradients, "drawn": torch.rand(()).item()}


def _plain(blocks: Sequence[nn.Module], x: Tensor, kept_bytes: Sequence[int], budget_bytes: int) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def observe_run_stack(answer: Answer) -> dict[str, Any]:
    """Return which blocks run, how often, what is kept, and whether gradients are the plain stack's."""
    seen: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]), _one_thread():
        for words, (hidden, over, room) in STACKS.items():
            kept = [_play(_plain, (h,), (0,), 0)["kept"] for h in hidden]
            order = sorted(kept, reverse=True)
            budget = sum(order[over:]) + int(room * (order[over - 1] if over else order[-1]))
            found = _play(answer, hidden, kept, budget)
            seen[f"{words}: blocks that run in forward"] = found["forward"]
            seen[f"{words}: backward"] = found["backward"]
            seen[f"{words}: blocks that run again"] = found["again"]
            within = found["kept"] <= budget + SLACK * max(1, over)
            seen[f"{words}: what is kept is within the budget"] = within
            seen[f"{words}: norms of the gradients"] = found["gradients"]
            seen[f"{words}: a random number after the step"] = found["drawn"]
    return seen


# -- 05.3


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Return the mean cross-entropy over tokens whose label isn't -100, without all tokens' logits at once."""

    def summed(h: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(h @ weight.T, y, reduction="sum")  # ignores -100 by default

    total = hidden.new_zeros(())
    for h, y in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        total = total + checkpoint(summed, h, y, use_reentrant=False)  # its logits are freed and recomputed in backward
    return total / (labels != -100).sum()


def _mean_of_means(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    parts = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    means = [checkpoint(lambda h, y: functional.cross_entropy(h @ weight.T, y), *p, use_reentrant=False) for p in parts]
    return torch.stack(means).mean()


def _all_tokens(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    return chunked_loss(hidden, weight, labels, chunk_tokens) * (labels != -100).sum() / len(labels)


def _kept_logits(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    parts = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    return sum(functional.cross_entropy(h @ weight.T, y, reduction="sum") for h, y in parts) / (labels != -100).sum()


def _whole(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    return functional.cross_entropy(hidden @ weight.T, labels)


WORDS, SMALL_WIDTH = 4096, 16


def observe_chunked_loss(answer: Answer) -> dict[str, Any]:
    """Return loss and gradients, with a shorter last chunk and ignored tokens, and the logits alive at once."""
    seen: dict[str, Any] = {}
    with _one_thread():
        for tokens, ignored in ((250, 0), (256, 90)):
            where = f"{tokens} tokens, {ignored} of them ignored"
            draw = torch.Generator().manual_seed(tokens)
            hidden, weight = (torch.randn(n, SMALL_WIDTH, generator=draw, requires_grad=True) for n in (tokens, WORDS))
            labels = torch.randint(WORDS, (tokens,), generator=draw)
            labels[:ignored] = -100
            with Allocated() as forward:
                loss = answer(hidden, weight, labels, 32)
            kept = forward.alive()
            seen[f"{where}: the loss"] = loss.item()
            with Allocated() as backward:
                (3 * loss.reshape(())).backward()
            for name, grad in (("hidden", hidden.grad), ("weight", weight.grad)):
                seen[f"{where}: norm of the gradient of {name}"] = 0.0 if grad is None else grad.norm().item()
            logits, chunk = 4 * tokens * WORDS, 4 * 32 * WORDS
            seen[f"{where}: all logits exist at once"] = max(forward.largest, backward.largest) > 0.9 * logits
            seen[f"{where}: logits wait for backward"] = kept > 2 * chunk
            seen[f"{where}: more than ten chunks' logits at once"] = max(forward.most, backward.most) > 10 * chunk
    return seen


# -- 05.4


class Sampler:
    """Row numbers of each batch, in an order that is drawn again for every epoch."""

    def __init__(self, seed: int, rows: int = 80, batch_rows: int = 16) -> None:
        self.rows, self.batch_rows = rows, batch_rows
        self.generator = torch.Generator().manual_seed(seed)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch by drawing its order."""
        self.epoch, self.position = epoch, 0
        self.order = torch.randperm(self.rows, generator=self.generator)

    def next_rows(self) -> Tensor:
        if self.position == self.rows:
            self.set_epoch(self.epoch + 1)
        self.position += self.batch_rows
        return self.order[self.position - self.batch_rows : self.position]


class Trainer:
    """FP16 training with augmentation. Its steps depend on these attributes and on three global random states."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.sampler = Sampler(seed)
        data = torch.Generator().manual_seed(0)  # the same rows for every trainer, so not part of its state
        self.x = torch.randn(self.sampler.rows, 6, generator=data)
        self.y = (self.x @ torch.randn(6, 3, generator=data)).argmax(1)

    def step(self) -> float:
        """Take one step and return the loss."""
        rows = self.sampler.next_rows()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(self.model(self.augmented(self.x[rows])), self.y[rows])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def augmented(self, x: Tensor) -> Tensor:
        """Return `x` with NumPy noise, which fades from epoch to epoch, and without one feature that Python picks."""
        noise = torch.from_numpy(np.random.standard_normal(x.shape)).float()
        kept = torch.ones(x.shape[1])
        kept[random.randrange(len(kept))] = 0
        return (x + 0.3 / (1 + self.sampler.epoch) * noise) * kept


class Resumable(Trainer):
    """A Trainer that can resume from its state as if it had never stopped."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that later steps depend on: copies, of types that torch.load(weights_only=True) reads."""
        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"] = numpy_state["state"] | {"key": numpy_state["state"]["key"].tolist()}
        parts = ("model", "optimizer", "scheduler", "scaler")
        state = {name: getattr(self, name).state_dict() for name in parts} | {
            "sampler": {name: getattr(self.sampler, name) for name in ("epoch", "position", "order")},
            "generator": self.sampler.generator.get_state(),
            "torch": torch.get_rng_state(),
            "numpy": numpy_state,
            "python": random.getstate(),
        }
        return copy.deepcopy(state)  # state_dict() returns the live tensors, which the next step changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore everything; the random states come last, when nothing is left to draw."""
        state = copy.deepcopy(state)  # an optimizer keeps the tensors it is given, and updates them
        for name in ("model", "optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        for name, value in state["sampler"].items():
            setattr(self.sampler, name, value)
        self.sampler.generator.set_state(state["generator"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


class _Live(Resumable):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class _PositionOnly(Resumable):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        position = self.sampler.position
        self.sampler.set_epoch(self.sampler.epoch)
        self.sampler.position = position
        self.sampler.generator.set_state(state["generator"])


class _RandomFirst(Resumable):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        nn.Linear(6, 16)  # as if the model were made after the random states were set


class _WithoutScaler(Resumable):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"scaler": self.scaler.state_dict()})


def pieces(trainer: Trainer) -> dict[str, Any]:
    """Return all that the next steps depend on, by name."""
    moments, groups = (trainer.optimizer.state_dict()[key] for key in ("state", "param_groups"))
    return {
        "the parameters": [p.detach() for p in trainer.model.parameters()],
        "BatchNorm's buffers": list(trainer.model.buffers()),
        "the optimizer's moments": moments,
        "the learning rate": [g["lr"] for g in groups],
        "the scheduler": trainer.scheduler.state_dict(),
        "the loss scale": trainer.scaler.state_dict(),
        "the epoch's number": trainer.sampler.epoch,
        "the position in the epoch": trainer.sampler.position,
        "the order of this epoch": trainer.sampler.order,
        "the sampler's generator": trainer.sampler.generator.get_state(),
        "torch's random state": torch.get_rng_state(),
        "NumPy's random state": [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
        "Python's random state": random.getstate(),
    }


def _written(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def observe_resumable(cls: Answer) -> dict[str, Any]:
    """Save in mid-epoch, load into a trainer in another state, and return what was restored."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        with _one_thread():
            return _resumed(cls)
    finally:
        for put_back, state in zip((torch.set_rng_state, np.random.set_state, random.setstate), kept, strict=True):
            put_back(state)


def _resumed(cls: Answer) -> dict[str, Any]:
    trainer = cls(1)
    for _ in range(8):
        trainer.step()
    before, state = copy.deepcopy(pieces(trainer)), trainer.state_dict()
    data = _written(state)
    seen: dict[str, Any] = {"state_dict() changes nothing": _same(before, pieces(trainer))}
    losses = [trainer.step() for _ in range(12)]
    try:
        loaded = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        return seen | {"torch.load(weights_only=True)": f"raises {type(error).__name__}"}
    seen["torch.load(weights_only=True)"] = "reads it"
    seen["the state stays as it was while the trainer goes on"] = _same(
        torch.load(io.BytesIO(_written(state)), weights_only=True), loaded
    )
    other = cls(2)
    for _ in range(3):
        other.step()
    other.load_state_dict(loaded)
    now = pieces(other)
    seen |= {f"after load_state_dict(), {name}": _back(_same(piece, now[name])) for name, piece in before.items()}
    seen["after load_state_dict(), the next 12 losses"] = [other.step() for _ in range(12)] == losses
    return seen


def _back(same: bool) -> str:
    return "as saved" if same else "different"


EXERCISES = {
    "05.1": Exercise(
        "05.1",
        20,
        "recompute a stack, and measure its time and memory",
        observe_measure_step,
        measure_step,
        (
            KnownMistake(
                "You timed the forward pass only, but recomputing happens in backward.",
                "Read the clock before forward and after `backward()`.",
                _forward_only,
            ),
            KnownMistake(
                "The slow first step is part of the time.",
                "Take one step before you measure, then the median of several.",
                _cold,
            ),
            KnownMistake(
                "Nothing is recomputed.",
                "`checkpoint(block, x, use_reentrant=False)` when `recompute` is true.",
                _never_recomputed,
            ),
            KnownMistake(
                "You counted the parameters, which exist anyway.",
                "Skip tensors whose storage is a parameter's.",
                _parameters_counted,
            ),
        ),
    ),
    "05.2": Exercise(
        "05.2",
        30,
        "recompute as little as a budget of bytes allows",
        observe_run_stack,
        run_stack,
        (
            KnownMistake(
                "More blocks run again than needed.",
                "Drop the largest of `kept_bytes` first, and stop when the rest fits.",
                _all_again,
            ),
            KnownMistake(
                "A budget may be used up completely.", "Compare with `<=`, not with `<`.", _budget_not_used_up
            ),
            KnownMistake(
                "Backward runs another block than forward did: a lambda looks `block` up when it runs.",
                "Give `checkpoint` the block itself.",
                _late,
            ),
            KnownMistake(
                "The second run draws other dropout masks.", "Leave `preserve_rng_state` at True.", _other_mask
            ),
        ),
    ),
    "05.3": Exercise(
        "05.3",
        25,
        "compute a loss without all logits",
        observe_chunked_loss,
        chunked_loss,
        (
            KnownMistake(
                "A mean of the chunks' means isn't the mean over tokens.",
                'Add up sums (`reduction="sum"`), and divide once.',
                _mean_of_means,
            ),
            KnownMistake(
                "You divide by all tokens, including ignored ones.",
                "`(labels != -100).sum()` tokens count.",
                _all_tokens,
            ),
            KnownMistake(
                "Each chunk's logits wait for backward.",
                "Run the function of a chunk under `checkpoint`.",
                _kept_logits,
            ),
            KnownMistake("The logits of all tokens exist at once.", "Compute them chunk by chunk.", _whole),
        ),
    ),
    "05.4": Exercise(
        "05.4",
        25,
        "save everything that training depends on",
        observe_resumable,
        Resumable,
        (
            KnownMistake(
                "The state holds the live tensors, so it changes with every step.",
                "Return a copy: `copy.deepcopy(...)`.",
                _Live,
            ),
            KnownMistake(
                "A position is a place in an order, and `set_epoch()` drew another order.",
                "Save and set `sampler.order`.",
                _PositionOnly,
            ),
            KnownMistake(
                "Something drew random numbers after the random states were set.",
                "Set them at the very end.",
                _RandomFirst,
            ),
            KnownMistake("The loss scale starts anew.", "Save and load `scaler.state_dict()`.", _WithoutScaler),
        ),
    ),
}
