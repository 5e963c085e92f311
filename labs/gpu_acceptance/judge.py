"""When a step of the acceptance is a pass: pure functions of what it has found. Each can fail, and says by what."""

from __future__ import annotations

import re
from collections.abc import Iterable

from labs.common.timing.benchmark_loop import RUNGS
from labs.gpu_acceptance.evidence import Evidence, Verdict, failed, passed
from labs.kit.record import Record, Records

PEAK_SLACK = 1.05  # a rate above the datasheet's by more is a clock or a formula that is wrong
LEAST_16_BIT = 0.2  # of the dense peak, by the largest matrix product
LEAST_BANDWIDTH = 0.4  # of the datasheet's
ORACLE_ERROR = 0.10
MOST_NOISE = 1e-4  # of the largest gradient: sums of 1e4 FP32 or TF32 terms in another order stay far below
NOISE_FACTOR = 10  # the largest of many rounding errors varies from run to run, by much less than this
LEAST_SPEEDUP_16_BIT = 1.2
WRONG = 1e-2  # relative error of a product in FP32 or TF32
QUERIES_PER_GPU = {"brief": 25, "full": 100}
SECONDS = {"brief": 1.0, "full": 5.0}
MONITOR_COST = 0.02  # of one core
LEFT_BYTES = 300e6  # what a GPU may hold more after a fault than before: other processes come and go
RAISED = {
    "oom": r"out of memory",
    "assert": r"device-side assert",
    "sigkill": r"killed by SIGKILL|died without a word",
    "timeout": r"the run was stopped",
}


def _elsewhere(e: Evidence) -> str:
    """A sentence if records were taken on another kind of device than they should have been; "" otherwise."""
    kinds = {r.layout.get("device") for run in e.runs.values() for r in run}
    return f"ranks ran on {', '.join(map(str, sorted(kinds)))}, not on {e.device}" if kinds != {e.device} else ""


def _wrong(runs: Iterable[Records]) -> str:
    """A sentence if a rank computed or summed wrongly; "" otherwise."""
    records = [r for run in runs for r in run]
    product = max(r.value for r in records if r.metric == "matmul_relative_error")
    total = max(r.value for r in records if r.metric == "all_reduce_error")
    if not product <= WRONG:
        return f"a matrix product has a relative error of {product:.0e}"
    return "" if total == 0 else f"an all-reduce is wrong by {total:g}"


def launcher(e: Evidence) -> Verdict:
    """CUDA stays out of the process that launches, and ranks compute rightly on the GPU."""
    f = e.facts
    if f["cuda_initialized"]:
        return failed("the launching process has initialised CUDA")
    if f["libcuda_mapped"] and not f["libcuda_mapped_by_torch"]:
        return failed("the launching process has mapped libcuda.so, which importing torch alone does not")
    if f["holds_gpu"]:
        return failed("NVML lists the launching process on a GPU")
    if problem := _elsewhere(e) or _wrong(e.runs.values()):
        return failed(problem)
    return passed(f"no CUDA in the launching process; a rank on {e.device} computes rightly")


def probe(e: Evidence) -> Verdict:
    """Rates of products and memory, between what a card cannot miss and what it cannot beat."""
    run = e.runs["probe"]
    if problem := _elsewhere(e) or _wrong([run]):
        return failed(problem)
    best: dict[str, Record] = {}
    for r in run.where("matmul_share_of_peak"):
        best[r.case["dtype"]] = max(r, best.get(r.case["dtype"], r), key=lambda r: r.value)
    for name, r in best.items():
        if r.value > PEAK_SLACK:
            return failed(f"{name} runs at {r.value:.2f} of the dense peak: the clock or the formula is wrong")
        if name in ("bf16", "fp16") and r.value < LEAST_16_BIT:
            return failed(f"{name} reaches {r.value:.0%} of the dense peak, less than {LEAST_16_BIT:.0%}")
    memory = max(r.value for r in run.where("memory_b_s"))
    if limit := e.facts["bandwidth_b_s"]:
        share = memory / limit
        if not LEAST_BANDWIDTH <= share <= PEAK_SLACK:
            return failed(f"memory moves {memory / 1e9:.0f} GB/s, {share:.2f} of the datasheet's")
    if not best:
        return passed(f"right results; no datasheet of {e.facts['card']} here, so rates are not judged")
    return passed(", ".join(f"{n} {r.value:.0%} of the peak" for n, r in best.items()) + f"; {memory / 1e9:.0f} GB/s")


