"""What does activation checkpointing save, and what does it cost?

    python -m labs.activation_checkpointing --nproc 1
    python -m labs.activation_checkpointing --nproc 1 --parts pareto --model my_package.my_module:factory
    python -m labs.activation_checkpointing --nproc 1 --parts pareto --model narrow_bert --batch 8

About 17 s on 2 CPU cores. Five parts:
  pareto     a deep model cut into k segments that are computed again in backward: peak, time and operations
  sizes      the same model with few and with many rows: which part of the price is the same for all of them
  chain      the same for blocks that keep no more than their output: there k = sqrt(n) is best
  variants   what torch's checkpoint does with use_reentrant left out, True and False, and without the random state
  sequences  BERT-large's layers on long sequences: which term grows, and what each remedy does to it
The mechanism is in labs/common/memory/recomputation.py. Peaks are of the CPU's or GPU's own allocator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from labs.activation_checkpointing import deep_models, report, sequences, variants
from labs.activation_checkpointing.splitting import (
    Chain,
    Segments,
    after_forward,
    at_peak,
    best_segments,
    share_again,
    time_ratio,
    trace_chain,
)
from labs.activation_checkpointing.step import Step, can, possible, steps_of
from labs.common import models
from labs.common.activation_memory.allocator import slices
from labs.common.memory.recomputation import blocks, segments
from labs.common.models import Workload
from labs.common.models.large_models import BertShape
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank, same_bits
from labs.kit.record import Record, Records

Part = Literal["pareto", "sizes", "chain", "variants", "sequences"]
THIN = (36, 64, 2048)  # layers, width and rows of the chain
SLICES = 150  # of a step, for its curve of live bytes
SIZED = ("none", "block", "selective")  # policies of sizes, of which a model may not have all
SMOKE = {  # with --smoke in a shell
    "parts": ("pareto", "variants", "sequences"),
    "policies": ("block",),
    "batch": 32,
    "sequences": (128,),
}


@dataclass(frozen=True)
class Config:
    """Which model, cut how, and which parts to run."""

    parts: tuple[Part, ...] = get_args(Part)
    """What to run."""
    model: str = "deep_mlp"
    """deep_mlp or narrow_bert (24 blocks with dropout each), one of labs.models.MODELS, or package.module:factory."""
    policies: tuple[str, ...] = ()
    """As in labs.common.memory.recomputation; without any, all kinds that the model can have."""
    batch: int = 256
    """Rows of a step of the model."""
    sizes: tuple[int, ...] = (1, 512)
    """Rows of a step in the part sizes."""
    sequences: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """Tokens per sequence of BERT-large's layers."""
    seconds: float = 5.0
    """Time for all rounds of pareto, in s, and again for those of sizes. A slower machine takes fewer rounds and has
    wider intervals."""
    rounds: int | None = None
    """Times that every policy takes its turn; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of the model, the data and dropout."""
    smoke: bool = False
    """Two rounds, at most 128 rows."""

    def __post_init__(self) -> None:
        require(len(self.parts) > 0, f"parts must name one at least: {', '.join(get_args(Part))}")
        require(self.batch >= 1, f"batch must be at least 1, not {self.batch}")
        some = len(self.sizes) > 0 and len(set(self.sizes)) == len(self.sizes) and min(self.sizes) >= 1
        require(some, "sizes must hold positive numbers, all of them different")
        measure.require_budget(self.seconds, self.rounds)
        require(len(self.sequences) > 0 and min(self.sequences) >= 1, "sequences must hold positive numbers")
        models.require_known(self.model, besides=deep_models.DEEP)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the model cannot be built, has no chain of blocks, or cannot have a policy."""
    if {"pareto", "sizes"} & set(config.parts):
        module = deep_models.build(config.model, config.seed).module
        for policy in config.policies or ("block",):
            segments(module, policy)


def predict(chain: Chain, runs: Segments, passing: int = 0) -> int:
    """Peak bytes of a step whose blocks are cut into `runs`, as recomputation.segments gives them (empty: not at all).

    For n equal blocks that keep A bytes each, with inputs of b bytes, k segments of n/k blocks need at their peak
    fixed + outside + A n/k + b (k - 1), or more where gradients of parameters are large: segments.at_peak. `passing`:
    gradients of activations and what else backward holds for a moment, taken from the step without checkpointing.
    """
    return at_peak(chain, runs, passing).total


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The parts, one after the other."""
    parts = {"pareto": _pareto, "sizes": _sizes, "chain": _chain, "variants": _variants, "sequences": _sequences}
    for part in config.parts:
        for record in parts[part](config, rank):
            yield rank.record(record.metric, record.unit, record.samples, kind=record.kind, part=part, **record.case)


