"""A step of DDP with knobs in notebook 07: latency, bandwidth, ranks, bytes and what is hidden behind backward."""

from __future__ import annotations

from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.kit.explore import Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, ideal, log_axes
from labs.kit.record import Record, Records

BANDWIDTHS_GB_S = [0.0125 * 2**k for k in range(16)]  # 100 Mbit/s to 410 GB/s
BACKWARD = 2 / 3
"""Share of a step's computing that is backward, behind which gradients can travel: forward is half as much work."""


def exposed_s(compute_s: float, exchange_s: float, hidden: float) -> float:
    """Seconds that a step waits for its all-reduces, if the share `hidden` of backward can cover them."""
    return max(0.0, exchange_s - hidden * BACKWARD * compute_s)


def exchange_s(size: float, ranks: int, latency_s: float, b_s: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: 2 (n-1) messages of latency_s, 2 (n-1)/n bytes over each link."""
    return 2 * (ranks - 1) * latency_s + ring_all_reduce_bytes(size, ranks) / b_s


def step() -> None:
    """Explore efficiency against bandwidth."""
    explore(
        draw,
        compute_ms=Slider("one rank computes a step in (ms)", (1, 2, 5, 10, 20, 50, 100, 200, 500), 100),
        megabytes=Slider("gradients (MB)", (1, 3, 10, 30, 100, 300, 1000, 3000), 100),
        gb_s=Slider("bandwidth of a link, one direction (GB/s)", BANDWIDTHS_GB_S, BANDWIDTHS_GB_S[7]),
        latency_us=Slider("latency of a message (µs)", (1, 5, 20, 100, 500), 20),
        ranks=Slider("ranks", powers(2, 1024), 8),
        hidden=Slider("of backward that hides communication (%)", (0, 25, 50, 75, 100), 75),
        smaller=Slider("bytes sent, of FP32 (%)", (1, 2, 5, 10, 25, 50, 100), 100),
    )


def draw(
    compute_ms: float, megabytes: float, gb_s: float, latency_us: float, ranks: float, hidden: float, smaller: float
) -> tuple:
    """Efficiency of `ranks` ranks against bandwidth, with and without overlap; axes are the same for all settings."""
    n, compute, size = int(ranks), compute_ms / 1e3, 1e6 * megabytes * smaller / 100

    def efficiency(rate_gb_s: float, share: float) -> float:
        seconds = exchange_s(size, n, latency_us / 1e6, 1e9 * rate_gb_s)
        return 100 * compute / (compute + exposed_s(compute, seconds, share))

    now = efficiency(gb_s, hidden / 100)
    exchange = exchange_s(size, n, latency_us / 1e6, 1e9 * gb_s)
    message = f"{n} ranks work at {now:.0f}% of n times one rank"
    records = Records([Record("link", "efficiency", "%", (now,), "modelled")])
    fig, ax = figure(
        message,
        xlabel="bandwidth of a link, one direction (GB/s)",
        ylabel="efficiency (%)",
        records=records,
        legend_below=True,
    )
    curve(
        ax,
        BANDWIDTHS_GB_S,
        [efficiency(b, hidden / 100) for b in BANDWIDTHS_GB_S],
        label=f"{hidden:g} % of backward hides communication",
        color=SERIES[0],
    )
    curve(
        ax, BANDWIDTHS_GB_S, [efficiency(b, 0.0) for b in BANDWIDTHS_GB_S], label="nothing is hidden", color=SERIES[1]
    )
    ideal(ax, [BANDWIDTHS_GB_S[0], BANDWIDTHS_GB_S[-1]], [100, 100])
    here(ax, gb_s, now)
    log_axes(ax, (0.01, 0.1, 1, 10, 100))
    ax.set(xlim=(0.01, 500), ylim=(0, 110))
    exposed = exposed_s(compute, exchange, hidden / 100)
    sentence = (
        f"An all-reduce takes {1e3 * exchange:.3g} ms, {1e3 * exposed:.3g} ms of it exposed, beside {compute_ms:g} ms "
        f"of computing. Latency alone is {2e3 * (n - 1) * latency_us / 1e6:.3g} ms of it."
    )
    return fig, f"Efficiency against bandwidth. {message}, at {gb_s:.3g} GB/s.", sentence
