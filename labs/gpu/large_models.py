"""What do number formats, a fused optimizer and recomputing give BERT-large and a GPT block?

    python -m labs.gpu.large_models --nproc 1

About 45 s on an H200. Times a whole training step with AdamW for each model and format: with the default optimizer,
with the fused one and, for BERT, with every layer's activations recomputed in backward. The steps of one model and
format are interleaved. The peak is the allocator's, for one step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labs.common.models import Workload
from labs.common.models.large_models import Bert, bert, tiny_bert
from labs.common.models.text_models import gpt_block
from labs.common.precision import amp
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Model = Literal["bert_large", "gpt_block"]
Format = Literal["fp32", "tf32", "bf16", "fp16"]
WAYS = ("default", "fused", "recompute")
SMOKE = {"formats": ("fp32", "bf16")}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Which models and formats to run."""

    models: tuple[Model, ...] = ("bert_large", "gpt_block")
    """BERT-large on sequences of 128 tokens, and one block of the smallest GPT-2."""
    formats: tuple[Format, ...] = ("bf16", "fp32", "tf32", "fp16")
    """Number formats, most important first."""
    batch_size: Annotated[int, Ge(1)] = 32
    """Sequences per step."""
    rounds: Annotated[int, Ge(2)] = 9
    """Rounds; each way runs once per round."""
    smoke: bool = False
    """Small models and two rounds."""


class Recomputed(nn.Module):
    """A layer whose activations are recomputed in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def build(model: Model, way: str, smoke: bool) -> Workload:
    """Return the model's workload; "recompute" recomputes every layer of BERT."""
    torch.manual_seed(0)
    workload = gpt_block() if model == "gpt_block" else tiny_bert() if smoke else bert()
    if way == "recompute" and isinstance(workload.module, Bert):
        workload.module.layers = nn.Sequential(*map(Recomputed, workload.module.layers))
    return workload


def training_step(workload: Workload, name: Format, way: str, rows: int, device: torch.device) -> Callable[[], None]:
    """Make a step of AdamW on one batch, all on `device`."""
    module = workload.module.to(device)
    x, y = (t.to(device) for t in workload.make_batch(rows))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=way == "fused")
    scaler = amp.scaler(name, device)

    def step() -> None:
        optimizer.zero_grad()
        with amp.precision(name, device):
            loss = workload.loss(module(x), y)
        with amp.tf32(name == "tf32"):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure each model in each format: seconds per step and its peak, or that it didn't fit."""
    cases = [(model, name) for model in config.models for name in config.formats]
    for done, (model, name) in enumerate(cases):
        rank.progress(done, len(cases), f"{model} {name}")
        if name == "tf32" and rank.device.type == "cpu":
            continue
        try:
            yield from measured(model, name, config, rank)
        except torch.OutOfMemoryError as error:
            yield rank.record("out_of_memory", "1", 1.0, model=model, format=name, message=str(error).splitlines()[0])
        gc.collect()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()


def measured(model: Model, name: Format, config: Config, rank: Rank) -> Iterator[Record]:
    """Measure the peaks of all ways one after another, then their steps interleaved."""
    rows, steps = 2 if config.smoke else config.batch_size, {}
    case = {"model": model, "format": name, "batch_size": rows}
    for way in WAYS:
        if way == "recompute" and model != "bert_large":
            continue
        held = torch.cuda.memory_allocated(rank.device) if rank.device.type == "cuda" else 0  # by earlier ways
        step = steps[way] = training_step(build(model, way, config.smoke), name, way, rows, rank.device)
        measure.time_steps(step, 2 if config.smoke else 4, rank.device)
        if rank.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(rank.device)
            measure.time_steps(step, 1, rank.device)
            peak = torch.cuda.max_memory_allocated(rank.device) - held
            yield rank.record("peak_bytes", "B", peak, way=way, **case)
    seconds = measure.interleave(steps, 2 if config.smoke else config.rounds, rank.device, inner=2)
    for way, samples in seconds.items():
        yield rank.record("step_s", "s", samples, way=way, **case)


def answer(records: Records) -> Iterator[str]:
    """Report the speedup of each format and of the fused optimizer, and the cost of recomputing."""
    for model in dict.fromkeys(r.case["model"] for r in records.where("step_s")):
        step_s = {(r.case["format"], r.case["way"]): r for r in records.where("step_s", model=model)}
        said = [f"{name} {r.value * 1e3:.1f} ms" for (name, way), r in step_s.items() if way == "default"]
        yield f"A step of {model}: {', '.join(said)}."
        for name in dict.fromkeys(name for name, _ in step_s):
            default, fused = (step_s[name, way].samples for way in ("default", "fused"))
            yield f"{model}, {name}: the fused optimizer makes a step {measure.paired_ratio(default, fused)} as fast."
            if (name, "recompute") in step_s:
                ratio = measure.paired_ratio(step_s[name, "recompute"].samples, default)
                yield f"{model}, {name}: recomputing every layer makes a step {ratio} as long."


if __name__ == "__main__":
    cli.main()
