"""Who talks to whom when four devices split both the batch and the model?

    python -m labs.hybrid_parallel --nproc 4 --oversubscribe    # 2 x 2 on two cores: right results, no timings
    torchrun --nproc-per-node 8 -m labs.hybrid_parallel --dp 4

About 3 s on 2 CPU cores. Ranks form a mesh of dp x parts. A row of it holds one copy of the model, in parts; a column
holds the copies of one part:
  data x pipeline        a part is some layers; rows pass activations and their gradients, columns average gradients
  data x pipeline, torch the same, torch.distributed.pipelining does what rows do
  data x tensor          a part is a share of every layer; rows sum activations, columns average gradients
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.communication.wire import in_turn
from labs.parts.models import gradient_bytes
from labs.parts.pipelines import chain, even_cuts
from labs.parts.precision.rounding import METRIC, beyond, rounding_error
from labs.parts.sharding import blocks
from labs.parts.sharding.blocks import halves
from labs.parts.sharding.hybrid import AXES, Scheme, batch, pipeline, tensor, torch_pipeline
from labs.parts.sharding.link import require_messages
from labs.parts.sharding.tensor import share
from labs.parts.sharding.traffic import traffic_of


@dataclass(frozen=True)
class Config:
    """The mesh and the model."""

    dp: int = 2
    """Copies of the model; the ranks are shared out among them, so each copy has world size / dp parts."""
    model: str = "char_gpt"
    """Chain that the pipeline cuts: a key of labs.parts.pipelines.CHAINS, or package.module:factory."""
    micro_batches: int = 4
    """Parts of each copy's batch, which follow each other through the pipeline."""
    batch_size: int = 16
    """Samples of all copies together."""
    seconds: float = 1.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that the schemes take turns, where every rank has a core or GPU of its own.

    By default as many as fit into `seconds`, at least 6.
    """
    seed: int = 0
    """Seed of models and data."""
    smoke: bool = False
    """Two rounds."""

    def __post_init__(self) -> None:
        require(self.dp >= 1, f"dp must be at least 1, not {self.dp}")
        require(self.micro_batches >= 1, f"micro_batches must be at least 1, not {self.micro_batches}")
        measure.require_budget(self.seconds, self.rounds)
        parts = self.dp * self.micro_batches
        require(
            self.batch_size >= 1 and self.batch_size % parts == 0,
            f"batch_size {self.batch_size} cannot be split "
            f"into {self.dp} x {self.micro_batches} micro-batches: take a multiple of {parts}",
        )


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the ranks form no such mesh, or there are more parts than layers or heads."""
    require(
        world_size % config.dp == 0,
        f"nproc={world_size} cannot hold {config.dp} copies of equally many parts: "
        f"take nproc={config.dp * max(1, world_size // config.dp)}, or another dp",
    )
    parts = world_size // config.dp
    even_cuts(chain(config.model), parts)
    model = blocks.separated(chain(config.model).module())
    for half in map(model.get_submodule, halves(model)):
        share(half, 0, parts)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Gradients and bytes of every scheme; step times if every rank has a device of its own."""
    require_messages(rank)
    parts, mesh = rank.world_size // config.dp, make_mesh(config.dp, rank)
    makers = {"data x pipeline": pipeline, "data x pipeline, torch": torch_pipeline, "data x tensor": tensor}
    if not halves(blocks.separated(chain(config.model).module())):
        del makers["data x tensor"]  # no block of the kind that this course cuts into shares
    alone = chain(config.model, config.seed).workload()
    alone.module.to(rank.device)
    floor = rounding_error(alone.module, alone.loss, *batch(alone, config, rank))
    yield rank.record(METRIC, "1", rank.slowest([floor]))
    schemes = {}
    for done, (name, make) in enumerate(makers.items(), start=1):
        schemes[name] = make(config, mesh, rank)
        yield from trial(schemes[name], {"scheme": name, "dp": config.dp, "parts": parts}, mesh, rank)
        rank.progress(done, len(makers) + 1, name)
    if has_own_device(rank):
        yield from times(schemes, config, rank)


def make_mesh(dp: int, rank: Rank) -> DeviceMesh:
    """The ranks as a table: each row holds one copy of the model, in parts; each column the copies of one part."""
    return init_device_mesh(rank.device.type, (dp, rank.world_size // dp), mesh_dim_names=("dp", "parts"))


def trial(scheme: Scheme, case: dict, mesh: DeviceMesh, rank: Rank) -> Iterator[Record]:
    """Is the gradient that of one process, and what does each rank send (one sample each)?"""
    for _ in range(2):  # the first also tells neighbours and DDP what will come
        scheme.module.zero_grad()
        traffic, carried = traffic_of(scheme.backward, rank)
    gradients = [p.grad for p in scheme.module.parameters()]
    g, reference = (torch.cat([t.flatten() for t in ts]) for ts in (gradients, scheme.expected))
    error = rank.slowest([((g - reference).norm() / reference.norm()).item()])
    yield rank.record("gradient_relative_error", "1", error, **case)
    yield rank.record("bytes_per_rank", "B", rank.gather(gradient_bytes(scheme.module)), what="parameters", **case)
    for (axis, op), expected in scheme.sent_bytes.items():
        found = traffic.sent(mesh[AXES[axis]].get_group())[op]
        yield rank.record("sent_bytes", "B", rank.gather(found), axis=axis, op=op, **case)
        yield rank.record("sent_bytes", "B", rank.gather(expected), kind="modelled", axis=axis, op=op, **case)
    if carried is not None:
        yield rank.record("tcp_sent_bytes", "B", carried, **case)


def has_own_device(rank: Rank) -> bool:
    """Whether no two ranks of the job share a core or a GPU: otherwise a step time says nothing."""
    places = rank.gather((socket.gethostname(), str(rank.device), rank.cores))
    return len(set(places)) == len(places)


def times(schemes: dict[str, Scheme], config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds per step of every scheme and of one rank with the whole batch, in turn."""
    alone = chain(config.model, config.seed).workload()
    x, y = batch(alone, config, rank)
    single = Scheme(alone.module.to(rank.device), lambda: alone.loss(alone.module(x), y).backward(), [], {})
    steps = {"single": single.step if rank.rank == 0 else _wait, **{n: s.step for n, s in schemes.items()}}
    for step in steps.values():
        measure.time_steps(step, 2, rank.device)
    for name, seconds in in_turn(steps, config, rank).items():
        yield rank.record("step_s", "s", seconds, scheme=name, dp=config.dp)


