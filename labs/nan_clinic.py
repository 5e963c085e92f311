"""The loss is NaN, or the replicas drift apart: where did it begin?

    python -m labs.nan_clinic                                          # launches its own ranks
    python -m labs.nan_clinic --parts patients --seeds 4               # every planted cause, four times
    torchrun --nproc-per-node 2 -m labs.nan_clinic --parts drift price --every 1 10 100 1000

About 30 s on 2 CPU cores. Small trainings with one planted cause each: hooks name the first module and step whose
numbers are not finite, bisection finds the sample, a few trials tell the cause, and its cure is applied. What hooks and
torch's anomaly detection cost. Then replicas that drift apart on two ranks: found by a hash of their bits after every k
steps; what that costs, and what drift costs that nobody finds.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from labs.kit import cli, measure
from labs.kit.errors import did_you_mean, require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.faults import drift, numbers
from labs.parts.faults.drift import FAULTS, Replica
from labs.parts.faults.numbers import BATCH, CAUSES, HEALTHY, Case, Seen, Signs, Training

Part = Literal["patients", "finders", "drift", "damage", "price"]
SMOKE = {
    "parts": ("patients", "drift"),
    "causes": ("bad sample", "root of zero", "learning rate", "healthy"),
    "faults": ("none", "other weights"),
    "every": (1, 10),
}
SHARES = {"finders": 0.2, "damage": 0.45, "price": 0.35}  # of the seconds
DRIFT_STEPS, MOST_DRIFT_STEPS = 24, 100  # compared after each of the first, then after every k up to the last
DAMAGING = ("other weights", "optimizer state", "skipped step", "never averaged")
DAMAGE_AT, DAMAGE_STEPS = 30, 90  # the step of the fault, of so many
NO_INPUT_GRADIENT = "Full backward hook"  # torch warns of a first layer, whose inputs need no gradient: harmless
HOPELESS = 8  # steps in a row that a scaler skips, until one stops looking


@dataclass(frozen=True)
class Config:
    """Which causes, how often, and how long measurements take."""

    parts: tuple[Part, ...] = ("patients", "finders", "drift", "damage", "price")
    """patients: a cause for each NaN; finders: what hooks cost; drift: replicas; damage: what drift costs; price: what
    checking for it costs."""
    causes: tuple[str, ...] = ()
    """Of the patients; by default all."""
    faults: tuple[str, ...] = ()
    """That let replicas drift; by default all."""
    seeds: int = 1
    """Patients of each cause, and trainings of each fault in the part drift. A seed draws module, step and sample."""
    every: tuple[int, ...] = (1, 10, 100)
    """k: replicas are compared after so many steps."""
    width: int = 256
    """Hidden features of the model whose checks are timed: 207 * width + 10 parameters."""
    check_mb: tuple[float, ...] = (1.0, 8.0, 32.0)
    """Further sizes of what is checked, in MB, one tensor each."""
    seconds: float = 14.0
    """Time for finders, damage and price together, in s. A slower machine has fewer rounds and wider intervals."""
    rounds: int | None = None
    """Rounds of each measurement, and trainings of each fault in the part damage; by default as many as fit, at least
    6."""
    seed: int = 0
    """The first seed."""
    smoke: bool = False
    """Two rounds of each measurement."""

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, f"parts: name at least one of {', '.join(PARTS)}")
        for name, asked, known in (("causes", self.causes, CAUSES | HEALTHY), ("faults", self.faults, FAULTS)):
            for wrong in [a for a in asked if a not in known]:
                hint = did_you_mean(wrong, known)
                require(False, f"{name}: there is no {wrong!r:.60}: {hint}there are {', '.join(known)}")
        require(1 <= self.seeds <= 1000, f"seeds must be from 1 to 1000, not {self.seeds}")
        ascending = list(self.every) == sorted(set(self.every)) and len(self.every) > 0
        require(ascending and self.every[0] >= 1, f"every must be rising numbers of steps, not {self.every}")
        require(self.every[-1] <= 10_000, f"every must be at most 10000 steps, not {self.every[-1]}")
        require(8 <= self.width <= 16_384, f"width must be from 8 to 16384, not {self.width}")
        require(
            all(0.01 <= mb <= 100_000 for mb in self.check_mb),
            f"check_mb must be from 0.01 to 100000 MB, not {self.check_mb}",
        )
        require(0 <= self.seed < 2**31, f"seed must be from 0 to 2147483647, not {self.seed}")
        measure.require_budget(self.seconds, self.rounds)

    def rounds_for(self, part: str, rank: Rank) -> int | measure.Budget:
        """Of one part: its share of the seconds."""
        mine = sum(SHARES.get(p, 0.0) for p in self.parts)
        return measure.rounds_of(self, rank.slowest, SHARES[part] / mine)


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


def predict(start: int, every: int) -> int:
    """After how many steps a drift is found that is there after `start` steps: the next multiple of `every`."""
    return -(-start // every) * every


def predict_trials(n: int) -> int:
    """Trials of a bisection of `n` samples: ceil(log2 n); for numbers between powers of two sometimes one less."""
    return math.ceil(math.log2(n))


def predict_check_s(nbytes: float, bytes_per_s: float, latency_s: float) -> float:
    """Seconds of a check by a model: all bytes are read once, then the hashes are gathered. It leaves out computing."""
    return nbytes / bytes_per_s + latency_s


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The parts that were asked for, in the order of PARTS."""
    for part, do in PARTS.items():
        if part in config.parts and (rank.world_size > 1 or part in ("patients", "finders")):
            yield from do(config, rank)


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


