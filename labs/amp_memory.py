"""How much memory does mixed precision save, and of what?

    python -m labs.amp_memory --nproc 1
    python -m labs.amp_memory --nproc 1 --sequences 128 512 --batches 8 70 --attention sdpa

About 5 s on 2 CPU cores. A training step holds parameters, gradients, the optimizer's state and activations, which
are what autograd keeps for backward. Autocast leaves the first three in FP32, keeps a part of the activations in
16 bit, and adds 16-bit copies of the weights. Ways to know how much that is:
  formula    by hand, for BERT: labs/common/memory/bert_memory.py
  trace      autograd's own list, from a forward pass on tensors that have a shape but no memory
  measured   on a GPU, autograd's list in a real step and the peak of the allocator

BERT-large and ResNet-152 are traced by CUDA's rules wherever this runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from labs.common.memory.bert_memory import CATEGORIES, Memory, parameter_count, predict, states
from labs.common.memory.saved_tensors import Line, of_step, stack, trace_line
from labs.common.models import Workload
from labs.common.models.large_models import BertShape, bert, resnet
from labs.common.precision import amp
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Kind, Record, Records

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=1e-4),
}
GPU_HEADROOM = 1.2  # a large model really runs where this many times its predicted bytes are free


@dataclass(frozen=True)
class Config:
    """Which models to count, and how large."""

    sequences: tuple[int, ...] = (128, 512)
    """Tokens per sequence of BERT-large."""
    batches: tuple[int, ...] = (1, 8, 10, 32, 70)
    """Sequences per step of BERT-large."""
    images: tuple[int, ...] = (1, 32, 64)
    """Images per step of ResNet-152."""
    optimizer: Literal["adam", "momentum", "sgd"] = "adam"
    """Of all models but ResNet-152, which takes SGD with momentum."""
    attention: tuple[Literal["eager", "sdpa"], ...] = ("eager", "sdpa")
    """BERT-large's attention: written out, torch's scaled_dot_product_attention, or both."""
    smoke: bool = False
    """One sequence length of BERT-large, no ResNet-152."""

    def __post_init__(self) -> None:
        require(
            len(self.sequences) > 0 and all(8 <= s <= 512 for s in self.sequences),
            "sequences must hold numbers from 8 to 512: BERT-large has 512 places",
        )
        for name in ("batches", "images"):
            values = getattr(self, name)
            require(len(values) > 0 and min(values) >= 1, f"{name} must hold positive numbers")
            require(len(set(values)) == len(values), f"{name} must be different: each is a point of the curve")
        require(len(set(self.sequences)) == len(self.sequences), "sequences must be different")
        require(0 < len(set(self.attention)) == len(self.attention), "attention: name eager, sdpa or both, once")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The large models, traced, and BERT's formula beside it; on a GPU also a real step."""
    yield from _bert_large(config, rank)
    rank.progress(1, 2, "BERT-large")
    if not config.smoke:
        yield from _resnet152(config, rank)


def _by_category(rank: Rank, metric: str, memory: Memory, kind: Kind, case: dict) -> Iterator[Record]:
    for category, size in memory.by_category().items():
        yield rank.record(metric, "B", size, kind=kind, category=category, **case)


def measure_step(
    workload: Workload, batch: int, precision: str, optimizer: str, device: torch.device
) -> tuple[Memory, int | None]:
    """(what a real step holds, the peak of the allocator over a second step; None where there is no GPU)."""
    module = workload.module.to(device)
    x, y = (t.to(device) for t in workload.make_batch(batch))
    saved = of_step(workload, x, y, precision)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimize, scaler = OPTIMIZERS[optimizer](trained), amp.scaler(precision, device, init_scale=1.0)
    amp.train_step(module, workload.loss, [(x, y)], optimize, precision, scaler)
    state = [t for s in optimize.state.values() for t in s.values() if isinstance(t, torch.Tensor) and t.dim() > 0]
    grads = [p.grad for p in trained if p.grad is not None]
    sizes = (sum(t.nbytes for t in tensors) for tensors in (trained, grads, state))
    peak_bytes = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        amp.train_step(module, workload.loss, [(x, y)], optimize, precision, scaler)
        peak_bytes = torch.cuda.max_memory_allocated(device)
    return Memory(*sizes, saved.activations, saved.weight_copies), peak_bytes


def bert_line(shape: BertShape, seq: int, precision: str, target: str = "cuda") -> Line:
    """Saved bytes of a BERT of any depth, from traces of one and two of its layers."""
    shallow = (replace(shape, layers=n) for n in (1, 2))
    one, two = (trace_line(lambda s=s: bert(s, seq), precision, target) for s in shallow)
    return stack(one, two, shape.layers)


def _bert_large(config: Config, rank: Rank) -> Iterator[Record]:
    sequences = config.sequences[:1] if config.smoke else config.sequences
    for attention, seq, precision in itertools.product(config.attention, sequences, ("fp32", "fp16")):
        shape = BertShape(attention=attention)
        line = bert_line(shape, seq, precision)
        case = {
            "model": "bert_large",
            "attention": attention,
            "seq": seq,
            "precision": precision,
            "optimizer": config.optimizer,
        }
        yield from _traced(line, parameter_count(shape), config.batches, case, rank)
        for batch in config.batches:
            by_hand = predict(batch, seq, precision, shape, config.optimizer)
            yield from _by_category(rank, "formula_bytes", by_hand, "modelled", {**case, "batch": batch})
        yield from _on_gpu(lambda shape=shape, seq=seq: bert(shape, seq), line, config.batches, case, rank)


