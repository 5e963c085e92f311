"""How fast would this training run be on more GPUs than you have, and how far off is the answer?

    python -m labs.scaling_model --gpu "H100 SXM" --gpus 64 --params 7e9 --batch 512
    python -m labs.scaling_model --step-s 1.9 --step-gpus 8      # calibrated on a step that you have timed
    python -m labs.scaling_model --test                          # every published row, predicted, with its error

Takes 2 s on 2 CPU cores: nothing is trained. The model is labs/common/cost_model; `published` there tests it.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pandas
from annotated_types import Ge, Le

from labs.common.cost_model import cards, published, seconds
from labs.common.cost_model.jobs import JobConfig, Plan
from labs.common.cost_model.published import Estimate
from labs.common.cost_model.seconds import Cluster, Work
from labs.kit import cli
from labs.kit.errors import naming, require
from labs.kit.lab import require_limits


@dataclass(frozen=True)
class Config(JobConfig):
    """The model, its batch, the machines."""

    batch: Annotated[int, Ge(1)] = 512
    """Sequences per optimizer step, over all GPUs."""
    gpu: str = "H100 SXM"
    """Card of labs/kit/gpus.toml."""
    gpus: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """GPUs in all."""
    strategy: Literal["ddp", "fsdp"] = "fsdp"
    """Replicas (ddp), or states divided by all GPUs (fsdp)."""
    tensor: Annotated[int, Ge(1)] = 1
    """GPUs that share each layer's matrices."""
    pipeline: Annotated[int, Ge(1)] = 1
    """Stages of layers."""
    micro_batches: Annotated[int, Ge(1)] = 1
    """Per step and data-parallel rank."""
    recompute: bool = False
    """Activations are computed again in backward."""
    step_s: Annotated[float, Ge(0)] = 0.0
    """Seconds per step that you have timed on `step_gpus`. Default: what a published run reached on this card."""
    step_gpus: Annotated[int, Ge(1)] = 1
    """GPUs on which `step_s` was timed, each with as much of the batch as here."""
    test: bool = False
    """Print every published row with its error instead."""

    def __post_init__(self) -> None:
        require_limits(self)
        split = self.tensor * self.pipeline
        require(self.gpus % split == 0, f"tensor x pipeline = {split} must divide gpus = {self.gpus}")
        require(self.step_gpus % split == 0 or not self.step_s, f"tensor x pipeline = {split} must divide step_gpus")
        with naming("gpu"):
            cards.require_card(self.gpu)
        with naming("step_s"):
            self.cluster()  # BadInput for a step that no arithmetic explains

    def work(self) -> Work:
        """What a step has to do."""
        return Work.of(self.job)

    def plan(self, gpus: int | None = None) -> Plan:
        """How `gpus` (default: all) share it."""
        data = (gpus or self.gpus) // (self.tensor * self.pipeline)
        sharded = self.strategy == "fsdp" and data > 1
        return Plan(data, self.pipeline, self.tensor, sharded, self.micro_batches, self.recompute)

    def cluster(self) -> Cluster:
        """The machines, calibrated on `step_s` if you give it."""
        spec = cards.require_card(self.gpu)
        flop_s = published.reached(spec.gpu)[0] * cards.peak_flop_s(spec)
        found = cards.cluster(spec, self.gpus, self.gpus_per_node, self.network_gb_s, flop_s)
        if not self.step_s:
            return found
        timed = replace(self.work(), batch=self.batch * self.step_gpus / self.gpus)
        few = cards.cluster(spec, self.step_gpus, self.gpus_per_node, self.network_gb_s, flop_s)
        calibrated = seconds.calibrated(timed, few, self.plan(self.step_gpus), self.step_s)
        return replace(found, flop_s=calibrated.flop_s)


def predict(config: Config) -> Estimate:
    """One step of `config` with the band of its regime."""
    calibration = "a step of yours" if config.step_s else published.reached(config.gpu)[1]
    return published.estimate(config.work(), config.cluster(), config.plan(), calibration)


def answer(config: Config) -> list[str]:
    """What a step takes, how sure that is, what limits it."""
    found = predict(config)
    share = seconds.efficiency(config.work(), config.cluster(), config.plan())
    return [
        f"{config.params:.3g} parameters on {config.gpus} x {config.gpu}. {found}",
        f"Modelled, each GPU does {share:.0%} of what one alone would do with its share of the batch; the largest part "
        f"of a step is {found.step.limit()}.",
    ]


def table(config: Config) -> pandas.DataFrame:
    """What a step consists of, in ms."""
    found = predict(config).step
    rows = [(name, 1e3 * s, 100 * s / found.step_s) for name, s in found.parts().items()]
    return pandas.DataFrame(rows, columns=["part", "ms", "% of the step"]).set_index("part")


def test_report() -> list[str]:
    """The calibrated test: the two held-out rows first, then each regime."""
    held = published.test().query("held_out")
    near = (held["error"].abs() <= 0.2).sum()
    rows = "; ".join(f"{r.series} on {r.configuration} {r.error:+.0%}" for r in held.itertuples())
    return [
        f"Calibrated test. Held out while the model was built: {near} of {len(held)} within 20 % ({rows}). All other "
        "rows were seen while it was built.",
        *(band.refusal or f"Band for {band}." for band in published.bands().values()),
        f"In these bands one row calibrates all models of its machine. {published.BIAS}",
    ]


def main() -> None:
    """Entry point of the command line."""
    config = cli.parse_config(Config, __doc__, "python -m labs.scaling_model")
    with cli.closed_pipe_is_no_error():
        for line in test_report() if config.test else answer(config):
            print(textwrap.fill(line, 100, subsequent_indent="  "))
        if config.test:
            print(f"\n{published.report().to_string()}\n\n{published.test().round(4).to_string(index=False)}")
        else:
            print(f"\nAll of this is modelled:\n{table(config).round(1).to_string()}")


if __name__ == "__main__":
    main()