def patients(config: Config, rank: Rank) -> Iterator[Record]:
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


# What finding costs


def finders(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of a healthy step as it is, with first_bad and its reading, and under detect_anomaly, in turn."""
    case = Case.draw("healthy", config.seed)
    trained = {name: Training(case, case.cause.plan, rank.device) for name in ("plain", "hooks", "anomaly")}
    with first_bad(model=trained["hooks"].model, loss=trained["hooks"].loss) as notes:

        def hooked() -> None:
            notes.clear()
            trained["hooks"].step(0)
            culprit(notes)

        def anomalous() -> None:
            with torch.autograd.detect_anomaly():
                trained["anomaly"].step(0)

        steps = {"plain": lambda: trained["plain"].step(0), "hooks": hooked, "anomaly": anomalous}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f"Anomaly Detection|{NO_INPUT_GRADIENT}")
            for step in steps.values():
                measure.time_steps(step, 3, rank.device)
            rounds = config.rounds_for("finders", rank)
            timed = measure.interleave(steps, rounds, rank.device, inner=5, between=rank.barrier)
    for name, samples in timed.items():
        yield rank.record("finder_step_s", "s", rank.slowest(samples), finder=name)


# Replicas


def drifts(config: Config, rank: Rank) -> Iterator[Record]:
    """Each fault once per seed: after how many steps parameters, buffers and optimizer differ, and what a check says.

    One training serves all k: replicas are compared after each step, and what is seen after every k is read off.
    """
    names = config.faults or [f for f in FAULTS if f != "never averaged"]
    cases = [(name, config.seed + k) for k in range(config.seeds) for name in names]
    for done, (name, seed) in enumerate(cases, 1):
        at, bad_rank = drift.draw(name, seed, rank.world_size, DRIFT_STEPS)
        replica = Replica(name, seed, rank.device, at, bad_rank)
        about = {"fault": name, "of_seed": seed}
        yield rank.record("planted_step", "step", at, kind="modelled", of_rank=bad_rank, **about)
        found: dict[str, list[tuple[int, str, int]]] = {kind: [] for kind in KINDS}
        really: dict[str, list[int]] = {kind: [] for kind in KINDS}
        pairs: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}  # named alike, differs
        compared: list[int] = []
        for step in range(1, 1 + max(DRIFT_STEPS, *(k for k in (1, *config.every) if k <= MOST_DRIFT_STEPS))):
            if step > DRIFT_STEPS and not any(really.values()):
                break  # nothing differs: no k would find anything
            replica.step()
            if step > DRIFT_STEPS and all(step % k for k in config.every if k > 1):
                continue
            tensors = {(kind, name): t for kind in KINDS for name, t in replica.tensors(kind).items()}
            said, differ = replica_check(tensors), drift.really_differ(tensors)
            compared.append(step)
            for kind in KINDS:
                found[kind] += [(step, name, of_rank) for (of, name), of_rank in said if of == kind][:1]
                names_of = {name for of, name in differ if of == kind}
                really[kind] += [step] if names_of else []
                if any(of == kind for of, _ in tensors):  # a comparison of nothing would always agree
                    alike = {name for (of, name), _ in said if of == kind} == names_of
                    pairs[kind].append((float(alike), float(bool(names_of))))
        for kind in KINDS:
            expected = kind in FAULTS[name].differ
            if kind not in FAULTS[name].may:
                yield rank.record("differ_right", "1", float(bool(really[kind]) == expected), kind_of=kind, **about)
            if pairs[kind]:
                alike, differed = zip(*pairs[kind], strict=True)
                yield rank.record("check_right", "1", alike, kind_of=kind, **about)
                yield rank.record("differed", "1", differed, kind_of=kind, **about)
            if found[kind]:
                every = config.every if lasts(really[kind], compared) else ()  # what goes again, a check may miss
                yield from after_steps(every, rank, found[kind], really[kind][0], kind, about)
        rank.progress(done, len(cases), name)


KINDS = ("parameters", "buffers", "optimizer")


def lasts(differ: Sequence[int], compared: Sequence[int]) -> bool:
    """Whether from the first step of `differ` on replicas differed in every comparison; both are numbers of steps."""
    return list(differ) == [step for step in compared if step >= differ[0]]


def after_steps(
    every: Sequence[int], rank: Rank, found: list[tuple[int, str, int]], start: int, kind: str, about: dict
) -> Iterator[Record]:
    """After how many steps from the start a check every k steps finds it, for the k that these steps are enough for."""
    _, name, of_rank = found[0]
    yield rank.record("differ_step", "steps", start, kind_of=kind, name=name, of_rank=of_rank, **about)
    for k in every:
        seen = [step for step, *_ in found if step % k == 0]
        if seen:
            yield rank.record("found_step", "steps", seen[0], every=k, kind_of=kind, **about)
            yield rank.record(
                "predicted_found_step", "steps", predict(start, k), kind="modelled", every=k, kind_of=kind, **about
            )


def damage(config: Config, rank: Rank) -> Iterator[Record]:
    """Test accuracy of each rank's replica after trainings with a fault that nobody found, and of healthy ones.

    Trainings of one seed have the same weights at the start and the same batches: they are compared pair by pair.
    """
    names = ("none", *(f for f in DAMAGING if not config.faults or f in config.faults))
    judged: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    rounds = config.rounds_for("damage", rank)
    for seed in measure.within(range(config.seed, config.seed + 1000), rounds):
        for name in names:
            replica = Replica(name, seed, rank.device, DAMAGE_AT, rank.world_size - 1)
            for _ in range(DAMAGE_STEPS):
                replica.step()
            judged[name].append(rank.gather(replica.judged()))
        rank.progress(len(judged["none"]), max(6, len(judged["none"])), f"seed {seed}")
    for name in names:
        for of_rank, found in enumerate(zip(*judged[name], strict=True)):
            accuracy, loss = zip(*found, strict=True)
            yield rank.record("accuracy", "1", accuracy, fault=name, of_rank=of_rank)
            yield rank.record("test_loss", "nats", loss, fault=name, of_rank=of_rank)


def price(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of steps with a check after every k; then of the pieces of a check, for this model and larger ones."""
    replicas = {k: Replica("none", config.seed, rank.device, width=config.width) for k in (0, *config.every)}
    block = 20 if config.smoke else config.every[-1]

    def steps(k: int) -> None:
        replica = replicas[k]
        for _ in range(block):
            replica.step()
            if k and replica.done % k == 0 and replica_check(replica.tensors("parameters")):
                raise RuntimeError("healthy replicas differ")

    for k in replicas:
        steps(k)
    timed = measure.interleave(
        {k: functools.partial(steps, k) for k in replicas},
        config.rounds_for("price", rank),
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, "steps with a check every k"),
    )
    checked = {"model": replicas[0].tensors("parameters")}
    checked |= {f"{mb:g} MB": {"all": torch.ones(round(mb * 250_000), device=rank.device)} for mb in config.check_mb}
    took = {name: pieces(tensors, config, rank) for name, tensors in checked.items()}
    latency_s = min(statistics.median(of["gather_s"]) for of in took.values())  # some numbers each: the rest is noise
    model_s = {}
    for name, tensors in checked.items():
        nbytes = sum(t.nbytes for t in tensors.values())
        for metric, samples in took[name].items():
            yield rank.record(metric, "s", samples, of=name, bytes=nbytes, tensors=len(tensors))
        model_s[name] = predict_check_s(nbytes, nbytes / statistics.median(took[name]["read_s"]), latency_s)
        yield rank.record("predicted_check_s", "s", model_s[name], kind="modelled", of=name, bytes=nbytes)
    for k, samples in timed.items():
        yield rank.record("step_s", "s", [s / block for s in rank.slowest(samples)], every=k)  # 0: never
        if k:
            yield rank.record("predicted_added_s", "s", model_s["model"] / k, kind="modelled", every=k)