def copies(e: Evidence) -> Verdict:
    """Both directions, pinned at least as fast as pageable, none faster than the PCIe link."""
    if problem := _elsewhere(e):
        return failed(problem)
    said = []
    for direction in ("to device", "to host"):
        pinned, pageable = (
            e.runs["copies"].one("host_device_b_s", direction=direction, memory=m).value for m in ("pinned", "pageable")
        )
        if pinned < 0.9 * pageable:
            return failed(f"{direction}, pinned memory is slower than pageable: {pinned / pageable:.2f} times as fast")
        limit = e.facts["pcie_b_s"]
        if limit and pinned > PEAK_SLACK * limit:
            return failed(f"{direction} at {pinned / 1e9:.1f} GB/s, above the PCIe link's {limit / 1e9:.1f}")
        said.append(f"{direction} {pinned / 1e9:.1f} GB/s pinned, {pageable / 1e9:.1f} pageable")
    return passed("; ".join(said))


def timing(e: Evidence) -> Verdict:
    """A step is not faster than the best kernel allows, and waiting for the device does not make the loop faster."""
    run = e.runs["timing"]
    if problem := _elsewhere(e):
        return failed(problem)
    step = run.one("step_s", mode="train").value
    share = run.one("step_flop").value / step / max(r.value for r in run.where("peak_flop_s"))
    if share > PEAK_SLACK:
        return failed(f"a step runs at {share:.2f} of the best measured rate: the clock does not wait for the device")
    before = RUNGS[RUNGS.index("synchronise") - 1]  # the same loop, but for the wait
    hurried, waited = (run.one("answer_s", rung=rung).value for rung in (before, "synchronise"))
    if waited < 0.7 * hurried:
        return failed(f"the loop that waits for the device takes {waited / hurried:.2f} of the one that does not")
    return passed(f"a step takes {step * 1e3:.2f} ms, {share:.1%} of the best measured rate")


def utilisation(e: Evidence) -> Verdict:
    """The counter sees a busy device, and one that waits for data."""
    run = e.runs["utilisation"]
    if problem := _elsewhere(e):
        return failed(problem)
    busy, waits = (run.one("busy_share", job=job).value for job in ("large products", "waiting for data"))
    if not all(0 <= r.value <= 1.1 for r in run.where("busy_share")):
        return failed("a busy share is not between 0 and 1")
    if busy < 0.7 or busy - waits < 0.05:
        return failed(f"large products look {busy:.0%} busy and a device that waits for data {waits:.0%}")
    return passed(f"large products {busy:.0%} busy, waiting for data {waits:.0%}")


def amp(e: Evidence) -> Verdict:
    """All formats of the card run, and 16 bits pay in the largest product."""
    run = e.runs["amp"]
    if problem := _elsewhere(e):
        return failed(problem)
    for r in run.where("not_possible"):
        return failed(f"{r.case['precision']} is not possible: {r.case['why']}")
    wanted = e.facts["formats"]
    ladder = [r for r in run.where("step_s", part="matmul") if not r.case["casts"]]
    sides = {f: {r.case["side"]: r.value for r in ladder if r.case["precision"] == f} for f in wanted}
    if missing := [f for f in wanted if not sides[f]]:
        return failed(f"no matrix product was timed in {', '.join(missing)}")
    side = max(set.intersection(*(set(s) for s in sides.values())), default=None)
    if side is None:
        return failed("no side of a matrix product was timed in all formats")
    speedups = {f: sides["fp32"][side] / sides[f][side] for f in wanted if f != "fp32"}
    best = max((f for f in speedups if f in ("bf16", "fp16")), key=speedups.__getitem__)
    if speedups[best] < LEAST_SPEEDUP_16_BIT:
        return failed(f"at side {side} {best} is {speedups[best]:.2f} times as fast as fp32")
    return passed(f"at side {side}, over fp32: " + ", ".join(f"{f} {s:.1f} x" for f, s in speedups.items()))


