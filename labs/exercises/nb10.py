"""Exercises of notebook 10: a loop that hangs on uneven data, the origin of a NaN, which rank went wrong."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labs.kit.answers import on_ranks
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]

# -- 10.1: a training loop that ends on every split


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    log: Callable[[float], None],
) -> None:
    """Train on all ranks' batches. A rank without a batch takes part in every collective, with 0 samples."""
    batches, total = iter(batches), torch.zeros(2)  # sum of losses, samples
    while True:
        batch = next(batches, None)
        left = torch.tensor(float(batch is not None))
        dist.all_reduce(left)
        if left == 0:
            break
        optimizer.zero_grad()
        count = torch.zeros(1)
        if batch is not None:
            x, y = batch
            loss = mse_loss(model(x), y, reduction="sum")
            loss.backward()
            count += len(x)
            total += torch.tensor([loss.item(), len(x)])
        dist.all_reduce(count)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= count
        optimizer.step()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        log(float(total[0] / total[1]))


def _train_with(
    fewest: bool = False, mean_of_means: bool = False, stale: bool = False, own_loss: bool = False
) -> Callable[..., None]:
    """Return the reference with one thing changed."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, log: Callable[[float], None]) -> None:
        batches, total, ranks = iter(batches), torch.zeros(2), dist.get_world_size()
        while True:
            batch = next(batches, None)
            left = torch.tensor(float(batch is not None))
            dist.all_reduce(left)
            if left < (ranks if fewest else 1):
                break
            if batch is not None or not stale:
                optimizer.zero_grad()
            count = torch.zeros(1)
            if batch is not None:
                x, y = batch
                loss = mse_loss(model(x), y, reduction="mean" if mean_of_means else "sum")
                loss.backward()
                count += len(x)
                total += torch.tensor([loss.item() * (len(x) if mean_of_means else 1), len(x)])
            dist.all_reduce(count)
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= ranks if mean_of_means else count
            optimizer.step()
        if not own_loss:
            dist.all_reduce(total)
        if dist.get_rank() == 0:
            log(float(total[0] / total[1]) if total[1] else math.nan)

    return loop


SPLITS = ((12, 12), (13, 22), (8, 0, 17))
"""Samples of each rank. The first split is even."""
BATCH = 4


def _batches(samples: Sequence[int], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    numbers = torch.arange(sum(samples[:rank]), sum(samples[: rank + 1]), dtype=torch.float32)
    x = torch.stack([torch.sin(numbers * (k + 1.7)) for k in range(3)], dim=1)
    y = x[:, :1] - 2 * x[:, 1:2] * x[:, 2:]
    return zip(x.split(BATCH), y.split(BATCH), strict=True) if len(x) else iter(())


def observe_train(answer: Answer) -> dict[str, Any]:
    """Return steps, weights and logged losses of the ranks, for every split."""
    seen: dict[str, Any] = {}
    for samples in SPLITS:
        where = f"ranks with {', '.join(map(str, samples))} samples"
        ranks = on_ranks(_train_on_rank, len(samples), answer, samples, when=f"({where})")
        seen[f"{where}: optimizer steps on each rank"] = [steps for steps, _, _ in ranks]
        seen[f"{where}: the ranks' weights agree"] = all(w == ranks[0][1] for _, w, _ in ranks)
        seen[f"{where}: first weights"] = ranks[0][1][:3]
        seen[f"{where}: losses logged by rank 0"] = ranks[0][2]
        seen[f"{where}: lines logged by the other ranks"] = sum(len(logged) for _, _, logged in ranks[1:])
    return seen


def _train_on_rank(answer: Answer, samples: Sequence[int]) -> tuple[int, list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    steps: list[int] = []
    logged: list[float] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    answer(model, optimizer, _batches(samples, dist.get_rank()), lambda loss: logged.append(float(loss)))
    return len(steps), nn.utils.parameters_to_vector(model.parameters()).tolist(), logged


# -- 10.2: the module and the sample where NaN starts


def locate(model: nn.Module, x: Tensor) -> tuple[str, int]:
    """(name of the first module that makes bad numbers from finite ones, index of the sample that is to blame)."""
    found: list[str] = []

    def check(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if all(i.isfinite().all() for i in inputs) and not output.isfinite().all():
            found.append(name)

    hooks = [m.register_forward_hook(partial(check, name)) for name, m in model.named_modules()]
    try:
        with torch.no_grad():
            low, high = 0, len(x)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if model(x[low:middle]).isfinite().all() else (low, middle)
            found.clear()
            model(x[low:high])
    finally:
        for hook in hooks:
            hook.remove()
    return (found[0] if found else ""), low


def _locate_with(
    outputs_only: bool = False, one_by_one: bool = False, hooks_stay: bool = False, outermost: bool = False
) -> Callable[..., tuple[str, int]]:
    """Return the reference with one thing changed."""

    def search(model: nn.Module, x: Tensor) -> tuple[str, int]:
        found: list[str] = []

        def check(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if (outputs_only or all(i.isfinite().all() for i in inputs)) and not output.isfinite().all():
                found.append(name)

        hooks = [m.register_forward_hook(partial(check, name)) for name, m in model.named_modules()]
        with torch.no_grad():
            low, high = 0, len(x)
            while not one_by_one and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if model(x[low:middle]).isfinite().all() else (low, middle)
            if one_by_one:
                low = next(i for i in range(len(x)) if not model(x[i : i + 1]).isfinite().all())
            found.clear()
            model(x[low : low + 1])
        for hook in hooks if not hooks_stay else ():
            hook.remove()
        return (found[-1 if outermost else 0] if found else ""), low

    return search


class Log(nn.Module):
    """log |x|: -inf at 0."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x.abs().log()


