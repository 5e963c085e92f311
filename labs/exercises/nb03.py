"""Exercises of notebook 03: a sampler, accumulation on unequal ranks, a DDP program."""

from __future__ import annotations

import datetime
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from labs.common.data_parallel.gradient_buckets import counting_all_reduce
from labs.kit import answers
from labs.kit.answers import on_ranks
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]


def shard(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    """Return the indices of one rank's samples: every n-th of the epoch's order, padded from its beginning."""
    # With seed + epoch, epoch 1 of seed 0 would have the order of epoch 0 of seed 1.
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(dataset_size, generator=generator).tolist()
    total = math.ceil(dataset_size / world_size) * world_size
    return list(islice(cycle(order), total))[rank::world_size]


def _same_in_every_epoch(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    return shard(dataset_size, rank, world_size, 0, seed)


def _order_per_rank(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    return shard(dataset_size, rank, world_size, epoch, seed + 10 * rank)


def _not_shuffled(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    total = math.ceil(dataset_size / world_size) * world_size
    return list(islice(cycle(range(dataset_size)), total))[rank::world_size]


def _tail_dropped(dataset_size: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(dataset_size, generator=generator).tolist()
    return order[: dataset_size // world_size * world_size][rank::world_size]


def observe_shard(answer: Answer) -> dict[str, Any]:
    """Return how all ranks' parts fit together, for sizes that divide evenly and sizes that don't."""

    def parts(size: int, ranks: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
        return [[int(i) for i in answer(size, rank, ranks, epoch, seed)] for rank in range(ranks)]

    before = torch.get_rng_state()
    seen: dict[str, Any] = {}
    for size, ranks in ((12, 3), (10, 4), (2, 5)):
        found, where = parts(size, ranks), f"{size} samples on {ranks} ranks"
        seen[f"{where}: samples per rank"] = [len(part) for part in found]
        seen[f"{where}: different samples read"] = len({i for part in found for i in part})
    seen["the order is shuffled"] = any(part != sorted(part) for part in parts(12, 3))
    seen["different orders in 4 epochs"] = len({str(parts(60, 2, epoch)) for epoch in range(4)})
    seen["a rank's samples change from epoch to epoch"] = set(parts(60, 2, 0)[0]) != set(parts(60, 2, 1)[0])
    seen["different orders for 4 seeds"] = len({str(parts(60, 2, 0, seed)) for seed in range(4)})
    seen["asking twice gives the same answer"] = parts(60, 2) == parts(60, 2)
    seen["torch's global random state is unchanged"] = bool(torch.equal(before, torch.get_rng_state()))
    return seen


def accumulate_step(
    ddp: DistributedDataParallel,
    optimizer: Optimizer,
    micro_batches: list[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Take one optimizer step with the mean gradient of all rows of all ranks."""
    rows = torch.tensor(sum(len(x) for x, _ in micro_batches), device=micro_batches[0][0].device)
    dist.all_reduce(rows)  # total over all ranks, 8 bytes
    scale = dist.get_world_size() / rows  # cancels DDP's division by the number of ranks
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        with nullcontext() if last else ddp.no_sync():
            (loss_fn(ddp(x), y) * len(x) * scale).backward()
    optimizer.step()


def _weighted_by_own_rows(ddp: Any, optimizer: Any, micro_batches: Any, loss_fn: Any) -> None:
    rows = sum(len(x) for x, _ in micro_batches)
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with nullcontext() if i == len(micro_batches) - 1 else ddp.no_sync():
            (loss_fn(ddp(x), y) * len(x) / rows).backward()
    optimizer.step()


def _exchanged_every_time(ddp: Any, optimizer: Any, micro_batches: Any, loss_fn: Any) -> None:
    with _ignored(ddp):
        accumulate_step(ddp, optimizer, micro_batches, loss_fn)


@contextmanager
def _ignored(ddp: DistributedDataParallel) -> Iterator[None]:
    """Disable `ddp.no_sync()` within the block."""
    ddp.no_sync = nullcontext  # type: ignore[method-assign]
    try:
        yield
    finally:
        del ddp.no_sync


def _gradients_not_cleared(ddp: Any, optimizer: Any, micro_batches: Any, loss_fn: Any) -> None:
    kept, optimizer.zero_grad = optimizer.zero_grad, lambda: None
    accumulate_step(ddp, optimizer, micro_batches, loss_fn)
    optimizer.zero_grad = kept


def _one_backward(ddp: Any, optimizer: Any, micro_batches: Any, loss_fn: Any) -> None:
    rows = torch.tensor(sum(len(x) for x, _ in micro_batches))
    dist.all_reduce(rows)
    optimizer.zero_grad()
    losses = [loss_fn(ddp(x), y) * len(x) for x, y in micro_batches]
    (sum(losses) * dist.get_world_size() / rows).backward()
    optimizer.step()


ROWS = ((5, 3, 1), (1, 2, 1))
"""Rows of each rank's micro-batches."""


def observe_accumulate(answer: Answer) -> dict[str, Any]:
    """Return what one step does on two ranks with unequal numbers of rows."""
    return on_ranks(_accumulate_on_rank, len(ROWS), answer, when="in accumulate_step")[0]


def _accumulate_on_rank(answer: Answer) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    batches = [(torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)) for n in ROWS[rank]]
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(4, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    mse_loss(ddp(batches[0][0]), batches[0][1]).backward()  # leaves gradients, as an earlier step would
    sent: dict[str, int] = {"all_reduces": 0, "bytes": 0}
    ddp.register_comm_hook(sent, counting_all_reduce)
    passes: list[str] = []

    def note_passes(module: nn.Module, inputs: Any, output: Tensor) -> None:
        passes.append("forward")
        output.register_hook(lambda _: passes.append("backward"))

    ddp.module.register_forward_hook(note_passes)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    size = sum(p.nbytes for p in ddp.parameters())
    with _all_reduces_of(size // 2) as by_hand:
        answer(ddp, optimizer, batches, mse_loss)
    weights = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    return {
        "optimizer steps": len(steps),
        "passes on rank 0": passes,
        "times that the gradients cross the network": round((sent["bytes"] + sum(by_hand)) / size),
        "weights after the step": weights.tolist(),
    }


@contextmanager
def _all_reduces_of(least_bytes: int) -> Iterator[list[int]]:
    """Yield the bytes of each dist.all_reduce of at least `least_bytes` called outside DDP's hook."""
    sent, real = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.extend([tensor.nbytes] if tensor.nbytes >= least_bytes and not kwargs.get("async_op") else [])
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sent
    finally:
        dist.all_reduce = real


def train(model: nn.Module, train_set: Dataset, test_set: Dataset, epochs: int, path: str) -> float:
    """Train on all ranks that torchrun started, save, and return the accuracy on the whole test set."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), path)
    model.eval()
    counts = torch.zeros(2)  # correct answers, samples
    with torch.no_grad():
        for i in range(rank, len(test_set), ranks):  # a DistributedSampler would repeat samples to even out the ranks
            x, y = test_set[i]
            counts += torch.tensor([float(model(x).argmax() == y), 1.0])
    dist.all_reduce(counts)
    dist.destroy_process_group()
    return (counts[0] / counts[1]).item()


BATCH, LR, EPOCHS, TRAINED, TESTED = 8, 0.1, 3, 32, 7


class _Samples(Dataset):
    """Random rows with a learnable rule. `read` lists the indices in reading order."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=generator)
        self.y = (self.x[:, :3] + torch.randn(count, 3, generator=generator)).argmax(1)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read.append(int(i))
        return self.x[i], self.y[i]


def _parts() -> tuple[nn.Module, _Samples, _Samples]:
    """Return model, training set and test set, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3), _Samples(TRAINED, seed=1), _Samples(TESTED, seed=2)


def observe_train(answer: Answer) -> dict[str, Any]:
    """Return what a program does on two ranks, as if torchrun had started them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        found = on_ranks(_run_program, 2, answer, str(path), when="in your program")
        state = torch.load(path, weights_only=True) if path.exists() else {}
    model, *_ = _parts()
    read = [f["read"] for f in found]
    each = TRAINED // len(read)
    epochs = [[part[e * each : (e + 1) * each] for part in read] for e in range(EPOCHS)]
    seen: dict[str, Any] = {
        "training samples that each rank reads": [len(part) for part in read],
        "different samples in an epoch": len({i for part in epochs[0] for i in part}),
        f"different orders in {EPOCHS} epochs": len({str(parts) for parts in epochs}),
        "ranks that write the file": [rank for rank, f in enumerate(found) if f["saves"]],
        "names in the file": sorted(state),
    }
    if seen["names in the file"] == sorted(model.state_dict()):
        model.load_state_dict(state)
        saved = nn.utils.parameters_to_vector(model.parameters())
        seen["saved weights are those of one process with both ranks' batches"] = bool(
            torch.allclose(saved, _trained_alone(read), rtol=1e-3, atol=1e-5)
        )
        seen["what the ranks return"] = [_accuracy_of(f["returned"], model, rank) for rank, f in enumerate(found)]
    return seen | {"the process group still exists at the end": any(f["group is left"] for f in found)}


def _run_program(answer: Answer, path: str) -> dict[str, Any]:
    """Run `answer` with torchrun's environment variables and without a process group."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ports: list[Any] = [None] * ranks
    dist.all_gather_object(ports, [_free_port(), _free_port()])
    dist.destroy_process_group()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0][0]), TORCHELASTIC_USE_AGENT_STORE="False")
    model, train_set, test_set = _parts()
    saves: list[str] = []
    save, init = torch.save, dist.init_process_group

    def impatient(*args: Any, **kwargs: Any) -> None:
        init(*args, **({"timeout": datetime.timedelta(seconds=answers.WAIT_S)} | kwargs))
        # A group that ends with the answer's DDP object joins gloo's threads while holding the GIL, and may hang.
        _kept.append(dist.group.WORLD)

    torch.save = lambda value, file, *args, **kwargs: (saves.append(str(file)), save(value, file, *args, **kwargs))
    dist.init_process_group = impatient
    try:
        returned = answer(model, train_set, test_set, EPOCHS, path)
        left = dist.is_initialized()
        if left:
            dist.destroy_process_group()
    finally:
        torch.save, dist.init_process_group = save, init
        if not dist.is_initialized():  # the launcher expects a group, which it leaves at the end
            os.environ["MASTER_PORT"] = str(ports[0][1])
            dist.init_process_group("gloo")
    return {"returned": returned, "read": train_set.read, "saves": len(saves), "group is left": left}


_kept: list[Any] = []


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _trained_alone(read: list[list[int]]) -> Tensor:
    """Return the weights of one process that trains on the ranks' batches together."""
    model, data, _ = _parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for start in range(0, min(map(len, read)), BATCH):
        rows = [i for part in read for i in part[start : start + BATCH]]
        optimizer.zero_grad()
        cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters())


def _accuracy_of(returned: Any, model: nn.Module, rank: int) -> str:
    """Say in words on which test samples `returned` is the saved model's accuracy."""
    *_, test = _parts()
    right = (model(test.x).argmax(1) == test.y).float()
    shares = [right[r::2].mean().item() for r in range(2)]
    meanings = {
        "the accuracy on the whole test set": right.mean().item(),
        "the accuracy on its own share": shares[rank],
        "the mean of the ranks' accuracies": sum(shares) / 2,
        "the accuracy with a sample counted twice": torch.cat([right, right[:1]]).mean().item(),
    }
    if not isinstance(returned, (int, float)):
        return f"{returned!r:.40}"
    return next((word for word, value in meanings.items() if abs(returned - value) < 1e-4), f"{returned:.4f}")


def _own_share_tested(model: Any, train_set: Any, test_set: Any, epochs: int, path: str) -> float:
    train(model, train_set, test_set, epochs, path)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine = [test_set[i] for i in range(rank, len(test_set), ranks)]
    return sum(int(model(x).argmax() == y) for x, y in mine) / len(mine)


def _shuffled_on_each_rank(model: Any, train_set: Any, test_set: Any, epochs: int, path: str) -> float:
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    for _ in range(epochs):
        for x, y in DataLoader(train_set, batch_size=BATCH, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(ddp(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path)
    dist.destroy_process_group()
    return 0.0


def _without_set_epoch(*args: Any) -> float:
    set_epoch = DistributedSampler.set_epoch
    DistributedSampler.set_epoch = lambda self, epoch: None
    try:
        return train(*args)
    finally:
        DistributedSampler.set_epoch = set_epoch


def _module_called(*args: Any) -> float:
    forward = DistributedDataParallel.forward
    DistributedDataParallel.forward = lambda self, *inputs: self.module(*inputs)
    try:
        return train(*args)
    finally:
        DistributedDataParallel.forward = forward


EXERCISES = {
    "03.1": Exercise(
        "03.1",
        15,
        "give each rank its part of the data",
        observe_shard,
        shard,
        (
            KnownMistake(
                "Every epoch has the same order.",
                "The generator's seed must depend on `epoch`.",
                _same_in_every_epoch,
            ),
            KnownMistake(
                "Each rank draws a different order, so some samples are read twice and others never.",
                "All ranks must draw the same order: the seed must not depend on `rank`.",
                _order_per_rank,
            ),
            KnownMistake("The samples are not shuffled.", "Draw one order of all samples, then cut it.", _not_shuffled),
            KnownMistake(
                "The last samples are dropped when the ranks don't divide them evenly.",
                "Round the number per rank up, and repeat samples from the beginning of the order.",
                _tail_dropped,
            ),
        ),
    ),
    "03.3": Exercise(
        "03.3",
        25,
        "accumulate gradients on unequal ranks",
        observe_accumulate,
        accumulate_step,
        (
            KnownMistake(
                "Each rank weighs by its own rows only, so rows of a small rank count too much.",
                "Find the number of rows of all ranks with `dist.all_reduce`, and undo DDP's division by the ranks.",
                _weighted_by_own_rows,
            ),
            KnownMistake(
                "Every micro-batch sends its gradients.",
                "Put forward and backward of all but the last one inside `ddp.no_sync()`.",
                _exchanged_every_time,
            ),
            KnownMistake(
                "The gradients of the step before are still in the sum.",
                "Call `optimizer.zero_grad()` before the first micro-batch.",
                _gradients_not_cleared,
            ),
            KnownMistake(
                "All forward passes come before the backward pass, so all activations are in memory at once.",
                "Call `backward()` for each micro-batch.",
                _one_backward,
            ),
        ),
    ),
    "03.4": Exercise(
        "03.4",
        30,
        "turn a program for one device into a DDP program",
        observe_train,
        train,
        (
            KnownMistake(
                "Each rank reads the whole training set, so two ranks do the work of one.",
                "Give the loader a DistributedSampler.",
                _shuffled_on_each_rank,
            ),
            KnownMistake("Every epoch has the same order.", "Call `sampler.set_epoch(epoch)`.", _without_set_epoch),
            KnownMistake(
                "The ranks never exchange a gradient.",
                "Call the wrapper, `ddp(x)`: the module inside knows nothing of other ranks.",
                _module_called,
            ),
            KnownMistake(
                "Each rank returns the accuracy on its own share of the test set.",
                "Add up right answers and samples over the ranks with `dist.all_reduce`, then divide.",
                _own_share_tested,
            ),
        ),
    ),
}