def _wait() -> None:
    """One rank trains alone; the others go to the next barrier."""


def answer(run: Records) -> Iterator[str]:
    """Whether gradients and bytes are as they must be, what travels along each axis, and the speed if it was timed."""
    dp, parts = (run.where("gradient_relative_error")[0].case[k] for k in ("dp", "parts"))
    wrong = beyond(run)
    yield f"{dp} copies x {parts} parts: " + (
        f"the gradients of {len(wrong)} schemes are WRONG."
        if wrong
        else "every scheme has one process's gradient up to rounding."
    )
    for scheme in dict.fromkeys(r.case["scheme"] for r in run.where("sent_bytes")):
        found = run.where("sent_bytes", scheme=scheme)
        sent = [
            (m, next(f for f in found if f.kind == "modelled" and f.case == m.case))
            for m in found
            if m.kind == "measured"
        ]
        said = ", ".join(f"{max(m.samples) / 1e6:.2f} MB along {m.case['axis']} ({m.case['op']})" for m, _ in sent)
        exact = all(m.samples == f.samples for m, f in sent)
        yield f"{scheme}: {said}; {'as' if exact else 'NOT as'} the closed forms say."
    steps = run.where("step_s")
    single = [r for r in steps if r.case["scheme"] == "single"]
    for r in (r for r in steps if single and r.case["scheme"] != "single"):
        ratio = measure.paired_ratio(single[0].samples, r.samples)
        yield f"{r.case['scheme']}: {ratio} as fast as one device."
    if not steps:
        yield "Ranks shared cores or GPUs: no time was taken."


if __name__ == "__main__":
    cli.main()
