"""When does splitting pay? DDP's speedup against bandwidth, with sliders for the step, the gradients and the ranks."""

from __future__ import annotations

import math

from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.explorers.controls import Slider, explore, here, log_axis, powers
from labs.kit import plot
from labs.kit.record import Record

BANDWIDTHS = [0.0125 * 2**k for k in range(16)]  # GB/s: 100 Mbit/s to 410 GB/s
BACKWARD = 2 / 3  # share of a step: backward computes about twice as much as forward


def exchange_s(size: float, ranks: int, latency_s: float, b_s: float) -> float:
    """Return seconds of a ring all-reduce: 2 (n-1) messages of `latency_s`, and 2 (n-1)/n of `size` bytes at `b_s`."""
    return 2 * (ranks - 1) * latency_s + ring_all_reduce_bytes(size, ranks) / b_s


def exposed_s(compute_s: float, seconds: float, hidden: float) -> float:
    """Return how long a step waits for an exchange if the share `hidden` of backward can hide it."""
    return max(0.0, seconds - hidden * BACKWARD * compute_s)


def pays_above_b_s(compute_s: float, size: float, ranks: int, latency_s: float, hidden: float) -> float:
    """Return the bytes/s above which `ranks` train faster than one: n single-rank steps last longer than DDP's step."""
    room = (ranks - 1) * compute_s + hidden * BACKWARD * compute_s - 2 * (ranks - 1) * latency_s
    return ring_all_reduce_bytes(size, ranks) / room if room > 0 else math.inf


def draw(compute_ms: float, mb: float, gb_s: float, latency_us: float, ranks: int, hidden: int) -> tuple:
    """Return the figure, its description, and the time of an exchange."""
    compute, size = compute_ms / 1e3, 1e6 * mb

    def speedup(rate_gb_s: float, share: float) -> float:
        seconds = exchange_s(size, ranks, latency_us / 1e6, 1e9 * rate_gb_s)
        return ranks * compute / (compute + exposed_s(compute, seconds, share))

    now = speedup(gb_s, hidden / 100)
    message = f"{ranks} ranks train {now:.2g}x as fast as one at {gb_s:.2g} GB/s"
    origin = Record("link", "speedup", "x", (now,), "modelled")
    fig, ax = plot.figure(
        message, xlabel="bandwidth of a link, one direction (GB/s)", ylabel="speedup", records=[origin]
    )
    for share, color, label in (
        (0.0, plot.VERMILION, "nothing hidden"),
        (hidden / 100, plot.BLUE, f"{hidden}% of backward can hide it"),
    ):
        ax.plot(BANDWIDTHS, [speedup(b, share) for b in BANDWIDTHS], color=color, label=label)
    ax.axhline(1, color=plot.GREY, linestyle=":")
    here(ax, gb_s, now)
    log_axis(ax, (0.01, 0.1, 1, 10, 100))
    ax.set(xlim=(0.01, 500), ylim=(0, 1.1 * ranks))
    ax.legend(loc="upper left")
    pays = pays_above_b_s(compute, size, ranks, latency_us / 1e6, hidden / 100)
    seconds = exchange_s(size, ranks, latency_us / 1e6, 1e9 * gb_s)
    exposed = exposed_s(compute, seconds, hidden / 100)
    above = "Splitting pays on no link." if pays == math.inf else f"Splitting pays above {pays / 1e9:.2g} GB/s."
    return (
        fig,
        f"Speedup against bandwidth. {message}.",
        (f"An exchange takes {1e3 * seconds:.3g} ms; backward can't hide {1e3 * exposed:.3g} ms of it. {above}"),
    )


def exchange() -> None:
    """Explore the step, the gradients, the link, the ranks and how much of backward can hide the exchange."""
    explore(
        lambda compute_ms, mb, gb_s, latency_us, ranks, hidden: draw(
            compute_ms, mb, gb_s, latency_us, int(ranks), int(hidden)
        ),
        compute_ms=Slider("one rank computes a step in (ms)", (1, 2, 5, 10, 20, 50, 100, 200, 500), 100),
        mb=Slider("gradients (MB)", (1, 3, 10, 30, 100, 300, 1000, 3000), 100),
        gb_s=Slider("bandwidth of a link, one direction (GB/s)", BANDWIDTHS, BANDWIDTHS[7]),
        latency_us=Slider("latency of a message (µs)", (1, 5, 20, 100, 500), 20),
        ranks=Slider("ranks", powers(2, 1024), 8),
        hidden=Slider("share of backward that can hide the exchange (%)", (0, 25, 50, 75, 100), 75),
    )