def pieces(tensors: Mapping[str, Tensor], config: Config, rank: Rank) -> dict[str, list[float]]:
    """Seconds of a check; of its hashes alone, of reading as many bytes once, of gathering as many hashes."""
    nbytes = sum(t.nbytes for t in tensors.values())
    flat = torch.ones(nbytes // 4, device=rank.device)
    hashes = torch.zeros(len(tensors), dtype=torch.int64, device=rank.device)
    of_ranks = [torch.empty_like(hashes) for _ in range(rank.world_size)]
    parts: dict[str, Callable[[], object]] = {
        "check_s": lambda: replica_check(tensors),
        "hash_s": lambda: torch.stack([bit_hash(t) for t in tensors.values()]),
        "read_s": lambda: flat.sum().item(),
        "gather_s": lambda: dist.all_gather(of_ranks, hashes),
    }
    for work in parts.values():
        measure.time_steps(work, 3, rank.device)
    rounds = 2 if config.smoke else 15
    timed = measure.interleave(parts, rounds, rank.device, inner=3, between=rank.barrier)
    return {metric: rank.slowest(samples) for metric, samples in timed.items()}


PARTS: dict[str, Callable[[Config, Rank], Iterator[Record]]] = {
    "patients": patients,
    "finders": finders,
    "drift": drifts,
    "damage": damage,
    "price": price,
}


# What a learner reads


def matrix(run: Records) -> dict[str, dict[str, int]]:
    """{planted: {named: patients}}, with a row for each cause that was examined."""
    rows: dict[str, dict[str, int]] = {}
    for r in run.where("cause_right"):
        row = rows.setdefault(r.case["planted"], {})
        row[r.case["named"]] = row.get(r.case["named"], 0) + 1
    return rows


def steps_right(run: Records) -> list[bool]:
    """For each patient with a planted step whether the step that was found is that one."""
    return [
        run.one("bad_step", planted=r.case["planted"], of_seed=r.case["of_seed"]).value == r.value
        for r in run.where("planted_step")
        if "planted" in r.case
    ]


def slower(run: Records, finder: str) -> Estimate:
    """How many times as long a step takes with "hooks" or under "anomaly" detection, pair by pair."""
    plain, found = (run.one("finder_step_s", finder=name).samples for name in ("plain", finder))
    return measure.paired_ratio(found, plain)


def added(run: Records, every: int) -> Estimate:
    """Seconds that a check after every k steps adds to a step, pair by pair."""
    never, checked = (run.one("step_s", every=k).samples for k in (0, every))
    return measure.estimate([a - b for a, b in zip(checked, never, strict=True)], "s")


def added_percent(run: Records, every: int) -> Estimate:
    """The same in percent of a step without a check."""
    never, checked = (run.one("step_s", every=k).samples for k in (0, every))
    return measure.estimate([100 * (a / b - 1) for a, b in zip(checked, never, strict=True)], "%")


def lost(run: Records, fault: str, of_rank: int = 0) -> Estimate:
    """Points of test accuracy that a fault costs this rank's replica: healthy less faulty, seed by seed."""
    healthy, faulty = (run.one("accuracy", fault=f, of_rank=of_rank).samples for f in ("none", fault))
    return measure.estimate([100 * (a - b) for a, b in zip(healthy, faulty, strict=True)], "points")


def is_shown(found: Estimate, null: float = 0.0) -> bool:
    """Whether there are enough samples for an interval, and it leaves out `null`."""
    return found.n >= measure.fewest() and measure.differs(found, null)


def damaged(run: Records) -> list[str]:
    """Faults whose damage was measured."""
    return list(dict.fromkeys(r.case["fault"] for r in run.where("accuracy") if r.case["fault"] != "none"))


def compared(run: Records) -> tuple[int, int, int]:
    """Comparisons of a kind of tensors; in how many hashes and all bytes name the same; in how many any differ."""
    alike, differed = ([x for r in run.where(metric) for x in r.samples] for metric in ("check_right", "differed"))
    return len(alike), int(sum(alike)), int(sum(differed))


def share(flags: Iterable[float]) -> str:
    """For example "8 of 9"."""
    flags = list(flags)
    return f"{sum(map(bool, flags))} of {len(flags)}"


def answer(run: Records) -> Iterator[str]:
    """How often cause, module, step and sample were named right; when drift was found; what both cost."""
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
    if run.where("finder_step_s"):
        hooks, anomaly = slower(run, "hooks"), slower(run, "anomaly")
        yield f"A step of this small model takes {hooks} as long with hooks, {anomaly} under detect_anomaly."
    if run.where("check_right"):
        yield from _drift_answer(run)
    if faults := damaged(run):
        points = {fault: lost(run, fault) for fault in faults}
        told = [
            f"{f!r} costs rank 0's replica {p}" if is_shown(p) else f"{f!r} cannot be told from healthy ({p})"
            for f, p in points.items()
        ]
        yield f"Unnoticed to the end, in test accuracy: {'; '.join(told)}."
    if run.where("check_s"):
        yield from _price_answer(run)
    if run[0].layout["world_size"] == 1 and {"drift", "damage", "price"} & set(run[0].config.get("parts", ())):
        yield "One rank has no replica to drift from: drift, damage and price need two."


def _drift_answer(run: Records) -> Iterator[str]:
    late = [
        r.value
        - run.one("differ_step", fault=r.case["fault"], of_seed=r.case["of_seed"], kind_of=r.case["kind_of"]).value
        for r in run.where("found_step")
    ]
    names = sorted({r.case["fault"] for r in run.where("differ_step", kind_of="parameters")})
    n, alike, differed = compared(run)
    yield (
        f"Parameters differ between ranks after: {', '.join(names) or 'no fault'}. Hashes name the same tensors as "
        f"comparing every byte in {alike} of {n} comparisons, of which {differed} differed."
    )
    if late:
        on_time = [run.one("predicted_found_step", **r.case).value == r.value for r in run.where("found_step")]
        yield (
            f"A check after every k steps finds drift where the formula says in {share(on_time)} cases, at most "
            f"{max(late):.0f} steps after it began."
        )


def _price_answer(run: Records) -> Iterator[str]:
    told = []
    for check in run.where("check_s"):
        model_s = run.one("predicted_check_s", of=check.case["of"]).value
        told.append(
            f"of {check.case['bytes'] / 1e6:.3g} MB {measure.estimate(check.samples, 's')} (by the model, to "
            f"read the bytes once and to gather the hashes, {1e3 * model_s:.3g} ms)"
        )
    yield f"A check takes: {'; '.join(told)}."
    told = []
    for k in (r.case["every"] for r in run.where("step_s") if r.case["every"]):
        found, percent = added(run, k), added_percent(run, k)
        told.append(
            f"every {k}: {found}, {percent}"
            if is_shown(found)
            else f"every {k}: nothing that this run can show ({percent})"
        )
    yield f"It adds to a step, by how many steps lie between two checks: {'; '.join(told)}."


if __name__ == "__main__":
    cli.main()
