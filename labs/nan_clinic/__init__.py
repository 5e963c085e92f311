"""The loss is NaN: where did it begin?

    python -m labs.nan_clinic                                          # launches its own ranks
    python -m labs.nan_clinic --seeds 4                                # every planted cause, four times
    torchrun --nproc-per-node 2 -m labs.nan_clinic

About 12 s on 2 CPU cores. Small trainings with one planted cause each: hooks name the first module and step whose
numbers are not finite, bisection finds the sample, a few trials tell the cause, and its cure is applied.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.kit._compat import tree_leaves
from labs.kit.errors import did_you_mean, require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.nan_clinic import numbers
from labs.nan_clinic.numbers import BATCH, CAUSES, HEALTHY, Case, Seen, Signs, Training

SMOKE = {
    "causes": ("bad sample", "root of zero", "learning rate", "healthy"),
}
NO_INPUT_GRADIENT = "Full backward hook"  # torch warns of a first layer, whose inputs need no gradient: harmless
HOPELESS = 8  # steps in a row that a scaler skips, until one stops looking


@dataclass(frozen=True)
class Config:
    """Which causes, and how often."""

    causes: tuple[str, ...] = ()
    """Of the patients; by default all."""
    seeds: int = 1
    """Patients of each cause. A seed draws module, step and sample."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """Four causes."""

    def __post_init__(self) -> None:
        for wrong in [name for name in self.causes if name not in CAUSES | HEALTHY]:
            hint = did_you_mean(wrong, CAUSES | HEALTHY)
            require(False, f"causes: there is no {wrong!r:.60}: {hint}there are {', '.join(CAUSES | HEALTHY)}")
        require(1 <= self.seeds <= 1000, f"seeds must be from 1 to 1000, not {self.seeds}")
        require(0 <= self.seed < 2**31, f"seed must be from 0 to 2147483647, not {self.seed}")


# What a learner takes home

Note = tuple[str, str, Tensor]
"""Module; "output", "gradient" (of its inputs) or, say, "gradient of weight"; and a bool on the device: whether it was
the one that made it bad."""


@contextmanager
def first_bad(**watched: nn.Module) -> Iterator[list[Note]]:
    """Inside: notes, in order of time, of whether a module made numbers that are not finite out of finite ones.

    `watched`: first_bad(model=model, loss=criterion). Clear the list between steps, and ask `culprit` after one. A
    module with in-place operations may refuse backward hooks; a float mask with -inf counts as a bad input.
    """
    notes: list[Note] = []
    fine: dict[str, Tensor] = {}  # whether the gradient that came to a module was finite
    hooks = []
    for name, module in nn.ModuleDict(watched).named_modules():

        def forward(_: nn.Module, args: Any, kwargs: Any, gave: Any, name: str = name) -> None:
            notes.append((name, "output", all_finite((args, kwargs)) & ~all_finite(gave)))

        def before(_: nn.Module, came: Any, name: str = name) -> None:
            fine[name] = all_finite(came)

        def backward(_: nn.Module, gave: Any, came: Any, name: str = name) -> None:  # from the outputs to the inputs
            notes.append((name, "gradient", all_finite(came) & ~all_finite(gave)))

        hooks += [
            module.register_forward_hook(forward, with_kwargs=True),
            module.register_full_backward_pre_hook(before),
            module.register_full_backward_hook(backward),
        ]
        for of, parameter in module.named_parameters(recurse=False):

            def summed(p: Tensor, name: str = name, of: str = of) -> None:  # sums over the batch: may overflow alone
                notes.append((name, f"gradient of {of}", fine.get(name, torch.tensor(True)) & ~all_finite(p.grad)))

            if parameter.requires_grad:
                hooks.append(parameter.register_post_accumulate_grad_hook(summed))
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def all_finite(nested: Any) -> Tensor:
    """Whether all tensors in it are finite; a bool on the device of the first, which nobody waits for here.

    Integers always are: the lengths of a PackedSequence stay on the CPU, wherever its data are.
    """
    tensors = [t for t in tree_leaves(nested) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    found = [(t.coalesce().values() if t.is_sparse else t).isfinite().all() for t in tensors]
    if not found:
        return torch.tensor(True)
    device = next((f.device for f in found if f.device.type != "cpu"), found[0].device)  # of a GPU, if any is there
    return torch.stack([f.to(device, non_blocking=True) for f in found]).all()


def culprit(notes: list[Note]) -> tuple[str, str]:
    """(module, what) of the first note that is bad, ("", "") if none is. Waits for the device."""
    if not notes:
        return "", ""
    device = notes[0][2].device
    bad = torch.stack([made.to(device) for _, _, made in notes]).tolist()  # one wait for all
    return next(((name, what) for (name, what, _), is_bad in zip(notes, bad, strict=True) if is_bad), ("", ""))


def bad_sample(is_bad: Callable[[int, int], bool], n: int) -> tuple[int, int]:
    """(index, trials) of the first bad one of `n` samples; `is_bad(a, b)` tries samples a to b - 1.

    At least one of them must be bad. Each trial halves what is left: at most ceil(log2 n) of them.
    """
    low, high, trials = 0, n, 0
    while high - low > 1:
        middle, trials = (low + high) // 2, trials + 1
        low, high = (low, middle) if is_bad(low, middle) else (middle, high)
    return low, trials


def replica_check(tensors: Mapping[Any, Tensor]) -> list[tuple[Any, int]]:
    """(name, rank) of every tensor that is not, bit for bit, what it is on rank 0. All ranks must call it together.

    One 64-bit number per tensor and rank is exchanged. Rank 0 may be the wrong one: on three or more ranks the majority
    tells (is every other rank named, it is rank 0), on two nobody can.
    """
    hashes = torch.stack([bit_hash(t) for t in tensors.values()])
    of_ranks = [torch.empty_like(hashes) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, hashes)  # every rank waits here for the last
    differs = torch.stack(of_ranks) != of_ranks[0]
    names = list(tensors)
    return [(names[k], rank) for rank, k in differs.nonzero().tolist()]


def bit_hash(tensor: Tensor) -> Tensor:
    """64 bits, int64 on the tensor's device, of its bits and their places: each word times an odd number of its own.

    Modulo 2^64 an odd factor loses nothing: one changed word always changes the sum, two cancel with a chance of 2^-32
    at most. In a plain sum +1 and -1 cancel; torch.hash_tensor takes XOR, and gives 4 zeros and 4 ones the same number.
    """
    words = tensor.detach().contiguous().flatten()
    words = words.view({1: torch.int8, 2: torch.int16}.get(words.itemsize, torch.int32))
    odd = odd_numbers(words.device)
    total = odd.new_zeros(())
    for part in words.split(len(odd)):  # what a part makes stays in the cache
        total = total * odd[0] + (part * odd[: len(part)]).sum()
    return total


@functools.cache
def odd_numbers(device: torch.device) -> Tensor:
    """Random odd int64, the same on all ranks: 2^16 on a CPU, more on a GPU, whose kernels should be few."""
    n = 2**16 if device.type == "cpu" else 2**22
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (n,), generator=draw) * 2 + 1).to(device)


def predict_trials(n: int) -> int:
    """Trials of a bisection of `n` samples: ceil(log2 n); for numbers between powers of two sometimes one less."""
    return math.ceil(math.log2(n))


# Patients


@dataclass
class Found:
    """What was found in one patient."""

    signs: Signs
    module: str = ""
    step: int | None = None
    """The first one with numbers that are not finite, or that the scaler skipped with all after it."""
    sample: int | None = None
    trials: int = 0
    tried: int = 0
    """Samples that were bisected."""
    anomaly: str = ""
    """What torch's anomaly detection names: an autograd function; "" for nothing."""
    anomaly_in: str = ""
    """The class whose `forward` it points to."""
    seen: list[Seen] = field(default_factory=list)

    @property
    def named(self) -> str:
        """The cause, by the signs alone."""
        return numbers.diagnose(self.signs)


