"""Speed-up of data parallel training in notebook 03 with knobs: compute, bytes and link."""

from __future__ import annotations

from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.timing.collectives import LatencyBandwidth, fit
from labs.crossover import predict
from labs.kit import hardware
from labs.kit.explore import Menu, Slider, explore, here, powers
from labs.kit.plot import SERIES, curve, figure, ideal, log_axes, plain_number
from labs.kit.record import Record, Records

RANKS = powers(2, 64)
HERE = "this machine, measured"
ETHERNET_GBIT_S = (10, 100)  # the names of the standards are their bit rates
GOOD = 0.9  # efficiency to ask for


def links() -> dict[str, tuple[float, str]]:
    """By name: bytes per second in one direction, as published, and the source."""
    found = {f"Ethernet, {g} Gbit/s": (g * 1e9 / 8, "its name") for g in ETHERNET_GBIT_S}
    for s in sorted((s for s in hardware.specs() if s.link and s.link_gb_s), key=lambda s: s.link_gb_s):
        rate = s.link_gb_s / 2  # datasheets add up both directions
        found.setdefault(f"{s.link}, {rate:g} GB/s", (rate * 1e9, s.source))
    return found


def speedup(run: Records | None = None) -> None:
    """Explore the speed-up of DDP. `run`: a run of labs.crossover, whose all-reduce times become one more link."""
    table = {name: (*rest, None) for name, rest in links().items()}
    latency, first = 20.0, "PCIe 4 x16, 32 GB/s"
    if run is not None:
        one_way, link_b_s = own_link(run)
        table, first = {HERE: (link_b_s, "", run), **table}, HERE
        latency = one_way * 1e6
    latencies = sorted({1.0, 5.0, 20.0, 100.0, 500.0, latency})

    def draw(step_ms: float, parameters: float, link: str, latency_us: float, ranks: float) -> tuple:
        b_s, source, records = table[link]
        if records is None:
            told = f"speed-up without overlap; rate of the link from {source}"
            seconds = all_reduce_s(4e6 * parameters, int(ranks), latency_us / 1e6, b_s)
            records = Records(
                [Record("link", "all_reduce_s", "s", (seconds,), "modelled", provenance={"source": told})]
            )
        return draw_speedup(step_ms, parameters, (link, b_s), latency_us, int(ranks), records)

    explore(
        draw,
        step_ms=Slider("one rank computes a step in (ms)", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000), 20),
        parameters=Slider("parameters (million)", (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000), 30),
        link=Menu("link of a rank, one direction", list(table), first),
        latency_us=Slider("latency of a message (µs)", latencies, latency, lambda v: f"{v:.3g}"),
        ranks=Slider("ranks", RANKS, 8),
    )


def all_reduce_s(size: float, ranks: int, latency_s: float, link_b_s: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: 2 (n-1) messages, and 2 (n-1)/n S bytes over each link."""
    return _ring(ranks, latency_s, link_b_s).seconds(ring_all_reduce_bytes(size, ranks))


def _ring(ranks: int, latency_s: float, link_b_s: float) -> LatencyBandwidth:
    """A whole ring all-reduce, per byte that a rank sends: it has 2 (n-1) messages one after the other."""
    return LatencyBandwidth(2 * (ranks - 1) * latency_s, link_b_s)


def weak_speedup(step_s: float, size: float, ranks: int, latency_s: float, link_b_s: float) -> float:
    """Speed-up of DDP without overlap, each rank with a batch of its own: labs.crossover.predict on a ring."""
    return predict(step_s, ring_all_reduce_bytes(size, ranks), _ring(ranks, latency_s, link_b_s), ranks)


def own_link(run: Records) -> tuple[float, float]:
    """(latency of one message in s, bytes/s of a link) that a ring would need for the all-reduces of `run`."""
    times = run.where("all_reduce_s")
    link = fit([r.case["size"] for r in times], [r.value for r in times])
    n = max(2, times[0].layout["world_size"])
    return link.latency_s / (2 * (n - 1)), ring_all_reduce_bytes(link.b_s, n)


def draw_speedup(
    step_ms: float, parameters: float, link: tuple[str, float], latency_us: float, ranks: int, records: Records
) -> tuple:
    """Speed-up against ranks, all axes the same for all settings."""
    name, b_s = link
    size, step_s, latency_s = 4e6 * parameters, step_ms / 1e3, latency_us / 1e6  # FP32 gradients
    found = {n: weak_speedup(step_s, size, n, latency_s, b_s) for n in RANKS}
    exchange = all_reduce_s(size, ranks, latency_s, b_s)
    efficiency = found[ranks] / ranks
    message = f"{ranks} ranks: {found[ranks]:.2g} times as fast as one, {efficiency:.0%} of {ranks}"
    fig, ax = figure(
        message, xlabel="ranks (a batch for each)", ylabel="speed-up (x)", records=records, legend_below=True
    )
    ideal(ax, [1, *RANKS])
    curve(ax, [1, *RANKS], [1, *found.values()], label="DDP without overlap", color=SERIES[0])
    here(ax, ranks, found[ranks])
    bottom = min(1 / 24, min(found.values()) / 2)
    log_axes(ax, [1, *RANKS], [t for t in powers(4**-8, 64, 4) if t >= bottom])
    ax.set_xlim(0.9, 72)
    ax.set_ylim(bottom, 90)
    needed_ms = 1e3 * exchange * GOOD / (1 - GOOD)
    limit = "communication" if exchange > step_s else "computing"
    more = f"{GOOD:.0%} would take {plain_number(float(f'{needed_ms:.2g}'))} ms of computing in a step"
    if efficiency >= GOOD:
        more = f"{GOOD:.0%} is reached from {plain_number(float(f'{needed_ms:.2g}'))} ms of computing on"
    sentence = (
        f"Limited by {limit}: {step_ms:g} ms of computing, {1e3 * exchange:.3g} ms for an all-reduce of "
        f"{plain_number(size / 1e6)} MB over {name}. {more}. What DDP hides behind backward is not in this."
    )
    return fig, f"Speed-up against ranks, up to {RANKS[-1]}. {message}, over {name}.", sentence
