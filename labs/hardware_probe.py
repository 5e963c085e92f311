"""Is this machine ready, and how fast can it be?

    python -m labs.hardware_probe                        # checks, then the speed limits
    python -m labs.hardware_probe --preflight            # GO or NO-GO for the course, a report, no speed limits
    python -m labs.hardware_probe --smoke --json         # quick, and machine-readable
    python -m labs.hardware_probe --require-gpus 2       # fail unless PyTorch can use two GPUs
    torchrun --nproc-per-node 2 -m labs.hardware_probe   # only the speed limits, on a cluster

Exit code: 0 all passed (warnings allowed), 1 a check failed, 2 bad input. About 20 s on 2 CPU cores.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

if __name__ == "__main__" and "--preflight" in sys.argv:  # before torch: it may be missing
    from labs.classroom import room_preflight

    room_preflight.main()

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import Tensor, nn

from labs.common import models
from labs.common.models import Workload
from labs.common.timing import collectives, probing
from labs.common.timing.roofline import matmul_work, operators
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

GPT_BLOCK = "labs.common.models.text_models:gpt_block"
SMOKE = {"dtypes": ("fp32",), "models": ("mlp",)}  # with --smoke in a shell
LONGEST_S = 0.5  # skip a format whose product takes longer
FORMATS = {"fp32": "FP32", "tf32": "TF32", "bf16": "BF16", "fp16": "FP16"}
Step = Callable[[], object]


@dataclass(frozen=True)
class Config:
    """What to measure. Empty or 0: a default that suits the device."""

    parts: tuple[str, ...] = ()
    """What to run: correctness (always), matmul, memory, copies, operators, models, all_reduce. (): all."""
    dtypes: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
    """Number formats of the matrix products; formats that the device lacks are skipped."""
    matmul_sizes: tuple[int, ...] = ()
    """Side lengths of the square matrices. Default: 128 to 512 on a CPU core, 1024 to 8192 on a GPU."""
    array_mib: Annotated[int, Ge(0)] = 0
    """Size of each array of the memory test in MiB. Default: 256 on a CPU core, 512 on a GPU."""
    message_kib: tuple[float, ...] = (1, 8, 32, 256, 1024, 4096, 16384)
    """Sizes of the all-reduced buffers in KiB."""
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Layers of the tiny models that show an operator's overhead."""
    models: tuple[str, ...] = ("mlp", "cnn", "cnn_batchnorm", GPT_BLOCK)
    """Models to time: keys of labs.common.models.MODELS or package.module:factory."""
    batch_size: Annotated[int, Ge(0)] = 0
    """Rows per batch of the models. Default: 64; for the GPT block on a CPU core 1, because a row is 128 tokens."""
    rounds: Annotated[int, Ge(2)] = 9
    """Samples of each measurement."""
    smoke: bool = False
    """Use few samples and sizes."""

    def __post_init__(self) -> None:
        for name, allowed in (("parts", PARTS), ("dtypes", FORMATS)):
            wrong = sorted(set(getattr(self, name)) - set(allowed))
            require(not wrong, f"{name} may hold {', '.join(allowed)}, not {', '.join(wrong)}")
        require(all(n >= 1 for n in (*self.matmul_sizes, *self.depths)), "matmul_sizes and depths must be at least 1")
        require(all(k * 1024 >= 4 for k in self.message_kib), "message_kib must be at least 0.004 (one float)")
        models.require_known(*self.models, option="models")

    def passes(self, device: str) -> list[tuple[str, int]]:
        """Return (model, rows) of every pass to time; the first model is also timed with one row."""
        usual = {GPT_BLOCK: 1} if device == "cpu" else {}
        found = [(m, self.batch_size or usual.get(m, 64)) for m in self.models]
        return list(dict.fromkeys([*found, *((m, 1) for m in self.models[:1])]))

    def sizes(self, device: str) -> tuple[int, ...]:
        """Return the matrix sizes for this kind of device, ascending."""
        usual = (128, 256, 512) if device == "cpu" else (1024, 2048, 4096, 8192)
        return tuple(sorted(set(self.matmul_sizes))) or (usual[:2] if self.smoke else usual)

    def array_bytes(self, device: str) -> int:
        """Return the bytes of one array of the memory test, larger than most processors' caches."""
        usual = 256 if device == "cpu" else 512
        return (self.array_mib or (usual // 4 if self.smoke else usual)) * 2**20

    def messages(self) -> tuple[int, ...]:
        """Return all-reduce sizes in bytes, ascending, in whole float32 elements."""
        sizes = sorted({int(k * 1024) // 4 * 4 for k in self.message_kib})
        return tuple(sizes[:4] if self.smoke else sizes)

    @property
    def samples(self) -> int:
        """Samples of each measurement."""
        return 3 if self.smoke else self.rounds


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Run the requested parts. Rank 0 measures alone, except that all ranks join in correctness and all_reduce."""
    stages = [stage for name, stage in PARTS.items() if name in ("correctness", *(config.parts or PARTS))]
    for done, stage in enumerate(stages):
        rank.progress(done, len(stages), stage.__name__.replace("_", " "))
        rank.barrier()
        if rank.rank == 0 or stage in (correctness, all_reduce):
            yield from stage(config, rank)
    rank.progress(len(stages), len(stages), "done")


def correctness(config: Config, rank: Rank) -> Iterator[Record]:
    """Check a product against float64 and an all-reduce against the sum: a fast wrong answer is useless."""
    a, b = torch.randn(2, 64, 64)
    want = a.double() @ b.double()
    got = (a.to(rank.device) @ b.to(rank.device)).cpu().double()
    yield rank.record("matmul_relative_error", "", relative_error(got, want), rank=rank.rank)
    buffer = torch.full((1024,), float(rank.rank + 1), device=rank.device)
    dist.all_reduce(buffer)
    want_sum = rank.world_size * (rank.world_size + 1) / 2
    yield rank.record("all_reduce_error", "", float((buffer.cpu() - want_sum).abs().max()), rank=rank.rank)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ||got - want|| / ||want||; NaN and infinity become 1e9, because records hold only finite numbers."""
    error = float((got - want).norm() / want.norm())
    return error if math.isfinite(error) else 1e9


def seconds_of(steps: Mapping[Any, Step], config: Config, device: torch.device) -> dict[Any, list[float]]:
    """Return seconds per call of each step. Steps are interleaved in blocks of calls that take about 8 ms."""
    calls = {name: probing.inner_calls(step, device) for name, step in steps.items()}  # this also warms up

    def block(name: Any) -> Step:
        return lambda: [steps[name]() for _ in range(calls[name])]

    seconds = measure.interleave({name: block(name) for name in steps}, config.samples, device)
    return {name: [s / calls[name] for s in found] for name, found in seconds.items()}


def matmul(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield FLOP/s of square matrix products in each format, interleaved, and their share of the dense peak."""
    for n in config.sizes(rank.device.type):
        steps = {d: product(d, n, rank.device) for d in config.dtypes if probing.supported(d, rank.device)}
        slow = {d for d, step in steps.items() if min(measure.time_steps(step, 2, rank.device)) > LONGEST_S}
        timed = seconds_of({d: step for d, step in steps.items() if d not in slow}, config, rank.device)
        for dtype, seconds in timed.items():
            rates = [matmul_work(n, 4).flop / s for s in seconds]
            yield rank.record("matmul_flop_s", "FLOP/s", rates, rank=0, dtype=dtype, side=n)
            if peak := probing.datasheet_peak(dtype, rank.device):
                shares = [rate / peak.flop_s for rate in rates]
                yield rank.record("matmul_share_of_peak", "", shares, rank=0, source=peak.source, dtype=dtype, side=n)
    allow_tf32(False)


def product(dtype: str, n: int, device: torch.device) -> Step:
    """Return a product of two random n x n matrices: on zeros a GPU draws less power and may run faster."""
    a, b = (torch.randn(n, n, device=device).to(probing.DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> None:
        allow_tf32(dtype == "tf32")
        torch.mm(a, b, out=out)

    return step


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in FP32 matrix products, for the whole process. Affects NVIDIA GPUs only."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    else:  # before torch 2.9
        torch.backends.cuda.matmul.allow_tf32 = allowed


def memory(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield bytes per second of STREAM's copy a = b and triad a = b + 2c, counting each array once as STREAM does.

    A CPU may read a cache line before overwriting it, and so move more. Source: J. D. McCalpin, STREAM.
    """
    nbytes = config.array_bytes(rank.device.type)
    a, b, c = (torch.ones(nbytes // 4, device=rank.device) for _ in range(3))
    steps = {"copy": lambda: a.copy_(b), "triad": lambda: torch.add(b, c, alpha=2.0, out=a)}
    for op, seconds in seconds_of(steps, config, rank.device).items():
        moved = nbytes * (2 if op == "copy" else 3)
        yield rank.record("memory_b_s", "B/s", [moved / s for s in seconds], rank=0, op=op)


def copies(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield bytes per second between host and GPU, with pageable and with pinned memory; nothing on a CPU."""
    if rank.device.type == "cpu":
        return
    there = torch.ones(2**24, device=rank.device)  # 64 MiB
    steps = {("to device", "pageable"): copy_from_pageable(there), ("to device", "pinned"): copy_from_pinned(there)}
    for memory in ("pageable", "pinned"):
        host = torch.empty(there.shape, pin_memory=memory == "pinned")
        steps["to host", memory] = lambda host=host: host.copy_(there, non_blocking=True)
    for (direction, memory), seconds in seconds_of(steps, config, rank.device).items():
        rates = [there.nbytes / s for s in seconds]
        yield rank.record("host_device_b_s", "B/s", rates, rank=0, direction=direction, memory=memory)


def copy_from_pageable(there: Tensor) -> Step:
    """Return a copy from pageable host memory to the GPU."""
    host = torch.ones(there.shape)
    return lambda: there.copy_(host)


def copy_from_pinned(there: Tensor) -> Step:
    """Return a copy from pinned host memory to the GPU."""
    host = torch.ones(there.shape, pin_memory=True)
    return lambda: there.copy_(host, non_blocking=True)


def operator_times(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield seconds of passes through ever more tiny layers: the slope is the time per operator."""
    x = torch.zeros(1, device=rank.device)
    passes = {n: probing.training_step(tiny(n), 1, rank.device) for n in config.depths}
    called = {n: len(operators(step)) for n, step in passes.items()}
    for n, seconds in seconds_of({0: lambda: x.add_(1), **passes}, config, rank.device).items():
        if n:
            yield rank.record("tiny_pass_s", "s", seconds, rank=0, layers=n, operators=called[n])
        else:
            yield rank.record("operator_s", "s", seconds, rank=0, of="add_")


def tiny(layers: int) -> Workload:
    """Build `layers` layers of width 8: a pass calls operators with almost nothing to compute."""
    module = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(8, 8), nn.ReLU())))
    return Workload(module, lambda rows: (torch.randn(rows, 8), torch.zeros(rows, dtype=torch.long)), cross_entropy)


def model_passes(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield FLOP/s of each model's forward and backward pass in FP32, and FLOPs and bytes of each operator."""
    passes = config.passes(rank.device.type)
    steps = {(m, rows): probing.training_step(models.build(m), rows, rank.device) for m, rows in passes}
    seconds = seconds_of(steps, config, rank.device)
    for (model, rows), step in steps.items():
        calls = operators(step)  # on this device: fused attention is one operator here
        case = {"model": model, "batch_size": rows}
        flop, moved = sum(c.flop for c in calls), sum(c.bytes for c in calls)
        yield rank.record("model_flop_s", "FLOP/s", [flop / s for s in seconds[model, rows]], rank=0, **case)
        yield rank.record("model_flop", "FLOP", flop, kind="modelled", rank=0, **case)
        yield rank.record("model_bytes", "B", moved, kind="modelled", rank=0, **case)
        yield rank.record("model_operators", "1", float(len(calls)), kind="modelled", rank=0, **case)
        for name in dict.fromkeys(c.name for c in calls):
            same = [c for c in calls if c.name == name]
            one = {"kind": "modelled", "rank": 0, **case, "operator": name}
            yield rank.record("operator_flop", "FLOP", [c.flop for c in same], **one)
            yield rank.record("operator_bytes", "B", [c.bytes for c in same], **one)


def all_reduce(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield the slowest rank's seconds of an all-reduce by message size, and its bus bandwidth; nothing on one rank."""
    n = rank.world_size
    buffers = {size: torch.zeros(size // 4, device=rank.device) for size in config.messages() if n > 1}
    found: dict[int, list[float]] = {size: [] for size in buffers}
    for turn in range(config.samples + 1):  # interleaving sizes spreads a slow spell of the machine over all of them
        for size, buffer in buffers.items():
            calls = max(4, min(20, 2**20 // size))
            rank.barrier()
            seconds = probing.block_s(lambda buffer=buffer: dist.all_reduce(buffer), calls, rank.device) / calls
            found[size] += [seconds] if turn else []  # the first round opens the connections
    for size, own in found.items():
        seconds = rank.slowest(own)
        if rank.rank == 0:
            busbw = [collectives.busbw_b_s(size, s, n) for s in seconds]
            yield rank.record("all_reduce_s", "s", seconds, bytes=size, ranks=n)
            yield rank.record("busbw_b_s", "B/s", busbw, bytes=size, ranks=n)


PARTS = {
    "correctness": correctness,
    "matmul": matmul,
    "memory": memory,
    "copies": copies,
    "operators": operator_times,
    "models": model_passes,
    "all_reduce": all_reduce,
}
cross_entropy = nn.functional.cross_entropy


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward and backward pass, and of its bounds. An operator counts for the longer of its two."""

    name: str
    measured: float
    arithmetic: float
    memory: float
    launches: float

    @property
    def limit(self) -> str:
        """The bound that takes the longest."""
        return max(("arithmetic", "memory", "launches"), key=lambda part: getattr(self, part))


def passes(records: Records) -> list[Pass]:
    """Return each timed pass with its bounds: per operator, FLOPs / best FP32 rate or bytes / best bandwidth.

    LookupError if matmul, memory, operators or models wasn't measured.
    """
    flop_s = max(rate for r in records.where("matmul_flop_s", dtype="fp32") for rate in r.samples)
    bytes_s = max(rate for r in records.where("memory_b_s") for rate in r.samples)
    tiny_passes = records.where("tiny_pass_s")
    slope = statistics.linear_regression([r.case["operators"] for r in tiny_passes], [r.value for r in tiny_passes])[0]
    found = []
    for timed in records.where("model_flop_s"):
        case = {"model": timed.case["model"], "batch_size": timed.case["batch_size"]}
        flop = [f / flop_s for r in records.where("operator_flop", **case) for f in r.samples]
        moved = [b / bytes_s for r in records.where("operator_bytes", **case) for b in r.samples]
        found.append(
            Pass(
                pass_name(**case),
                records.one("model_flop", **case).value / timed.value,
                sum(f for f, b in zip(flop, moved, strict=True) if f >= b),
                sum(b for f, b in zip(flop, moved, strict=True) if f < b),
                slope * len(flop),
            )
        )
    return found


def pass_name(model: str, batch_size: int) -> str:
    """Name a pass, for example "mlp, 64 rows"."""
    return f"{model.rpartition(':')[2]}, {batch_size} row{'s' * (batch_size > 1)}"


def category(records: Records) -> str:
    """Say in a word or two what each round of notebook 00 decides, for the parts that were run."""
    words = []
    if len(records.where("matmul_flop_s", dtype="bf16")):
        side = max(r.case["side"] for r in records.where("matmul_flop_s", dtype="bf16"))
        bf16, fp32 = (records.one("matmul_flop_s", dtype=d, side=side).samples for d in ("bf16", "fp32"))
        ratio = measure.paired_ratio(bf16, fp32)
        words.append(f"BF16 {'faster' if ratio.low > 1 else 'slower' if ratio.high < 1 else 'inconclusive'}")
    if len(records.where("busbw_b_s")):
        rates = {r.case["bytes"]: r.value for r in records.where("busbw_b_s")}
        share = rates.get(2**15, 0.0) / max(rates.values())
        words.append(f"32 KiB reach {'less' if share < 0.5 else 'more'} than half of the bandwidth")
    if len(records.where("tiny_pass_s")) and len(records.where("model_flop_s")):
        words += [f"{p.name}: {p.limit}" for p in passes(records)]
    return "; ".join(words)


def answer(records: Records) -> Iterator[str]:
    """Yield sentences: this device's speed in each format, its bandwidth, and each pass's limit."""
    best: dict[str, Record] = {}
    for r in records.where("matmul_flop_s"):
        best[r.case["dtype"]] = max(best.get(r.case["dtype"], r), r, key=lambda r: r.value)
    if best:
        rates = (f"{FORMATS[d]} {measure.estimate(r.samples, r.unit)} (n = {r.case['side']})" for d, r in best.items())
        yield f"Matrix products at their best size: {', '.join(rates)}."
    for r in records.where("memory_b_s", op="triad"):
        yield f"The triad moves {measure.estimate(r.samples, r.unit)}."
    for r in records.where("host_device_b_s", memory="pinned"):
        yield f"A copy {r.case['direction']} moves {measure.estimate(r.samples, r.unit)} from or to pinned memory."
    busbw = records.where("busbw_b_s")
    if len(busbw):
        first, last = busbw[0], busbw[-1]
        yield (
            f"An all-reduce over {last.case['ranks']} ranks reaches {measure.estimate(last.samples, 'B/s')} (busbw) "
            f"with {last.case['bytes'] / 1024:,.0f} KiB, and {measure.estimate(first.samples, 'B/s')} with "
            f"{first.case['bytes'] / 1024:,.0f} KiB."
        )
    if best and all(len(records.where(metric)) for metric in ("memory_b_s", "tiny_pass_s", "model_flop_s")):
        limits = (f"{p.name} by {p.limit} ({1e3 * p.measured:.3g} ms)" for p in passes(records))
        yield f"Passes are limited: {', '.join(limits)}."
    for metric, what in (("matmul_relative_error", "a matrix product"), ("all_reduce_error", "an all-reduce")):
        worst = max((r.value for r in records.where(metric)), default=0.0)
        if worst > 1e-2:
            yield f"WRONG RESULTS: {what} is off by {worst:.1e}. Fix that first: no speed above counts."


if __name__ == "__main__":
    if "RANK" in os.environ:
        cli.main()  # one rank under torchrun: only the speed limits
    else:
        from labs.common.timing.probe_report import main

        main("hardware_probe", __doc__, Config, answer)