def memory(e: Evidence) -> Verdict:
    """The oracle's peak against what the allocator was asked for; and asked <= allocated <= reserved."""
    run, worst, models = e.runs["memory"], 0.0, []
    if problem := _elsewhere(e):
        return failed(problem)
    for r in run.where("measured_bytes"):
        predicted = sum(p.value for p in run.where("peak_bytes", **r.case))
        allocated, reserved = (run.one(f"{kind}_bytes", **r.case).value for kind in ("allocated", "reserved"))
        error = predicted / r.value - 1
        if not r.value <= allocated <= reserved:
            return failed(
                f"{r.case['model']}: asked {r.value:.0f} B, allocated {allocated:.0f}, reserved {reserved:.0f}"
            )
        if abs(error) > ORACLE_ERROR:
            return failed(f"{r.case['model']}: the oracle is off by {error:+.1%}, more than {ORACLE_ERROR:.0%}")
        worst, models = max(worst, error, key=abs), [*models, r.case["model"]]
    if not models:
        return failed("no step was really run beside its trace")
    return passed(f"{', '.join(dict.fromkeys(models))}: the oracle is off by {worst:+.1%} at most")


def recompute(e: Evidence) -> Verdict:
    """Recomputing lowers the peak and leaves the gradients as they were, but for rounding."""
    run = e.runs["recompute"]
    if problem := _elsewhere(e):
        return failed(problem)
    peaks = {r.case["policy"]: r.value for r in run.where("peak_bytes", part="pareto")}
    saved = 1 - peaks["block"] / peaks["none"]
    off = {r.case["policy"]: r.value for r in run.where("gradient_difference")}
    worst, again = max(value for policy, value in off.items() if policy != "none"), off["none"]
    if saved <= 0:
        return failed(f"recomputing every block takes {-saved:.0%} more memory, not less")
    if not again <= MOST_NOISE:
        return failed(f"two runs of one step have gradients that differ by {again:.0e} of the largest")
    if not worst <= NOISE_FACTOR * again:  # 0 where two runs give the same bits
        return failed(f"gradients differ by {worst:.0e} when activations are computed again, by {again:.0e} if not")
    bits = "the same bits" if worst == 0 else f"as far off ({worst:.0e}) as those of two equal runs ({again:.0e})"
    return passed(f"the peak falls by {saved:.0%}; gradients are {bits}")


def loader(e: Evidence) -> Verdict:
    """All four ways to copy batches run, and pinned with non_blocking is not behind."""
    if problem := _elsewhere(e):
        return failed(problem)
    rates = {
        (pin, non_blocking): e.runs["loader"].one("images_per_s", pin_memory=pin, non_blocking=non_blocking).value
        for pin in (False, True)
        for non_blocking in (False, True)
    }
    gain = rates[True, True] / rates[False, False]
    if gain < 0.8:
        return failed(f"pinned and non_blocking is {gain:.2f} times as fast as neither")
    return passed(f"{rates[True, True]:.0f} images/s pinned and non_blocking, {gain:.2f} times as fast as neither")


