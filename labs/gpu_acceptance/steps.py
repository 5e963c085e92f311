"""The steps of the acceptance: each launches the course's own labs on this machine and gathers what they recorded.

A step runs in a process of its own. What it finds is judged in labs.gpu_acceptance.judge.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

import psutil
import torch

from labs.gpu_acceptance import judge
from labs.gpu_acceptance.evidence import Cannot, Evidence, Setting, Verdict
from labs.gpu_acceptance.faulty import FAULTS
from labs.gpu_acceptance.maps import libcuda_mapped
from labs.kit import hardware, nvml, supervise, timeouts
from labs.kit.launch import RankFailed, Run, launch

PCIE_B_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane in one direction, after encoding, by generation (PCI Express Base Specification)."""


@dataclass(frozen=True)
class Step:
    """What is tried, for how long at most, and how it is judged."""

    question: str
    gather: Callable[[Setting], Evidence]
    judge: Callable[[Evidence], Verdict]
    limit_s: float = 90.0
    long_limit_s: float = 300.0


def run_lab(setting: Setting, lab: str, nproc: int = 1, device: str = "", **parameters: Any) -> Run:
    """Launch a lab where the setting says; when pretending as a smoke run on cores, of which ranks may share one."""
    limit_s = 280.0 if setting.long else 85.0
    if setting.pretend:
        parameters = {"smoke": True} | parameters
        return launch(lab, nproc, device="cpu", oversubscribe=True, timeout_s=limit_s, **parameters)
    return launch(lab, nproc, device=device or setting.device, timeout_s=limit_s, **parameters)


def launcher(setting: Setting) -> Evidence:
    """A launch, and what it has left in the process that launched."""
    run = run_lab(setting, "hardware_probe", parts=("correctness",))
    code = "import torch; from labs.gpu_acceptance.maps import libcuda_mapped; print(libcuda_mapped())"
    alone = supervise.run([sys.executable, "-c", code], timeouts.IMPORT_S)
    holders = {p.pid for gpu in nvml.gpus() for p in gpu.processes or ()}
    facts = {
        "cuda_initialized": torch.cuda.is_initialized(),
        "libcuda_mapped": libcuda_mapped(),
        "libcuda_mapped_by_torch": alone.stdout.strip() == "True",
        "holds_gpu": os.getpid() in holders,
    }
    return Evidence(setting.device, {"correctness": run}, facts)


def _card() -> hardware.Visible | None:
    """The first GPU that CUDA shows, asked without starting CUDA."""
    return next(iter(nvml.visible(nvml.report(brief=True)) or ()), None)


def probe(setting: Setting) -> Evidence:
    """The speed limits of one GPU."""
    parts = ("matmul", "memory", "models") if setting.long else ("matmul", "memory")
    run = run_lab(setting, "hardware_probe", parts=parts)
    card = _card()
    row = hardware.spec(card.name or "") if card else None
    facts = {"card": card.name if card else None, "bandwidth_b_s": row.bandwidth_gb_s * 1e9 if row else None}
    return Evidence(setting.device, {"probe": run}, facts)


def copies(setting: Setting) -> Evidence:
    """Host to device and back, pinned and pageable."""
    run = run_lab(setting, "hardware_probe", parts=("copies",))
    index = card.nvml_index if (card := _card()) else None
    link = next(((g.pcie_gen_max, g.pcie_width_max) for g in nvml.gpus() if g.index == index), (None, None))
    limit = PCIE_B_S[link[0]] * link[1] if link[0] in PCIE_B_S and link[1] else None
    return Evidence(setting.device, {"copies": run}, {"pcie_b_s": limit})


def timing(setting: Setting) -> Evidence:
    """A model's step, and the article's loop with and without a wait for the device."""
    run = run_lab(setting, "timing", repeats=6 if setting.long else 1)
    return Evidence(setting.device, {"timing": run})


def utilisation(setting: Setting) -> Evidence:
    """What the counter of busy time says of jobs that are known."""
    run = run_lab(setting, "utilisation", smoke=not setting.long)
    return Evidence(setting.device, {"utilisation": run})


def amp(setting: Setting) -> Evidence:
    """Formats of AMP in models and matrix products."""
    models = ("cnn", "char_gpt", "mlp") if setting.long else ("mlp",)
    run = run_lab(setting, "mixed_precision", models=models)
    index = card.nvml_index if (card := _card()) else None
    capability = next((g.compute_capability for g in nvml.gpus() if g.index == index), None)
    formats = ["fp32", "fp16"] if capability and capability < (8, 0) else ["fp32", "tf32", "bf16", "fp16"]
    return Evidence(setting.device, {"amp": run}, {"formats": formats})


def memory(setting: Setting) -> Evidence:
    """The memory oracle beside the allocator."""
    run = run_lab(setting, "memory_oracle", smoke=not setting.long)
    return Evidence(setting.device, {"memory": run})


def recompute(setting: Setting) -> Evidence:
    """Peak and gradients with and without activation checkpointing."""
    run = run_lab(setting, "activation_checkpointing", parts=("pareto",), policies=("none", "block"))
    return Evidence(setting.device, {"recompute": run})


def loader(setting: Setting) -> Evidence:
    """Batches that a DataLoader's workers hand over, four ways to copy them."""
    run = run_lab(
        setting, "dataloader", parts=("transfer",) if not setting.pretend else ("sweep",), smoke=not setting.long
    )
    return Evidence(setting.device, {"loader": run})


def nccl(setting: Setting) -> Evidence:
    """All GPUs at once."""
    runs = {"nccl": run_lab(setting, "hardware_probe", setting.gpus, parts=("all_reduce",))}
    if setting.gpus > 1:
        runs["ddp"] = run_lab(setting, "ddp_parity", setting.gpus, models=("mlp", "cnn"))
    return Evidence(setting.device, runs, {"gpus": setting.gpus})


