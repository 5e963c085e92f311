"""Figures, tables and sentences of notebook 00, computed from the probe's records and the hardware table."""

from __future__ import annotations

import math
from pathlib import Path

import pandas

from labs.kit import hardware, preflight
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import bars, curve, figure, log_axes, plain_number, points, prediction, show
from labs.kit.preflight import as_text, gather
from labs.kit.record import Record, Records, load
from labs.parts.timing import collectives
from labs.parts.timing.roofline import Work, attainable_flop_s, ridge_flop_per_byte

FORMATS = {"fp32": "FP32", "tf32": "TF32", "bf16": "BF16", "fp16": "FP16"}
RECORDS = Path(__file__).parents[3] / "records"


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


def recorded_runs(folder: Path = RECORDS) -> None:
    """The matrix rates of probe runs on GPUs that are committed under records/, labelled; a sentence if none."""
    runs = [load(p) for p in sorted(folder.glob("*/hardware_probe*.jsonl"))]
    runs = [r for r in runs if r[0].layout.get("device") == "cuda"]
    if not runs:
        say("No recorded GPU run of this lab exists yet, so no GPU number is shown in its place.")
    for run in runs:
        best = _best_by_format(run)
        rates = ", ".join(f"{FORMATS[d]} {estimate(r.samples, r.unit)}" for d, r in best.items())
        say(f"**recorded** on {', '.join(run.provenance['gpus'])}, {run.provenance['utc'][:10]}: {rates}.")


def _best_by_format(run: Records) -> dict[str, Record]:
    """The matrix product record with the highest rate, for each format."""
    best: dict[str, Record] = {}
    for r in run.where("matmul_flop_s"):
        best[r.case["dtype"]] = max(r, best.get(r.case["dtype"], r), key=lambda r: r.value)
    return best


def formats(run: Records, guess: Prediction) -> None:
    """Matrix product rate against size, a line per format; the guess is BF16's rate over FP32's."""
    best = _best_by_format(run)
    fastest = max(best, key=lambda d: best[d].value)
    slowest = min(best, key=lambda d: best[d].value)
    message = f"{FORMATS[fastest]} is fastest here, {FORMATS[slowest]} slowest: bits alone do not decide"
    fig, ax = figure(message, xlabel="matrix side n", ylabel="GFLOP/s of one device", records=run)
    for dtype in best:
        rows = run.where("matmul_flop_s", dtype=dtype)
        rates = [estimate(r.samples).scaled(1e-9) for r in rows]
        points(ax, [r.case["side"] for r in rows], rates, label=FORMATS[dtype], line=True)
    top = best["fp32"]
    prediction(ax, top.case["side"], float(guess) * top.value / 1e9, label="BF16")
    values = [r.value / 1e9 for r in run.where("matmul_flop_s")]
    log_axes(ax, sorted({r.case["side"] for r in run.where("matmul_flop_s")}), _decades(min(values), max(values)))
    lines = "; ".join(f"{FORMATS[d]} {estimate(r.samples, r.unit)} at n = {r.case['side']}" for d, r in best.items())
    show(fig, alt=f"{message}. {lines}.")
    say(_formats_text(run, guess, best, fastest, slowest))


def _formats_text(run: Records, guess: Prediction, best: dict[str, Record], fastest: str, slowest: str) -> str:
    text = f"From fastest to slowest: {best[fastest].value / best[slowest].value:.0f} times. "
    if "bf16" in best:
        ratio = _ratio_of_medians(best["bf16"], best["fp32"])
        text += f"BF16 over FP32: {ratio}. {guess.against(ratio)} "
    if best[slowest].value < best["fp32"].value / 2:
        text += f"{FORMATS[slowest]} looks emulated: sizes that would take too long were left out. "
    shares = run.where("matmul_share_of_peak")
    if not len(shares):
        return text + "No datasheet peak is known for this device, so no share of one is given."
    top = {r.case["dtype"]: max(s.value for s in shares.where(dtype=r.case["dtype"])) for r in shares}
    return text + "Share of the dense peak: " + ", ".join(f"{FORMATS[d]} {v:.0%}" for d, v in top.items()) + "."


def _ratio_of_medians(a: Record, b: Record) -> Estimate:
    """a / b, not taken in pairs: the interval reaches from the one's low end over the other's high end."""
    x, y = estimate(a.samples), estimate(b.samples)
    return Estimate(x.value / y.value, x.low / y.high, x.high / y.low, min(x.n, y.n), "x")


