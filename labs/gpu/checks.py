"""Does this GPU keep what the course promises? Runs one check; `make gpu` runs each in its own process.

    python -m labs.gpu.checks launcher            # launcher, memory, formats, nvml or faults
    python -m labs.gpu.checks faults --rehearse   # the same code on CPU cores, without what only a GPU can decide

Prints one line that begins with "pass" or "fail". Exit code: 0 or 1; 2 for bad input.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

import psutil
import torch

from labs.kit import cli, nvml, supervise, timeouts
from labs.kit.errors import did_you_mean
from labs.kit.failure import RankFailed
from labs.kit.launch import Run, launch
from labs.kit.record import Records

PROG = "python -m labs.gpu.checks"
ORACLE_ERROR = 0.10
LEAST_SPEEDUP = 1.2
"""Of a 16-bit format over FP32, in the largest product that all formats ran."""
MONITOR_COST = 0.02  # share of one core
MOST_QUERIES = {"brief": 25, "full": 100}  # NVML queries per GPU
LIBCUDA = "libcuda.so"
LEFT_BYTES = 300e6  # other processes come and go
RAISED = {
    "oom": r"out of memory",
    "assert": r"device-side assert",
    "sigkill": r"killed by SIGKILL|died without a word",
    "timeout": r"the run was stopped",
}


class CheckFailed(Exception):
    """A check failed; the message says how."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise CheckFailed(otherwise) unless `holds`."""
    if not holds:
        raise CheckFailed(otherwise)


def run_lab(name: str, rehearse: bool, **parameters: Any) -> Run:
    """Run one rank of a lab on the GPU, or as a smoke run on a CPU core."""
    if rehearse:
        return launch(name, 1, device="cpu", **{"smoke": True} | parameters)
    return launch(name, 1, device="cuda", **parameters)


def launcher(rehearse: bool) -> str:
    """Check that the launching process stays free of CUDA, and that a rank computes correctly."""
    run = run_lab("hardware_probe", rehearse, parts=("correctness",))
    alone = supervise.run(
        [sys.executable, "-c", "import torch; print(open('/proc/self/maps').read())"], timeouts.IMPORT_S
    )
    holders = {p.pid for gpu in nvml.gpus() for p in gpu.processes or ()}
    expect(not torch.cuda.is_initialized(), "the launching process has initialised CUDA")
    by_torch = LIBCUDA in alone.stdout
    expect(by_torch or not libcuda_mapped(), "the launching process has mapped libcuda.so, and torch alone does not")
    expect(os.getpid() not in holders, "NVML lists the launching process on a GPU")
    expect_right_results(run)
    return "right results, no CUDA in the launching process"


def libcuda_mapped() -> bool:
    """Return whether this process has mapped CUDA's driver; False if the system doesn't show that."""
    try:
        with open("/proc/self/maps") as maps:
            return LIBCUDA in maps.read()
    except OSError:
        return False


def expect_right_results(run: Records) -> None:
    """Raise CheckFailed if a rank got a wrong product or sum."""
    product, total = (run.where(metric) for metric in ("matmul_relative_error", "all_reduce_error"))
    worst = max(r.value for r in product)
    expect(worst <= 1e-2, f"a matrix product has a relative error of {worst:.0e}")
    expect(max(r.value for r in total) == 0, "an all-reduce has a wrong sum")


def memory(rehearse: bool) -> str:
    """Compare the memory oracle with what the allocator was asked for."""
    run, worst = run_lab("memory_oracle", rehearse, smoke=True), 0.0
    measured = run.where("measured_bytes")
    expect(len(measured) > 0, "no step was run beside its trace")
    for r in measured:
        error = sum(p.value for p in run.where("peak_bytes", **r.case)) / r.value - 1
        expect(abs(error) <= ORACLE_ERROR, f"{r.case['model']}: the oracle is off by {error:+.1%}")
        worst = max(worst, error, key=abs)
    return f"the oracle is off by {worst:+.1%} at most, over {len(measured)} steps"


def formats(rehearse: bool) -> str:
    """Check that this card runs every format, and that 16 bits pay in the largest product."""
    run = run_lab("mixed_precision", rehearse, models=("mlp",))
    for r in run.where("not_possible"):
        expect(rehearse, f"{r.case['precision']} is not possible: {r.case['why']}")
    sides: dict[str, dict[int, float]] = {}
    for r in run.where("step_s", part="matmul"):
        if not r.case["casts"]:
            sides.setdefault(r.case["precision"], {})[r.case["side"]] = r.value
    common = set.intersection(*(set(by_side) for by_side in sides.values()))
    expect(bool(common), "no product was timed in every format")
    side = max(common)
    gains = {name: sides["fp32"][side] / by_side[side] for name, by_side in sides.items() if name != "fp32"}
    best = max((gain for name, gain in gains.items() if name in ("bf16", "fp16")), default=0.0)
    expect(rehearse or best >= LEAST_SPEEDUP, f"at side {side} no 16-bit format is {LEAST_SPEEDUP}x as fast as FP32")
    return f"at side {side}, over FP32: " + ", ".join(f"{name} {gain:.2g}x" for name, gain in gains.items())


