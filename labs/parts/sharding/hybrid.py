"""Data x pipeline and data x tensor: what each rank of a two-dimensional mesh does, and with whom it talks.

A row of the mesh ("parts") holds one copy of the model, in parts; a column ("dp") holds the copies of one part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parameters_to_vector

from labs.kit.rank import Rank
from labs.parts.data_parallel.scaling import ring_all_reduce_bytes
from labs.parts.models import Workload, gradient_bytes
from labs.parts.pipelines import chain, even_cuts, split
from labs.parts.sharding import blocks
from labs.parts.sharding.blocks import halves
from labs.parts.sharding.tensor import by_hand, whole_gradients

AXES = {"rows": "parts", "columns": "dp"}  # who talks, and the name of that dimension of the mesh
Sent = dict[tuple[str, str], float]  # bytes by axis of the mesh and kind of call
Micro = list[tuple[Tensor, Tensor]]


class Layout(Protocol):
    """What of the lab's Config the schemes need."""

    dp: int
    model: str
    micro_batches: int
    batch_size: int
    seed: int


def predict(on: int, back: int, micro_batches: int, gradients: int, dp: int) -> Sent:
    """Bytes that a rank sends per step, data x pipeline: activations on, gradients back, own gradients around.

    `on` is the bytes of one micro-batch for the stage after (0 if there is none), `back` those for the stage before,
    `gradients` those of all parameters of this stage.
    """
    return {
        ("rows", "send"): micro_batches * (on + back),
        ("columns", "all_reduce"): ring_all_reduce_bytes(gradients, dp),
    }


def pipeline_step(
    stage: nn.Module, loss: Callable, micro: Micro, template: Tensor | None, pipe: dist.ProcessGroup
) -> None:
    """All micro-batches forward, then backward, through the stages of one copy of the model: one rank's share of it.

    The first stage reads the inputs, the last the targets. `template` is a tensor like what comes in from the stage
    before. The gradient in `stage` becomes that of the mean over the micro-batches.
    """
    me, last, kept = pipe.rank(), pipe.size() - 1, []
    for x, y in micro:
        if me > 0:
            x = torch.empty_like(template)
            dist.recv(x, group=pipe, group_src=me - 1)
            x.requires_grad_()
        out = stage(x)
        if me < last:
            dist.send(out.detach(), group=pipe, group_dst=me + 1)
        else:
            out = loss(out, y) / len(micro)
        kept.append((x, out))
    for x, out in kept:
        gradient = None
        if me < last:
            gradient = torch.empty_like(out)
            dist.recv(gradient, group=pipe, group_src=me + 1)
        out.backward(gradient)
        if me > 0:
            dist.send(x.grad, group=pipe, group_dst=me - 1)