class ByNorm(nn.Module):
    """x / |x|: 0 / 0 for a row of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width)."""
        return x / x.norm(dim=1, keepdim=True)


class Half(nn.Module):
    """x in FP16, squared: above 65,504 it is inf."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return (x.half() ** 2).float()


WIDTH = 8
SEARCHES = (
    ("a zero before a logarithm", Log, 0.0, 100, 1),
    ("a row of zeros before a norm", ByNorm, 0.0, 256, 0),
    ("a large value in FP16", Half, 1e5, 33, 2),
    ("a bad sample in the data", nn.ReLU, math.nan, 64, 1),
)
"""(name, module, value of the bad sample, number of samples, block that the module is in)."""


def _searched(module: type[nn.Module], value: float, samples: int, block: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(samples)
    x = torch.rand(samples, WIDTH) + 0.5
    x[samples // 3] = value
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Identity()) for _ in range(4)]
    for each in blocks:
        nn.init.eye_(each[0].weight)
    blocks[block][2] = module()
    return nn.Sequential(*blocks), x


def observe_locate(answer: Answer) -> dict[str, Any]:
    """Return what the answer finds, whether it needs few forward passes, and how many hooks it leaves behind."""
    return on_ranks(_locate_on_rank, 1, answer, when="in locate")[0]


def _locate_on_rank(answer: Answer) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, module, value, samples, block in SEARCHES:
        model, x = _searched(module, value, samples, block)
        passes: list[int] = []
        count = model.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        found = answer(model, x.clone())
        count.remove()
        where, sample = found if isinstance(found, tuple) and len(found) == 2 else (repr(found)[:40], -1)
        seen |= {
            f"{name}: module": str(where),
            f"{name}: sample": int(sample),
            f"{name}: at most {math.ceil(math.log2(samples)) + 3} forward passes": len(passes)
            <= math.ceil(math.log2(samples)) + 3,
            f"{name}: hooks left on modules": sum(
                len(hooks)
                for m in model.modules()
                for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)
            ),
        }
    return seen


# -- 10.3: which rank went wrong, from Flight Recorder's entries

Entry = dict[str, Any]


def post_mortem(dumps: dict[int, list[Entry]]) -> tuple[int, str, int, str] | None:
    """(rank, kind, number, line) of the first call that isn't the same on all ranks; None if there is none."""
    calls = {rank: {e["collective_seq_id"]: e for e in entries} for rank, entries in dumps.items()}
    newest = {rank: max(numbered) for rank, numbered in calls.items()}
    for number in range(1, max(newest.values()) + 1):
        here = {rank: numbered[number] for rank, numbered in calls.items() if number in numbered}
        if not here:  # overwritten in every ring
            continue
        usual = Counter(map(_what, here.values())).most_common(1)[0][0]
        for rank in dumps:
            if newest[rank] < number:
                return rank, "missing", number, _line(next(e for e in here.values() if _what(e) == usual))
            if rank in here and _what(here[rank]) != usual:
                same = _what(here[rank])[0] == usual[0]
                return rank, "other size" if same else "other collective", number, _line(here[rank])
    return None