class Counting:
    """NVML's library with a counter for its queries."""

    def __init__(self, library: Any) -> None:
        self.library, self.queries = library, 0

    def __getattr__(self, name: str) -> Any:
        self.queries += bool(re.match(r"nvml[A-Z]", name))
        return getattr(self.library, name)


def nvml_cost(rehearse: bool) -> str:
    """Count the queries of a report, and measure the monitor's share of a core."""
    parameters = {"name": "hardware_probe", "parts": ("matmul",)} if rehearse else {"name": "utilisation"}
    run = run_lab(rehearse=rehearse, smoke=True, **parameters)
    said = []
    for kind, most in MOST_QUERIES.items() if not rehearse else ():
        counting = Counting(nvml.library())
        gpus = max(1, len(nvml.report(counting, brief=kind == "brief").gpus))
        limit = most * gpus + 4 * gpus**2
        expect(counting.queries <= limit, f"a {kind} report asks NVML {counting.queries} times, more than {limit}")
        said.append(f"a {kind} report asks {counting.queries} times")
    cost = run.monitor.cost_fraction
    expect(cost <= MONITOR_COST, f"the monitor takes {cost:.1%} of a core, more than {MONITOR_COST:.0%}")
    return ", ".join([*said, f"the monitor takes {cost:.2%} of a core"])


def faults(rehearse: bool) -> str:
    """Check that each fault is named and leaves no process or memory, and that the next launch works."""
    device, slowest = "cpu" if rehearse else "cuda", 0.0
    for fault, pattern in RAISED.items():
        before, start = held_bytes(), time.monotonic()
        text = ""
        try:
            launch("labs.gpu.faulty", 1, device=device, timeout_s=8.0 if fault == "timeout" else 60.0, fault=fault)
        except RankFailed as error:
            text = str(error)
        slowest = max(slowest, time.monotonic() - start)
        expect(bool(text), f"{fault}: the launch reported no error")
        expect(bool(re.search(pattern, text)), f"{fault}: reported as {text[-100:]!r}")
        expect(until(lambda: ranks_left() == 0), f"{fault}: {ranks_left()} processes were left behind")
        more = f"{fault}: the GPU holds {(held_bytes() - before) / 1e9:.1f} GB more than before"
        expect(until(lambda before=before: held_bytes() - before <= LEFT_BYTES), more)
    again = launch("labs.gpu.faulty", 1, device=device, fault="none")
    expect(again.one("sum").value == 256**3, "after the faults a launch computes a wrong sum")
    return f"{', '.join(RAISED)}: each named within {slowest:.0f} s, nothing left"


def held_bytes() -> int:
    """Return the bytes in use on all GPUs of this machine; 0 if NVML doesn't answer."""
    return sum(g.memory_used_bytes or 0 for g in nvml.gpus())


def until(holds: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Wait up to `limit_s` seconds for `holds`, since the driver frees memory with a delay."""
    end = time.monotonic() + limit_s
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def ranks_left() -> int:
    """Return how many descendants of the fork server still run."""
    try:
        below = psutil.Process(forkserver._forkserver._forkserver_pid).children(recursive=True)
        return sum(p.status() != psutil.STATUS_ZOMBIE for p in below)
    except (psutil.Error, ValueError, TypeError):  # it has ended, or never existed
        return 0


CHECKS: dict[str, Callable[[bool], str]] = {
    "launcher": launcher,
    "memory": memory,
    "formats": formats,
    "nvml": nvml_cost,
    "faults": faults,
}


def main() -> None:
    names = [word for word in sys.argv[1:] if word != "--rehearse"]
    if len(names) != 1 or names[0] not in CHECKS:
        wrong = names[0] if names else ""
        cli.fail(PROG, f"name one check: {did_you_mean(wrong, CHECKS)}there are {', '.join(CHECKS)}")
    try:
        print(f"pass: {CHECKS[names[0]]('--rehearse' in sys.argv)}")
    except (CheckFailed, RankFailed) as error:
        print(f"fail: {str(error).strip().splitlines()[-1]}")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
