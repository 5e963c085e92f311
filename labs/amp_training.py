"""Which gradients does FP16 lose, and does training notice?

    python -m labs.amp_training      |      torchrun --nproc-per-node 2 -m labs.amp_training --rows 8 32 128 512

About 10 s on 2 CPU cores. A small GPT first trains in FP32. Then its gradient on one batch is computed again in each
16-bit format, and compared with FP32's: for batches of more and more tokens, whose mean is the loss. No loss is scaled
by hand: only GradScaler's factor is there, where a scaler is used. Last, short training runs in FP16 without a scaler
and in FP32, from the same seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from labs.common import models
from labs.common.models.text_models import held_out
from labs.common.precision import amp
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

MODEL = "char_gpt"
UNSCALED, SCALED, BF16 = "FP16, no scaler", "FP16, scaler", "BF16"
WAYS = {UNSCALED: (amp.NO_SCALING, 1.0), SCALED: ("fp16", 65536.0), BF16: ("bf16", 1.0)}
"""Format of autocast, and the factor of the loss: GradScaler's first one."""
LOWEST, HIGHEST = -60, 10
"""Exponents of the histogram; what is beyond counts in its first and last place."""
MUCH = 3.0
"""An error this many times another one is larger."""


@dataclass(frozen=True)
class Config:
    """How many tokens, and how much training."""

    rows: tuple[int, ...] = (8, 32, 128)
    """Rows of the batches whose gradients are compared. A row has 64 tokens."""
    before: Annotated[int, Ge(0)] = 60
    """Steps in FP32 before the gradients are compared."""
    steps: Annotated[int, Ge(1)] = 20
    """Steps of each short training run."""
    train_rows: Annotated[int, Ge(1)] = 4
    """Rows of their batches."""
    seeds: Annotated[int, Interval(ge=1, le=64)] = 4
    """Short training runs in each format."""
    seed: int = 0
    """Seed of the model and of the data; the short runs have the seeds after it."""
    smoke: bool = False
    """Two small batches, two seeds and few steps."""

    def __post_init__(self) -> None:
        require(min(self.rows, default=0) >= 1, f"rows must hold positive numbers, not {self.rows}")
        require(len({*self.rows}) == len(self.rows), "rows must be different: each is a case of its own")


def trained(config: Config, rank: Rank, steps: int) -> models.Workload:
    """The GPT after its steps in FP32, equal on all ranks."""
    workload = models.make(MODEL, config.seed)
    train(workload, "fp32", steps, 8, rank)
    return workload


def train(workload: models.Workload, name: str, steps: int, rows: int, rank: Rank) -> None:
    """Steps of AdamW in the format `name` of amp.FORMATS."""
    module = workload.module.to(rank.device)
    optimizer, scaler = torch.optim.AdamW(module.parameters(), lr=1e-3), amp.scaler(name, rank.device)
    for _ in range(steps):
        batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
        amp.whole_batch_step(name, module, workload.loss, batch, optimizer, scaler)


def gradients(workload: models.Workload, batch: tuple[Tensor, Tensor], name: str, scale: float) -> tuple[Tensor, ...]:
    """(of the parameters, of the activations): gradients divided by the loss's `scale`, flat, in FP64.

    Activations are the outputs of all layers that hold no other layers: backward hands their gradients on in 16 bits.
    """
    found: list[Tensor] = []
    workload.module.zero_grad()
    hooks = [m.register_forward_hook(_watch(found)) for m in workload.module.modules() if not any(m.children())]
    with amp.precision(name, batch[0].device):
        loss = workload.loss(workload.module(batch[0]), batch[1])
    (loss * scale).backward()
    for hook in hooks:
        hook.remove()
    of_parameters = [p.grad.double().flatten() for p in workload.module.parameters()]
    return torch.cat(of_parameters) / scale, torch.cat(found) / scale


def _watch(found: list[Tensor]) -> Callable[[nn.Module, object, Tensor], None]:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda g: found.append(g.detach().double().flatten()))

    return hook


