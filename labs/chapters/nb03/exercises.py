"""Exercises of notebook 03: the sampler, accumulation with no_sync, a program to repair."""

from __future__ import annotations

import datetime
import os
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, combinations, permutations
from operator import index
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from labs.chapters.nb03 import solutions as solution
from labs.common.data_parallel.gradient_buckets import counting_all_reduce
from labs.kit import answers
from labs.kit.answers import number, on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]


def check_shard(f: Function) -> None:
    """Disjoint, complete, equal in length, in a new order each epoch, the same whoever asks."""
    state = _random_states()
    shards = _shards(f, 12, 3)
    if _random_states() != state:
        raise Mistake(
            "your code used or reset a global random generator: dropout and augmentation, which draw from it too, "
            "now depend on how often shard() is called",
            "make a generator of its own: torch.Generator().manual_seed(...), and pass it to torch.randperm",
        )
    in_turn, in_blocks = [list(range(rank, 12, 3)) for rank in range(3)], [list(range(k, k + 4)) for k in (0, 4, 8)]
    if shards == [sorted(s) for s in shards] and shards not in (in_turn, in_blocks) and shards[0] != shards[1]:
        raise Mistake(
            f"each rank's samples are sorted: with 12 samples rank 0 got {shards[0]}, rank 1 {shards[1]}",
            "leave them in the order that was drawn",
        )
    if shards == [sorted(s) for s in shards]:
        raise Mistake(
            f"nothing is shuffled: with 12 samples rank 0 got {shards[0]}, rank 1 {shards[1]}",
            "draw one order of all samples first, then give each rank its part of that order",
        )
    if shards[0] == shards[1]:
        raise Mistake(
            f"ranks 0 and 1 both got {shards[0]}: three GPUs do the work of one",
            "rank decides which part of the common order is yours, for example order[rank::world_size]",
        )
    for size, ranks in ((12, 3), (10, 4), (3, 4)):
        _check_partition(_shards(f, size, ranks), size, ranks)
    _check_orders(f)
    for size, ranks in ((10, 4), (3, 4)):
        _check_filling(_shards(f, size, ranks), size, ranks)
    _check_few(_shards(f, 2, 7), 2, 7)


def _check_few(shards: list[list[int]], size: int, ranks: int) -> None:
    """Fewer samples than are missing: a test set on many GPUs."""
    if any(len(s) != 1 for s in shards):
        raise Mistake(
            f"{size} samples on {ranks} ranks: the ranks got {[len(s) for s in shards]} samples; whoever has none "
            "never comes to the all-reduce in which the others wait",
            "repeat the order as often as it takes: once more is not enough here",
        )


