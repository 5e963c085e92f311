"""Both halves of a model in one process, on two devices, as most articles show it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from labs.parts.pipelines.chains import Chain, split


class NaiveSplit(nn.Module):
    """The plain form: each half on its device, and the activations moved between them. One device works at a time."""

    def __init__(self, first: nn.Module, second: nn.Module, devices: tuple[str, str] = ("cuda:0", "cuda:1")) -> None:
        super().__init__()
        self.devices = devices
        self.first, self.second = first.to(devices[0]), second.to(devices[1])

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of the first half -> outputs of the second, on the second device: the targets belong there, too."""
        between = self.first(x.to(self.devices[0]))
        return self.second(between.to(self.devices[1]))  # autograd moves the gradient back by itself


class TwoDevices:
    """`model` cut at `cut`: the first half on devices[0], the second on devices[1].

    Nothing here says what runs at the same time. On GPUs it follows from the queues: the host only enqueues work, so
    the first half of micro-batch 1 runs while the second half of micro-batch 0 does; autograd has a thread per GPU and
    overlaps the backward in the same way. With one micro-batch there is nothing to overlap: the naive split. On two
    CPU devices the result is the same and nothing overlaps.
    """

    def __init__(self, model: Chain, cut: int, devices: tuple[torch.device, torch.device]) -> None:
        first, second = split(model, [cut])
        self.devices, self.loss = devices, model.loss
        self.first, self.second = first.to(devices[0]), second.to(devices[1])

    @property
    def halves(self) -> nn.ModuleList:
        """For an optimizer: its parameters live on two devices, which torch.optim allows."""
        return nn.ModuleList([self.first, self.second])

    def step(self, inputs: Tensor, targets: Tensor, micro_batches: int) -> Tensor:
        """Forward and backward; returns the mean loss. `inputs` are best on devices[0], `targets` on devices[1]."""
        losses = []
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            between = self.first(x.to(self.devices[0])).to(self.devices[1], non_blocking=True)  # autograd comes back
            losses.append(self.loss(self.second(between), y.to(self.devices[1])) / micro_batches)
        total = torch.stack(losses).sum()
        total.backward()  # keeps the activations of all micro-batches until here, as GPipe does
        return total.detach()
