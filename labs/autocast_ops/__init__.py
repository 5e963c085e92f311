"""Which operations does autocast lower to 16 bits, and which does it leave alone?

    python -m labs.autocast_ops --nproc 1
    torchrun --nproc-per-node 1 -m labs.autocast_ops --models my_package.my_module:factory --precisions bf16

About 5 s on 2 CPU cores. A dispatch mode below autocast sees each operation as it runs, with the casts that autocast
has put in front of it. What an operation would get that happens to receive the right format already, its own trace
cannot tell: so torch is asked for its rule, too, for a CPU and for CUDA (labs/autocast_ops/autocast_rules.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from labs.autocast_ops import autocast_rules
from labs.common import models
from labs.common.precision import amp
from labs.common.timing.probing import supported
from labs.kit._compat import TorchDispatchMode, tree_leaves
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
CAST = "_to_copy"
LOWERED, KEPT, FOLLOWS = "cast to 16 bits", "cast to FP32", "not cast"
TREATMENTS = (LOWERED, KEPT, FOLLOWS, "cast")
RULE_OF = {
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "convolution": "conv2d",
    "native_layer_norm": "layer_norm",
    "_log_softmax": "log_softmax",
    "_softmax": "softmax",
    "nll_loss_forward": "nll_loss",
    "native_batch_norm": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
}
"""The function that has the rule, of operations that run under another name."""
SAME_VALUES = ("_unsafe_view", "detach", "ones_like")  # compute nothing, as views


@dataclass(frozen=True)
class Config:
    """What to trace."""

    models: tuple[str, ...] = ("mlp", "cnn", "cnn_batchnorm", "char_gpt")
    """Of labs.models.MODELS, or package.module:factory."""
    precisions: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")
    """Formats that autocast lowers to; each model is traced without autocast ("fp32") too."""
    batch: int = 2
    """Rows: the operations are the same for every number."""
    smoke: bool = False
    """The first format only."""

    def __post_init__(self) -> None:
        require(len(self.models) > 0, f"models must name at least one of {', '.join(models.MODELS)}")
        require(len(self.precisions) > 0, "precisions must name at least one of bf16, fp16")
        require(len(set(self.models)) == len(self.models), "models must name each model once")
        require(len(set(self.precisions)) == len(self.precisions), "precisions must name each format once")
        require(self.batch >= 1, f"batch must be at least 1, not {self.batch}")
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be built."""
    for model in config.models:
        models.build(model)


@dataclass(frozen=True)
class Call:
    """One operation as it ran: `dtype_in` joins the formats of its floating-point inputs with +."""

    phase: str
    op: str
    dtype_in: str
    dtype_out: str
    treatment: str


class Trace(TorchDispatchMode):
    """Counts calls of the floating-point operations that run inside it, without views.

    An operation is "cast to 16 bits" if autocast has cast an input of it, "cast to FP32" if it has cast one back, and
    else "not cast": it has no rule, or it got what its rule asks for. Autocast is off in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.calls = "forward", Counter[Call]()
        self._cast: dict[int, tuple[str, Tensor]] = {}  # keeps the tensor alive: an id would be given again

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run `func` and note it."""
        out = func(*args, **(kwargs or {}))
        ins, outs = _floats((args, kwargs)), _floats(out)
        if not ins or not outs:
            return out
        name, casts = func.overloadpacket.__name__, [self._cast[id(t)][0] for t in ins if id(t) in self._cast]
        if name == CAST and ins[0].dtype != outs[0].dtype:
            self._note_cast(ins[0], outs[0])
        elif func.is_view or name in SAME_VALUES:
            self._cast.update({id(t): (casts[0], t) for t in outs} if casts else {})
        else:
            treatment = casts[0] if casts and self.phase == "forward" else FOLLOWS
            self.calls[Call(self.phase, name, _joined(ins), _joined(outs[:1]), treatment)] += 1
        return out

    def _note_cast(self, before: Tensor, after: Tensor) -> None:
        down = after.itemsize < before.itemsize
        if self.phase == "forward":  # in backward a tensor with a second owner would be copied into .grad
            self._cast[id(after)] = (LOWERED if down else KEPT, after)
        self.calls[Call(self.phase, CAST, _joined([before]), _joined([after]), "cast")] += 1