def _check_partition(shards: list[list[int]], size: int, ranks: int) -> None:
    case, lengths = f"{size} samples on {ranks} ranks", [len(s) for s in shards]
    seen = Counter(i for s in shards for i in s)
    missing, want = sorted(set(range(size)) - set(seen)), -(-size // ranks)
    if strange := sorted(set(seen) - set(range(size))):
        raise Mistake(f"{case}: there is no sample {strange[0]}", f"indices go from 0 to {size - 1}")
    if len(set(lengths)) > 1:
        raise Mistake(
            f"{case}: the ranks got {lengths} samples, so one does a step more and waits in all-reduce for ever",
            "fill the order up to a multiple of world_size by repeating samples from its beginning",
        )
    if missing and seen.total() < size:
        raise Mistake(
            f"{case}: sample {missing[0]} goes to no rank; {lengths[0]} per rank do not cover all",
            "round the length up, not down, and repeat a few samples so that all ranks get equally many",
        )
    if missing:
        twice = next(i for i, n in seen.items() if n > 1)
        owners = [r for r, s in enumerate(shards) if twice in s]
        where = f"ranks {owners[0]} and {owners[1]} both got" if len(owners) > 1 else f"rank {owners[0]} got twice"
        raise Mistake(
            f"{case}: {where} sample {twice}, while nobody got sample {missing[0]}",
            "all ranks must draw the same order: the seed may depend on seed and epoch, never on rank",
        )
    if lengths[0] != want:
        raise Mistake(f"{case}: {lengths[0]} samples per rank, {want} are enough", "repeat as few as possible")


def _check_filling(shards: list[list[int]], size: int, ranks: int) -> None:
    case, want, seen = f"{size} samples on {ranks} ranks", -(-size // ranks), Counter(i for s in shards for i in s)
    # Every n-th or one block each, whichever rank has the first.
    dealt = ([s[i] for i in range(want) for s in turn] for turn in permutations(shards))
    blocks = ([i for s in turn for i in s] for turn in permutations(shards))
    if not any(order[size:] == order[: want * ranks - size] for order in chain(dealt, blocks)):
        twice = ", ".join(f"sample {i} {n} times" for i, n in seen.items() if n > 1)
        raise Mistake(
            f"{case}: what fills the order up is not its own beginning ({twice}): samples from one place would count "
            "more than others in every epoch",
            "place i of the order that is filled up holds order[i % dataset_size]",
        )


def _check_orders(f: Function) -> None:
    epochs, seeds = [_shards(f, 60, 2, e, 7) for e in range(5)], [_shards(f, 60, 2, 0, s) for s in range(7, 11)]
    first, second, *_ = epochs
    if same := _two_alike(epochs):
        raise Mistake(
            f"epoch {same[0]} and epoch {same[1]} have the same order, as with a DistributedSampler whose set_epoch is "
            "never called",
            "seed the generator with something that holds the epoch, such as seed + epoch",
        )
    if [set(s) for s in first] == [set(s) for s in second]:
        raise Mistake(
            f"rank 0 gets the same {len(first[0])} samples in every epoch, only in another order",
            "shuffle all samples first and cut then; you cut first",
        )
    if same := _two_alike(seeds):
        raise Mistake(
            f"seeds {7 + same[0]} and {7 + same[1]} give the same order", "the generator's seed must hold `seed` too"
        )


def _two_alike(orders: list[list[list[int]]]) -> tuple[int, int] | None:
    return next(((i, j) for i, j in combinations(range(len(orders)), 2) if orders[i] == orders[j]), None)


def _shards(f: Function, size: int, ranks: int, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    """Every rank's indices as plain lists; Mistake if asking twice gives two answers."""
    answers = [[f(size, rank, ranks, epoch, seed) for rank in range(ranks)] for _ in range(2)]
    try:
        once, again = ([[index(i) for i in s] for s in shards] for shards in answers)
    except (TypeError, ValueError):
        raise Mistake(f"{answers[0][0]!r:.60} is not a list of indices", "return a list of ints") from None
    if once != again:
        raise Mistake(
            f"called twice with the same arguments, rank 0 got {once[0]}, then {again[0]}: no two ranks would agree",
            "let the order depend on seed and epoch alone: seed a generator with them",
        )
    return once


def _random_states() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state(legacy=False))


# -- 03.3: on real ranks


Rows = tuple[tuple[int, ...], ...]
ROWS: Rows = ((6, 4, 2), (2, 1, 1))
"""Rows of the micro-batches of each rank: 12 on rank 0, 4 on rank 1."""
OTHER_ROWS: Rows = ((4, 3, 2, 1), (1, 5, 3, 3), (2, 3, 1, 2))
"""With other numbers of ranks, micro-batches and rows, none of which an answer may take as fixed."""
COUNTS_BYTES = 64
"""What an answer may send by hand to agree on numbers of rows."""


@contextmanager
def _bytes_sent_by_hand() -> Iterator[list[int]]:
    """Within, the bytes of each dist.all_reduce, DDP's own among them."""
    sent, real = [], dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield sent
    finally:
        dist.all_reduce = real


def _gradient_or_zeros(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def check_accumulate_step(f: Function) -> None:
    """One step, one synchronisation, the whole batch's gradient, one graph at a time, on two ranks; then on three."""
    found = on_ranks(_accumulate, len(ROWS), f, ROWS, when="in your accumulation")
    first, m = found[0], len(ROWS[0])
    idle = [rank for rank, r in enumerate(found) if not r["applied"]]
    if idle and len(idle) < len(found):
        raise Mistake(
            f"rank {idle[0]} made no optimizer step, and the other did: the ranks' models drift apart",
            "every rank holds a copy of the model: optimizer.step() on all of them",
        )
    if (steps := len(first["applied"])) != 1:
        raise Mistake(
            f"{m} micro-batches made {steps} optimizer steps, not 1",
            "optimizer.step() comes once, after the loop over micro-batches",
        )
    if first["all_reduces"] == 0 and first["own_bytes"] <= COUNTS_BYTES:
        spread = (found[0]["parameters"] - found[1]["parameters"]).abs().max()
        raise Mistake(
            f"no all-reduce in the whole step: the parameters of the two ranks now differ by up to {spread:.2g}",
            "call ddp(x): a forward of the module inside goes around DDP"
            if first["no_sync"] == 0
            else "the last micro-batch must be outside of no_sync(): its backward sends what has accumulated",
        )
    _check_gradient(first["applied"][0], ROWS)
    if not _close(found[1]["applied"][0], first["applied"][0]):
        raise Mistake(
            "rank 0 has the gradient of the whole batch, rank 1 another: their models drift apart",
            "dist.all_reduce gives the sum to all ranks, dist.reduce to one",
        )
    gradient_bytes = first["parameters"].nbytes
    if first["own_bytes"] > gradient_bytes * (first["all_reduces"] == 0) + COUNTS_BYTES:
        raise Mistake(
            f"the gradient is right, of {gradient_bytes} bytes, but you sent {first['own_bytes']} by hand",
            "all micro-batches but the last in ddp.no_sync(), and DDP's own all-reduce once",
        )
    if first["all_reduces"] > 1 and first["no_sync"] == 0:
        raise Mistake(
            f"the gradient is right, but it was all-reduced {first['all_reduces']} times per step, not once",
            "with ddp.no_sync(): around forward and backward of all micro-batches but the last",
        )
    if first["all_reduces"] > 1:
        raise Mistake(
            f"you entered no_sync(), yet there were {first['all_reduces']} all-reduces, not one",
            "DDP decides in the forward pass: ddp(x) must be inside the `with`, like backward()",
        )
    if "forward forward" in first["order"]:
        raise Mistake(
            f"all {m} forward passes come before the first backward: their activations are in memory "
            "at once, as with the batch that did not fit",
            "call backward() for each micro-batch, and let .grad do the adding",
        )
    if first["most rows"] > max(ROWS[0]):
        raise Mistake(
            f"{first['most rows']} rows went through the model at once, and the largest micro-batch has "
            f"{max(ROWS[0])}: as with the batch that did not fit",
            "a forward and a backward for each micro-batch",
        )
    _check_nothing_is_fixed(f)


def _check_nothing_is_fixed(f: Function) -> None:
    """The same on other numbers of ranks, micro-batches and rows, for an answer that is right on ROWS."""
    rows, m, ranks = sum(map(sum, OTHER_ROWS)), len(OTHER_ROWS[0]), len(OTHER_ROWS)
    case = f"on {ranks} ranks with {m} micro-batches each, {rows} rows in all"
    hint = "take each from what you are given: dist.get_world_size(), len(micro_batches), an all_reduce of the rows"

    def fixed(what: str, seen: str) -> Mistake:
        return Mistake(f"the number of {what} is fixed in your code: {case}, {seen}", hint)

    try:
        found = on_ranks(_accumulate, ranks, f, OTHER_ROWS, when=f"in your accumulation, {case}")
    except RankFailed as e:
        if "IndexError" in str(e) or "ValueError" in str(e):
            raise fixed("ranks, micro-batches or rows", "it raises an error") from e
        raise
    if any(len(r["applied"]) != 1 for r in found):
        raise fixed("ranks or micro-batches", "not every rank makes one optimizer step")
    share, mean = _weighing(OTHER_ROWS)
    whole = mean(share)
    if any(not _close(r["applied"][0], whole) for r in found):
        raise fixed("ranks, micro-batches or rows", "the gradient is not that of the whole batch")
    if found[0]["all_reduces"] > 1:
        raise fixed("micro-batches", f"it is all-reduced {found[0]['all_reduces']} times")


def _weighing(rows: Rows) -> tuple[Callable[[int, int], float], Callable[..., Tensor]]:
    """(a micro-batch's share of all rows, DDP's mean of gradients with weights), each by rank and i."""
    model, batches = _problem(rows)
    ranks, g = len(rows), [[_gradient(model, *batch) for batch in own] for own in batches]

    def mean(weights: Callable[[int, int], float]) -> Tensor:
        return sum(weights(rank, i) * g[rank][i] for rank in range(ranks) for i in range(len(rows[rank]))) / ranks

    def share(rank: int, i: int) -> float:  # of all rows, times the ranks that DDP divides by
        return ranks * rows[rank][i] / sum(map(sum, rows))

    return share, mean


def _check_gradient(got: Tensor, rows: Rows) -> None:
    """Mistake unless `got` is the gradient of the whole batch; knows what the usual mistakes would give."""
    share, mean = _weighing(rows)
    m = len(rows[0])

    def last(rank: int, i: int) -> bool:
        return i == m - 1

    whole = mean(share)
    weigh = "weigh each micro-batch's loss by its share of all rows of all ranks"
    known = [
        (
            mean(lambda r, i: rows[r][i] / sum(rows[r])),
            "each rank's mean weighs the same, but rank 0 has 12 rows and "
            "rank 1 has 4: a row of rank 1 counts three times as much as one of rank 0",
            "all ranks must know how many rows there are in all: all_reduce that number",
        ),
        (
            mean(lambda r, i: 1 / len(rows[r])),
            "every micro-batch weighs the same, but they have 6, 4 and 2 rows: a row "
            "of the small one counts three times as much as a row of the large one",
            weigh,
        ),
        (
            mean(lambda r, i: last(r, i) * share(r, i)),
            "only the last micro-batch is in the gradient",
            "zero_grad() empties .grad: call it once, before the loop",
        ),
        (
            whole / 2,
            "the gradient is half as large as it should be",
            "DDP divides the sum over ranks by their number: multiply by dist.get_world_size()",
        ),
    ]
    if _close(got, whole):
        return
    for gradient, what, hint in known:
        if _close(got, gradient):
            raise Mistake(what, hint)
    raise Mistake(
        f"the gradient is {(got - whole).norm() / whole.norm():.2g} of its size off that of the whole batch", weigh
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def _problem(rows: Rows) -> tuple[nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """The model, and each rank's micro-batches; the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        return model, [[(torch.randn(n, 5), torch.randn(n, 1)) for n in own] for own in rows]


def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _flat(torch.autograd.grad(mse_loss(model(x), y), list(model.parameters())))


def _accumulate(f: Function, rows: Rows) -> dict[str, Any]:
    model, batches = _problem(rows)
    mine = batches[dist.get_rank()]
    ddp, traffic, order, applied, at_once = DistributedDataParallel(model), Counter(), [], [], []

    def hook(traffic, bucket):  # DDP refuses annotations that are text
        traffic["in hook"] += bucket.buffer().nbytes
        return counting_all_reduce(traffic, bucket)

    ddp.register_comm_hook(traffic, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: applied.append(_flat(map(_gradient_or_zeros, ddp.parameters()))))
    mse_loss(ddp(mine[0][0]), mine[0][1]).backward()  # the step before, whose gradient is still there
    traffic.clear()
    model.register_forward_pre_hook(lambda _, inputs: at_once.append(len(inputs[0])))
    no_sync = ddp.no_sync

    def counted() -> AbstractContextManager:
        traffic["no_sync"] += 1
        return no_sync()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = mse_loss(output, target)
        order.append("forward")
        loss.register_hook(lambda _: order.append("backward"))
        return loss

    ddp.no_sync = counted  # type: ignore[method-assign]
    with _bytes_sent_by_hand() as sent:
        f(ddp, optimizer, mine, loss_fn)
    own_bytes = sum(sent) - traffic["in hook"]  # the hook ends in dist.all_reduce, too
    return {
        "own_bytes": own_bytes,
        "applied": applied,
        "all_reduces": traffic["all_reduces"],
        "no_sync": traffic["no_sync"],
        "most rows": max(at_once, default=0),
        "order": " ".join(order),
        "parameters": _flat(ddp.parameters()),
    }


# -- 03.4: a whole program, on ranks that have joined no group yet


EPOCHS, BATCH, LR, TESTED = 3, 8, 0.1, 7
"""What the program of 03.4 trains: 32 samples, `TESTED` to test on, which two ranks cannot share equally."""
SAVE_TAKES_S = 0.5
"""Before a checkpoint appears: a large one takes as long, and a rank that does not wait finds nothing."""


class _Samples(Dataset):
    """Rows of a known rule. Notes who is asked for."""

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
    """Model, training set, test set: the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3), _Samples(32, seed=1), _Samples(TESTED, seed=2)


def check_train(f: Function) -> None:
    """Each of the faults that were planted, seen from outside: what is read, sent, written, returned, left behind."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "model.pt"))
        try:
            found = on_ranks(_program, 2, f, path, when="in your program")
        except RankFailed as e:
            raise _explained(str(e)) or e from None
        if not Path(path).exists():
            raise Mistake("no rank wrote the file", "torch.save(model.state_dict(), path), on one rank")
        try:
            saved = torch.load(path, weights_only=True)
        except UnpicklingError:
            raise Mistake(
                "the file holds more than tensors: it cannot be read without this program's classes",
                "torch.save(model.state_dict(), path)",
            ) from None
    _check_what_is_read([r["read"] for r in found])
    model, *_ = _parts()
    if set(saved) != set(model.state_dict()):
        names = ", ".join(saved), ", ".join(model.state_dict())
        raise Mistake(
            f"the file holds {names[0]}; a program without DDP looks for {names[1]}",
            "save model.state_dict(), not that of the wrapper",
        )
    _check_trained(_flat(saved.values()), [r["read"] for r in found])
    if (writers := [rank for rank, r in enumerate(found) if r["saves"]]) != [0]:
        raise Mistake(
            f"ranks {', '.join(map(str, writers))} wrote the same file, perhaps at the same time",
            "one rank saves: if rank == 0",
        )
    model.load_state_dict(saved)
    _check_accuracy(model, [r["returned"] for r in found])
    if any(r["group is left"] for r in found):
        raise Mistake(
            "the process group still exists when the program ends",
            "dist.destroy_process_group() at the end: otherwise torch warns of leaks",
        )


def _program(f: Function, path: str) -> dict[str, Any]:
    """Run `f` as torchrun would start it: the environment names the job, and there is no group yet."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ports: list = [None] * ranks
    with _kept_port() as first, _kept_port() as second:  # until the end: nobody else is given them meanwhile
        dist.all_gather_object(ports, (first, second))
        dist.destroy_process_group()
        return _on_ports(f, path, rank, ranks, *ports[0])


def _on_ports(f: Function, path: str, rank: int, ranks: int, port: int, port_after: int) -> dict[str, Any]:
    """`f` with a group that meets at `port`; then the group that whoever started this rank expects, at `port_after`."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    model, train_set, test_set = _parts()
    try:
        with _watched_program() as saves:
            returned = f(model, train_set, test_set, EPOCHS, path)
    except BaseException:
        if not dist.is_initialized():  # whoever started this rank leaves a group at the end
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        raise
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port_after)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return {"returned": returned, "read": train_set.read, "saves": len(saves), "group is left": left}


@contextmanager
def _kept_port() -> Iterator[int]:
    """A free port. A store of this machine can listen there meanwhile, but the system gives it to nobody else."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store's: two may bind if one does not listen
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]


_kept: list[Any] = []


@contextmanager
def _watched_program() -> Iterator[list[str]]:
    """Within, the paths that torch.save is given are noted, saving takes a while, and no collective waits for long."""
    saves, save, init = [], torch.save, dist.init_process_group

    def slow_save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        saves.append(str(path))
        time.sleep(SAVE_TAKES_S)
        save(value, path, *args, **kwargs)

    def impatient(*args: Any, **kwargs: Any) -> None:
        init(*args, **({"timeout": datetime.timedelta(seconds=answers.WAIT_S)} | kwargs))
        # A group that dies with the learner's DDP object joins gloo's threads while it holds the GIL, and may hang.
        _kept.append(dist.group.WORLD)

    torch.save, dist.init_process_group = slow_save, impatient
    try:
        yield saves
    finally:
        torch.save, dist.init_process_group = save, init


def _explained(text: str) -> Mistake | None:
    """What the error of a rank means, where it is one of the planted faults."""
    if "rocess group has not been initialized" in text:
        return Mistake(
            "the program uses a process group that nobody has made (torch: Default process group has not "
            "been initialized)",
            'dist.init_process_group("gloo") comes first',
        )
    if "FileNotFoundError" in text:
        return Mistake(
            "a rank looks for the file before it is there: writing takes a while",
            "dist.barrier() between the writing and the reading, on every rank",
        )
    if "Error(s) in loading state_dict" in text:
        return Mistake(
            "the names in the file are not those of the model: DDP's wrapper puts module. before each",
            "save model.state_dict(), not that of the wrapper",
        )
    return None


def _check_what_is_read(read: list[list[int]]) -> None:
    """Each epoch shows each sample once, to one rank, in a new order."""
    n = len(_parts()[1])
    if any(len(r) == EPOCHS * n for r in read):
        raise Mistake(
            f"each rank reads all {n} samples in every epoch: two ranks do the work of one",
            "a DistributedSampler gives each rank its part: DataLoader(..., sampler=sampler)",
        )
    each = n // len(read)
    if any(len(r) != EPOCHS * each for r in read):
        raise Mistake(
            f"in {EPOCHS} epochs the ranks read {' and '.join(str(len(r)) for r in read)} samples, not "
            f"{EPOCHS * each} each",
            "leave epochs and data as they are, without loader workers",
        )
    epochs = [[r[e * each : (e + 1) * each] for r in read] for e in range(EPOCHS)]
    for epoch, ranks in enumerate(epochs):
        seen = {i for r in ranks for i in r}
        if len(seen) < n:
            raise Mistake(
                f"epoch {epoch} shows {len(seen)} of {n} samples: the ranks' parts overlap",
                "all ranks must draw the same order: one seed for the sampler",
            )
    if epochs[0] == [list(range(rank, n, len(read))) for rank in range(len(read))]:
        raise Mistake(
            "nothing is shuffled: the ranks read the samples in the order in which they lie",
            "a DistributedSampler shuffles unless it is told shuffle=False",
        )
    if same := _two_alike(epochs):
        which = "every epoch has" if same == (0, 1) else f"epochs {same[0]} and {same[1]} have"
        raise Mistake(f"{which} the same order", "sampler.set_epoch(epoch), before the epoch begins")


def _check_trained(saved: Tensor, read: list[list[int]]) -> None:
    """The saved model is what one process gets from the same samples, both ranks' rows in one batch."""
    if torch.allclose(saved, _trained(read), rtol=1e-3, atol=1e-5):
        return
    if torch.allclose(saved, _trained(read, adds_up=True), rtol=1e-3, atol=1e-5):
        raise Mistake(
            "the gradients are never set back: each step adds to those of all steps before it",
            "optimizer.zero_grad() in every step",
        )
    if torch.allclose(saved, _trained(read[:1]), rtol=1e-3, atol=1e-5):
        raise Mistake(
            "rank 0 has learned from its own samples only: nobody exchanged gradients",
            "call the wrapper, ddp(x): a forward of the module inside goes around DDP",
        )
    raise Mistake(
        "the saved model is not what the samples that were read should make of it",
        f"leave batch size {BATCH}, SGD and its learning rate {LR} as they are",
    )


def _trained(read: list[list[int]], adds_up: bool = False) -> Tensor:
    model, data, _ = _parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for start in range(0, len(read[0]), BATCH):
        rows = [i for r in read for i in r[start : start + BATCH]]
        if not adds_up:
            optimizer.zero_grad()
        cross_entropy(model(data.x[rows]), data.y[rows]).backward()
        optimizer.step()
    return _flat(model.parameters())


def _check_accuracy(model: nn.Module, returned: list[Any]) -> None:
    *_, test = _parts()
    right = (model(test.x).argmax(1) == test.y).float()
    own = [right[rank :: len(returned)].mean().item() for rank in range(len(returned))]
    if None in returned and any(r is not None for r in returned):
        raise Mistake(f"rank {returned.index(None)} returns None", "every rank returns the accuracy")
    got = [number(r, "0.5") for r in returned]
    if np.allclose(got, right.mean().item(), atol=1e-4):
        return
    said = " and ".join(f"{g:.3f}" for g in got)
    if np.allclose(got, own, atol=1e-4):
        raise Mistake(
            f"the ranks return {said}: each one its own share's accuracy, not that of the test set",
            "all_reduce the number of right answers and the number of samples, then divide",
        )
    if np.allclose(got, sum(own) / len(own), atol=1e-4):
        raise Mistake(
            f"{said} is the mean of the ranks' accuracies, but rank 0 has tested 4 samples and rank 1 only 3",
            "all_reduce the two counts, then divide",
        )
    filled_up = torch.cat([right, right[: -len(right) % len(got)]])
    if np.allclose(got, filled_up.mean().item(), atol=1e-4):
        raise Mistake(
            f"the ranks return {said}: {len(filled_up)} samples were counted, and the test set has {len(right)}",
            "a DistributedSampler repeats some: give each rank every n-th",
        )
    raise Mistake(
        f"the ranks return {said}; the saved model gets {right.mean().item():.3f} of the test set right",
        "right answers of all ranks over samples of all ranks, on every rank",
    )


EXERCISES = {
    "03.1": Exercise("each rank's share of the samples", check_shard, solution.shard),
    "03.3": Exercise(
        "one step from unequal shares, synchronised once", check_accumulate_step, solution.accumulate_step
    ),
    "03.4": Exercise("a complete DDP program, repaired", check_train, solution.train),
}
