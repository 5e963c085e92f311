"""How fast would this training be on more GPUs than you have, and how wrong is the answer?

    python -m labs.scaling_model --gpu "H100 SXM" --gpus 64 --params 7e9 --batch 512
    python -m labs.scaling_model --step-s 1.9 --step-gpus 8      # calibrated on a step that you have timed
    python -m labs.scaling_model --blind                         # every published row, predicted, and its error

About 2 s on 2 CPU cores: nothing is trained. The model is `step` of labs/common/planning/scaling.py: computing, two
levels of links with overlap, stragglers, input, failures. labs/common/planning/blind_test.py holds it against published
runs: one row of each series calibrates, the others are predicted. Their errors are the band that is told with every
answer.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas

from labs.common.planning import blind_test, scaling
from labs.common.planning.blind_test import Band
from labs.common.planning.parallel_cost import Job, Plan, shape
from labs.common.planning.scaling import INFINITE, Cluster, Link, Step, Work
from labs.kit import cli, hardware
from labs.kit.errors import naming, require
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Records

DAY_S = 86_400.0


@dataclass(frozen=True)
class Config:
    """The model, its batch, the machines."""

    gpu: str = "H100 SXM"
    """Card of labs/kit/gpus.toml: its peak, its links, its memory's bandwidth."""
    gpus: int = 64
    """GPUs in all."""
    gpus_per_node: int = 8
    """GPUs that share a node and its links inside."""
    network_gb_s: float = 25.0
    """Bandwidth of one GPU to other nodes, one direction, in 10^9 bytes/s: the node's network cards over its GPUs."""
    params: float = 7e9
    """Parameters of the transformer."""
    batch: int = 512
    """Sequences per optimizer step, over all GPUs."""
    seq: int = 2048
    """Tokens per sequence."""
    strategy: Literal["ddp", "fsdp"] = "fsdp"
    """Replicas (ddp), or states divided by all GPUs (fsdp)."""
    tensor: int = 1
    """GPUs that share each layer's matrices."""
    pipeline: int = 1
    """Stages of layers."""
    micro_batches: int = 1
    """Per step and data-parallel rank."""
    recompute: bool = False
    """Activations are computed again in backward."""
    reached: float = 0.5
    """Share of the card's dense 16-bit peak that one GPU reaches; a timed step (step_s) is better."""
    step_s: float = 0.0
    """Seconds per step that you have timed with this job on `step_gpus`: calibrates. 0: `reached` is taken."""
    step_gpus: int = 1
    """GPUs on which `step_s` was timed, each with as much of the batch as here."""
    feed_samples_s: float = 0.0
    """Sequences per second that one node's input pipeline delivers; 0: as many as are wanted."""
    tokens: float = 0.0
    """Tokens of the whole training, for its length in days; 0: one step only."""
    gpu_mtbf_days: float = 0.0
    """Mean days between failures of one GPU; 0: none fails. Llama 3's 419 in 54 days on 16,384 make 2,112."""
    save_s: float = 60.0
    """Training stops for so long to save, in s."""
    restart_s: float = 600.0
    """From a failure until training goes on, in s."""
    startup_s: float = 60.0
    """From the start of the job to its first step, in s; counts with `tokens` only."""
    blind: bool = False
    """Print every row of the blind test instead."""

    def __post_init__(self) -> None:
        for name in (
            "gpus",
            "gpus_per_node",
            "params",
            "batch",
            "seq",
            "tensor",
            "pipeline",
            "micro_batches",
            "step_gpus",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name):g}")
        for name in ("step_s", "feed_samples_s", "tokens", "gpu_mtbf_days", "save_s", "restart_s", "startup_s"):
            require(getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name):g}")
        require(self.network_gb_s > 0, f"network_gb_s must be positive, not {self.network_gb_s:g}")
        require(0 < self.reached <= 1, f"reached is a share of the peak, above 0 and at most 1, not {self.reached:g}")
        require(self.gpus <= 1e6 and self.params <= 1e14, "gpus must be at most 1e6, and params at most 1e14")
        split = self.tensor * self.pipeline
        require(self.gpus % split == 0, f"tensor x pipeline = {split} must divide gpus = {self.gpus}")
        require(self.step_gpus % split == 0 or not self.step_s, f"tensor x pipeline = {split} must divide step_gpus")
        with naming("gpu"):
            hardware.require_spec(self.gpu)
        self.cluster()  # a card without a sourced link, a step that cannot be

    def work(self) -> Work:
        """What a step has to do."""
        layers, hidden = shape(self.params)
        return Work.of(Job(self.params, self.batch, self.seq, layers, hidden, 50257))

    def plan(self, gpus: int | None = None) -> Plan:
        """How `gpus` (default: all) share it."""
        data = (gpus or self.gpus) // (self.tensor * self.pipeline)
        return Plan(
            data, self.pipeline, self.tensor, self.strategy == "fsdp" and data > 1, self.micro_batches, self.recompute
        )

    def cluster(self) -> Cluster:
        """The machines, calibrated on `step_s` if that is given."""
        mtbf = self.gpu_mtbf_days * DAY_S or float("inf")
        found = replace(
            scaling.of_card(self.gpu, self.gpus, self.gpus_per_node, self.network_gb_s, self.reached),
            feed_samples_s=self.feed_samples_s or float("inf"),
            gpu_mtbf_s=mtbf,
            save_s=self.save_s,
            restart_s=self.restart_s,
            startup_s=self.startup_s,
        )
        if not self.step_s:
            return found
        timed = replace(self.work(), batch=self.batch * self.step_gpus / self.gpus)
        few = replace(found, gpus=self.step_gpus)
        with naming("step_s"):
            return replace(found, flop_s=scaling.calibrated(timed, few, self.plan(self.step_gpus), self.step_s).flop_s)


