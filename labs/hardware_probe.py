"""Is this machine ready, and how fast can it go?

    python -m labs.hardware_probe                        # checks, then the speed limits
    python -m labs.hardware_probe --preflight            # GO or NO-GO for the course, a report, no speed limits
    python -m labs.hardware_probe --smoke --json         # quick, and readable by a program
    python -m labs.hardware_probe --require-gpus 2       # fail unless torch can use two GPUs
    torchrun --nproc-per-node 2 -m labs.hardware_probe   # the speed limits alone, on a cluster

Exit code: 0 all passed (warnings allowed), 1 a check failed, 2 bad input. About 10 s on 2 CPU cores.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

if __name__ == "__main__" and "--preflight" in sys.argv:  # before torch: it also says when that is missing
    from labs.classroom import room_preflight

    room_preflight.main()

import torch
import torch.distributed as dist
from torch import Tensor

from labs.common import models
from labs.common.timing import collectives, limits, probing
from labs.common.timing.roofline import Work, matmul_work, training_step_work
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

GPT_BLOCK = "labs.common.models.text_models:gpt_block"
SMOKE = {"dtypes": ("fp32",), "models": ("mlp",), "budget_s": 0.1}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """What to measure. Empty or 0: a default that suits the device."""

    parts: tuple[str, ...] = ()
    """What to do: correctness (always), matmul, convolution, memory, copies, overhead, models, ceiling, all_reduce.
    () is all."""
    dtypes: tuple[str, ...] = ("fp32", "tf32", "bf16", "fp16")
    """Number formats of matrix products and convolutions; those a device cannot do are left out."""
    matmul_sizes: tuple[int, ...] = ()
    """Sides of the square matrices. Default: 128 to 1024 on a CPU core, 1024 to 8192 on a GPU."""
    array_mib: int = 0
    """Size of each array of the memory bandwidth test. Default: 64 on a CPU core, 512 on a GPU."""
    message_kib: tuple[float, ...] = (1, 8, 64, 512, 4096, 16384)
    """Sizes of the all-reduced buffers."""
    models: tuple[str, ...] = ("mlp", "cnn", "cnn_batchnorm", GPT_BLOCK)
    """Models for the roofline: keys of labs.models.MODELS or package.module:factory."""
    batch_size: int = 0
    """Rows in a batch of the models. Default: 64; 1 of the GPT block on a CPU core: a row is 128 tokens."""
    rounds: int = 9
    """Samples of each measurement."""
    budget_s: float = 0.3
    """Longest that all samples of one product may take (four times that for the convolution). What a slow format cannot
    do in it is left out."""
    smoke: bool = False
    """Few samples and sizes: does it work at all?"""

    def __post_init__(self) -> None:
        wrong = sorted(set(self.parts) - set(PARTS))
        require(not wrong, f"parts may hold {', '.join(PARTS)}, not {', '.join(wrong)}")
        unknown = set(self.dtypes) - set(probing.DTYPES)
        require(not unknown, f"dtypes may hold {', '.join(probing.DTYPES)}, not {', '.join(sorted(unknown))}")
        require(all(n >= 1 for n in self.matmul_sizes), "matmul_sizes must be at least 1")
        require(self.array_mib >= 0, f"array_mib must be at least 1 (or 0 for the default), not {self.array_mib}")
        require(all(k * 1024 >= 4 for k in self.message_kib), "message_kib must be at least 0.004 (one float)")
        models.require_known(*self.models, option="models")
        require(self.batch_size >= 0, f"batch_size must be at least 1 (or 0 for the default), not {self.batch_size}")
        require(self.rounds >= 2, f"rounds must be at least 2, not {self.rounds}")
        require(self.budget_s > 0, f"budget_s must be positive, not {self.budget_s}")

    def passes(self, device: str) -> list[tuple[str, int]]:
        """(model, rows) of every pass to time; the first model also with one row."""
        usual = {GPT_BLOCK: 1} if device == "cpu" else {}
        found = [(m, self.batch_size or usual.get(m, 64)) for m in self.models]
        return list(dict.fromkeys([*found, *((m, 1) for m in self.models[:1])]))

    def sizes(self, device: str) -> tuple[int, ...]:
        """The matrix sizes for this kind of device, ascending."""
        if self.matmul_sizes:
            return tuple(sorted(set(self.matmul_sizes)))
        usual = (128, 256, 512, 1024) if device == "cpu" else (1024, 2048, 4096, 8192)
        return usual[:2] if self.smoke else usual

    def array_bytes(self, device: str) -> int:
        """Bytes of one array of the bandwidth test: beyond any cache."""
        usual = 64 if device == "cpu" else 512
        return (self.array_mib or (usual // 4 if self.smoke else usual)) * 2**20

    def messages(self) -> tuple[int, ...]:
        """All-reduce sizes in bytes, ascending, whole float32 elements."""
        sizes = sorted({int(k * 1024) // 4 * 4 for k in self.message_kib})
        return tuple(sizes[:4] if self.smoke else sizes)

    @property
    def samples(self) -> int:
        """Samples of each measurement."""
        return 3 if self.smoke else self.rounds


def predict(config: Config) -> dict[str, Work]:
    """FLOPs, bytes and operators of every product and pass on a CPU core, counted without running any of them."""
    work = {f"matmul {n}": matmul_work(n, 4) for n in config.sizes("cpu")}
    return work | {
        limits.pass_name(m, rows): training_step_work(models.build(m), rows) for m, rows in config.passes("cpu")
    }


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """What each rank does; rank 0 measures alone while the others wait, then all measure at once."""
    stages = [stage for name, stage in PARTS.items() if name in ("correctness", *(config.parts or PARTS))]
    for done, stage in enumerate(stages):
        rank.progress(done, len(stages), stage.__name__.replace("_", " "))
        rank.barrier()
        yield from stage(config, rank)
    rank.progress(len(stages), len(stages), "done")


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; a NaN or an infinity counts as 1e9, since a record holds finite numbers only."""
    error = float((got - want).norm() / want.norm())
    return error if math.isfinite(error) else 1e9


