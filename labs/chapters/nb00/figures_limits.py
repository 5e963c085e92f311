"""Notebook 00: which of three limits a pass meets; the hardware table."""

from __future__ import annotations

import pandas

from labs.chapters.nb00.figures import _decades
from labs.common.timing import limits
from labs.common.timing.limits import FORMATS, Pass
from labs.common.timing.roofline import Work, attainable_flop_s, ridge_flop_per_byte
from labs.kit import hardware
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate
from labs.kit.plot import BLUE, SERIES, bars, curve, figure, log_axes, name_points, points, prediction, show
from labs.kit.record import Records


def roof(run: Records) -> tuple[float, float]:
    """(FLOP/s, byte/s): the FP32 peak of section 2 and the faster memory stream, medians."""
    return limits.peaks(run)["fp32"].value, limits.memory(run).value


def roofline(run: Records, guess: Prediction, guessed: str = "mlp, 64 rows") -> None:
    """Attained FLOP/s of each pass under the roof of this device; the guess is in GFLOP/s."""
    peak, bandwidth = roof(run)
    found = {p.name: p for p in limits.passes(run)}
    ridge = ridge_flop_per_byte(peak, bandwidth)
    rate = {name: p.work.flop / p.seconds.value / 1e9 for name, p in found.items()}
    share = {name: 1e9 * rate[name] / attainable_flop_s(p.work.intensity, peak, bandwidth) for name, p in found.items()}
    message = f"From {min(share.values()):.0%} to {max(share.values()):.0%} of the roof is reached"
    fig, ax = figure(
        message,
        xlabel="arithmetic intensity (FLOP per byte)",
        ylabel="GFLOP/s",
        records=run,
        size=(7.0, 4.4),
        legend_below=True,
    )
    x = [p.work.intensity for p in found.values()]
    grid = [min(*x, ridge) / 2, ridge, 4 * max(*x, ridge)]
    curve(ax, grid, [attainable_flop_s(i, peak, bandwidth) / 1e9 for i in grid], label="roof")
    points(ax, x, [_gflop_s(p) for p in found.values()], label="pass")
    name_points(ax, {name: (p.work.intensity, rate[name]) for name, p in found.items()}, x=2.5 * max(x))
    prediction(ax, found[guessed].work.intensity, guess, label="mlp")
    log_axes(ax, _decades(grid[0], grid[-1]), _decades(min(rate.values()), 2 * peak / 1e9))
    ax.set_xlim(grid[0], 8 * grid[-1])
    text = ", ".join(f"{name} {value:.0%}" for name, value in share.items())
    show(fig, alt=f"{message}: {text}.")
    above = " More than 100% is noise, or bytes that came from a cache." if max(share.values()) > 1.005 else ""
    say(
        f"The roof bends at {ridge:.1f} FLOP per byte ({peak / 1e9:.3g} GFLOP/s, {bandwidth / 1e9:.3g} GB/s). Of their "
        f"roof the passes reach: {text}.{above} {guess.against(_gflop_s(found[guessed]))}"
    )


def _gflop_s(p: Pass) -> Estimate:
    seconds, gflop = p.seconds, p.work.flop / 1e9
    return Estimate(gflop / seconds.value, gflop / seconds.high, gflop / seconds.low, seconds.n, "GFLOP/s")


def three_limits(run: Records) -> None:
    """The measured time of each pass beside what arithmetic, memory and overhead alone would take."""
    found = limits.passes(run)
    small = found[-1]
    message = _small_message(small)
    fig, ax = figure(
        message,
        xlabel="time of a forward and backward pass (ms)",
        ylabel="pass",
        records=run,
        size=(7.0, 4.4),
        legend_below=True,
    )
    names = [p.name for p in found]
    for what, color in zip(("arithmetic", "memory", "overhead"), SERIES[1:], strict=False):
        bars(ax, names, [1e3 * p.limits[what] for p in found], kind="modelled", label=f"{what} alone", color=color)
    bars(ax, names, [p.seconds.scaled(1e3) for p in found], label="the pass", color=BLUE)
    times = [1e3 * t for p in found for t in (*p.limits.values(), p.seconds.value)]
    log_axes(ax, _decades(min(times), max(times)))
    told = "; ".join(f"{p.name}: {p.limit or ' and '.join(p.between)}" for p in found)
    show(fig, alt=f"{message}. The longest of the three for each pass: {told}.")
    say("\n".join([*(f"* {_limit_text(p)}" for p in found), "", _small_text(found)]))


def _small_message(p: Pass) -> str:
    if p.limit == "overhead":
        return f"{p.name}: neither arithmetic nor memory, but the calls themselves"
    return f"{p.name}: " + (f"the limit is {p.limit}" if p.limit else f"{' and '.join(p.between)} are near one another")


def _limit_text(p: Pass) -> str:
    times = ", ".join(f"{what} {_time(s)}" for what, s in p.limits.items())
    word = f"{p.limit} stands out" if p.limit else f"{p.between[0]} and {p.between[1]} are near one another"
    over = p.seconds.value / max(p.limits.values())
    return f"*{p.name}* took {_time(p.seconds.value)}, {over:.1f} times the longest of {times}: {word}."


def _small_text(found: list[Pass]) -> str:
    """One row beside many rows of the same model; caches and what is unexplained, if the times show them."""
    small = found[-1]
    large = next(p for p in found if p.name.partition(",")[0] == small.name.partition(",")[0])
    less, faster = large.work.flop / small.work.flop, large.seconds.value / small.seconds.value
    text = f"With {less:.0f} times less arithmetic *{small.name}* is {faster:.1f} times as fast as *{large.name}*."
    cached = [p for p in found if p.seconds.high < p.limits["memory"]]
    if cached:
        text += (
            f" *{cached[0].name}* takes less than memory alone would: not all of its "
            f"{cached[0].work.bytes / 1e6:.1f} MB came from memory, some stayed in a cache."
        )
    beyond = [p for p in found if p.seconds.low > sum(p.limits.values())]
    if beyond:
        text += (
            f" {len(beyond)} of {len(found)} passes take longer than the three together. The rest has another "
            "cause, perhaps kernels that are slower than the best one: this run does not tell."
        )
    return text


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def work_table(work: dict[str, Work]) -> pandas.DataFrame:
    """FLOPs, bytes, intensity and operators, counted without running anything."""
    rows = {
        m: {
            "MFLOP": f"{w.flop / 1e6:,.2f}",
            "MB moved": f"{w.bytes / 1e6:,.2f}",
            "FLOP per byte": f"{w.intensity:.2f}",
            "operators": w.operators or 1,
        }
        for m, w in work.items()
    }
    return pandas.DataFrame(rows).T


def hardware_table() -> pandas.DataFrame:
    """Datasheet figures (published; dense), with what bus width times data rate gives; "" where none is sourced."""
    rows = []
    for s in hardware.specs():
        pins = hardware.bus_bandwidth_gb_s(s.bus_bits, s.pin_gbit_s) if s.bus_bits and s.pin_gbit_s else None
        rows.append(
            {
                "GPU": s.gpu,
                "GB": s.memory_gb,
                "GB/s": s.bandwidth_gb_s,
                "bus x rate / 8": pins and round(pins),
                **{FORMATS[d]: s.tflops(d) for d in FORMATS},
                "link GB/s": s.link_gb_s,
                "W": s.tdp_w,
            }
        )
    return pandas.DataFrame(rows).set_index("GPU").map(lambda v: "" if pandas.isna(v) else f"{v:,g}")