def examine(case: Case, device: torch.device) -> Found:
    """Train with hooks until numbers are not finite and stay so; then try that step again in several ways."""
    training, in_a_row = Training(case, case.cause.plan, device), 0
    start: tuple[int, dict[str, Tensor], str, str] | None = None  # of the steps in a row that went wrong
    seen: list[Seen] = []
    with first_bad(model=training.model, loss=training.loss) as notes:
        for number in range(len(training.batches)):
            weights = training.state()
            notes.clear()
            seen.append(training.step(number))
            if math.isfinite(seen[-1].loss) and math.isfinite(seen[-1].norm):
                start, in_a_row = None, 0
                continue
            in_a_row += 1
            start = start or (number, weights, *culprit(notes))
            if not training.scaler.is_enabled() or in_a_row == HOPELESS:
                break
    if start is None or (training.scaler.is_enabled() and in_a_row < HOPELESS):
        return Found(Signs("nowhere", clip_ratio=clip_ratio(training, seen)), seen=seen)
    found = try_again(training, start, seen)
    if training.scaler.is_enabled():  # nobody sees a NaN: it goes on
        found.seen += [training.step(number) for number in range(len(seen), len(training.batches))]
    return found


def try_again(training: Training, start: tuple[int, dict[str, Tensor], str, str], seen: list[Seen]) -> Found:
    """From the weights before the bad step: its batch in parts, another batch, FP32, anomaly detection."""
    number, weights, module, what = start
    batch, precision = training.batches[number], training.plan.precision

    def is_bad(low: int, high: int, other: int | None = None, in_format: str = precision) -> bool:
        chosen = batch if other is None else training.batches[other]
        part = tuple(t[low:high] for t in chosen)
        return not all(map(math.isfinite, training.gradient(weights, part, in_format)))

    n = len(batch[0])
    again = is_bad(0, n)
    other_batch = is_bad(0, BATCH, other=number - 1 if number else number + 1)
    sample, trials = bad_sample(is_bad, n) if again and not other_batch else (None, 0)
    x, shown, _ = (t if sample is None else t[sample : sample + 1] for t in batch)
    where = what.partition(" ")[0] if x.isfinite().all() else "input"  # "gradient of weight" is a gradient
    signs = Signs(
        where=where,
        again=again,
        other_batch=other_batch,
        in_fp32=is_bad(0, n, in_format="fp32"),
        rising=numbers.rising([s.loss for s in seen[:number]]),
        samples=n,
        row_masked=sample is not None and not shown.any(),
        skipped=sum(s.skipped for s in seen[-HOPELESS:]) / HOPELESS,
    )
    anomaly, anomaly_in = anomaly_says(lambda: training.gradient(weights, batch, precision))
    return Found(signs, "" if where == "input" else module, number, sample, trials, n, anomaly, anomaly_in, seen[:])