def _floats(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _joined(tensors: list[Tensor]) -> str:
    return "+".join(sorted({NAMES.get(t.dtype, str(t.dtype)) for t in tensors}))


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Every model's operations, without autocast and in every format; then the rules."""
    names, wanted = config.models, config.precisions[:1] if config.smoke else config.precisions
    formats = [p for p in wanted if supported(p, rank.device)]
    for missing in set(wanted) - set(formats):
        print(f"autocast_ops: {missing} is left out: this device does not support it")
    for done, name in enumerate(names, start=1):
        workload = models.make(name)
        workload.module.to(rank.device)
        x, y = (t.to(rank.device) for t in workload.make_batch(config.batch))
        able = []
        for precision in formats:
            if why := amp.impossible(workload.module, workload.loss, (x, y), precision):
                yield rank.record("not_possible", "1", 1.0, model=name, precision=precision, why=why)
            else:
                able.append(precision)
        for precision in ("fp32", *able):
            yield from _trace_records(name, precision, traced_step(workload, x, y, precision), rank)
        rank.progress(done, len(names), name)
    for function, by_device in autocast_rules.rules().items():
        for kind, rule in by_device.items():
            yield rank.record(
                "has_rule", "1", float(rule != autocast_rules.FOLLOWS), op=function, device=kind, rule=rule
            )


def traced_step(workload: models.Workload, x: Tensor, y: Tensor, precision: str) -> Trace:
    """What runs in one training step on the batch (x, y), in a format of amp.FORMATS."""
    workload.module.zero_grad()
    with Trace() as trace:
        with amp.precision(precision, x.device):
            loss = workload.loss(workload.module(x), y)
        trace.phase = "backward"
        loss.backward()
    return trace


def _trace_records(name: str, precision: str, trace: Trace, rank: Rank) -> Iterator[Record]:
    """Calls by operation."""
    for call, calls in trace.calls.items():
        yield rank.record("calls", "calls", calls, model=name, precision=precision, **vars(call))


def table(records: Records, model: str, precision: str, phase: str = "forward") -> list[dict[str, Any]]:
    """One row per operation and input format, sorted by treatment, then name; `fp32_calls`: without autocast.

    Rows: treatment, op, dtype_in, dtype_out, calls, fp32_calls. An operation with two input formats has two rows
    with the same `fp32_calls`. Without times: equal on every machine with the same torch and kind of device.
    """
    plain = Counter[str]()
    for r in records.where("calls", model=model, precision="fp32", phase=phase):
        plain[r.case["op"]] += int(r.value)
    rows = [
        {
            **{k: r.case[k] for k in ("treatment", "op", "dtype_in", "dtype_out")},
            "calls": int(r.value),
            "fp32_calls": plain[r.case["op"]],
        }
        for r in records.where("calls", model=model, precision=precision, phase=phase)
    ]
    return sorted(rows, key=lambda row: (TREATMENTS.index(row["treatment"]), row["op"], row["dtype_in"]))


def rule_of(records: Records, op: str, device: str) -> str:
    """torch's rule for the operation `op` of a trace on "cpu" or "cuda"; "?" for one that was not asked for."""
    name = "scaled_dot_product_attention" if op.startswith("_scaled_dot_product") else RULE_OF.get(op, op)
    found = records.where("has_rule", op=name, device=device)
    return found[0].case["rule"] if len(found) else "?"


@dataclass(frozen=True)
class Share:
    """A model's forward pass under autocast, counted."""

    operations: int
    """Calls, without views and casts."""
    lowered: int
    """Those whose floating-point inputs have 16 bits."""
    casts: int


def shares(records: Records, precision: str = "bf16") -> dict[str, Share]:
    """How much of each model runs in 16 bits, by name."""
    found = {}
    for name in dict.fromkeys(r.case["model"] for r in records.where("calls", precision=precision)):
        rows = table(records, name, precision)
        plain = [row for row in rows if row["op"] != CAST]
        found[name] = Share(
            sum(row["calls"] for row in plain),
            sum(row["calls"] for row in plain if precision in row["dtype_in"].split("+")),
            sum(row["calls"] for row in rows if row["op"] == CAST),
        )
    return found


def answer(run: Records) -> Iterator[str]:
    """How much of each model runs in 16 bits, and where a CPU's rules are not CUDA's, in sentences."""
    for r in run.where("not_possible"):
        yield f"{r.case['model']} in {r.case['precision'].upper()}: {r.case['why']}."
    for precision in dict.fromkeys(r.case["precision"] for r in run.where("calls")):
        if precision != "fp32":
            parts = [
                f"{name} {s.lowered} of {s.operations}, {s.casts} casts" for name, s in shares(run, precision).items()
            ]
            yield f"Operations of a forward pass with {precision.upper()} inputs: {'; '.join(parts)}."
    by_op = {
        op: [rule_of(run, op, kind) for kind in autocast_rules.DEVICES]
        for op in dict.fromkeys(r.case["op"] for r in run.where("has_rule"))
    }
    other = [op for op, (cpu, cuda) in by_op.items() if cpu != cuda]
    if by_op:
        told = f"{len(other)} of {len(by_op)} have another rule on CUDA than on a CPU: {', '.join(other)}"
        yield f"Of torch's rules, {told if other else f'all {len(by_op)} are the same on a CPU and on CUDA'}."