def correctness(config: Config, rank: Rank) -> Iterator[Record]:
    """A fast wrong answer is no answer: a product against float64, an all-reduce against the sum."""
    a, b = torch.randn(2, 64, 64)
    want = a.double() @ b.double()
    got = (a.to(rank.device) @ b.to(rank.device)).cpu().double()
    yield rank.record("matmul_relative_error", "", relative_error(got, want), rank=rank.rank)
    buffer = torch.full((1024,), float(rank.rank + 1), device=rank.device)
    dist.all_reduce(buffer)
    want_sum = rank.world_size * (rank.world_size + 1) / 2
    yield rank.record("all_reduce_error", "", float((buffer.cpu() - want_sum).abs().max()), rank=rank.rank)


def matmul_alone(config: Config, rank: Rank) -> Iterator[Record]:
    """FLOP/s of square matrix products on one device, the others idle, and their share of the dense peak."""
    formats = [d for d in config.dtypes if probing.supported(d, rank.device)] if rank.rank == 0 else []
    for dtype in formats:
        peak = probing.datasheet_peak(dtype, rank.device)
        for n, seconds in probing.matmul_sweep(dtype, config.sizes(rank.device.type), config, rank.device):
            rates = [matmul_work(n, 4).flop / s for s in seconds]
            case = {"dtype": dtype, "side": n}
            yield rank.record("matmul_flop_s", "FLOP/s", rates, rank=0, **case)
            if peak:
                shares = [r / peak.flop_s for r in rates]
                yield rank.record("matmul_share_of_peak", "", shares, rank=0, source=peak.source, **case)


def convolution_alone(config: Config, rank: Rank) -> Iterator[Record]:
    """FLOP/s of a 3x3 convolution in each format: another library than the product's, so another candidate."""
    formats = [d for d in config.dtypes if probing.supported(d, rank.device)] if rank.rank == 0 else []
    for dtype in formats:
        step, flop = probing.convolution_step(rank.device, dtype, images=1)
        rate = flop / min(measure.time_steps(step, 4, rank.device))
        step, flop = probing.convolution_step(rank.device, dtype)
        if (config.samples + 3) * flop / rate <= 4 * config.budget_s:
            rates = [flop / s for s in probing.timed(step, config.samples, rank.device)]
            yield rank.record("convolution_flop_s", "FLOP/s", rates, rank=0, dtype=dtype)
    torch.backends.cudnn.allow_tf32 = False  # a process-wide switch: the next part wants FP32