def _pareto(config: Config, rank: Rank) -> Iterator[Record]:
    workload = deep_models.build(config.model, config.seed)
    policies = ["none", *(p for p in config.policies if p != "none")] if config.policies else possible(workload.module)
    batch = min(128, config.batch) if config.smoke else config.batch
    steps = steps_of(workload, policies, batch, rank.device)
    yield from _memory(workload, steps, config.model, rank)
    yield from _operations(steps, config, rank)
    rounds, turns = measure.rounds_of(config, rank.slowest), {**steps, "forward": lambda: steps["none"].forward()}
    seconds = measure.interleave(
        turns,
        rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"round {done}"),
    )
    yield rank.record("forward_s", "s", rank.slowest(seconds.pop("forward")), **_case(steps["none"], config.model))
    for policy, samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), **_case(steps[policy], config.model))


def _sizes(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of a step with few and with many rows, all sizes and policies in turn."""
    workload = deep_models.build(config.model, config.seed)
    policies = [p for p in SIZED if p == "none" or can(workload.module, p)]
    sizes = sorted({min(n, 128) for n in config.sizes} if config.smoke else config.sizes)
    steps = {(p, n): s for n in sizes for p, s in steps_of(workload, policies, n, rank.device).items()}
    for policy in policies:
        steps[policy, sizes[0]]()  # the first call imports and compiles; that is not what is timed
    seconds = measure.interleave(steps, measure.rounds_of(config, rank.slowest), rank.device, between=rank.barrier)
    for (policy, rows), samples in seconds.items():
        yield rank.record("step_s", "s", rank.slowest(samples), model=config.model, policy=policy, rows=rows)


def _case(step: Step, model: str) -> dict:
    """`segments` is the number of runs of blocks, 0 without a policy; `share`, of the blocks that run again."""
    share = share_again(len(blocks(step.module)), step.runs)
    return {"model": model, "policy": step.policy, "segments": len(step.runs), "share": share}


def _memory(workload: Workload, steps: dict[str, Step], model: str, rank: Rank) -> Iterator[Record]:
    """Peak and what forward leaves behind, measured, and as predicted from one forward pass without policy."""
    none, passing = steps["none"], 0
    fixed = none.fixed()
    plain = Workload(none.module, workload.make_batch, none.loss)
    chain = trace_chain(plain, none.x, none.y, sum(fixed.values()))
    chain = dataclasses.replace(chain, optimizer=none.stepping())
    for policy, step in steps.items():
        case, live = _case(step, model), step.live()
        yield rank.record("peak_bytes", "B", chain.fixed + live.peak, **case)
        yield rank.record("saved_bytes", "B", live.after_forward, **case)
        if live.changes:
            yield rank.record("live_bytes", "B", [chain.fixed + b for b in slices(live.changes, SLICES)], **case)
        if policy == "none":
            passing = chain.fixed + live.peak - predict(chain, step.runs)
        if not policy.startswith("selective"):  # what that keeps depends on operations, not on blocks
            yield from _predicted(chain, step.runs, fixed, passing, case, rank)
    yield rank.record("best_segments", "1", best_segments(chain), kind="modelled", model=model, blocks=len(chain.kept))


def _predicted(chain: Chain, runs: Segments, fixed: dict, passing: int, case: dict, rank: Rank) -> Iterator[Record]:
    moment = at_peak(chain, runs, passing)
    parts = {
        **fixed,
        "outside the blocks": moment.outside,
        "inputs of segments": moment.boundaries,
        "segment in work": moment.segment,
        "gradients": moment.gradients,
        "optimizer's step": moment.optimizer,
        "passing": moment.passing,
    }
    for name, size in parts.items():
        yield rank.record("peak_part_bytes", "B", size, kind="modelled", of=name, **case)
    yield rank.record("predicted_peak_bytes", "B", moment.total, kind="modelled", **case)
    yield rank.record("predicted_saved_bytes", "B", after_forward(chain, runs), kind="modelled", **case)
    yield rank.record("predicted_flops_ratio", "x", time_ratio(case["share"]), kind="modelled", **case)


def _operations(steps: dict[str, Step], config: Config, rank: Rank) -> Iterator[Record]:
    """FLOPs of a step, and its gradients against those without policy; "none" is compared with a second run of itself.

    A GPU's kernels may add up in any order, unless they are asked not to, and then some have no other way: where two
    runs of one step differ, no policy can be expected to be equal bit for bit.
    """
    with same_bits(rank.device):
        reference, _ = steps["none"].gradients(config.seed)
        largest = max(float(g.abs().max()) for g in reference) or 1.0
        for step in steps.values():
            gradients, flops = step.gradients(config.seed)
            pairs, case = list(zip(reference, gradients, strict=True)), _case(step, config.model)
            difference = max(float((a - b).abs().max()) for a, b in pairs)
            yield rank.record("flops", "FLOP", flops, **case)
            yield rank.record("gradients_equal", "1", all(torch.equal(a, b) for a, b in pairs), **case)
            yield rank.record("gradient_difference", "x", difference / largest, **case)  # of the largest gradient


def _chain(config: Config, rank: Rank) -> Iterator[Record]:
    layers, width, rows = THIN
    torch.manual_seed(config.seed)
    workload = deep_models.thin_chain(layers, width)
    policies = [p for p in possible(workload.module) if p == "none" or p.count(":") == 1]
    yield from _memory(workload, steps_of(workload, policies, rows, rank.device), "thin_chain", rank)


def _variants(config: Config, rank: Rank) -> Iterator[Record]:
    torch.manual_seed(config.seed)
    x = torch.randn(8, 16, device=rank.device)
    for (scenario, variant), out in variants.outcomes(x).items():
        case = {"scenario": scenario, "variant": variant}
        yield rank.record("raised", "1", bool(out.error), error=out.error, **case)
        yield rank.record("parameters_without_gradient", "1", out.without_gradient, **case)
        yield rank.record(
            "warnings",
            "1",
            len(out.warned),
            categories=sorted({c for c, _ in out.warned}),
            texts=[text for _, text in out.warned],
            **case,
        )
    for preserve in (True, False):
        yield rank.record("gradient_error", "1", variants.gradient_error(x, preserve), preserve_rng_state=preserve)
    for way in ("checkpoint", "recompute()"):
        yield rank.record("batches_counted", "1", variants.batches_counted(x, way), way=way)
    for way in ("none", "block", "block, to the end"):
        yield rank.record("flops", "FLOP", variants.flops(rank.device, way), model="char_gpt", way=way)


def _sequences(config: Config, rank: Rank) -> Iterator[Record]:
    for attention in ("eager", "sdpa"):
        shape = BertShape(attention=attention)
        for seq in config.sequences:
            share = sequences.square_share(shape, seq)
            yield rank.record("square_share", "1", share, kind="modelled", attention=attention, seq=seq)
            for policy in ("none", "block"):
                live, case = sequences.deep(shape, seq, policy), {"attention": attention, "policy": policy, "seq": seq}
                yield rank.record("kept_bytes", "B", live.after_forward, kind="modelled", **case)
                yield rank.record("peak_bytes", "B", live.peak, kind="modelled", **case)


def answer(run: Records) -> Iterator[str]:
    """What the least memory costs in time, which part of the price is fixed, and what else was tried, in sentences."""
    if run.where("step_s", part="pareto"):
        rows = [r for r in report.pareto(run) if r["policy"] != "none"]
        none = run.one("peak_bytes", part="pareto", policy="none").value
        least = min(rows, key=lambda r: r["peak_bytes"], default=None)
        yield f"A step of {run[0].config['model']} takes {none / 1e6:.1f} MB at its peak with nothing recomputed."
        if least:
            yield (
                f"The least of {len(rows)} policies is {least['peak_bytes'] / 1e6:.1f} MB "
                f"({least['policy']}): it has {least['flops_ratio']:.2f} x the operations and takes "
                f"{least['time_ratio']} the time."
            )
            yield f"Gradients with dropout, beside those of the step without policy: {report.same_gradients(run)}."
    yield from report.fixed_price(run)
    if best := run.where("best_segments", part="chain"):
        found = min((r for r in report.pareto(run, "chain") if r["segments"]), key=lambda r: r["peak_bytes"])
        yield (
            f"On a chain of {best[0].case['blocks']} blocks that keep only their output, {found['segments']} "
            f"segments "
            f"take least; the square root says {best[0].value:.0f}."
        )
    if tried := run.where("raised", part="variants", variant="use_reentrant=False"):
        lost = run.where("parameters_without_gradient", part="variants", variant="use_reentrant=False")
        bad = sum(bool(r.value or n.value) for r, n in zip(tried, lost, strict=True))
        yield (
            f"With use_reentrant=False {len(tried) - bad} of {len(tried)} ways to call checkpoint() train all "
            f"parameters."
        )