def clip_ratio(training: Training, seen: list[Seen]) -> float:
    """The last finite norm that clipping saw in a full batch over that of its gradient in FP32, at the last weights."""
    number = max(k for k, s in enumerate(seen[: numbers.STEPS]) if math.isfinite(s.norm))
    _, norm = training.gradient(training.state(), training.batches[number], "fp32")
    return seen[number].norm / norm


def anomaly_says(work: Callable[[], object]) -> tuple[str, str]:
    """(autograd function, class whose forward called it) that torch.autograd.detect_anomaly names; "" for nothing."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                work()
        except RuntimeError as e:
            function = re.search(r"Function '(\w+)' returned nan", str(e))
            traceback = "\n".join(str(w.message) for w in warned)
            lines = re.findall(r'File "(.+)", line (\d+), in forward', traceback)
            return (function[1] if function else str(e)), numbers.class_at(lines[-1]) if lines else ""
    return "", ""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each patient is examined on one rank, and trained again with the cure of what was named."""
    names = config.causes or (*CAUSES, *HEALTHY)
    if why := numbers.fp16_impossible(rank.device):
        yield rank.record("not_possible", "1", 1.0, precision="fp16", why=why)
        names = [name for name in names if not (CAUSES | HEALTHY)[name].plan.precision.startswith("fp16")]
    cases = [Case.draw(name, config.seed + k) for k in range(config.seeds) for name in names]
    mine: list[list[Record]] = []
    for done, case in enumerate(cases[rank.rank :: rank.world_size], 1):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"std\(\)")  # of one sample: the very thing that is planted
            warnings.filterwarnings("ignore", NO_INPUT_GRADIENT)
            mine.append(list(of_patient(case, rank)))
        rank.progress(done * rank.world_size, len(cases), case.cause.name)
    for of_rank in rank.gather(mine):
        for records in of_rank:
            yield from records