def ceiling(run: Records, guess: Prediction) -> None:
    """Speed-up of n ranks that exchange nothing, for arithmetic and for memory traffic."""
    rows = run.where("ceiling_speedup")
    if not len(rows):
        return say("One rank alone has no ceiling to measure: run with NPROC = 2 or more.")
    n = rows[0].case["ranks"]
    names = {"matmul": "arithmetic\n(matrix products)", "triad": "memory traffic\n(triad)"}
    found = {r.case["job"]: estimate(r.samples, "x") for r in rows}
    message = f"{n} ranks: {found['matmul'].value:.2f} x the arithmetic, {found['triad'].value:.2f} x the memory"
    fig, ax = figure(message, xlabel=f"total rate of {n} ranks over that of one (x)", ylabel="job", records=run,
                     size=(7.0, 3.2))  # fmt: skip
    bars(ax, list(names.values()), [found[j] for j in names])
    prediction(ax, float(guess), 1)
    ax.axvline(n, linestyle=":", color="black")
    ax.annotate(f"ideal: {n}", (n, -0.4), ha="right", fontsize=10)
    ax.set_xlim(0, n * 1.15)
    show(fig, alt=f"{message}; the ideal is {n}.")
    word = "less than arithmetic" if found["triad"].high < found["matmul"].low else "no less than arithmetic"
    return say(
        f"Memory traffic gains {found['triad']}, {word} ({found['matmul']}). {guess.against(found['triad'])} No "
        f"message was sent: what is missing to {n} is taken by shared caches, memory, power and other programs. That "
        f"is the ceiling to judge parallel training by, not {n}."
    )


def link_model(run: Records) -> collectives.LatencyBandwidth:
    """Latency and bandwidth fitted to the all-reduce times of `run`."""
    rows = run.where("all_reduce_s")
    return collectives.fit([r.case["bytes"] for r in rows], [r.value for r in rows])


def all_reduce(run: Records, guess: Prediction) -> None:
    """Bus bandwidth against message size with the fitted model; the guess is where half of it is reached (KiB)."""
    rows = run.where("busbw_b_s")
    if not len(rows):
        return say("One rank has nobody to reduce with: run with NPROC = 2 or more.")
    n, model = rows[0].case["ranks"], link_model(run)
    limit = model.b_s * collectives.bus_factor("all_reduce", n) / 1e9
    half_kib, told = model.half_bytes / 1024, math.isfinite(model.b_s)
    message = "No bandwidth to be seen: large messages took no longer than small ones"
    if told and not half_kib:  # noise between two sizes can hide what a message costs by itself
        message = "This run cannot tell from which size on the bandwidth is reached"
    elif told:
        message = f"Under {plain_number(float(f'{half_kib:.2g}'))} KiB, less than half of the bandwidth"
    fig, ax = figure(message, xlabel="message size (KiB)", ylabel="bus bandwidth (GB/s)", records=run)
    sizes = [r.case["bytes"] for r in rows]
    points(ax, [s / 1024 for s in sizes], [estimate(r.samples).scaled(1e-9) for r in rows], label=f"{n} ranks")
    grid = [2 ** (math.log2(sizes[0]) + k / 40 * math.log2(sizes[-1] / sizes[0])) for k in range(41)]
    busbw = [collectives.busbw_b_s(s, model.seconds(s), n) / 1e9 for s in grid]
    curve(ax, [s / 1024 for s in grid], busbw, label="latency + size / bandwidth")
    if told:
        prediction(ax, float(guess), limit / 2, label="half reached")
    values = [r.value / 1e9 for r in rows]
    log_axes(ax, [s / 1024 for s in sizes], _decades(min(values), max(*values, limit if told else 0.0)))
    show(fig, alt=f"{message}; {plain_number(values[0])} GB/s for the smallest, {values[-1]:.2g} for the largest.")
    if not told:
        return say("By the fit a byte costs nothing, so that this run cannot tell the bandwidth: noise has hidden it. "
                   "Run the cell again, on a quiet machine or with more rounds.")  # fmt: skip
    if not half_kib:
        return say("By the fit a message costs nothing beside its bytes, which small messages above refute: noise has "
                   "hidden it. Run the cell again, on a quiet machine or with more rounds.")  # fmt: skip
    return say(
        f"The fit: latency {model.latency_s * 1e6:.0f} µs, bandwidth {limit:.2g} GB/s (busbw). "
        f"{guess.against(half_kib)} By it, 10 KiB take {model.seconds(10 * 1024) * 1e3:.2f} ms and a hundred times "
        f"as much takes {model.seconds(1000 * 1024) * 1e3:.2f} ms: that is why DDP sends gradients in buckets."
    )


def limits(run: Records) -> tuple[float, float]:
    """(FLOP/s, byte/s): the best sample of any FP32 kernel and of any memory stream. A roof is a best case."""
    kernels = (*run.where("matmul_flop_s", dtype="fp32"), *run.where("convolution_flop_s"))
    return max(max(r.samples) for r in kernels), max(max(r.samples) for r in run.where("memory_b_s"))