def nccl(e: Evidence) -> Verdict:
    """As many ranks as GPUs, over NCCL: sums are right; with several, DDP has one process's gradient."""
    if problem := _elsewhere(e) or _wrong([e.runs["nccl"]]):
        return failed(problem)
    layout = e.runs["nccl"][0].layout
    if e.device == "cuda" and "nccl" not in layout["backend"]:
        return failed(f"the backend is {layout['backend']}, without NCCL")
    if layout["world_size"] != e.facts["gpus"]:
        return failed(f"{layout['world_size']} ranks for {e.facts['gpus']} GPUs")
    if layout["world_size"] == 1:
        return passed("one GPU: a group of one rank; messages between GPUs are not tried")
    rounding = e.runs["ddp"].where("gradient_relative_error", dtype="float64", sync_batchnorm=False)
    worst = max(r.value for r in rounding if "batchnorm" not in r.case["model"])
    if worst > 1e-9:
        return failed(f"DDP's gradient differs from one process's by {worst:.0e} in FP64")
    busbw = max(r.value for r in e.runs["nccl"].where("busbw_b_s"))
    return passed(f"{layout['world_size']} ranks, sums right, {busbw / 1e9:.1f} GB/s bus bandwidth")


def pipeline(e: Evidence) -> Verdict:
    """A stage per GPU: every schedule comes to its end, with one process's gradient."""
    run = e.runs["pipeline"]
    if problem := _elsewhere(e):
        return failed(problem)
    worst = max(run.where("gradient_relative_error"), key=lambda r: r.value)
    if worst.value > 1e-3:
        return failed(f"{worst.case['schedule']} has a gradient that differs by {worst.value:.0e}")
    return passed(
        f"{run[0].layout['world_size']} stages, all schedules end; gradients differ by {worst.value:.0e} at most"
    )


def shared(e: Evidence) -> Verdict:
    """Two ranks on one GPU, over gloo."""
    if problem := _elsewhere(e) or _wrong([e.runs["shared"]]):
        return failed(problem)
    layout = e.runs["shared"][0].layout
    if (layout["world_size"], layout["backend"]) != (2, "gloo"):
        return failed(f"{layout['world_size']} ranks over {layout['backend']}, not 2 over gloo")
    return passed("2 ranks share a GPU over gloo, sums are right")


def faults(e: Evidence) -> Verdict:
    """Each fault is told by its name, leaves no process and no memory, and the next launch works."""
    for name, pattern in RAISED.items():
        found = e.facts["faults"][name]
        if not found["raised"]:
            return failed(f"{name}: the launch ended as if nothing had happened")
        if not re.search(pattern, found["raised"]):
            return failed(f"{name}: told as {found['raised'][-100:]!r}")
        if found["left"]:
            return failed(f"{name}: {found['left']} processes were left behind")
        if found["held_bytes"] > LEFT_BYTES:
            return failed(f"{name}: the GPU holds {found['held_bytes'] / 1e9:.1f} GB more than before")
    if not e.facts["works_again"]:
        return failed("after the faults a launch does not work any more")
    slowest = max(f["seconds"] for f in e.facts["faults"].values())
    return passed(f"{', '.join(RAISED)}: each told by its name within {slowest:.0f} s, nothing left")


def nvml(e: Evidence) -> Verdict:
    """What asking the driver costs: for a launch, for a whole report, and while a run is watched."""
    f = e.facts
    for kind in ("brief", "full"):
        limit = QUERIES_PER_GPU[kind] * f["gpus"] + 4 * f["gpus"] ** 2
        if f[f"{kind}_queries"] > limit:
            return failed(f"a {kind} report asks NVML {f[f'{kind}_queries']} times, more than {limit}")
        if f[f"{kind}_s"] > SECONDS[kind]:
            return failed(f"a {kind} report takes {f[f'{kind}_s']:.1f} s, more than {SECONDS[kind]:g}")
    if f["monitor_cost"] > MONITOR_COST:
        return failed(f"the monitor takes {f['monitor_cost']:.1%} of a core, more than {MONITOR_COST:.0%}")
    asked = ", ".join(f"{kind} {f[f'{kind}_queries']} in {f[f'{kind}_s'] * 1e3:.0f} ms" for kind in ("brief", "full"))
    return passed(f"queries: {asked}; the monitor takes {f['monitor_cost']:.2%} of a core")
