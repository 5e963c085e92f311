"""What does it cost to keep only a part of every parameter on each device?

    python -m labs.fully_sharded                                # launches its own ranks
    torchrun --nproc-per-node 2 -m labs.fully_sharded --models my_package.module:factory

About 8 s on 2 CPU cores. Every rank trains on its own part of the batch:
  ddp         every rank has all parameters, gradients and optimizer states
  fsdp        FSDP2: every rank has 1/n of each; a block's parameters are gathered when it runs, forward and backward
  fsdp, kept  the same, but what forward gathered stays until backward is through (reshard_after_forward=False)
  fsdp, bf16  mixed precision: parameters are gathered and used in BF16, kept in FP32; gradients are summed in FP32
  fsdp, offload   shards and optimizer states are in the host's memory. On CPU ranks that is where they are anyway: what
              is tried there is that it runs and computes the same
  single      one process with the whole batch: what the others must compute
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.activation_memory.allocator import watch
from labs.common.communication.wire import in_turn
from labs.common.models import Workload
from labs.common.precision.rounding import METRIC, rounding_error
from labs.common.sharding.fsdp import Gathered, predict, shard, shard_bytes
from labs.common.sharding.link import require_messages
from labs.common.sharding.traffic import traffic_of
from labs.common.tensors import nbytes
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

WAYS = ("ddp", "fsdp", "fsdp, kept", "fsdp, bf16", "fsdp, offload")
LOWERED = "fsdp, bf16"
TIMED = WAYS[:3]  # on a CPU the time of BF16 is that of its units, and offload moves nothing
OPTIMIZERS = {"momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adam": partial(torch.optim.Adam, lr=1e-3)}
STATES = {"momentum": 1, "adam": 2}  # numbers per parameter
SMOKE = {"models": ("labs.common.sharding.blocks:uneven_mlp",), "steps": 1}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """What to train."""

    models: tuple[str, ...] = (
        "labs.common.sharding.blocks:wide_mlp",
        "char_gpt",
        "labs.common.sharding.blocks:uneven_mlp",
    )
    """Keys of labs.models.MODELS, or package.module:factory.

    The first is a model of states: parameters and optimizer fill the memory. The third has sizes that no ranks share
    evenly.
    """
    batch_size: int = 16
    """Samples per rank."""
    optimizer: Literal["momentum", "adam"] = "adam"
    """SGD with momentum keeps one number more per parameter, Adam two."""
    steps: int = 3
    """Steps after which the parameters of all ways are compared."""
    seconds: float = 2.4
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the ways take turns, per model; by default as many as fit into `seconds`, at least 6."""
    seed: int = 0
    """Seed of models and data."""
    smoke: bool = False
    """Two rounds."""

    def __post_init__(self) -> None:
        require(len(self.models) > 0, "models must name at least one model")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.steps >= 1, f"steps must be at least 1, not {self.steps}")
        measure.require_budget(self.seconds, self.rounds)
        models.require_known(*self.models, option="models")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be built."""
    for name in config.models:
        models.build(name)


@dataclass
class Trainer:
    """One way to train: its module, with an optimizer of its own, and this rank's part of the batch."""

    workload: Workload
    module: nn.Module
    x: Tensor
    y: Tensor
    optimizer: torch.optim.Optimizer

    def forward(self) -> Tensor:
        """The loss; gradients of the step before are gone."""
        self.optimizer.zero_grad()
        return self.workload.loss(self.module(self.x), self.y)

    def finish(self, loss: Tensor) -> None:
        """Backward, and an update of the parameters."""
        loss.backward()
        self.optimizer.step()

    def step(self) -> None:
        """One training step."""
        self.finish(self.forward())