def _resnet152(config: Config, rank: Rank) -> Iterator[Record]:
    with torch.device("meta"):
        count = sum(p.numel() for p in resnet().module.parameters())
    for precision in ("fp32", "fp16"):
        line = trace_line(resnet, precision, "cuda")
        case = {"model": "resnet152", "seq": 0, "precision": precision, "optimizer": "momentum"}
        yield from _traced(line, count, config.images, case, rank)
        yield from _on_gpu(resnet, line, config.images, case, rank)


def _traced(line: Line, parameters: int, batches: tuple[int, ...], case: dict, rank: Rank) -> Iterator[Record]:
    for batch in batches:
        memory = states(parameters, case["optimizer"], line.activations(batch), line.weight_copies)
        yield from _by_category(rank, "predicted_bytes", memory, "modelled", {**case, "batch": batch})


def _on_gpu(
    make: Callable[[], Workload], line: Line, batches: tuple[int, ...], case: dict, rank: Rank
) -> Iterator[Record]:
    """The peak of a real step of a large model, for the largest batch that fits; nothing without a GPU."""
    if rank.device.type != "cuda":
        return
    torch.cuda.empty_cache()  # models before this one are gone, but their memory would not count as free
    free = torch.cuda.mem_get_info(rank.device)[0] - 16 * 340e6
    fits = [b for b in batches if GPU_HEADROOM * (line.activations(b) + line.weight_copies) < free]
    if fits:
        measured, peak_bytes = measure_step(make(), max(fits), case["precision"], case["optimizer"], rank.device)
        yield from _by_category(rank, "measured_bytes", measured, "measured", {**case, "batch": max(fits)})
        yield rank.record("peak_bytes", "B", peak_bytes, batch=max(fits), **case)


def total(records: Records, metric: str = "predicted_bytes", **case: object) -> float:
    """Bytes of all categories of one step; LookupError if a category is missing or there are several steps."""
    return sum(records.one(metric, category=c, **case).value for c in CATEGORIES)


def saved_shares(records: Records, model: str, seq: int = 0, **case: object) -> dict[int, float]:
    """Share of a traced large model's memory that autocast saves, by batch; negative where its copies cost more.

    BERT-large has two kinds of `attention`: name one.
    """
    case |= {"model": model, "seq": seq}
    batches = {r.case["batch"] for r in records.where("predicted_bytes", **case)}
    return {
        b: 1 - total(records, batch=b, precision="fp16", **case) / total(records, batch=b, precision="fp32", **case)
        for b in sorted(batches)
    }


@dataclass(frozen=True)
class Step:
    """Memory of one training step of a large model, in bytes, without and with autocast."""

    case: dict
    """model, seq, batch, and attention, if the model has any"""
    fp32: float
    lowered: float

    @property
    def saved(self) -> float:
        """Share that autocast saves, in %; negative where its copies of the weights cost more."""
        return 100 * (1 - self.lowered / self.fp32)

    @property
    def name(self) -> str:
        """The model, and its attention if that is fused."""
        return NAMES[self.case["model"]] + (", fused attention" if self.case.get("attention") == "sdpa" else "")

    def __str__(self) -> str:
        tokens = f" of {self.case['seq']} tokens" if self.case["seq"] else ""
        return f"{self.name}, batch {self.case['batch']}{tokens}"


NAMES = {"bert_large": "BERT-large", "resnet152": "ResNet-152"}
ARTICLE_BYTES = 24e9  # what an article gives for BERT-large in FP32
WHICH = ("model", "attention", "seq", "batch")


def steps(records: Records) -> list[Step]:
    """Every step of the large models, the one that saves least first."""
    found = []
    for r in records.where("predicted_bytes", category="parameters", precision="fp32"):
        if r.case["model"] in NAMES:
            case = {k: r.case[k] for k in WHICH if k in r.case}
            found.append(Step(case, *(total(records, precision=p, **case) for p in ("fp32", "fp16"))))
    return sorted(found, key=lambda s: s.saved)


def answer(run: Records) -> Iterator[str]:
    """What autocast saves at least and at most, where BERT-large is near the article's 24 GB, and how sure that is."""
    found = steps(run)
    yield (
        f"Modelled: mixed precision saves from {found[0].saved:.0f} % ({found[0]}) to {found[-1].saved:.0f} % "
        f"({found[-1]}) of a training step's memory."
    )
    near = min((s for s in found if s.case["model"] == "bert_large"), key=lambda s: abs(s.fp32 - ARTICLE_BYTES))
    for s in (s for s in found if all(s.case.get(k) == near.case[k] for k in ("model", "seq", "batch"))):
        yield f"{s}: {s.fp32 / 1e9:.1f} GB in FP32, {s.lowered / 1e9:.1f} GB with autocast, {s.saved:.0f} % less."
    peaks = run.where("peak_bytes")
    kind = "GPU" if run[0].layout["device"] == "cuda" else "CPU"
    for r in (r for r in peaks if r.case["model"] in NAMES):
        size = total(run, **{k: r.case[k] for k in (*WHICH, "precision") if k in r.case})
        name = Step(r.case, 1, 1)
        yield f"{name}, {r.case['precision'].upper()}: the allocator's peak is {r.value / size - 1:+.0%} off the count."
    if not len(peaks):
        yield f"No allocator was asked: this ran on a {kind}."


if __name__ == "__main__":
    cli.main()
