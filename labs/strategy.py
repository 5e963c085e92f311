"""Which way should you split this model over these GPUs? The fastest plan that fits with 10 % headroom, by the cost
model.

    python -m labs.strategy --params 7e9 --batch 64 --gpus 8 --gpu "A100 80GB SXM"
    python -m labs.strategy --params 1.5e9 --batch 64 --gpus 4 --gpu L4 --seq 1024

Takes a second, because nothing is trained. Cards and links are real ones, from labs/kit/gpus.toml. Each time comes with
the error band of its regime; without published runs to support it, no time is printed. Notebook 08 tests the model.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Annotated

import pandas
from annotated_types import Ge, Le

from labs.common.cost_model import cards, choose, published
from labs.common.cost_model.choose import Cost
from labs.common.cost_model.jobs import JobConfig, Plan
from labs.common.cost_model.memory import GRADIENT_BYTES, HEADROOM, STATE_BYTES, States
from labs.common.cost_model.seconds import Cluster, Work
from labs.kit import cli
from labs.kit.errors import naming
from labs.kit.lab import require_limits


@dataclass(frozen=True)
class Config(JobConfig):
    """The model, its batch, and the machine."""

    gpus: Annotated[int, Ge(1), Le(4096)] = 8
    """Number of GPUs, all equal."""
    gpu: str = "A100 80GB SXM"
    """A card of labs/kit/gpus.toml."""
    tflops: Annotated[float, Ge(0)] = 0.0
    """10^12 FLOP/s that one GPU reached in your own 16-bit step. Default: as in a published run on this card."""
    link_gb_s: Annotated[float, Ge(0)] = 0.0
    """Your measured busbw (nccl-tests) inside a node, in 10^9 bytes/s. Default: 80 % of the datasheet's."""

    def __post_init__(self) -> None:
        require_limits(self)
        with naming("gpu"):
            cards.require_card(self.gpu)

    @property
    def calibration(self) -> tuple[float, str]:
        """(FLOP/s of one GPU, their source; "" for a guess)."""
        spec = cards.require_card(self.gpu)
        share, source = published.reached(spec.gpu)
        if self.tflops:
            return 1e12 * self.tflops, "a step of yours"
        return share * cards.peak_flop_s(spec), f"{share:.0%} of its dense peak: {source}" if source else ""

    @property
    def cluster(self) -> Cluster:
        """The machine."""
        spec = cards.require_card(self.gpu)
        flop_s = self.calibration[0]
        return cards.cluster(spec, self.gpus, self.gpus_per_node, self.network_gb_s, flop_s, self.link_gb_s)


@dataclass(frozen=True)
class Advice:
    """The cost model's advice for one Config."""

    config: Config
    costs: list[Cost]
    """Every plan's cost, fastest first."""
    choice: Cost | None
    """The simplest of the fastest plans that fit; None if none does."""
    estimate: published.Estimate | None
    """The choice's step time with its error band, or the reason why there is none."""
    remedies: list[tuple[States, Plan, float]]
    """If no plan fits: (other states, a plan that fits with them, its bytes per GPU)."""
    enough_gpus: int | None
    """If no plan fits: this many of these GPUs are enough."""

    @property
    def table(self) -> pandas.DataFrame:
        """The best plan of each scheme: `choose.by_scheme`."""
        return choose.by_scheme(self.costs, self.config.cluster)


def advise(config: Config) -> Advice:
    """Apply the cost model."""
    job, cluster = config.job, config.cluster
    found = choose.costs(job, cluster)
    choice = choose.best(found, choose.limit_bytes(cluster))
    if not choice:
        remedies, enough = list(choose.remedies(job, cluster)), choose.fewest_gpus(job, cluster)
        return Advice(config, found, None, None, remedies, enough)
    estimate = published.estimate(Work.of(job), cluster, choice.plan, config.calibration[1])
    return Advice(config, found, choice, estimate, [], None)