def trainers(name: str, config: Config, mesh: DeviceMesh, rank: Rank) -> dict[str, Trainer]:
    """One for each way and for a single process, which has the whole batch; all start with the same parameters."""
    workload = models.build(name, config.seed)
    torch.manual_seed(config.seed + 1)
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size * rank.world_size))
    mine = slice(rank.rank * config.batch_size, (rank.rank + 1) * config.batch_size)
    module = workload.module.to(rank.device)
    made = {way: copy.deepcopy(module) for way in (*WAYS, "single")}
    made["ddp"] = DistributedDataParallel(made["ddp"])
    made["fsdp"] = shard(made["fsdp"], mesh)
    made["fsdp, kept"] = shard(made["fsdp, kept"], mesh, reshard_after_forward=False)
    made[LOWERED] = shard(made[LOWERED], mesh, lowered=torch.bfloat16)
    made["fsdp, offload"] = shard(made["fsdp, offload"], mesh, offload=True)
    part = {way: (x, y) if way == "single" else (x[mine], y[mine]) for way in made}
    optimizer = OPTIMIZERS[config.optimizer]
    return {way: Trainer(workload, m, *part[way], optimizer(m.parameters())) for way, m in made.items()}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Parity, bytes held, bytes sent and step times of every model and way."""
    require_messages(rank)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nobody here writes into an output
    mesh = init_device_mesh(rank.device.type, (rank.world_size,))
    for done, name in enumerate(config.models, start=1):
        ways = trainers(name, config, mesh, rank)
        for trainer in ways.values():
            for _ in range(config.steps):
                trainer.step()
        whole, single = models.build(name, config.seed).module, ways["single"]
        floor = rounding_error(single.module, single.workload.loss, single.x, single.y)
        yield rank.record(METRIC, "1", rank.slowest([floor]), model=name)
        for way in WAYS:
            case = {"way": way, "model": name}
            yield from errors(ways[way], single, case, rank)
            yield from held(ways[way], whole, case, config, rank)
            yield from moved(ways[way], whole, case, rank)
        yield from times(ways, name, config, rank)
        rank.progress(done, len(config.models), name)


def errors(trainer: Trainer, single: Trainer, case: dict, rank: Rank) -> Iterator[Record]:
    """||a - b|| / ||b||, b from the single process: of parameters after the steps, and of the last gradient.

    Of BF16 under a name of its own: it is not meant to be equal up to FP32's rounding.
    """
    lowered = "bf16_" if case["way"] == LOWERED else ""
    for what, of in (("parameter", lambda p: p.detach()), ("gradient", lambda p: p.grad)):
        a, b = (torch.cat([_whole(of(p)).flatten() for p in t.module.parameters()]) for t in (trainer, single))
        yield rank.record(
            f"{lowered}{what}_relative_error", "1", rank.slowest([((a - b).norm() / b.norm()).item()]), **case
        )


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # a DTensor: this rank has a shard


def _local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def held(trainer: Trainer, whole: nn.Module, case: dict, config: Config, rank: Rank) -> Iterator[Record]:
    """Bytes on a rank between two steps, on the rank that has the most."""
    parameters = list(trainer.module.parameters())
    states = [t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()]  # not Adam's counter
    found = {"parameters": parameters, "gradients": [p.grad for p in parameters], "optimizer": states}
    n = 1 if case["way"] == "ddp" else rank.world_size
    expected = sum(shard_bytes(p, n) for p in whole.parameters())
    factors = {"parameters": 1, "gradients": 1, "optimizer": STATES[config.optimizer]}
    between = sum(nbytes(*map(_local, tensors)) for tensors in found.values())
    for what, tensors in found.items():
        size = max(rank.gather(nbytes(*map(_local, tensors))))
        yield rank.record("bytes_per_rank", "B", size, what=what, **case)
        yield rank.record("bytes_per_rank", "B", factors[what] * expected, kind="modelled", what=what, **case)
    peak = between + watch(trainer.forward, trainer.finish, rank.device).peak
    yield rank.record("peak_bytes", "B", max(rank.gather(peak)), **case)


def moved(trainer: Trainer, whole: nn.Module, case: dict, rank: Rank) -> Iterator[Record]:
    """Collectives and bytes of one step, and how many bytes of parameters were whole at once."""
    traffic, carried = traffic_of(trainer.step, rank)
    with Gathered(trainer.module) as gathered:
        trainer.step()
    expected = predict(whole, case["way"], rank.world_size)
    yield rank.record("gathered_bytes", "B", max(rank.gather(gathered.most)), **case)
    yield rank.record("gathered_bytes", "B", expected.pop("gathered"), kind="modelled", **case)
    for op, size in expected.items():
        yield rank.record("calls", "1", traffic.count()[op], op=op, **case)
        yield rank.record("sent_bytes", "B", traffic.sent()[op], op=op, **case)
        yield rank.record("sent_bytes", "B", size, kind="modelled", op=op, **case)
    if carried is not None:
        yield rank.record("tcp_sent_bytes", "B", max(carried), **case)
        really = predict(whole, case["way"], rank.world_size, gloo=True)
        yield rank.record("tcp_sent_bytes", "B", sum(really.values()) - really["gathered"], kind="modelled", **case)


def times(ways: dict[str, Trainer], name: str, config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds per step, the ways in turn."""
    steps = {way: ways[way].step for way in TIMED}
    for way, seconds in in_turn(steps, config, rank, 1 / len(config.models)).items():
        yield rank.record("step_s", "s", seconds, way=way, model=name)


