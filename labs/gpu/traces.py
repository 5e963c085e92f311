"""What do a launch-bound step and a compute-bound step look like in a trace?

    python -m labs.gpu.traces --nproc 1 --folder build/traces

About 15 s on an H200. Profiles the first steps of a narrow, deep perceptron and of a GPT block with torch.profiler, and
writes a Chrome trace of each (gzip, under 2 MB), which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from annotated_types import Interval
from torch import nn
from torch.profiler import ProfilerActivity, profile

from labs.common.models import Workload
from labs.common.models.text_models import gpt_block
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

MOST_BYTES = 2_000_000


@dataclass(frozen=True)
class Config:
    """How many steps to trace, and where the traces go."""

    folder: Path = Path("build/traces")
    """Folder for launch_bound.json.gz and compute_bound.json.gz."""
    steps: Annotated[int, Interval(ge=1, le=20)] = 3
    """Steps in each trace; the first is the process's first."""
    smoke: bool = False
    """One step."""


def launch_bound() -> Workload:
    """Build 40 layers, 32 wide: many operators, nearly no arithmetic."""
    module = nn.Sequential(*(m for _ in range(40) for m in (nn.Linear(32, 32), nn.ReLU())))
    return Workload(module, lambda rows: (torch.randn(rows, 32), torch.randn(rows, 32)), nn.functional.mse_loss)


def training_step(workload: Workload, rows: int, device: torch.device) -> Callable[[], None]:
    """Make a step of SGD on one batch."""
    module = workload.module.to(device)
    x, y = (t.to(device) for t in workload.make_batch(rows))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(module(x), y).backward()
        optimizer.step()

    return step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Write each trace; record each step's seconds and the share in which the device runs a kernel."""
    cases = {"launch_bound": (launch_bound, 32), "compute_bound": (gpt_block, 2 if config.smoke else 64)}
    for done, (name, (build, rows)) in enumerate(cases.items()):
        rank.progress(done, len(cases), name)
        step = training_step(build(), rows, rank.device)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (rank.device.type == "cuda")
        with profile(activities=activities) as profiler:
            seconds = measure.time_steps(step, 1 if config.smoke else config.steps, rank.device)
        size = export(profiler, config.folder / f"{name}.json.gz")
        yield rank.record("step_s", "s", seconds, trace=name)
        yield rank.record("trace_bytes", "B", size, trace=name)
        if rank.device.type == "cuda":
            yield rank.record("kernel_share", "1", kernel_s(profiler) / sum(seconds), trace=name)


def kernel_s(profiler: profile) -> float:
    """Return the total seconds of kernels and copies on the GPU."""
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time_total for e in on_gpu if not getattr(e, "is_user_annotation", False)) / 1e6


def export(profiler: profile, path: Path) -> int:
    """Write the trace to `path`, completely or not at all; return its bytes. RuntimeError above MOST_BYTES."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix(".part")
    try:
        profiler.export_chrome_trace(str(plain))
        packed = gzip.compress(plain.read_bytes(), mtime=0)
    finally:
        plain.unlink(missing_ok=True)
    if len(packed) > MOST_BYTES:
        raise RuntimeError(f"the trace {path.name} has {len(packed):,} bytes, more than {MOST_BYTES:,}: --steps 1")
    path.with_suffix(".new").write_bytes(packed)
    path.with_suffix(".new").replace(path)
    return len(packed)


def answer(records: Records) -> Iterator[str]:
    """Report each trace's first and last step, and how busy the device was."""
    for r in records.where("step_s"):
        busy = [
            f", kernels run {s.value:.0%} of the time" for s in records.where("kernel_share", trace=r.case["trace"])
        ]
        yield f"{r.case['trace']}: {1e3 * r.samples[0]:.1f} ms, then {1e3 * r.samples[-1]:.1f} ms{''.join(busy)}."


if __name__ == "__main__":
    cli.main()