def average_gradients(module: nn.Module, copies: dist.ProcessGroup) -> None:
    """Mean over the copies of this part, as one message."""
    gradients = [p.grad for p in module.parameters()]
    whole = parameters_to_vector(gradients)
    dist.all_reduce(whole, group=copies)
    whole /= copies.size()
    for gradient, mean in zip(gradients, whole.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


@dataclass
class Scheme:
    """One way to train: `backward` leaves gradients in `module`, this rank's part of the model."""

    module: nn.Module
    backward: Callable[[], object]
    expected: list[Tensor]
    """This rank's part of one process's gradient, in the order of the module's parameters."""
    sent_bytes: Sent
    """By closed form."""

    def step(self) -> None:
        """Forward, backward and an optimizer step."""
        self.module.zero_grad()
        self.backward()
        with torch.no_grad():
            for p in self.module.parameters():
                p -= 0.01 * p.grad


@dataclass
class Stage:
    """What both pipelines need: this rank's stage, its copy's micro-batches, and what one process computes."""

    module: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    micro: Micro
    template: Tensor | None
    sent_bytes: Sent
    expected: list[Tensor]


def _stage(config: Layout, mesh: DeviceMesh, rank: Rank) -> Stage:
    model, me, parts = chain(config.model, config.seed), mesh["parts"].get_local_rank(), mesh["parts"].size()
    x, y = batch(model.workload(), config, rank)
    whole = model.module().to(rank.device)
    model.loss(whole(x), y).backward()
    stages = split(model, even_cuts(model, parts))
    expected = [p.grad for p in stages[me].parameters()]
    x, y = (t.chunk(config.dp)[mesh["dp"].get_local_rank()].chunk(config.micro_batches) for t in (x, y))
    with torch.no_grad():  # what comes in looks like what the stages before make of a micro-batch
        template = nn.Sequential(*stages[:me])(x[0]) if me else None
        on = stages[me](x[0] if template is None else template).nbytes if me < parts - 1 else 0
    back = 0 if template is None else template.nbytes
    stage = copy.deepcopy(stages[me])
    stage.zero_grad()
    sent = predict(on, back, config.micro_batches, gradient_bytes(stage), config.dp)
    return Stage(stage, model.loss, list(zip(x, y, strict=True)), template, sent, expected)


def pipeline(config: Layout, mesh: DeviceMesh, rank: Rank) -> Scheme:
    """By hand: rows and columns of the mesh in turn."""
    s, pipe, copies = _stage(config, mesh, rank), mesh["parts"].get_group(), mesh["dp"].get_group()

    def backward() -> None:
        pipeline_step(s.module, s.loss, s.micro, s.template, pipe)
        average_gradients(s.module, copies)

    return Scheme(s.module, backward, s.expected, s.sent_bytes)


def torch_pipeline(config: Layout, mesh: DeviceMesh, rank: Rank) -> Scheme:
    """By torch: a schedule runs the row. The column stays ours.

    DDP around a stage fails in its second step with this schedule (torch 2.13: its buckets count parameters twice).
    """
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    s, pipe, copies = _stage(config, mesh, rank), mesh["parts"].get_group(), mesh["dp"].get_group()
    stage = PipelineStage(s.module, pipe.rank(), pipe.size(), rank.device, group=pipe)
    schedule = ScheduleGPipe(stage, len(s.micro), loss_fn=s.loss)
    x, y = (torch.cat(parts) for parts in zip(*s.micro, strict=True))

    def backward() -> None:
        schedule.step(*([x] if stage.is_first else []), **({"target": y} if stage.is_last else {}))
        average_gradients(s.module, copies)

    return Scheme(s.module, backward, s.expected, s.sent_bytes)


def tensor(config: Layout, mesh: DeviceMesh, rank: Rank) -> Scheme:
    """The same model with a share of every block's layers; embedding and head are whole on every rank."""
    model, ours = (chain(config.model, config.seed).workload() for _ in range(2))
    x, y = batch(model, config, rank)
    whole = blocks.separated(model.module).to(rank.device)
    model.loss(whole(x), y).backward()
    shares, copies = mesh["parts"].get_group(), mesh["dp"].get_group()
    module = by_hand(blocks.separated(ours.module).to(rank.device), shares)
    gradients = whole_gradients(whole, shares)
    x, y = (t.chunk(config.dp)[copies.rank()] for t in (x, y))

    def backward() -> None:
        model.loss(module(x), y).backward()
        average_gradients(module, copies)

    widths = [getattr(half, half.ROW).out_features for half in map(whole.get_submodule, halves(whole))]
    sums = 2 * sum(ring_all_reduce_bytes(4 * x.numel() * width, shares.size()) for width in widths)
    sent = {
        ("rows", "all_reduce"): sums,
        ("columns", "all_reduce"): ring_all_reduce_bytes(gradient_bytes(module), copies.size()),
    }
    return Scheme(module, backward, [gradients[n] for n, _ in module.named_parameters()], sent)


def batch(whole: Workload, config: Layout, rank: Rank) -> tuple[Tensor, Tensor]:
    torch.manual_seed(config.seed + 1)
    x, y = whole.make_batch(config.batch_size)
    return x.to(rank.device), y.to(rank.device)