def _what(entry: Entry) -> tuple[str, str]:
    return entry["profiling_name"], str(entry["input_sizes"])


def _line(entry: Entry) -> str:
    frame = next(f for f in entry["frames"] if "site-packages" not in f["filename"])
    return f"{frame['filename']}:{frame['line']}"


def _by_position(dumps: dict[int, list[Entry]]) -> Any:
    first = min(e["collective_seq_id"] for entries in dumps.values() for e in entries)
    moved = {r: [e | {"collective_seq_id": first + i} for i, e in enumerate(d)] for r, d in dumps.items()}
    return post_mortem(moved)


def _names_only(dumps: dict[int, list[Entry]]) -> Any:
    return post_mortem({r: [e | {"input_sizes": []} for e in d] for r, d in dumps.items()})


def _torchs_line(dumps: dict[int, list[Entry]]) -> Any:
    return post_mortem({r: [e | {"frames": [{**e["frames"][0], "filename": "distributed_c10d.py"}]} for e in d]
                        for r, d in dumps.items()})  # fmt: skip


def _who_waits(dumps: dict[int, list[Entry]]) -> Any:
    found = post_mortem(dumps)
    waiting = [r for r, d in dumps.items() if any(e["state"] == "started" for e in d)]
    return found and (waiting[0] if waiting else found[0], *found[1:])


RING = 10  # entries that a rank keeps
LOSS, GRADIENT, WEIGHTS, METRIC = ((1,), 21), ((2048,), 24), ((4096,), 31), ((1,), 38)
"""(size, line of train.py) of this program's calls."""
Called = tuple[str, tuple[tuple[int, ...], int]]
STEP: list[Called] = [("all_reduce", LOSS), ("all_reduce", GRADIENT)]
CASES: dict[str, tuple[list[list[Called]], int]] = {
    "a healthy step": ([[*STEP * 3]] * 3, 6),
    "one rank stops early": ([[*STEP * 4], [*STEP * 4], [*STEP * 3], [*STEP * 4]], 6),
    "one rank broadcasts": (
        [[*STEP * 3, ("all_reduce", LOSS)], [*STEP * 3, ("broadcast", WEIGHTS)], [*STEP * 3, ("all_reduce", LOSS)]],
        6,
    ),
    "one rank skips a call": ([[*STEP * 3, *STEP], [*STEP * 3, *STEP], [*STEP * 3, *STEP[1:], *STEP]], 6),
    "rings that have wrapped": (
        [[*STEP * 9], [*STEP * 8, ("all_reduce", LOSS)], [*STEP * 9], [*STEP * 9]],
        17,
    ),
    "a smaller last batch": (
        [[*STEP * 6, ("all_gather", ((32,), 38))], [*STEP * 6, ("all_gather", ((32,), 38))],
         [*STEP * 6, ("all_gather", ((20,), 38))], [*STEP * 6, ("all_gather", ((32,), 38))]],
        12,
    ),
}  # fmt: skip
"""{job: (calls of each rank, number of the last call that completed)}."""