def of_patient(case: Case, rank: Rank) -> Iterator[Record]:
    """What is planted and what was found, of one patient."""
    found = examine(case, rank.device)
    name, named = case.cause.name, found.named
    about = {"planted": name, "of_seed": case.seed}
    truth = "healthy" if name in HEALTHY else name
    yield rank.record("cause_right", "1", float(named == truth), named=named, where=found.signs.where, **about)
    if found.step is not None:
        yield rank.record(
            "bad_step",
            "step",
            found.step,
            module=found.module,
            planted_module=case.module,
            anomaly=found.anomaly,
            anomaly_in=found.anomaly_in,
            **about,
        )
        if name in CAUSES and name != "learning rate":  # its step is where the rise began, not where it ended
            yield rank.record("planted_step", "step", case.step, kind="modelled", **about)
        if case.module:
            yield rank.record("module_right", "1", float(found.module == case.module), **about)
    if case.cause.planted and found.sample is not None:
        yield rank.record("sample_right", "1", float(found.sample == case.sample), sample=found.sample, **about)
        yield rank.record("trials", "trials", found.trials, of=found.tried, **about)
        yield rank.record("predicted_trials", "trials", predict_trials(found.tried), kind="modelled", **about)
    if found.step is None:
        yield rank.record("clip_ratio", "1", found.signs.clip_ratio, **about)
    for metric, unit, series in (
        ("loss", "nats", [s.loss for s in found.seen]),
        ("gradient_norm", "1", [s.norm for s in found.seen]),
    ):
        finite = [(k, v) for k, v in enumerate(series) if math.isfinite(v)]
        if finite:
            yield rank.record(metric, unit, [v for _, v in finite], steps=[k for k, _ in finite], **about)
    losses = [s.loss for s in numbers.train(case, numbers.cured(case.cause.plan, named), rank.device)]
    well = all(map(math.isfinite, losses))
    yield rank.record("cure_works", "1", float(well and falls(losses)), finite=well, cure_of=named, **about)
    if well:
        yield rank.record("cured_loss", "nats", losses, **about)


def falls(losses: list[float]) -> bool:
    """Whether the last full batches have clearly less loss than the first."""
    return statistics.median(losses[-numbers.LAST - 1 : -1]) < 0.85 * losses[0]


# What a learner reads


def steps_right(run: Records) -> list[bool]:
    """For each patient with a planted step whether the step that was found is that one."""
    return [
        run.one("bad_step", planted=r.case["planted"], of_seed=r.case["of_seed"]).value == r.value
        for r in run.where("planted_step")
        if "planted" in r.case
    ]


def share(flags: Iterable[float]) -> str:
    """For example "8 of 9"."""
    flags = list(flags)
    return f"{sum(map(bool, flags))} of {len(flags)}"


def answer(run: Records) -> Iterator[str]:
    """How often cause, module, step and sample were named right."""
    values = {m: [r.value for r in run.where(m)] for m in ("cause_right", "module_right", "sample_right", "cure_works")}
    for r in run.where("not_possible"):
        yield f"FP16 is not possible here, and its patients are left out: {r.case['why']}."
    if values["cause_right"]:
        yield (
            f"The cause is named right in {share(values['cause_right'])} trainings, healthy look-alikes included; "
            f"the first bad module in {share(values['module_right'])}, the step in {share(steps_right(run))}, the "
            f"sample in {share(values['sample_right'])}. After the cure of what was named "
            f"{share(values['cure_works'])} learn with finite losses."
        )
        for r in run.where("cause_right"):
            if not r.value:
                yield f"NOT right: {r.case['planted']!r} of seed {r.case['of_seed']} was called {r.case['named']!r}."
