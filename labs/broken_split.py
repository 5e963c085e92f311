"""Why does the first half of the article's split model never train, and which check catches it?

    python -m labs.broken_split
    torchrun --nproc-per-node 2 -m labs.broken_split --steps 400

About 3 s on 2 CPU cores. A model of two layers (784-512-10, as printed) on real images, its halves on two ranks, in
three ways: the second half gets an input of its own; it receives the first half's output, and the gradient stops
there; it sends the gradient back. Then the same model with the article's loss, which takes logits for probabilities.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from labs.common.data import fashion_mnist
from labs.kit import cli
from labs.kit.errors import require
from labs.kit.measure import estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Way = Literal["own input", "received", "gradient sent back"]
Loss = Literal["logits", "as probabilities"]
PIXELS, HIDDEN, CLASSES = 784, 512, 10  # of the article's listing
EPSILON = 1e-7  # Keras's backend.epsilon()


@dataclass(frozen=True)
class Config:
    """How long each way trains."""

    steps: int = 200
    """Steps of Adam, the article's optimizer."""
    batch: int = 64
    """Images per step."""
    seeds: int = 3
    """Runs of each way, from different starts."""
    smoke: bool = False
    """Ten steps from one start."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seeds"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput unless there is a rank for each half."""
    require(world_size == 2, f"the model has two halves: take 2 ranks (--nproc 2), not {world_size}")


def predict(way: Way) -> tuple[int, int]:
    """Parameter tensors of the first and of the second half that get a gradient."""
    return (2 if way == "gradient sent back" else 0), 2


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each way with the right loss, then the right way with the article's."""
    arms: list[tuple[Way, Loss]] = [(way, "logits") for way in Way.__args__]
    arms.append(("gradient sent back", "as probabilities"))
    seeds, steps = (1, min(10, config.steps)) if config.smoke else (config.seeds, config.steps)
    for done, (way, loss) in enumerate(arms, start=1):
        runs = [_train(way, loss, steps, config.batch, seed, rank) for seed in range(seeds)]
        case = {"way": way, "loss": loss}
        for metric, unit in (("test_accuracy", "1"), ("first_loss", "nats")):
            yield rank.record(metric, unit, [r[metric] for r in runs], **case)
        for metric, unit in (("trained_parameters", "parameter tensors"), ("moved", "1")):
            halves = rank.gather([r[metric] for r in runs])
            for half, samples in zip(("first", "second"), halves, strict=True):
                yield rank.record(metric, unit, samples, half=half, **case)
        rank.progress(done, len(arms), f"{way}, {loss}")


def untrained(module: nn.Module) -> list[str]:
    """Names of parameters that the last backward pass gave no gradient, or only zeros. Assert that there are none."""
    return [n for n, p in module.named_parameters() if p.grad is None or not p.grad.any()]


def as_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of what is taken for probabilities, as Keras computes it with TensorFlow and from_logits=False.

    Clipped to [1e-7, 1 - 1e-7], logarithm, then softmax cross entropy: keras/src/backend/tensorflow/nn.py. A logit
    outside (0, 1) is clipped and gets no gradient.
    """
    return functional.cross_entropy(logits.clamp(EPSILON, 1 - EPSILON).log(), labels)


LOSSES: dict[Loss, Callable[[Tensor, Tensor], Tensor]] = {
    "logits": functional.cross_entropy,
    "as probabilities": as_probabilities,
}


def _train(way: Way, loss: Loss, steps: int, batch: int, seed: int, rank: Rank) -> dict[str, float]:
    """Train this rank's half; the accuracy and the loss are rank 1's, told to both."""
    x, y, x_test, y_test = _images(rank.device)
    torch.manual_seed(seed)
    halves = nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    half = halves[rank.rank].to(rank.device)
    start = [p.detach().clone() for p in half.parameters()]
    optimizer = torch.optim.Adam(half.parameters())
    order, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,), generator=order).to(rank.device)
        optimizer.zero_grad()
        losses.append(step(way, half, x[rows], y[rows], LOSSES[loss], rank))
        optimizer.step()
    trained = len(start) - len(untrained(half))
    with torch.no_grad():
        moves = [(p - s).norm() for p, s in zip(half.parameters(), start, strict=True)]
        moved = float(sum(moves) / sum(s.norm() for s in start))
        output = forward(way, half, x_test, rank)
    right = float((output.argmax(1) == y_test).float().mean()) if rank.rank == 1 else 0.0
    told = rank.gather((right, losses[0]))[1]
    return {"test_accuracy": told[0], "first_loss": told[1], "trained_parameters": trained, "moved": moved}


def step(way: Way, half: nn.Module, x: Tensor, y: Tensor, loss: Callable, rank: Rank) -> float:
    """Forward and backward pass over both ranks; the loss on rank 1, 0 on rank 0."""
    output = forward(way, half, x, rank)
    if rank.rank == 0:
        if way == "gradient sent back":
            gradient = torch.empty_like(output)
            dist.recv(gradient, src=1)
            output.backward(gradient)
        return 0.0
    value = loss(output, y)
    value.backward()
    if way == "gradient sent back":
        dist.send(half.seen.grad, dst=0)
    return value.item()


def forward(way: Way, half: nn.Module, x: Tensor, rank: Rank) -> Tensor:
    """This rank's half of the model: (batch, 784) -> (batch, 512) on rank 0, (batch, 10) on rank 1."""
    if rank.rank == 0:
        hidden = half(x)
        if way != "own input":
            dist.send(hidden.detach(), dst=1)
        return hidden
    if way == "own input":
        return half(x[:, :HIDDEN])  # a second Input(512): something else must feed it; here, part of the image
    # A tensor that arrives is a leaf: autograd does not know where it came from.
    half.seen = torch.empty(len(x), HIDDEN, device=x.device).requires_grad_(torch.is_grad_enabled())
    dist.recv(half.seen.detach(), src=0)
    return half(half.seen)


def _images(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fashion-MNIST, flat, scaled as Keras's examples do: (N, 784) in [0, 1], and labels (N,)."""
    data = fashion_mnist()
    arrays = (data.x_train, data.y_train, data.x_test, data.y_test)
    x, y, x_test, y_test = (torch.from_numpy(a).to(device) for a in arrays)
    return x.flatten(1).float().div(255), y.long(), x_test.flatten(1).float().div(255), y_test.long()


def answer(run: Records) -> Iterator[str]:
    """Which way trains which half, what the test accuracy is, and which check tells."""
    for r in run.where("test_accuracy"):
        way, loss = r.case["way"], r.case["loss"]
        trained = {h: run.one("trained_parameters", half=h, way=way, loss=loss).samples for h in ("first", "second")}
        idle = [h for h, tensors in trained.items() if min(tensors) == 0]
        word = f"the {' and the '.join(idle)} half never trains" if idle else "both halves train"
        accuracy = estimate([100 * s for s in r.samples], "%")
        yield f"{way}, loss of {loss}: {word}; test accuracy {accuracy}."
    yield "`untrained(module)` names the parameters without a gradient after a step: accuracy alone does not tell."


if __name__ == "__main__":
    cli.main()