def dumps_of(job: str) -> dict[int, list[Entry]]:
    """Return made-up entries in the format of PyTorch's NCCL dumps, with the fields that this exercise needs."""
    ranks, completed = CASES[job]
    return {rank: _entries(calls, completed, rank) for rank, calls in enumerate(ranks)}


def _entries(calls: list[Called], completed: int, rank: int) -> list[Entry]:
    entries = []
    for number, (name, (size, line)) in enumerate(calls, start=1):
        state = "completed" if number <= completed else "started" if number == completed + 1 else "scheduled"
        entries.append({
            "collective_seq_id": number,
            "process_group": ("0", "default_pg"),
            "profiling_name": f"nccl:{name}",
            "input_sizes": [list(size)],
            "state": state,
            "time_created_ns": 1_760_000_000_000_000_000 + 1_000_000 * (10 * number + rank),
            "frames": [
                {"name": name, "filename": "/opt/site-packages/torch/distributed/distributed_c10d.py", "line": 3000},
                {"name": "train", "filename": "train.py", "line": line},
                {"name": "<module>", "filename": "train.py", "line": 50},
            ],
        })  # fmt: skip
    return entries[-RING:]


def observe_post_mortem(answer: Answer) -> dict[str, Any]:
    """Return the answer for every job."""
    found = on_ranks(_mortem_on_rank, 1, answer, when="in post_mortem")[0]
    return {f"{job}: (rank, kind, number, line)": value for job, value in found.items()}


def _mortem_on_rank(answer: Answer) -> dict[str, str]:
    return {job: str(answer(copy.deepcopy(dumps_of(job)))) for job in CASES}


EXERCISES = {
    "10.1": Exercise(
        "10.1",
        30,
        "a loop that ends on every split",
        observe_train,
        train,
        (
            KnownMistake(
                "all ranks stop with the one that has the fewest batches",
                "go on until no rank has a batch left; a rank without one takes part with 0 samples",
                _train_with(fewest=True),
            ),
            KnownMistake(
                "you average the ranks' means, so a sample in a small batch counts more",
                "divide the sum of all gradients by the number of all samples of the step",
                _train_with(mean_of_means=True),
            ),
            KnownMistake(
                "a rank without a batch hands in its gradient of the step before once more",
                "call zero_grad() in every step, also without a batch",
                _train_with(stale=True),
            ),
            KnownMistake(
                "rank 0 logs the loss of its own samples only",
                "all ranks sum up losses and samples, and then rank 0 logs",
                _train_with(own_loss=True),
            ),
        ),
    ),
    "10.2": Exercise(
        "10.2",
        25,
        "find the module and the sample where NaN starts",
        observe_locate,
        locate,
        (
            KnownMistake(
                "you name a module whose input was bad already",
                "a module is to blame if its inputs are finite and its output isn't",
                _locate_with(outputs_only=True),
            ),
            KnownMistake(
                "you try the samples one by one", "try one half, and go on with the half that is bad",
                _locate_with(one_by_one=True),
            ),
            KnownMistake("your hooks stay on the model", "call remove() on each handle", _locate_with(hooks_stay=True)),
            KnownMistake(
                "you name a module that contains the one to blame",
                "hooks run when a module ends: inner ones come first",
                _locate_with(outermost=True),
            ),
        ),
    ),
    "10.3": Exercise(
        "10.3",
        30,
        "which rank went wrong, from Flight Recorder's entries",
        observe_post_mortem,
        post_mortem,
        (
            KnownMistake(
                "you compare entries by their place in the list",
                "a ring may hold fewer or older calls: compare by collective_seq_id",
                _by_position,
            ),
            KnownMistake("you compare names and not sizes", "input_sizes must be the same as well", _names_only),
            KnownMistake(
                "the line is torch's own", "take the first frame that isn't in site-packages", _torchs_line
            ),
            KnownMistake(
                "you name a rank that waits", "the rank at fault is the one that differs from the majority", _who_waits
            ),
        ),
    ),
}  # fmt: skip
