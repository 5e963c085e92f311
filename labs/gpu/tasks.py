"""The tasks of `make gpu`, in order: checks of what the course promises, then launches, most valuable first.

To record a notebook's new launch on GPUs, add it here with the seconds it takes and a limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where tasks run: the number of GPUs, or of CPU cores in a rehearsal."""

    gpus: int
    rehearsal: bool = False


@dataclass(frozen=True)
class Task:
    """The question, its time on an H200, its time limit, and the command that writes into a folder."""

    question: str
    seconds: float
    limit_s: float
    command: Callable[[Place, Path], list[Any]]
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    fine: tuple[int, ...] = (0,)
    """Exit codes that count as success."""


def lab(
    name: str, *options: Any, nproc: int | None = 1, saved: str = "", folder: bool = False
) -> Callable[[Place, Path], list[Any]]:
    """Return the command `python -m labs.NAME` with these options and its records in NAME.jsonl (or `saved`).

    nproc None means all GPUs. With `folder`, the lab writes other files into --folder.
    """

    def command(place: Place, part: Path) -> list[Any]:
        ranks = place.gpus if nproc is None else nproc
        short = ["--smoke", "--device", "cpu", "--oversubscribe"] if place.rehearsal else []
        file = part / f"{saved or name.rpartition('.')[2]}.jsonl"
        more = ["--folder", part / "files"] if folder else []
        return [f"labs.{name}", *options, "--nproc", ranks, "--out", file, *more, *short]

    return command


def check(name: str) -> Callable[[Place, Path], list[Any]]:
    """Return the command of one check."""
    return lambda place, part: ["labs.gpu.checks", name, *(["--rehearse"] if place.rehearsal else [])]


def doctor(script: str, *options: Any) -> Callable[[Place, Path], list[Any]]:
    """Return the command of a doctor's report, as report.json."""

    def command(place: Place, part: Path) -> list[Any]:
        short = ["--steps", 5, "--seconds", 0] if place.rehearsal else ["--seconds", 20]
        return ["labs.doctor", *short, "--out", part, script, *options]

    return command


NCCL = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING", "NCCL_DEBUG_FILE": "{part}/nccl.%p.txt"}

NOT_READY = (0, 1)
"""hardware_probe exits with 1 if the machine lacks something, such as JupyterLab, but still measures."""

TASKS: dict[str, Task] = {
    "launcher": Task("Does CUDA stay out of the launching process?", 12, 40, check("launcher")),
    "memory": Task("Does the oracle predict the allocator's peak?", 25, 60, check("memory")),
    "formats": Task("Do all of AMP's formats run, and pay?", 20, 60, check("formats")),
    "nvml": Task("What does asking the driver cost?", 10, 30, check("nvml")),
    "faults": Task("Are faults named and cleared away?", 45, 90, check("faults")),
    "large_models": Task("What do formats, a fused optimizer and recomputing give large models?", 45, 120,
                         lab("gpu.large_models")),
    "hardware_probe": Task("How fast are products, memory and copies, and what does an operator cost?", 30, 90,
                           lab("hardware_probe", "--parts", "matmul", "memory", "copies", "operators", "models"),
                           fine=NOT_READY),
    "timing": Task("How wrong is each way to time a loop?", 25, 90,
                   lab("timing", "--loop-steps", 100, "--repeats", 5)),
    "timing_large": Task("And with a batch that fills the queue?", 25, 90,
                         lab("timing", "--batch-size", 8192, "--loop-steps", 20, "--repeats", 3, saved="timing_large")),
    "timing_article": Task("And an article's layer?", 25, 90,
                           lab("timing", "--model", "labs.timing:article", "--batch-size", 32, "--loop-steps", 100,
                               "--repeats", 9, saved="timing_article")),
    "traces": Task("Notebook 09: what does a launch-bound step look like, and a compute-bound one?", 15, 60,
                   lab("gpu.traces", folder=True)),
    "compiled_step": Task("Notebook 09: after how many steps has torch.compile paid?", 40, 120,
                          lab("compiled_step", "--processes", 2)),
    "utilisation": Task("Which work looks busy to NVML?", 10, 40, lab("utilisation")),
    "out_of_memory": Task("What does an out-of-memory error say, and its snapshot?", 10, 40,
                          lab("gpu.out_of_memory", folder=True)),
    "recompute": Task("What does recomputing cost a launch-bound stack?", 25, 90,
                      lab("activation_checkpointing")),
    "pinned_copies": Task("Does pinned memory help, and a stream of its own?", 10, 40, lab("gpu.pinned_copies")),
    "dataloader": Task("Notebook 02: does a step on the GPU leave the cores to the workers?", 20, 60,
                       lab("dataloader")),
    "ddp_one_rank": Task("What does DDP cost on one GPU?", 10, 40,
                         lab("data_parallel", "--model", "cnn", saved="data_parallel_one_rank")),
    "fsdp_one_rank": Task("What does FSDP2 cost on one GPU?", 20, 60,
                          lab("fully_sharded", saved="fully_sharded_one_rank")),
    "doctor_healthy": Task("What does the doctor report for a healthy script?", 40, 120,
                           doctor("labs/recipes/train_single.py", "--steps", 2000)),
    "doctor_faulty": Task("And of a slow one?", 40, 120, doctor("labs/exercises/slow_training.py", "--epochs", 1000)),
    "mixed_precision": Task("How fast are the course's models in each format?", 40, 120, lab("mixed_precision")),
    "memory_oracle": Task("What fills memory, model by model?", 40, 120, lab("memory_oracle")),
    "fooled": Task("Notebook 11: what do careless benchmarks report?", 15, 60, lab("fooled")),
    "all_reduce": Task("Notebook 07: how fast are messages between GPUs, and what does NCCL choose?", 15, 60,
                       lab("hardware_probe", "--parts", "all_reduce", nproc=None, saved="all_reduce"), 2,
                       NCCL, NOT_READY),
    "data_parallel_mlp": Task("Notebook 03: how much faster is DDP, for an MLP?", 10, 60,
                              lab("data_parallel", nproc=None, saved="data_parallel_mlp"), 2),
    "data_parallel_cnn": Task("Notebook 03: how much faster is DDP, for a CNN?", 10, 60,
                              lab("data_parallel", "--model", "cnn", nproc=None, saved="data_parallel"), 2),
    "comm_overlap": Task("Notebook 03: does DDP hide the exchange?", 15, 60, lab("comm_overlap", nproc=None), 2),
    "speedup_map": Task("Notebook 03: which models gain?", 15, 60, lab("speedup_map", nproc=None), 2),
    "ddp_parity": Task("Notebook 03: is it the same training?", 10, 60, lab("ddp_parity", nproc=None), 2),
    "pipeline_parallel": Task("Notebook 06: how long is each stage idle?", 40, 120,
                              lab("pipeline_parallel", nproc=2), 2),
    "fully_sharded": Task("Notebook 06: what does FSDP2 save and cost?", 25, 90, lab("fully_sharded", nproc=None), 2),
    "bucket_sizes": Task("Notebook 07: which bucket size?", 20, 90,
                         lab("comm_overlap", "--bucket-mb", 4, 1, nproc=None, saved="bucket_sizes"), 2),
    "gradient_compression": Task("Notebook 07: does compression pay between GPUs?", 25, 90,
                                 lab("gradient_compression", nproc=None), 2),
}  # fmt: skip
"""By name, in the order they run."""