def memory_alone(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes per second of copy and triad over arrays beyond the caches, on one device, the others idle."""
    steps = probing.memory_steps(config.array_bytes(rank.device.type), rank.device) if rank.rank == 0 else {}
    for op, (step, moved) in steps.items():
        seconds = probing.timed(step, config.samples, rank.device)
        yield rank.record("memory_b_s", "B/s", [moved / s for s in seconds], rank=0, op=op)


def host_device_copies(config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes per second between host and GPU, from pageable and from pinned memory; nothing on a CPU."""
    if rank.rank or rank.device.type == "cpu":
        return
    for (direction, memory), (step, moved) in probing.copy_steps(64 * 2**20, rank.device).items():
        rates = [moved / s for s in probing.timed(step, config.samples, rank.device)]
        yield rank.record("host_device_b_s", "B/s", rates, rank=0, direction=direction, memory=memory)


def overhead(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds per operator where there is nothing to compute: one operator alone, and in a pass of a tiny MLP."""
    if rank.rank:
        return
    alone = probing.timed(probing.add_step(rank.device), config.samples, rank.device)
    yield rank.record("operator_s", "s", alone, rank=0, of="add_")
    operators = training_step_work(probing.tiny_mlp(), 1).operators
    tiny = probing.training_step(probing.tiny_mlp(), 1, rank.device)
    seconds = probing.timed(tiny, config.samples, rank.device)
    yield rank.record("operator_s", "s", [s / operators for s in seconds], rank=0, of="pass")


def model_steps(config: Config, rank: Rank) -> Iterator[Record]:
    """FLOP/s of a forward and backward pass of each model in FP32, with its counted FLOPs, bytes and operators."""
    for name, rows in config.passes(rank.device.type) if rank.rank == 0 else ():
        work = training_step_work(models.build(name), rows)
        step = probing.training_step(models.build(name), rows, rank.device)
        rates = [work.flop / s for s in probing.timed(step, config.samples, rank.device)]
        case = {"model": name, "batch_size": rows}
        yield rank.record("model_flop_s", "FLOP/s", rates, rank=0, **case)
        yield rank.record("model_flop", "FLOP", work.flop, kind="modelled", rank=0, **case)
        yield rank.record("model_bytes", "B", work.bytes, kind="modelled", rank=0, **case)
        yield rank.record("model_operators", "1", float(work.operators), kind="modelled", rank=0, **case)


def all_together(config: Config, rank: Rank) -> Iterator[Record]:
    """The machine's ceiling: one rank alone, then all at once, in turn, with no communication.

    The ratio of the two totals is the best speed-up that any parallel training can have here. Nothing on one
    rank.
    """
    if rank.world_size == 1:
        return
    sizes = config.sizes(rank.device.type)
    n = min(512, sizes[-1]) if rank.device.type == "cpu" else sizes[-1]
    triad, moved = probing.memory_steps(config.array_bytes(rank.device.type), rank.device)["triad"]
    product = probing.matmul_step("fp32", n, rank.device)
    yield from _ceiling(config, rank, "matmul", product, matmul_work(n, 4).flop, "FLOP/s")
    yield from _ceiling(config, rank, "triad", triad, moved, "B/s")


def _ceiling(config: Config, rank: Rank, job: str, step: probing.Step, amount: float, unit: str) -> Iterator[Record]:
    alone: list[float] = []
    together: list[float] = []
    inner = max(rank.gather(probing.inner_calls(step, rank.device, target_s=0.02)))
    for _ in range(config.samples):
        rank.barrier()
        alone += rank.slowest([probing.block_s(step, inner, rank.device) if rank.rank == 0 else 0.0])
        together += rank.slowest([probing.block_s(step, inner, rank.device)])
    if rank.rank == 0:
        n = rank.world_size
        speedup = [n * a / t for a, t in zip(alone, together, strict=True)]
        yield rank.record("ceiling_rate", unit, [inner * amount / s for s in alone], job=job, ranks=1)
        yield rank.record("ceiling_rate", unit, [n * inner * amount / s for s in together], job=job, ranks=n)
        yield rank.record("ceiling_speedup", "x", speedup, job=job, ranks=n)


def all_reduce(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of an all-reduce by message size, slowest rank, and its bus bandwidth; nothing on one rank."""
    n = rank.world_size
    steps = {size: probing.all_reduce_step(size, rank.device) for size in config.messages() if n > 1}
    found: dict[int, list[float]] = {size: [] for size in steps}
    for _ in range(config.samples):  # all sizes in every round: a slow spell of the machine hits all of them
        for size, step in steps.items():
            inner = max(1, min(20, 2**20 // size))
            rank.barrier()
            found[size].append(probing.block_s(step, inner, rank.device) / inner)
    for size, own in found.items():
        seconds = rank.slowest(own)
        if rank.rank == 0:
            busbw = [collectives.busbw_b_s(size, s, n) for s in seconds]
            yield rank.record("all_reduce_s", "s", seconds, bytes=size, ranks=n)
            yield rank.record("busbw_b_s", "B/s", busbw, bytes=size, ranks=n)


def answer(run: Records) -> Iterator[str]:
    """How fast this device is in each format, what limits each pass, what ranks and messages cost, in sentences."""
    best = limits.peaks(run)
    if best:
        rates = "; ".join(
            f"{limits.FORMATS[d]} {measure.estimate(r.samples, r.unit)} ({limits.kernel(r)})" for d, r in best.items()
        )
        yield f"The fastest kernel in each format: {rates}."
    if "fp32" in best and len(run.where("memory_b_s")):
        stream = limits.memory(run)
        ridge = best["fp32"].value / stream.value
        yield (
            f"Memory moves {measure.estimate(stream.samples, 'B/s')}: in FP32 a pass with fewer than {ridge:.1f} "
            "FLOP per byte waits for memory rather than for arithmetic."
        )
        if len(run.where("operator_s")) and len(run.where("model_flop_s")):
            yield _passes_sentence(limits.passes(run))
    for r in run.where("ceiling_speedup"):
        n, what = r.case["ranks"], "arithmetic" if r.case["job"] == "matmul" else "memory traffic"
        gain = measure.estimate(r.samples, "x")
        short = "less than" if gain.high < n else "no less, that this run can show, than"
        yield f"{n} ranks that exchange nothing reach {gain} the {what} of one: {short} {n}."
    if len(run.where("all_reduce_s")) > 1:
        yield _link_sentence(limits.link(run))
    for direction in ("to device", "to host"):
        found = {r.case["memory"]: r for r in run.where("host_device_b_s", direction=direction)}
        if len(found) == 2:
            rate, gain = (
                measure.estimate(found["pinned"].samples, "B/s"),
                limits.ratio(*map(found.get, ("pinned", "pageable"))),
            )
            yield f"A copy {direction} moves {rate} from pinned memory, {gain} the rate of pageable memory."
    for metric, what in (("matmul_relative_error", "a matrix product"), ("all_reduce_error", "an all-reduce")):
        worst = max((r.value for r in run.where(metric)), default=0.0)
        if worst > 1e-2:
            yield f"WRONG RESULTS: {what} is off by {worst:.1e}. No speed above counts until that is mended."


def _link_sentence(link: limits.Link) -> str:
    latency = f"An all-reduce takes {link.model.latency_s * 1e6:.0f} µs at least"
    if not math.isfinite(link.busbw_b_s):
        return f"{latency}; its bandwidth this run cannot tell."
    half = f"half of it at {link.half}" if link.told else "the size that reaches half of it this run cannot tell"
    return f"{latency} and reaches {link.busbw_b_s / 1e9:.2g} GB/s (busbw); {half}."


def _passes_sentence(found: list[limits.Pass]) -> str:
    rows = (
        f"{p.name} {p.limit or ' and '.join(p.between)} ({p.seconds}, {p.seconds.value / max(p.limits.values()):.1f} x)"
        for p in found
    )
    return f"What limits a pass (its time, and how many times that of the limit alone): {'; '.join(rows)}."


PARTS = {
    "correctness": correctness,
    "matmul": matmul_alone,
    "convolution": convolution_alone,
    "memory": memory_alone,
    "copies": host_device_copies,
    "overhead": overhead,
    "models": model_steps,
    "ceiling": all_together,
    "all_reduce": all_reduce,
}


if __name__ == "__main__":
    if "RANK" in os.environ:
        cli.main()  # one rank under torchrun: the speed limits alone
    else:
        from labs.common.timing.probe_report import main

        main("hardware_probe", __doc__, Config, answer)