def answer(advice: Advice) -> list[str]:
    """Return what to use, what it needs, how long a step takes, and on what evidence."""
    config, limit = advice.config, choose.limit_bytes(advice.config.cluster) / 1e9
    lines = [_choice(advice, limit) if advice.choice else _nothing_fits(advice, limit)]
    lines += [str(advice.estimate)] if advice.estimate else []
    lines += [choose.undivided(config.batch, config.gpus)]
    if config.gpu in cards.NO_PEER_TO_PEER and config.gpus > 1 and not config.link_gb_s:
        lines += [f"{config.gpu}s have no peer-to-peer: measure busbw with nccl-tests and give it as --link-gb-s."]
    return [line for line in lines if line]


def _choice(advice: Advice, limit: float) -> str:
    c, params = advice.choice, advice.config.params
    twice = c.plan.data > 1 and not c.plan.sharded and not c.plan.bucket_view
    buckets = GRADIENT_BYTES * params / (c.plan.pipeline * c.plan.tensor) / 1e9
    view = f" gradient_as_bucket_view=True would save {buckets:.2g} GB of that." * twice
    return f"Use {c.plan}: {c.memory_bytes / 1e9:.3g} of {limit:.3g} GB per GPU.{view}"


def _nothing_fits(advice: Advice, limit: float) -> str:
    least = min(advice.costs, key=lambda c: c.memory_bytes)
    lines = [
        f"Nothing fits into {limit:.3g} GB per GPU with Adam in FP32, which keeps {STATE_BYTES} bytes per parameter. "
        f"Least: {least.plan}, {least.memory_bytes / 1e9:.3g} GB."
    ]
    if advice.enough_gpus:
        lines.append(f"{advice.enough_gpus} of these GPUs are enough.")
    for states, plan, size in advice.remedies:
        host = f" and {states.host_bytes * advice.config.params / 1e9:.3g} GB of host memory" * bool(states.host_bytes)
        lines.append(f"{states.name} fits: {plan}, {size / 1e9:.3g} GB per GPU{host} ({states.source}).")
    return " ".join(lines)


def inputs(config: Config) -> list[str]:
    """Return the answer's inputs with their sources."""
    spec, job, cluster = cards.require_card(config.gpu), config.job, config.cluster
    flop_s, calibration = config.calibration
    memory = spec.usable_source or spec.source
    link = "yours" if config.link_gb_s else f"{cards.REACHED:.0%} of one direction: {spec.source}"
    return [
        f"{job.layers} layers, hidden size {job.hidden}, vocabulary {job.vocabulary}, {job.seq} tokens",
        f"memory: {cluster.memory_bytes / 1e9:.3g} GB ({memory}), less {HEADROOM:.0%} headroom",
        f"{'PCIe' if cluster.pcie else spec.link}: {cluster.inside.bytes_s / 1e9:.3g} GB/s ({link})",
        f"arithmetic: {flop_s / 1e12:.3g} TFLOP/s ({calibration or 'a guess, good only to compare plans'})",
    ]


def printed(table: pandas.DataFrame) -> str:
    """Format the table for a terminal."""
    fastest = table["step_s"][table["fits"] | ~table["fits"].any()].min()
    shown = pandas.DataFrame(
        {
            "plan": table["plan"],
            "": ["fits" if f else "too large" for f in table["fits"]],
            "GB per GPU": (table["states_gb"] + table["activations_gb"]).map("{:.1f}".format),
            "of it states": table["states_gb"].map("{:.1f}".format),
            "time": (table["step_s"] / fastest).map("{:.2f} x".format),
        }
    )
    return shown.to_string(index=False)


def main() -> None:
    """Run the command line."""
    config = cli.parse_config(Config, __doc__, "python -m labs.strategy")
    advice = advise(config)
    with cli.closed_pipe_is_no_error():
        for line in answer(advice):
            print(textwrap.fill(line, 100, subsequent_indent="  "))
        print("\nAll of this is modelled, from (GB are 10^9 bytes):")
        print("\n".join(f"  {line}" for line in inputs(config)))
        print("\nThe best plan of each scheme; times over the fastest that fits, to compare only:")
        print(printed(advice.table))


if __name__ == "__main__":
    main()