def pipeline(setting: Setting) -> Evidence:
    """A pipeline with a stage per GPU: its messages go over a group for each link and direction."""
    if setting.gpus < 2:
        raise Cannot("one GPU: a pipeline needs a GPU for each of two stages")
    run = run_lab(setting, "pipeline_parallel", min(setting.gpus, 8), smoke=not setting.long)
    return Evidence(setting.device, {"pipeline": run})


def shared(setting: Setting) -> Evidence:
    """Two ranks on one GPU."""
    card = _card()
    if card and card.exclusive:
        raise Cannot("the GPU is in exclusive-process mode: nvidia-smi -c DEFAULT (as root) lets two processes in")
    run = run_lab(setting, "hardware_probe", 2, "cuda-shared", parts=("all_reduce",), smoke=True)
    return Evidence(setting.device, {"shared": run})


def faults(setting: Setting) -> Evidence:
    """Out of memory, an assert on the device, a killed rank, one that never answers; then a launch that works."""
    found = {}
    for fault in (name for name in FAULTS if name != "none"):
        before, start = _held(), time.monotonic()
        raised = _raised(setting, fault)
        seconds = time.monotonic() - start
        found[fault] = {"raised": raised, "seconds": seconds, "left": _wait_until_alone(), "held_bytes": _more(before)}
    again = run_lab(setting, "labs.gpu_acceptance.faulty", fault="none")
    facts = {"faults": found, "works_again": again.one("sum").value == 256**3}
    return Evidence(setting.device, {"again": again}, facts)


def _raised(setting: Setting, fault: str) -> str:
    limit_s = 10.0 if fault == "timeout" else 60.0
    device = "cpu" if setting.pretend else setting.device
    try:
        launch("labs.gpu_acceptance.faulty", 1, device=device, timeout_s=limit_s, fault=fault)
    except RankFailed as e:
        return str(e)
    return ""


def _held() -> int:
    """Bytes that all GPUs of this machine hold; 0 where NVML cannot tell."""
    return sum(g.memory_used_bytes or 0 for g in nvml.gpus())


def _more(before: int, limit_s: float = 5.0) -> int:
    """Bytes that all GPUs hold more than `before`, once the driver had time to take back those of dead processes."""
    until = time.monotonic() + limit_s
    while (more := max(0, _held() - before)) > judge.LEFT_BYTES and time.monotonic() < until:
        time.sleep(0.1)
    return more


def _wait_until_alone(limit_s: float = 5.0) -> int:
    """Ranks of this process's launches that are still there after a while."""
    until = time.monotonic() + limit_s
    while (left := _ranks()) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def _ranks() -> int:
    """Ranks and their workers that are still there: what this process's fork server has forked."""
    try:
        below = psutil.Process(forkserver._forkserver._forkserver_pid).children(recursive=True)
    except (psutil.Error, ValueError, TypeError):  # it has ended, or was never there
        return 0
    return sum(p.is_running() and _status(p) not in (None, psutil.STATUS_ZOMBIE) for p in below)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.Error:
        return None


class Counting:
    """NVML's library, with a count of what it is asked."""

    def __init__(self, library: Any) -> None:
        self.library, self.queries = library, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.library, name)
        if re.match(r"nvml[A-Z]", name):
            self.queries += 1
        return found


def cost_of_reports(library: Any) -> dict[str, Any]:
    """Queries and seconds of a brief and of a full report, and the number of GPUs."""
    facts: dict[str, Any] = {}
    for kind in ("brief", "full"):
        counting, start = Counting(library), time.perf_counter()
        found = nvml.report(counting, brief=kind == "brief")
        facts |= {
            f"{kind}_s": time.perf_counter() - start,
            f"{kind}_queries": counting.queries,
            "gpus": len(found.gpus),
        }
    return facts


def nvml_cost(setting: Setting) -> Evidence:
    """What a launch, a report and the monitor cost."""
    run = run_lab(setting, "utilisation", smoke=True)
    facts = cost_of_reports(nvml.library()) | {"monitor_cost": run.monitor.cost_fraction}
    return Evidence(setting.device, {"watched": run}, facts)


STEPS: dict[str, Step] = {
    "launcher": Step("Does CUDA stay out of the launching process?", launcher, judge.launcher, 60),
    "probe": Step("How fast is the GPU?", probe, judge.probe, 90, 240),
    "copies": Step("How fast are copies, pinned and pageable?", copies, judge.copies, 60),
    "timing": Step("Can a step's time be trusted?", timing, judge.timing, 100, 300),
    "utilisation": Step("What does the counter of busy time see?", utilisation, judge.utilisation, 60),
    "amp": Step("Do all formats of AMP run, and pay?", amp, judge.amp, 90, 240),
    "memory": Step("Is the memory oracle right?", memory, judge.memory, 90, 300),
    "recompute": Step("Does recomputing save memory?", recompute, judge.recompute, 90, 240),
    "loader": Step("Do batches reach the GPU all four ways?", loader, judge.loader, 90, 240),
    "nccl": Step("Do all GPUs sum rightly over NCCL?", nccl, judge.nccl, 100, 240),
    "pipeline": Step("Does a pipeline come to its end?", pipeline, judge.pipeline, 100, 300),
    "shared": Step("Can two ranks share a GPU?", shared, judge.shared, 60),
    "faults": Step("Are faults told and cleared away?", faults, judge.faults, 150, 300),
    "nvml": Step("What does asking the driver cost?", nvml_cost, judge.nvml, 60),
}
"""In the order in which they are tried. Limits are seconds after which a step counts as hanging."""