def exponent_counts(gradient: Tensor) -> list[float]:
    """How many numbers other than 0 have a size from 2^e to 2^(e+1), for e from LOWEST to HIGHEST."""
    exponent = torch.frexp(gradient[gradient != 0]).exponent.long() - 1  # frexp's mantissa is in [0.5, 1)
    return torch.bincount(exponent.clamp(LOWEST, HIGHEST) - LOWEST, minlength=HIGHEST - LOWEST + 1).tolist()


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Gradients, then training runs, shared out over the ranks."""
    all_rows, seeds, steps = config.rows, config.seeds, config.steps
    if config.smoke:
        all_rows, seeds, steps = (2, 8), 2, 2
    work = [(rows, way) for rows in sorted(all_rows, reverse=True) for way in WAYS]
    workload = trained(config, rank, 2 if config.smoke else config.before)
    compared = {}
    for rows, way in work[rank.rank :: rank.world_size]:
        compared[rows, way] = compare_gradients(workload, rows, way, config, rank)
        rank.progress(len(compared), len(work), f"{rows} rows, {way}")
    losses = {}
    for seed in range(config.seed + 1 + rank.rank, config.seed + 1 + seeds, rank.world_size):
        for name in ("fp32", amp.NO_SCALING):
            losses[seed, name] = loss_after(seed, name, steps, config, rank)
    compared, losses = ({k: v for part in rank.gather(found) for k, v in part.items()} for found in (compared, losses))
    for (rows, way), (error, lost, counts) in sorted(compared.items()):
        case = {"rows": rows, "tokens": rows * 64, "way": way}
        yield rank.record("gradient_error", "1", error, **case)
        yield rank.record("lost_share", "1", lost, **case)
        if way == UNSCALED:
            yield rank.record("exponent_count", "1", counts, rows=rows, tokens=rows * 64, lowest=LOWEST)
    for name, way in (("fp32", "FP32"), (amp.NO_SCALING, UNSCALED)):
        samples = [loss for (_, format_), loss in sorted(losses.items()) if format_ == name]
        yield rank.record("held_out_loss", "nats", samples, way=way, steps=steps, tokens=config.train_rows * 64)


def compare_gradients(
    workload: models.Workload, rows: int, way: str, config: Config, rank: Rank
) -> tuple[float, float, list[float]]:
    """(relative error of the parameters' gradient, share of the activations' that became 0, FP32's exponent counts)."""
    torch.manual_seed(config.seed)
    batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
    exact, of_activations = gradients(workload, batch, "fp32", 1.0)
    found, lowered = gradients(workload, batch, *WAYS[way])
    lost = ((lowered == 0) & (of_activations != 0)).double().mean()
    return ((found - exact).norm() / exact.norm()).item(), lost.item(), exponent_counts(of_activations)


def loss_after(seed: int, name: str, steps: int, config: Config, rank: Rank) -> float:
    """Held-out loss of a new model after a short training run, in nats; judged in FP32."""
    workload = models.make(MODEL, seed)
    train(workload, name, steps, config.train_rows, rank)
    x, y = (t.to(rank.device) for t in held_out(32))
    with torch.no_grad():
        return workload.loss(workload.module(x), y).item()


def errors(records: Records) -> dict[tuple[int, str], float]:
    """Relative error of the gradient, by (tokens, way)."""
    return {(r.case["tokens"], r.case["way"]): r.value for r in records.where("gradient_error")}


def short_runs(records: Records) -> tuple[float, float]:
    """(largest distance of FP16 without a scaler from FP32 with the same seed, spread of FP32's seeds), in nats."""
    plain, exact = (records.one("held_out_loss", way=way).samples for way in (UNSCALED, "FP32"))
    return max(abs(a - b) for a, b in zip(plain, exact, strict=True)), max(exact) - min(exact)


def category(records: Records) -> str:
    """Without a scaler, FP16's gradient of the largest batch is worse or not; short training runs show it or not."""
    found, (apart, spread) = errors(records), short_runs(records)
    most = max(tokens for tokens, _ in found)
    worse = found[most, UNSCALED] > MUCH * found[most, SCALED]
    return f"{'worse' if worse else 'as good'}, the short runs show {'nothing' if apart < spread else 'it'}"


def answer(records: Records) -> Iterator[str]:
    """How far each gradient is off, and what short training runs make of it."""
    found = errors(records)
    for tokens in sorted({tokens for tokens, _ in found}):
        said = ", ".join(f"{way} {100 * found[tokens, way]:.2g} %" for way in WAYS)
        yield f"A batch of {tokens:,} tokens: the gradient differs from FP32's by this much: {said}."
    plain, (apart, spread) = records.where("held_out_loss", way=UNSCALED)[0], short_runs(records)
    yield (
        f"{plain.case['steps']} steps with {plain.case['tokens']} tokens each: FP16 without a scaler and FP32 end at "
        f"most {apart:.4f} nats apart with the same seed; FP32's seeds differ by {spread:.4f}."
    )


if __name__ == "__main__":
    cli.main()
