"""Which gradients does FP16 lose, and does training notice?

    python -m labs.amp_training      |      torchrun --nproc-per-node 2 -m labs.amp_training --rows 8 32 128 512

About 10 s on 2 CPU cores. Trains a small GPT in FP32, then recomputes its gradient in each 16-bit format and compares
it with FP32's, for batches of more and more tokens. The loss is the mean over tokens, and only GradScaler's factor
scales it. Finally runs short training runs in FP16 without a scaler and in FP32 from the same seeds.
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
"""Autocast's format, and the loss scale: GradScaler's initial one."""
LOWEST, HIGHEST = -60, 10
"""Exponents covered by the histogram; values outside count in its first or last bin."""
MUCH = 3.0
"""An error counts as larger if it is this many times another one."""


@dataclass(frozen=True)
class Config:
    """How many tokens to compare, and how long to train."""

    rows: tuple[int, ...] = (8, 32, 128)
    """Rows of the batches whose gradients are compared. A row has 64 tokens."""
    before: Annotated[int, Ge(0)] = 60
    """FP32 steps before comparing gradients."""
    steps: Annotated[int, Ge(1)] = 20
    """Steps of each short training run."""
    train_rows: Annotated[int, Ge(1)] = 4
    """Rows per batch in the short training runs."""
    seeds: Annotated[int, Interval(ge=1, le=64)] = 4
    """Number of short training runs in each format."""
    seed: int = 0
    """Seed of the model and the data; the short runs use the seeds after it."""
    smoke: bool = False
    """Use two small batches, two seeds and few steps."""

    def __post_init__(self) -> None:
        require(min(self.rows, default=0) >= 1, f"rows must hold positive numbers, not {self.rows}")
        require(len({*self.rows}) == len(self.rows), "rows must not repeat: each one is a separate case")


def trained(config: Config, rank: Rank, steps: int) -> models.Workload:
    """Return the GPT after `steps` FP32 steps, identical on all ranks."""
    workload = models.make(MODEL, config.seed)
    train(workload, "fp32", steps, 8, rank)
    return workload


def train(workload: models.Workload, name: str, steps: int, rows: int, rank: Rank) -> None:
    """Run AdamW steps in the format `name` of amp.FORMATS."""
    module = workload.module.to(rank.device)
    optimizer, scaler = torch.optim.AdamW(module.parameters(), lr=1e-3), amp.scaler(name, rank.device)
    for _ in range(steps):
        batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
        amp.whole_batch_step(name, module, workload.loss, batch, optimizer, scaler)


def gradients(workload: models.Workload, batch: tuple[Tensor, Tensor], name: str, scale: float) -> tuple[Tensor, ...]:
    """Return two flat FP64 vectors, gradients of the parameters and of the activations, both divided by `scale`.

    Activations are the outputs of all leaf modules: backward passes their gradients on in 16 bits.
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
    """Count the non-zero gradients with a magnitude from 2^e to 2^(e+1), for each e from LOWEST to HIGHEST."""
    exponent = torch.frexp(gradient[gradient != 0]).exponent.long() - 1  # frexp's mantissa is in [0.5, 1)
    return torch.bincount(exponent.clamp(LOWEST, HIGHEST) - LOWEST, minlength=HIGHEST - LOWEST + 1).tolist()


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield gradient comparisons, then losses of the training runs; the ranks share the work."""
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
    """Return (relative error of the parameter gradient, share of activation gradients that became 0, exponent counts).

    The exponent counts are those of FP32's activation gradients.
    """
    torch.manual_seed(config.seed)
    batch = tuple(t.to(rank.device) for t in workload.make_batch(rows))
    exact, of_activations = gradients(workload, batch, "fp32", 1.0)
    found, lowered = gradients(workload, batch, *WAYS[way])
    lost = ((lowered == 0) & (of_activations != 0)).double().mean()
    return ((found - exact).norm() / exact.norm()).item(), lost.item(), exponent_counts(of_activations)


def loss_after(seed: int, name: str, steps: int, config: Config, rank: Rank) -> float:
    """Train a new model briefly in format `name`; return its held-out loss in nats, evaluated in FP32."""
    workload = models.make(MODEL, seed)
    train(workload, name, steps, config.train_rows, rank)
    x, y = (t.to(rank.device) for t in held_out(32))
    with torch.no_grad():
        return workload.loss(workload.module(x), y).item()


def errors(records: Records) -> dict[tuple[int, str], float]:
    """Return the gradient's relative error by (tokens, way)."""
    return {(r.case["tokens"], r.case["way"]): r.value for r in records.where("gradient_error")}


def short_runs(records: Records) -> tuple[float, float]:
    """Return (largest difference between FP16 without a scaler and FP32 at equal seed, FP32's range over seeds), in
    nats.
    """
    plain, exact = (records.one("held_out_loss", way=way).samples for way in (UNSCALED, "FP32"))
    return max(abs(a - b) for a, b in zip(plain, exact, strict=True)), max(exact) - min(exact)


def category(records: Records) -> str:
    """Say whether FP16 without a scaler has a worse gradient at the largest batch, and whether short runs show it."""
    found, (apart, spread) = errors(records), short_runs(records)
    most = max(tokens for tokens, _ in found)
    worse = found[most, UNSCALED] > MUCH * found[most, SCALED]
    return f"{'worse' if worse else 'as good'}, the short runs show {'nothing' if apart < spread else 'it'}"


def answer(records: Records) -> Iterator[str]:
    """Yield each gradient's error, and how much the short training runs differ."""
    found = errors(records)
    for tokens in sorted({tokens for tokens, _ in found}):
        said = ", ".join(f"{way} {100 * found[tokens, way]:.2g} %" for way in WAYS)
        yield f"Gradient error relative to FP32 with {tokens:,} tokens: {said}."
    plain, (apart, spread) = records.where("held_out_loss", way=UNSCALED)[0], short_runs(records)
    yield (
        f"{plain.case['steps']} steps with {plain.case['tokens']} tokens each: FP16 without a scaler and FP32 end at "
        f"most {apart:.4f} nats apart with the same seed; FP32's seeds differ by {spread:.4f}."
    )


if __name__ == "__main__":
    cli.main()
