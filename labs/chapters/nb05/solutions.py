"""Reference solutions of notebook 05."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05.exercise_trainer import Trainer


def run_stack(blocks: Sequence[nn.Module], x: Tensor, kept_bytes: Sequence[int], budget_bytes: int) -> Tensor:
    """The blocks one after the other; the fewest that make what is kept for backward fit the budget run again there."""
    again: set[int] = set()
    for i in sorted(range(len(blocks)), key=lambda i: -kept_bytes[i]):  # the largest first: fewest for most bytes
        if sum(kept for k, kept in enumerate(kept_bytes) if k not in again) <= budget_bytes:
            break
        again.add(i)
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def chunked_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """Mean cross-entropy over the tokens whose label is not -100, without the logits of all of them at once."""

    def summed(h: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(h @ weight.T, y, reduction="sum")  # ignores -100 by default

    total = hidden.new_zeros(())
    for h, y in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
        total = total + checkpoint(summed, h, y, use_reentrant=False)  # its logits go, and come again in backward
    return total / (labels != -100).sum()


class Resumable(Trainer):
    """A Trainer that goes on from its state as if it had never stopped."""

    def state_dict(self) -> dict[str, Any]:
        """All that a later step depends on: copies, of types that torch.load(weights_only=True) reads."""
        numpy_state = np.random.get_state(legacy=False)
        numpy_state["state"] = numpy_state["state"] | {"key": numpy_state["state"]["key"].tolist()}
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": {name: getattr(self.sampler, name) for name in ("epoch", "position", "order")},
            "sampler_generator": self.sampler.generator.get_state(),
            "torch": torch.get_rng_state(),
            "numpy": numpy_state,
            "python": random.getstate(),
        }
        return copy.deepcopy(state)  # state_dict() hands out the live tensors, which the next step changes

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo all that this trainer has done; the random states come last, when nothing is left to draw."""
        state = copy.deepcopy(state)  # an optimizer keeps the tensors that it is given, and steps in them
        for name in ("model", "optimizer", "scheduler", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        for name, value in state["sampler"].items():
            setattr(self.sampler, name, value)
        self.sampler.generator.set_state(state["sampler_generator"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
