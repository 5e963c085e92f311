"""Notebook 00: this machine, its rates in each format, its ceilings, copies and messages, from the probe's records."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import torch

from labs import hardware_probe
from labs.common.sources import on_gpus
from labs.common.timing import collectives, limits
from labs.common.timing.limits import FORMATS
from labs.kit import hardware, host, preflight
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import estimate
from labs.kit.monitor import DISTURBED_PERCENT, Monitor, Trace
from labs.kit.plot import bars, curve, figure, log_axes, plain_number, points, prediction, show
from labs.kit.preflight import as_text, gather
from labs.kit.record import Record, Records

BATCH_BYTES = 64 * 3 * 224 * 224 * 4  # an image batch in FP32


def readiness() -> None:
    """The preflight's machine checks, one line each."""
    print(as_text(preflight.machine_checks(gather())))


def gpu_table(report: hardware.nvml.Report | None = None) -> pandas.DataFrame | None:
    """What NVML says about each GPU, one column per card; a sentence and None where there is none."""
    report = hardware.nvml.report() if report is None else report
    if not report.gpus:
        say(f"No GPU here ({report.problem or 'the driver lists none'}): this notebook measures CPU cores.")
        return None
    cards = pandas.DataFrame([vars(g) for g in report.gpus]).set_index("index").T
    say(f"Driver {report.driver}. Idle cards lower clocks and PCIe generation: compare with the `_max` rows.")
    return cards.dropna(how="all")


def machine(summary: dict[str, Any] | None = None, here: host.Container | None = None) -> pandas.DataFrame:
    """The processor, the cores that this process may use and which of them share a physical core, caches, memory."""
    summary, here = summary or hardware.summary(), here or host.container()
    physical, limit = host.cores(here.affinity), here.memory_limit_bytes
    rows = {
        "processor": summary["cpu"],
        "instructions that torch uses": torch.backends.cpu.get_cpu_capability(),
        "logical CPUs of the host": os.cpu_count(),
        "of these for this process (affinity)": len(here.affinity),
        "CPU quota (cores)": "none" if here.cpu_quota is None else f"{here.cpu_quota:g}",
        "ranks that fit": here.cores,
        "physical cores behind the affinity": len(physical),
        "NUMA nodes behind the affinity": len({core.node for core in physical}),
        "caches of one core": caches(),
        "memory limit (GiB)": "none" if limit is None else f"{limit / 2**30:.1f}",
    }
    return pandas.DataFrame({"here": rows})


def caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """For example "L1 32K, L2 1024K, L3 32768K", as Linux tells; a core may share the larger ones with others."""
    found = {}
    for index in sorted(folder.glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return ", ".join(f"{level} {size}" for level, size in found.items()) or "not told by this system"


def who_else(seconds: float = 0.6, trace: Trace | None = None) -> None:
    """How much of the usable cores other programs take right now; a sentence."""
    if trace is None:
        with Monitor(dict) as monitor:
            time.sleep(seconds)
        trace = monitor.trace
    share = trace.neighbours_percent
    if math.isnan(share):
        return say("Nobody can say what other programs take here.")
    word = "timings will be disturbed, so close programs or wait" if share > DISTURBED_PERCENT else "little enough"
    return say(
        f"Other programs take {share:.0f} % of the CPU time of this process's cores right now: {word}. `top` "
        "or `htop` in a terminal names them; on a GPU `nvidia-smi` does."
    )


def recorded_runs(folder: Path = on_gpus.RECORDS) -> None:
    """What probe runs on GPUs that are committed under records/ say, labelled; a sentence if there is none."""
    on_gpus.told(on_gpus.runs("hardware_probe", folder), _probe_text)


def _probe_text(run: Records) -> str:
    return "\n\n" + "\n".join(f"* {line}" for line in (*hardware_probe.answer(run), *_ratios(run)))


def _ratios(run: Records) -> Iterator[str]:
    """Shares of the datasheet, BF16 over FP32, memory over the link to the host."""
    best = limits.peaks(run)
    of_peak = {
        r.case["dtype"]: max(s.value for s in run.where("matmul_share_of_peak", dtype=r.case["dtype"]))
        for r in run.where("matmul_share_of_peak")
    }
    if of_peak:
        said = ", ".join(f"{FORMATS[d]} {share:.0%}" for d, share in of_peak.items())
        yield f"Of the datasheet's peaks (section 6) its products reach: {said}."
    link = run.where("host_device_b_s", direction="to device", memory="pinned")
    if {"fp32", "bf16"} <= set(best) and len(link) and len(run.where("memory_b_s")):
        memory = limits.memory(run).value / link[0].value
        formats = best["bf16"].value / best["fp32"].value
        yield f"BF16 over FP32: {formats:.1f} x; its memory over the link to the host: {memory:.0f} x."


def formats(run: Records, guess: Prediction) -> None:
    """The fastest product and the convolution in each format; the guess is BF16's best rate over FP32's."""
    best = limits.peaks(run)
    fastest, slowest = (pick(best, key=lambda d: best[d].value) for pick in (max, min))
    message = _order(best, fastest, slowest) + _bits(best)
    fig, ax = figure(
        message, xlabel="GFLOP/s of one device", ylabel="number format", records=run, size=(7.0, 3.6), legend_below=True
    )
    for metric, label in (("matmul_flop_s", "best matrix product"), ("convolution_flop_s", "3x3 convolution")):
        rows = {d: max(run.where(metric, dtype=d), key=lambda r: r.value, default=None) for d in best}
        found = [estimate(r.samples).scaled(1e-9) if r else math.nan for r in rows.values()]
        bars(ax, [FORMATS[d] for d in best], found, label=label)
    if "bf16" in best:
        prediction(ax, float(guess) * best["fp32"].value / 1e9, list(best).index("bf16"), label="BF16")
    values = [r.value / 1e9 for r in (*run.where("matmul_flop_s"), *run.where("convolution_flop_s"))]
    log_axes(ax, _decades(min(values), max(values)))
    lines = "; ".join(f"{FORMATS[d]} {estimate(r.samples, r.unit)} ({limits.kernel(r)})" for d, r in best.items())
    show(fig, alt=f"{message}. {lines}.")
    say(_formats_text(run, guess, best, fastest, slowest))


def _order(best: dict[str, Record], fastest: str, slowest: str) -> str:
    """Names the fastest and the slowest format where the interval of no other one reaches into theirs."""
    rate = {d: estimate(r.samples) for d, r in best.items()}
    first = all(rate[fastest].low > e.high for d, e in rate.items() if d != fastest)
    last = all(rate[slowest].high < e.low for d, e in rate.items() if d != slowest)
    if first:
        return f"{FORMATS[fastest]} is fastest here" + (f", {FORMATS[slowest]} slowest" if last else "")
    return f"{FORMATS[slowest]} is slowest here" if last else "This run cannot tell which format is fastest"


def _bits(best: dict[str, Record]) -> str:
    """Whether a format is slower than one with as many bits or more: then bits alone do not decide."""
    rate = {d: estimate(r.samples) for d, r in best.items()}
    bits = {"fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16}
    slower = any(bits[a] <= bits[b] and rate[a].high < rate[b].low for a in rate for b in rate)
    return ": bits alone do not decide" if slower else ""


def _formats_text(run: Records, guess: Prediction, best: dict[str, Record], fastest: str, slowest: str) -> str:
    text = f"The fastest is {best[fastest].value / best[slowest].value:.2g} times as fast as the slowest. "
    if "bf16" in best:
        found = limits.ratio(best["bf16"], best["fp32"])
        text += f"BF16 over FP32, each with its fastest kernel: {found}. {guess.against(found)} "
    if left_out := _left_out(run, best):
        text += f"Left out, for they would take too long: {'; '.join(left_out)}. "
    shares = run.where("matmul_share_of_peak")
    if not len(shares):
        return text + "No datasheet peak is known for this device, so no share of one is given."
    top = {r.case["dtype"]: max(s.value for s in shares.where(dtype=r.case["dtype"])) for r in shares}
    return text + "Share of the dense peak: " + ", ".join(f"{FORMATS[d]} {v:.0%}" for d, v in top.items()) + "."


def _left_out(run: Records, best: dict[str, Record]) -> list[str]:
    """What was timed in another format and not in this one."""
    kernels: dict[str, set[int]] = {d: set() for d in best}  # 0 stands for the convolution
    for r in (*run.where("matmul_flop_s"), *run.where("convolution_flop_s")):
        kernels[r.case["dtype"]].add(r.case.get("side", 0))
    every = set().union(*kernels.values())
    missing = {d: sorted(every - found) for d, found in kernels.items() if every - found}
    return [
        f"{FORMATS[d]} " + ", ".join(f"product, n = {n}" if n else "3x3 convolution" for n in m)
        for d, m in missing.items()
    ]


def tf32_switch(errors: dict[str, float]) -> None:
    """What the switch did, from the relative error of one FP32 product under each setting."""
    off, on = errors["highest"], errors["high"]
    changed = on > 10 * off  # TF32 keeps 10 of 23 bits of the mantissa
    what = (
        f"{on / off:,.0f} times as large: the product went through TF32"
        if changed
        else "no larger: this device computes FP32 products in FP32 either way"
    )
    say(f'Relative error of an FP32 product: {off:.1e} under "highest" and {on:.1e} under "high", {what}.')


def published_ratios() -> None:
    """How much faster BF16 is than TF32 and FP32 by the datasheets of the hardware table; a sentence."""
    cards = [s for s in hardware.specs() if s.tflops("bf16") and s.tflops("tf32")]
    over = {d: [s.tflops("bf16") / s.tflops(d) for s in cards] for d in ("tf32", "fp32")}
    ends = {d: dict.fromkeys((f"{min(v):.1f}", f"{max(v):.1f}")) for d, v in over.items()}  # one if they are the same
    tf32, fp32 = (" to ".join(found) for found in ends.values())
    say(
        f"By the datasheets of the {len(cards)} cards in section 6 with both (published, dense), BF16 is {tf32} times "
        f"as fast as TF32, and {fp32} times as fast as FP32 outside of the matrix units."
    )


def ceiling(run: Records, guess: Prediction) -> None:
    """Speed-up of n ranks that exchange nothing, for arithmetic and for memory traffic."""
    rows = run.where("ceiling_speedup")
    if not len(rows):
        return say("One rank alone has no ceiling to measure: run with NPROC = 2 or more.")
    n = rows[0].case["ranks"]
    names = {"matmul": "arithmetic\n(matrix products)", "triad": "memory traffic\n(triad)"}
    found = {r.case["job"]: estimate(r.samples, "x") for r in rows}
    message = f"{n} ranks: {found['matmul'].value:.2f} x the arithmetic, {found['triad'].value:.2f} x the memory"
    fig, ax = figure(
        message, xlabel=f"total rate of {n} ranks over that of one (x)", ylabel="job", records=run, size=(7.0, 3.2)
    )
    bars(ax, list(names.values()), [found[j] for j in names])
    prediction(ax, float(guess), 1)
    ax.axvline(n, linestyle=":", color="black")
    ax.annotate(f"ideal: {n}", (n, -0.4), ha="right", fontsize=10)
    ax.set_xlim(0, max(n * 1.15, *(1.05 * e.high for e in found.values())))
    show(fig, alt=f"{message}; the ideal is {n}.")
    triad, product = found["triad"], found["matmul"]
    word = "this run cannot tell whether that is less than arithmetic gains"
    if triad.high < product.low or triad.low > product.high:
        word = f"{'less' if triad.high < product.low else 'more'} than arithmetic gains"
    shared = "the host's cores, power and cooling" if run[0].layout["device"] == "cuda" else "memory, caches and power"
    missing = f"This run cannot show that anything is missing to {n}, nor that nothing is."
    if triad.high < n or product.high < n:
        missing = (
            f"No message was sent, so messages do not explain what is missing to {n}. A guess: {shared} "
            f"that the ranks share, and other programs. Judge parallel training by these, not by {n}."
        )
    return say(f"Memory traffic gains {triad}; {word} ({product}). {guess.against(triad)} {missing}")


def copies(run: Records) -> pandas.DataFrame | None:
    """Copies between host and GPU, from pageable and pinned memory; on a CPU what takes their place."""
    rows = run.where("host_device_b_s")
    if not len(rows):
        cards = [s for s in hardware.specs() if s.link and s.link.startswith("PCIe")]
        links = {s.link: s.link_gb_s / 2 for s in sorted(cards, key=lambda s: s.link)}  # of both directions
        times = ", ".join(
            f"{BATCH_BYTES / rate / 1e6:.2g} ms by {link} ({rate:g} GB/s each way)" for link, rate in links.items()
        )
        return say(
            "A CPU core has no memory of its own, so nothing was measured: `.to(device)` returns the same tensor. For "
            f"comparison, a batch of {BATCH_BYTES / 1e6:.1f} MB (64 images of 3 x 224 x 224 in FP32) at the published "
            f"peak of a GPU's link takes, modelled: {times}."
        )
    rates = {(r.case["direction"], r.case["memory"]): estimate(r.samples, "B/s") for r in rows}
    for direction in ("to device", "to host"):
        pinned, pageable = (run.one("host_device_b_s", direction=direction, memory=m) for m in ("pinned", "pageable"))
        found = limits.ratio(pinned, pageable)
        word = "faster than" if found.low > 1 else "slower than" if found.high < 1 else "not told apart from"
        say(f"Pinned memory is {word} pageable memory {direction}: {found}.")
    return pandas.DataFrame({d: {m: str(v) for (e, m), v in rates.items() if e == d} for d in ("to device", "to host")})


def all_reduce(run: Records, guess: Prediction) -> None:
    """Bus bandwidth against message size with the fitted model; the guess is where half of it is reached (KiB)."""
    rows = run.where("busbw_b_s")
    if not len(rows):
        return say("One rank has nobody to reduce with: run with NPROC = 2 or more.")
    link = limits.link(run)
    model, limit, half, n = link.model, link.busbw_b_s / 1e9, link.half, link.ranks
    if not math.isfinite(limit):
        message = "No bandwidth to be seen: large messages took no longer than small ones"
    elif not link.told:  # noise between two sizes can hide what a message costs by itself
        message = "This run cannot tell from which size on the bandwidth is reached"
    else:
        message = f"Half of the bandwidth is reached at about {_kib(half.value)}"
    fig, ax = figure(message, xlabel="message size (KiB)", ylabel="bus bandwidth (GB/s)", records=run)
    sizes = [r.case["bytes"] for r in rows]
    points(ax, [s / 1024 for s in sizes], [estimate(r.samples).scaled(1e-9) for r in rows], label=f"{n} ranks")
    grid = [2 ** (math.log2(sizes[0]) + k / 40 * math.log2(sizes[-1] / sizes[0])) for k in range(41)]
    busbw = [collectives.busbw_b_s(s, model.seconds(s), n) / 1e9 for s in grid]
    curve(ax, [s / 1024 for s in grid], busbw, label="latency + size / bandwidth")
    if math.isfinite(limit):
        prediction(ax, float(guess), limit / 2, label="half reached")
    values = [r.value / 1e9 for r in rows]
    log_axes(ax, [s / 1024 for s in sizes], _decades(min(values), max(*values, limit if math.isfinite(limit) else 0.0)))
    show(fig, alt=f"{message}; {plain_number(values[0])} GB/s for the smallest, {values[-1]:.2g} for the largest.")
    say(_all_reduce_text(link, guess))


def _all_reduce_text(link: limits.Link, guess: Prediction) -> str:
    again = "Run the cell again, on a quiet machine or with more rounds."
    if not math.isfinite(link.busbw_b_s):
        return f"By the fit a byte costs nothing, so that this run cannot tell the bandwidth. {again}"
    half, model = link.half, link.model
    fit = (
        f"The fit: latency {model.latency_s * 1e6:.0f} µs, bandwidth {link.busbw_b_s / 1e9:.2g} GB/s (busbw); the "
        f"point that it misses most is {link.misfit:.0%} away. "
    )
    if not link.told:
        top = _kib(half.high) if math.isfinite(half.high) else "any size"
        return f"{fit}Half of it is reached somewhere from {_kib(half.low)} to {top}: this run cannot tell. {again}"
    return (
        f"{fit}Half of the bandwidth is reached at {half}. {guess.against(half)} By the fit, 10 KiB take "
        f"{model.seconds(10 * 1024) * 1e3:.2f} ms and a hundred times as much takes "
        f"{model.seconds(1000 * 1024) * 1e3:.2f} ms."
    )


def _kib(kib: float) -> str:
    return f"{plain_number(float(f'{kib:.2g}'))} KiB"


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten (or of two, over a short range) for the ticks of a logarithmic axis, within [low, high]."""
    base = 10 if high / low > 200 else 2
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [float(base) ** k for k in range(first, last + 1)]