def roofline(run: Records, guess: Prediction, guessed_model: str = "mlp") -> None:
    """Attained FLOP/s of each model's training step under the roof of this device; the guess is in GFLOP/s."""
    peak, bandwidth = limits(run)
    names = [r.case["model"] for r in run.where("model_flop_s")]
    work = {m: Work(run.one("model_flop", model=m).value, run.one("model_bytes", model=m).value) for m in names}
    ridge = ridge_flop_per_byte(peak, bandwidth)
    share = {m: run.one("model_flop_s", model=m).value / attainable_flop_s(w.intensity, peak, bandwidth)
             for m, w in work.items()}  # fmt: skip
    sides = {w.intensity > ridge for w in work.values()}
    limit = {True: "arithmetic", False: "memory"}[sides.pop()] if len(sides) == 1 else "either"
    message = f"The limit is {limit}; {min(share.values()):.0%} to {max(share.values()):.0%} of it is reached"
    fig, ax = figure(message, xlabel="arithmetic intensity (FLOP per byte)", ylabel="GFLOP/s", records=run,
                     size=(7.0, 3.5), legend_below=True)  # fmt: skip
    grid = [ridge * 2 ** (k / 4) for k in range(-20, 21)]
    curve(ax, grid, [attainable_flop_s(i, peak, bandwidth) / 1e9 for i in grid], label="roof from the best samples")
    rates = [estimate(run.one("model_flop_s", model=m).samples).scaled(1e-9) for m in names]
    points(ax, [work[m].intensity for m in names], rates, label="training step")
    middle = sorted(w.intensity for w in work.values())[len(work) // 2]
    highest = max(rate.value for rate in rates)
    for m, rate in zip(names, rates, strict=True):
        right = work[m].intensity >= middle  # of these, the highest is named above its mark and the others below
        up = 0 if not right else 7 if rate.value == highest else -7
        ax.annotate(m, (work[m].intensity, rate.value), xytext=(9 if right else -9, up), va="center",
                    ha="left" if right else "right", textcoords="offset points")  # fmt: skip
    prediction(ax, work[guessed_model].intensity, guess, label=guessed_model)
    log_axes(
        ax, _decades(grid[0], grid[-1]), _decades(attainable_flop_s(grid[0], peak, bandwidth) / 1e9, 2 * peak / 1e9)
    )
    text = ", ".join(f"{m} {value:.0%} of its roof" for m, value in share.items())
    show(fig, alt=f"{message}. {text}.")
    got = estimate(run.one("model_flop_s", model=guessed_model).samples).scaled(1e-9)
    say(
        f"The roof bends at {ridge:.1f} FLOP per byte ({peak / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.0f} GB/s). Reached: "
        f"{text}. {guess.against(got)} The roof is the best sample of the fastest kernel seen here, not a "
        "datasheet's: small layers and what is no product keep a step below it, another kernel may lift it over."
    )


def work_table(work: dict[str, Work]) -> pandas.DataFrame:
    """FLOPs, bytes and intensity, counted without running anything."""
    rows = {
        m: {"MFLOP": w.flop / 1e6, "MB moved": w.bytes / 1e6, "FLOP per byte": w.intensity} for m, w in work.items()
    }
    return pandas.DataFrame(rows).T.round(2)


def hardware_table() -> pandas.DataFrame:
    """Datasheet figures (published; dense), with what bus width times data rate gives; "" where none is sourced."""
    rows = []
    for s in hardware.specs():
        pins = hardware.bus_bandwidth_gb_s(s.bus_bits, s.pin_gbit_s) if s.bus_bits and s.pin_gbit_s else None
        rows.append({
            "GPU": s.gpu, "GB": s.memory_gb, "GB/s": s.bandwidth_gb_s, "bus x rate / 8": pins and round(pins),
            **{FORMATS[d]: s.tflops(d) for d in FORMATS}, "link GB/s": s.link_gb_s, "W": s.tdp_w,
        })  # fmt: skip
    return pandas.DataFrame(rows).set_index("GPU").map(lambda v: "" if pandas.isna(v) else f"{v:,g}")


def sources() -> None:
    """The datasheets behind the hardware table, a line each."""
    cards: dict[tuple[str, str], list[str]] = {}
    for s in hardware.specs():
        cards.setdefault((s.source, s.url), []).append(s.gpu)
    say("\n".join(f"* {', '.join(gpus)}: [{title}]({url})" for (title, url), gpus in cards.items()))


def ridges(work: dict[str, Work]) -> pandas.DataFrame:
    """What limits each model's step on published cards: memory below the ridge, arithmetic above it."""
    rows = {}
    for name, dtype in (("H200 SXM", "fp32"), ("H200 SXM", "tf32"), ("RTX 4090", "fp32"), ("T4", "fp32")):
        s = hardware.spec(name)
        ridge = ridge_flop_per_byte(s.tflops(dtype) * 1e12, s.bandwidth_gb_s * 1e9)
        limit = {m: "arithmetic" if w.intensity > ridge else "memory" for m, w in work.items()}
        rows[f"{name}, {FORMATS[dtype]}"] = {"ridge (FLOP/byte)": f"{ridge:.1f}", **limit}
    return pandas.DataFrame(rows).T


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten (or of two, over a short range) for the ticks of a logarithmic axis, within [low, high]."""
    base = 10 if high / low > 200 else 2
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [float(base) ** k for k in range(first, last + 1)]