def held_bytes(run: Records, way: str, model: str) -> float:
    """Parameters, gradients and optimizer state on the rank that has the most, between two steps."""
    return sum(r.value for r in run.where("bytes_per_rank", way=way, model=model) if r.kind == "measured")


def sent_per_step(run: Records, way: str, model: str) -> float:
    """Bytes that a rank sends per step, as counted."""
    return sum(r.value for r in run.where("sent_bytes", way=way, model=model) if r.kind == "measured")


def answer(run: Records) -> Iterator[str]:
    """What FSDP2 saves and what it costs beside DDP, for the first model; whether the bytes are those of the forms."""
    model = run.where("peak_bytes")[0].case["model"]
    n = run[0].layout["world_size"]
    held, peak = (
        {w: f(w) for w in ("ddp", "fsdp")}
        for f in (lambda w: held_bytes(run, w, model), lambda w: run.one("peak_bytes", way=w, model=model).value)
    )
    yield (
        f"{model.rpartition(':')[2]} on {n} ranks: FSDP2 keeps {held['fsdp'] / 1e6:.1f} MB of states per rank, DDP "
        f"{held['ddp'] / 1e6:.1f} MB; at the peak of a step {peak['fsdp'] / 1e6:.1f} and {peak['ddp'] / 1e6:.1f} "
        "MB."
    )
    if ddp := sent_per_step(run, "ddp", model):
        ratios = {w: sent_per_step(run, w, model) / ddp for w in ("fsdp", LOWERED)}
        yield (
            f"It sends {ratios['fsdp']:.2f} times DDP's bytes in FP32, and {ratios[LOWERED]:.2f} times with BF16 "
            "parameters and FP32 gradients."
        )
    steps = {w: run.one("step_s", way=w, model=model).samples for w in ("ddp", "fsdp")}
    took = measure.paired_ratio(steps["fsdp"], steps["ddp"])
    word = (
        "no difference that this run can show"
        if took.low <= 1 <= took.high
        else f"FP32, over {run[0].layout.get('backend', 'this backend')}"
    )
    yield f"A step takes {took} as long as with DDP: {word}."
    counted = [r for m in ("bytes_per_rank", "gathered_bytes", "sent_bytes") for r in run.where(m)]
    forms = {(r.metric, *map(str, r.case.items())): r.value for r in counted if r.kind == "modelled"}
    off = [r for r in counted if r.kind == "measured" and forms.get((r.metric, *map(str, r.case.items()))) != r.value]
    word = "all are those of the closed forms" if not off else f"{len(off)} are NOT those of the closed forms"
    yield f"{len(forms)} byte counts of held, gathered and sent parameters: {word}."


if __name__ == "__main__":
    cli.main()
