"""A GPT trained in five ways on a mesh of any size: one rank's share of it, and the closed form of what it sends.

Ranks are numbered node by node. Tensor parallelism and HSDP's shards stay inside a node as far as it goes; the stages
of a pipeline are blocks of neighbouring ranks, so that on several nodes stages talk across.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.common.models.text_models import Block, char_loss
from labs.common.oracle.gpt import GptShape, gpt
from labs.common.pipelines.chains import Embed
from labs.common.sharding import blocks
from labs.common.sharding.fsdp import shard
from labs.common.sharding.tensor import by_hand
from labs.common.sharding.traffic import Call, sent_bytes
from labs.kit import _compat
from labs.kit.errors import require
from labs.many_ranks.fake_ranks import all_reduce_hook
from labs.many_ranks.hybrid import average_gradients, pipeline_step

LEVELS = ("inside", "across")


@dataclass(frozen=True)
class Job:
    """The model, and how `ranks` ranks share it."""

    shape: GptShape
    ranks: int
    per_node: int
    rows: int = 1
    """Sequences per step of each rank (of each pipeline or group of tensor ranks)."""
    micro_batches: int = 4
    """Parts of a pipeline's rows."""
    stages: int = 4

    def __post_init__(self) -> None:
        require(self.ranks >= 2, f"ranks must be at least 2, not {self.ranks}: one has nobody to talk to")
        require(
            self.ranks <= self.per_node or self.ranks % self.per_node == 0,
            f"{self.ranks} ranks do not fill nodes of {self.per_node}",
        )
        require(self.ranks % self.deep == 0, f"{self.ranks} ranks cannot be {self.deep} stages of equally many")
        require(self.shape.layers >= self.deep, f"{self.shape.layers} layers are not enough for {self.deep} stages")
        require(self.shape.heads % self.near == 0, f"{self.shape.heads} heads cannot be shared by {self.near} ranks")

    @property
    def near(self) -> int:
        """Ranks of one node, which share a layer (tensor) or hold one copy of the model (HSDP)."""
        return min(self.ranks, self.per_node)

    @property
    def deep(self) -> int:
        """Stages of the pipeline."""
        return min(self.ranks, self.stages)

    def rank_asked(self, way: str) -> int:
        """The rank that speaks for the others: of a pipeline one in the middle, which sends on and back."""
        return (self.deep // 2) * (self.ranks // self.deep) if way == "pipeline" else 0

    @property
    def peers(self) -> list[int]:
        """Ranks that the rank asked of a pipeline sends to: of the stage after, and of the one before."""
        me, block = self.rank_asked("pipeline"), self.ranks // self.deep
        return [r for r in (me + block, me - block) if 0 <= r < self.ranks]


Step = Callable[[], object]
Mode = AbstractContextManager
"""nullcontext(), or a FakeTensorMode: then neither parameters nor activations take memory."""


def ddp(job: Job, mode: Mode) -> Step:
    """Every rank has the whole model; gradients are summed over all."""
    workload = gpt(job.shape)
    module = DistributedDataParallel(workload.module)
    module.register_comm_hook(None, all_reduce_hook)
    x, y = workload.make_batch(job.rows)
    return lambda: workload.loss(module(x), y).backward()


def fsdp(job: Job, mode: Mode) -> Step:
    """Every rank keeps 1/n of each layer, and gathers it when it is needed."""
    return _sharded(job, init_device_mesh("cpu", (job.ranks,)), mode)


def hsdp(job: Job, mode: Mode) -> Step:
    """Each node keeps one copy in shards; gradients of a shard are summed over the nodes."""
    return _sharded(job, _mesh(job.ranks // job.near, job.near), mode)


def _sharded(job: Job, mesh: DeviceMesh, mode: Mode) -> Step:
    with mode:
        workload = gpt(job.shape)
        module = shard(workload.module, mesh)
        x, y = workload.make_batch(job.rows)

    def step() -> None:
        with mode:
            workload.loss(module(x), y).backward()

    return step


def tensor(job: Job, mode: Mode) -> Step:
    """Each node has one copy of the model, every rank a share of each layer; gradients are summed over the nodes."""
    mesh = _mesh(job.ranks // job.near, job.near)
    shares, copies = mesh["near"].get_group(), mesh["far"].get_group()
    with mode:
        workload = gpt(job.shape)
        module = by_hand(blocks.separated(workload.module), shares)
        x, y = workload.make_batch(job.rows)

    def step() -> None:
        with mode:
            workload.loss(module(x), y).backward()
            average_gradients(module, copies)

    return step


def pipeline(job: Job, mode: Mode) -> Step:
    """Each rank has some layers; activations go on, gradients back; copies of a stage sum their gradients."""
    mesh, shape = _mesh(job.deep, job.ranks // job.deep), job.shape
    pipe, copies = mesh["far"].get_group(), mesh["near"].get_group()
    with mode:
        stage = stages(shape, job.deep)[pipe.rank()]
        x, y = torch.zeros(2, job.micro_batches, job.rows, shape.places, dtype=torch.int64)
        template = torch.empty(job.rows, shape.places, shape.width)
        micro = list(zip(x, y, strict=True))

    def step() -> None:
        with mode:
            pipeline_step(stage, char_loss, micro, template, pipe)
            average_gradients(stage, copies)

    return step


WAYS: dict[str, Callable[[Job, Mode], Step]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tensor": tensor,
    "pipeline": pipeline,
}


def _mesh(far: int, near: int) -> DeviceMesh:
    return init_device_mesh("cpu", (far, near), mesh_dim_names=("far", "near"))


def stages(shape: GptShape, count: int) -> list[nn.Sequential]:
    """Embedding, blocks and head, cut into `count` stages of equally many blocks as far as that goes. Not tied."""
    cuts = [round(i * shape.layers / count) for i in range(count + 1)]
    found = [nn.Sequential(*(Block(shape.width, shape.heads) for _ in range(b - a))) for a, b in pairwise(cuts)]
    found[0].insert(0, Embed(shape.vocabulary, shape.width, shape.places))
    found[-1].append(nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocabulary)))
    return found


# -- closed forms, from sizes alone


@dataclass(frozen=True)
class Term:
    """Bytes that the rank asked sends in calls of one kind, in a group of `ranks` ranks that lie `stride` apart."""

    kind: str
    ranks: int
    stride: int
    sent: float


def predict(job: Job, way: str) -> list[Term]:
    """What the rank asked sends in one step, FP32, from the sizes of the model and of the mesh."""
    shape, n, near, block = job.shape, job.ranks, job.near, job.ranks // job.deep
    activation = 4 * job.rows * shape.places * shape.width

    def ring(kind: str, size: float, ranks: int, stride: int = 1) -> Term:
        return Term(kind, ranks, stride, sent_bytes(kind, size, ranks))

    if way == "ddp":
        found = [ring("all_reduce", 4 * shape.parameters, n)]
    elif way in ("fsdp", "hsdp"):
        over = n if way == "fsdp" else near
        groups = _padded(shape, over)
        again = sum(groups[:-1])  # backward gathers each block anew; what is outside of blocks is kept
        found = [ring("all_gather", sum(groups) + again, over), ring("reduce_scatter", sum(groups), over)]
        if way == "hsdp":
            found.append(ring("all_reduce", sum(groups) / near, n // near, near))
    elif way == "tensor":  # a sum at the end of each half of a block forward, one at its start backward
        found = [
            ring("all_reduce", 4 * shape.layers * activation, near),
            ring("all_reduce", 4 * tensor_parameters(shape, near), n // near, near),
        ]
    else:
        own = 4 * stage_parameters(shape, job.deep, job.deep // 2)
        found = [
            Term("send", job.deep, block, len(job.peers) * job.micro_batches * activation),
            ring("all_reduce", own, n // job.deep),
        ]
    return [term for term in found if term.sent]


def block_rows(shape: GptShape) -> list[tuple[int, int]]:
    """(rows, numbers in a row) of each parameter of a block: FSDP2 cuts rows."""
    w = shape.width
    return [(w, 1)] * 4 + [(3 * w, w), (3 * w, 1), (w, w), (w, 1), (4 * w, w), (4 * w, 1), (w, 4 * w), (w, 1)]


def _padded(shape: GptShape, ranks: int) -> list[int]:
    """Bytes that are gathered for each block, and last for the rest: every rank sends ceil(rows / n) rows."""
    rest = [(shape.vocabulary, shape.width), (shape.places, shape.width), (shape.width, 1), (shape.width, 1)]
    return [
        sum(4 * -(-rows // ranks) * ranks * numbers for rows, numbers in parameters)
        for parameters in [block_rows(shape)] * shape.layers + [rest]
    ]


def tensor_parameters(shape: GptShape, ranks: int) -> int:
    """Parameters of a rank: a share of the 12 w^2 of each block and of 7 w of its biases, all else whole."""
    w, tables = shape.width, (shape.vocabulary + shape.places) * shape.width
    return shape.layers * ((12 * w * w + 7 * w) // ranks + 6 * w) + tables + 2 * w


def stage_parameters(shape: GptShape, count: int, stage: int) -> int:
    """Parameters of one stage; the first has the tables too, the last a norm and a head."""
    w = shape.width
    cuts = [round(i * shape.layers / count) for i in range(count + 1)]
    own = (cuts[stage + 1] - cuts[stage]) * (12 * w * w + 13 * w)
    own += (shape.vocabulary + shape.places) * w if stage == 0 else 0
    return own + (2 * w + (w + 1) * shape.vocabulary if stage == count - 1 else 0)


def predict_levels(job: Job, way: str) -> dict[str, float]:
    """{"inside": bytes, "across": bytes} of the same: a ring over neighbours leaves each of its nodes once.

    A block of neighbours need not begin where a node does: 6 ranks of a stage lie on two nodes of 8, if 4 of them are
    the last ones of the first.
    """
    found = dict.fromkeys(LEVELS, 0.0)
    me, per_node = job.rank_asked(way), job.per_node
    for term in predict(job, way):
        if term.kind == "send":
            crosses = sum(me // per_node != peer // per_node for peer in job.peers) / len(job.peers)
        elif term.stride >= per_node:
            crosses = 1.0
        else:
            first = me - me % term.ranks
            nodes = (first + term.ranks - 1) // per_node - first // per_node + 1
            crosses = nodes / term.ranks if nodes > 1 else 0.0
        found["across"] += crosses * term.sent
        found["inside"] += (1 - crosses) * term.sent
    return found


# -- counted


def summed(terms: Sequence[Term]) -> Counter[tuple[str, int]]:
    """A closed form in the way of `counted`."""
    found: Counter[tuple[str, int]] = Counter()
    for term in terms:
        found[term.kind, term.ranks] += term.sent
    return found


def counted(calls: Sequence[Call]) -> Counter[tuple[str, int]]:
    """Bytes that the calls send, by kind and number of ranks in the group."""
    found: Counter[tuple[str, int]] = Counter()
    for call in calls:
        if call.sent_bytes:
            found[call.kind, call.ranks] += call.sent_bytes
    return found


def alike(one: Counter[tuple[str, int]], other: Counter[tuple[str, int]]) -> bool:
    """Whether two counts are equal but for the rounding of their sums in FP64."""
    return set(one) == set(other) and all(math.isclose(one[key], other[key], rel_tol=1e-12) for key in one)


def crossing_share(members: Sequence[int], per_node: int) -> float:
    """Which part of the links of a ring over these ranks, in this order, goes from one node to another."""
    if len(members) < 2:
        return 0.0
    links = pairwise([*members, members[0]])
    return sum(a // per_node != b // per_node for a, b in links) / len(members)


def by_level(calls: Sequence[Call], per_node: int) -> dict[str, float]:
    """Bytes that this rank sends inside its node and across: collectives as an average rank of a ring in rank order.

    To be called where the calls' groups still exist.
    """
    found = dict.fromkeys(LEVELS, 0.0)
    for call in calls:
        members = dist.get_process_group_ranks(_compat.resolve_group(call.group))
        if call.peer is None:
            crosses = crossing_share(members, per_node)
        else:
            crosses = float(dist.get_rank() // per_node != members[call.peer] // per_node)
        found["across"] += crosses * call.sent_bytes
        found["inside"] += (1 - crosses) * call.sent_bytes
    return found
