"""What is cheaper than recomputing: fused attention, micro-batches, or 16 bits?

    python -m labs.memory_remedies
    python -m labs.memory_remedies --tokens 256 --batch 4

About 10 s on 2 CPU cores. A four-layer BERT with unfused attention trains in FP32 with AdamW. Each remedy changes one
thing. The peak is the oracle's, by a GPU's rules; times are measured on this device, with all remedies interleaved.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le

from labs.common import oracle
from labs.common.memory.recomputation import recompute
from labs.common.models import Workload
from labs.common.models.large_models import BertShape, bert
from labs.common.oracle import Conditions
from labs.common.precision import amp
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

SHAPE = BertShape(layers=4, hidden=128, heads=4, vocabulary=512, places=512, dropout=0.0)  # dropout prevents CPU fusion
REMEDIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fused attention": {"attention": "sdpa"},
    "4 micro-batches": {"micro_batches": 4},
    "BF16 autocast": {"precision": "bf16"},
    "each layer recomputed": {"policy": "block"},
}
"""What each remedy changes: the model's attention, or conditions of the step."""
RECOMPUTE = "each layer recomputed"
SMOKE = {"tokens": 16, "batch": 4, "rounds": 6}


@dataclass(frozen=True)
class Config:
    """How large a step is, and how long to measure."""

    tokens: Annotated[int, Ge(8), Le(512)] = 128
    """Tokens per sequence."""
    batch: Annotated[int, Ge(4)] = 8
    """Sequences per step."""
    rounds: Annotated[int, Ge(6)] = 12
    """Number of rounds; each remedy takes one turn per round."""
    seed: int = 0
    """Seed of the model and the data."""
    smoke: bool = False
    """Use short sequences and six rounds."""

    def __post_init__(self) -> None:
        require(self.batch % 4 == 0, f"batch must be a multiple of 4, for 4 equal micro-batches, not {self.batch}")


def source(config: Config, attention: str = "eager") -> Workload:
    """Build the model with unfused ("eager") or fused ("sdpa") attention."""
    torch.manual_seed(config.seed)
    return bert(replace(SHAPE, attention=attention), config.tokens)


def training_step(config: Config, remedy: dict[str, Any], device: torch.device) -> Callable[[], object]:
    """Return an AdamW step under a remedy."""
    changed = {"attention": "eager", "precision": "fp32", "policy": "none", "micro_batches": 1} | remedy
    workload = source(config, changed["attention"])
    module = recompute(copy.deepcopy(workload.module).to(device), changed["policy"])
    x, y = (t.to(device) for t in workload.make_batch(config.batch))
    c = Conditions(optimizer="adam", precision=changed["precision"], micro_batches=changed["micro_batches"])
    scaler = amp.scaler(c.precision, device)
    return functools.partial(
        amp.train_step, module, workload.loss, c.parts(x, y), c.make_optimizer(module), c.precision, scaler
    )


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield each remedy's peak bytes by category, then interleaved step times."""
    for done, (name, remedy) in enumerate(REMEDIES.items()):
        rank.progress(done, len(REMEDIES) + 1, name)
        conditions = {k: v for k, v in remedy.items() if k != "attention"}
        factory = functools.partial(source, config, remedy.get("attention", "eager"))
        trace = oracle.step(factory, config.batch, optimizer="adam", target="cuda", **conditions)
        for category_, nbytes in trace.peak.items():
            yield rank.record("peak_bytes", "B", nbytes, kind="modelled", remedy=name, category=category_)
    steps = {name: training_step(config, remedy, rank.device) for name, remedy in REMEDIES.items()}
    seconds = measure.interleave(steps, config.rounds, rank.device, between=rank.barrier)
    for name, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), remedy=name)


def peaks(records: Records) -> dict[str, float]:
    """Return peak bytes by remedy."""
    return {name: sum(r.value for r in records.where("peak_bytes", remedy=name)) for name in REMEDIES}


def price(records: Records, remedy: str, over: str = "as it is") -> measure.Estimate:
    """Return the step time with this remedy over another, paired by round."""
    step_s = {r.case["remedy"]: r.samples for r in records.where("step_s")}
    return measure.paired_ratio(step_s[remedy], step_s[over])


def category(records: Records) -> str:
    """Say whether recomputing takes more time than fused attention and micro-batches."""
    found = [price(records, RECOMPUTE, over) for over in ("fused attention", "4 micro-batches")]
    if all(ratio.low > 1 for ratio in found):
        return "recomputing costs most"
    return "recomputing doesn't cost most" if any(ratio.high < 1 for ratio in found) else "inconclusive"


def answer(records: Records) -> Iterator[str]:
    """Yield each remedy's share of the original peak, and its relative time."""
    peak = peaks(records)
    yield f"The step takes {peak['as it is'] / 1e6:.1f} MB at its peak, as it is (modelled for a GPU)."
    for name in list(REMEDIES)[1:]:
        yield f"{name}: {100 * peak[name] / peak['as it is']:.0f} % of the peak, {price(records, name)} the time."


if __name__ == "__main__":
    cli.main()
