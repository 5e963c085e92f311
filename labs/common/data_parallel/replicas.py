"""The algorithm of `nn.DataParallel`, written out for CPU threads.

`nn.DataParallel` itself needs GPUs: on a CPU it only calls the module. This class goes through the same five
phases with threads in one process, counts what each moves, and is labelled as such wherever it is shown. One
difference matters: copies between "devices" are copies within one memory here, so their cost is far below that
of a PCIe link. What stays real is the replication at every step, the bottleneck at device 0 and the one GIL.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from labs.common.data_parallel.training import Loss


def nbytes(*tensors: Tensor) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


class ThreadedDataParallel:
    """`module` on one thread per core of `cores`; device 0 is the module itself, the others are made at every step."""

    def __init__(self, module: nn.Module, cores: Sequence[int], moved: Counter[str]) -> None:
        self.module, self.devices = module, len(cores)
        self.threads = ThreadPoolExecutor(len(cores), initializer=_pin_to_next, initargs=(deque(cores),))
        self.moved = moved
        """Counts the bytes that leave or reach device 0, by phase ("dp replicate", ...)."""

    def train_step(self, optimizer: Optimizer, x: Tensor, y: Tensor, loss: Loss) -> None:
        """One training step on one whole batch."""
        optimizer.zero_grad()
        self.step(x, y, loss)
        optimizer.step()  # of device 0 alone: the replicas are thrown away

    def step(self, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
        """Forward and backward of one whole batch; gradients end up in `module`. Returns the loss."""
        replicas = self.replicate()  # 1. all parameters and buffers go to every device, in every step
        shards = x.chunk(self.devices)  # 2. scatter
        self.moved["dp scatter"] += nbytes(*shards[1:])
        parts = list(self.threads.map(lambda m, shard: m(shard), replicas, shards))  # 3. forward, under one GIL
        output = torch.cat([p.detach() for p in parts]).requires_grad_()  # 4. gather
        self.moved["dp gather"] += nbytes(*parts[1:])
        value = loss(output, y)  # on device 0 alone: the others wait
        value.backward()
        grads = output.grad.split([len(p) for p in parts])
        self.moved["dp scatter gradients"] += nbytes(*grads[1:])
        list(self.threads.map(lambda p, g: p.backward(g), parts, grads))
        self.reduce(replicas[1:])  # 5. all gradients come back to device 0
        return value

    def replicate(self) -> list[nn.Module]:
        """The module, and a copy of it for each other device."""
        others = [copy.deepcopy(self.module) for _ in range(self.devices - 1)]
        for replica in others:
            self.moved["dp replicate"] += nbytes(*replica.parameters(), *replica.buffers())
            replica.zero_grad(set_to_none=True)
        return [self.module, *others]

    def reduce(self, others: list[nn.Module]) -> None:
        """Add the gradients of all replicas into device 0's module."""
        for replica in others:
            for own, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
                if theirs.grad is not None:
                    self.moved["dp reduce gradients"] += nbytes(theirs.grad)
                    own.grad = theirs.grad if own.grad is None else own.grad.add_(theirs.grad)

    def close(self) -> None:
        """End the threads."""
        self.threads.shutdown()


def _pin_to_next(cores: deque[int]) -> None:
    core = cores.popleft()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # 0 is the calling thread, not the process