def predict(config: Config) -> Step:
    """One step of `config`, by the model. Pure."""
    return scaling.step(config.work(), config.cluster(), config.plan())


def band(config: Config | None = None) -> Band:
    """The model's error on published runs: published over modelled seconds of the rows that calibrated nothing.

    Two tests: if a timed step of the same model calibrates, as `config.step_s` does, the median error is smaller than
    with a share of the card's peak, which another model reached.
    """
    timed = config is None or config.step_s
    return blind_test.band() if timed else blind_test.band_across()


def on_your_wire(run: Records) -> dict[float, tuple[Estimate, float]]:
    """{bandwidth in MB/s: (measured, modelled) seconds of a DDP step} from a run of labs.slow_link.

    A blind test of your own. One rank's step calibrates the arithmetic and how much its time varies; an all-reduce
    over the wire as it is gives the latency, the programs' own work among it; the paced bandwidth is known. DDP on all
    ranks is predicted.
    """
    ranks, size = run[0].layout["world_size"], run.one("gradient_bytes").value
    latency = run.one("all_reduce_s", mb_s=0.0).value / (2 * (ranks - 1))
    work = Work(size / 4, 1.0, ranks, update_bytes=0.0)  # a sample is one rank's batch, its work the unit
    found = {}
    for record in run.where("step_s", way="ddp"):
        mb_s = record.case["mb_s"]
        if not mb_s:
            continue
        alone = run.one("step_s", way="single", mb_s=mb_s)  # of the same rounds: a slow spell hits both
        low, middle, high = np.quantile(alone.samples, [0.25, 0.5, 0.75])
        spread = float((high - low) / 1.349 / middle)  # 1.349: quartiles of a normal distribution, in deviations
        cluster = Cluster(ranks, ranks, 1 / alone.value, Link(1e6 * mb_s, latency), INFINITE, gap_s=0.0, spread=spread)
        found[mb_s] = estimate(record.samples, "s"), scaling.step(work, cluster).step_s
    return found


def answer(config: Config) -> Iterator[str]:
    """What a step takes, what limits it, how sure that is."""
    cluster, found, error = config.cluster(), predict(config), band(config)
    share = scaling.efficiency(config.work(), cluster, config.plan())
    tokens = config.batch * config.seq / found.step_s
    yield (
        f"{config.params:.3g} parameters on {config.gpus} x {config.gpu}: {error.seconds(found.step_s)} per step, "
        f"{tokens:,.3g} tokens/s ({tokens / error.high:,.3g} to {tokens / error.low:,.3g})."
    )
    yield (
        f"Each GPU does {band().efficiency(share)} of what one alone would do with its share of the batch; "
        "the range is the model's error if one GPU's own step is known."
    )
    yield f"The largest part of a step goes into {found.limit()}."
    if config.tokens:
        whole = scaling.training(config.work(), cluster, config.tokens / (config.batch * config.seq), config.plan())
        yield (
            f"{config.tokens:.3g} tokens take {error.days(whole.total_s)}; saving and failures take "
            f"{whole.lost_share:.1%} of it."
        )
    yield str(error)


def blind() -> Iterator[str]:
    """What the blind test says: the errors, beside perfect scaling's, where scaling costs, and of what was held out."""
    hard, ideal = blind_test.hard_bands()
    perfect = blind_test.perfect_band()
    yield str(band())
    yield str(blind_test.band_across())
    yield (
        f"Perfect scaling errs by {perfect.median_error:.0%} on the first ones, and {perfect.within_20:.0%} of them "
        f"come within 20 %, where the model brings {band().within_20:.0%}."
    )
    yield (
        f"On the {hard.rows} rows where it errs by more than {blind_test.HARD:.0%} its median is "
        f"{ideal.median_error:.0%}, the model's {hard.median_error:.0%}; {hard.within_20:.0%} of them are within "
        "20 %: a datasheet does not tell what a link reaches."
    )
    two, same = blind_test.two_bands()
    yield (
        f"If the next larger number of GPUs calibrates the link, too: on the {two.rows} hard rows that are left "
        f"{two.within_20:.0%} are within 20 %, with one calibration row {same.within_20:.0%}."
    )
    held = ", ".join(f"{p.row.series} on {p.row.config} {p.error:+.0%}" for p in blind_test.judged(held_out=True))
    yield f"Held out while the model was built: {held}."


def table(config: Config) -> pandas.DataFrame:
    """What a step consists of, in ms."""
    found = predict(config)
    rows = [(name, 1e3 * s, 100 * s / found.step_s) for name, s in found.parts().items()]
    return pandas.DataFrame(rows, columns=["part", "ms", "% of the step"]).set_index("part")


def main() -> None:
    """Entry point of the command line."""
    config = cli.parse_config(Config, __doc__, "python -m labs.scaling_model")
    with cli.closed_pipe_is_no_error():
        for sentence in blind() if config.blind else answer(config):
            print(textwrap.fill(sentence, 100, subsequent_indent="  "))
        if config.blind:
            print(f"\n{blind_test.row_by_row().to_string()}")
        else:
            print(f"\nAll of this is modelled:\n{table(config).round(1).to_string()}")


if __name__ == "__main__":
    main()
