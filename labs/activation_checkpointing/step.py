"""A training step under a policy, and what can be asked of it: live bytes, gradients, operations."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from labs.common.activation_memory.allocator import Live, watch
from labs.common.memory.recomputation import blocks, recompute, segments
from labs.common.models import Workload
from labs.kit.errors import BadInput

COUNTS = (1, 2, 3, 4, 6, 8, 12, 18, 24, 36, 48)


class Step:
    """A training step with Adam; the steps of a model share parameters, optimizer and batch."""

    def __init__(self, workload: Workload, policy: str, optimizer: torch.optim.Optimizer, batch: tuple) -> None:
        module = workload.module
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self.module, self.policy = recompute(copy.deepcopy(module, shared), policy), policy
        self.runs = segments(self.module, policy)
        self.loss, self.optimizer, (self.x, self.y) = workload.loss, optimizer, batch

    def forward(self) -> Tensor:
        """The loss."""
        return self.loss(self.module(self.x), self.y)

    def __call__(self) -> None:
        """One step; the gradients of the last one are gone before forward begins."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()

    def live(self) -> Live:
        """Bytes alive in one step, from the allocator."""
        self.optimizer.zero_grad()

        def rest(loss: Tensor) -> None:
            loss.backward()
            self.optimizer.step()

        return watch(self.forward, rest, self.x.device)

    def gradients(self, seed: int) -> tuple[list[Tensor], int]:
        """(gradients of the batch with dropout drawn from `seed`, the FLOPs that they took)."""
        torch.manual_seed(seed)
        self.optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            self.forward().backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return gradients, counter.get_total_flops()

    def fixed(self) -> dict[str, int]:
        """Bytes that are there before a step begins, once the optimizer has its state."""
        state = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        there = {
            "parameters": [*self.module.parameters(), *self.module.buffers()],
            "optimizer state": state,
            "batch": [self.x, self.y],
        }
        return {name: sum(t.nbytes for t in tensors) for name, tensors in there.items()}

    def stepping(self) -> int:
        """Bytes that the optimizer's step makes for a moment.

        On a GPU torch updates all parameters with few kernels (foreach), and Adam's root has room for all at once.
        """
        on_gpu = self.x.device.type == "cuda"
        return sum(p.nbytes for p in self.module.parameters() if p.requires_grad) if on_gpu else 0


def steps_of(workload: Workload, policies: list[str], rows: int, device: torch.device) -> dict[str, Step]:
    """A step for each policy, on one batch; one of them has been taken, so that Adam's state exists."""
    module = workload.module.to(device)
    batch = tuple(t.to(device) for t in workload.make_batch(rows))
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    steps = {policy: Step(workload, policy, optimizer, batch) for policy in policies}
    next(iter(steps.values()))()
    return steps


def possible(module: nn.Module) -> list[str]:
    """Policies to compare that `module` can have: segments of several lengths, the last one kept or not, and others."""
    n = len(blocks(module))
    counts = sorted({k for k in COUNTS if n % k == 0 or (k < n and n not in COUNTS)} | {n})
    asked = [
        "none",
        *(f"segments:{k}" for k in counts),
        "block",
        "stage",
        "segments:2:keep_last",
        "segments:4:keep_last",
        "selective",
    ]
    if can(module, f"segments:{n}"):
        asked.remove("block")  # the same
    return [p for p in asked if can(module, p)]


def can(module: nn.Module, policy: str) -> bool:
    """Whether `module` can have `policy`."""
    try:
        segments(module, policy)
    except BadInput:
        return False
    return True
