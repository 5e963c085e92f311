"""The models that all labs train, and the contract for your own model.

    python -m labs.data_parallel --model my_package.my_module:factory

The factory takes no arguments and returns a Workload, like those in MODELS, or a module that maps Fashion-MNIST images,
shape (batch, 1, 28, 28), to 10 logits.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from labs.kit import timeouts
from labs.kit.errors import BadInput, require
from labs.kit.lab import imported, require_findable

STEP_LIMIT_S = timeouts.FUNCTION_S  # long enough to load weights; a hanging model must not hang its user forever


@dataclass(frozen=True)
class Workload:
    """What a lab needs to train a model: the module, a batch and a loss.

    `make_batch(batch_size)` returns `(input, target)` on the CPU, both with `batch_size` rows, drawn from torch's
    random state. `loss(output, target)` returns a scalar mean over the rows, so that the mean of equal shards' losses
    is the loss of the whole batch.
    """

    module: nn.Module
    make_batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp() -> Workload:
    """Build the articles' 1024-512-256-10 MLP (658,698 parameters) on random rows with a learnable rule."""
    module = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(batch_size, 1024)
        return x, x[:, :100].reshape(batch_size, 10, 10).sum(2).argmax(1)

    return Workload(module, make_batch, nn.functional.cross_entropy)


class ConvNet(nn.Module):
    """Three 3x3 convolutions, the last two with stride 2, and a linear head; `norm` adds BatchNorm after each."""

    def __init__(self, channels: int = 3, width: int = 32, norm: bool = False) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(((channels, width), (width, 2 * width), (2 * width, 4 * width))):
            layers.append(nn.Conv2d(inputs, outputs, 3, stride=1 if i == 0 else 2, padding=1))
            layers += [nn.BatchNorm2d(outputs)] if norm else []
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, 10) logits."""
        return self.head(self.features(x).mean((2, 3)))


def _images(batch_size: int) -> tuple[Tensor, Tensor]:
    """Draw random 3x32x32 images with random labels: for timing and parity, not for accuracy."""
    return torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))


def cnn() -> Workload:
    """Build a small CNN without normalisation (94,538 parameters) on 3x32x32 inputs."""
    return Workload(ConvNet(), _images, nn.functional.cross_entropy)


def cnn_batchnorm() -> Workload:
    """Build the CNN with BatchNorm, whose output depends on how the batch was split."""
    return Workload(ConvNet(norm=True), _images, nn.functional.cross_entropy)


def fashion_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    """Draw random Fashion-MNIST images, standardised (batch, 1, 28, 28) float32, and their labels."""
    images, labels = _fashion()
    rows = torch.randint(len(images), (batch_size,))
    return images[rows], labels[rows]


@cache
def _fashion() -> tuple[Tensor, Tensor]:
    from labs.common.data import fashion_mnist

    data = fashion_mnist()
    images = torch.from_numpy(data.x_train).float().div(255).sub(0.286).div(0.353).unsqueeze(1)
    return images, torch.from_numpy(data.y_train).long()


def fashion_cnn() -> Workload:
    """Build a CNN on real Fashion-MNIST images (1x28x28, 10 classes), for accuracy and loss curves."""
    return Workload(ConvNet(channels=1, width=16), fashion_batch, nn.functional.cross_entropy)


def char_gpt() -> Workload:
    """Build a character GPT (159,296 parameters) on Moby-Dick; a row is 64 characters."""
    return _import_factory("labs.common.models.text_models:char_gpt")()


MODELS: dict[str, Callable[[], Workload]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn_batchnorm": cnn_batchnorm,
    "fashion_cnn": fashion_cnn,
    "char_gpt": char_gpt,
}


def build(name: str, seed: int = 0) -> Workload:
    """Build the workload `name`: a key of MODELS or `package.module:factory`. Parameters depend only on `seed`.

    BadInput says in one line what is wrong with a factory that is missing, raises, returns something else, or makes an
    untrainable model. As a check, runs two rows forward within STEP_LIMIT_S.
    """
    try:
        with _time_limit(STEP_LIMIT_S):
            workload = make(name, seed)
            _check(workload)
    except BadInput:
        raise
    except (Exception, SystemExit) as e:
        told = " ".join(str(e).split())  # some messages, especially torch's, have many lines
        raise BadInput(f"model {name!r} cannot be built: {type(e).__name__}: {told[:300]}") from e
    return make(name, seed)


def make(name: str, seed: int = 0) -> Workload:
    """Return what `build` returns, without checks: computes nothing with the model."""
    factory = MODELS.get(name) or _import_factory(name)
    torch.manual_seed(seed)
    made = factory()
    return Workload(made, fashion_batch, nn.functional.cross_entropy) if isinstance(made, nn.Module) else made


def _check(workload: Workload) -> None:
    """Raise unless two rows go through `workload` and give a finite loss that trains a parameter."""
    if not isinstance(workload, Workload):
        raise TypeError(f"it returned {type(workload).__name__}, not a labs.models.Workload")
    if not any(p.requires_grad for p in workload.module.parameters()):
        raise ValueError("its module has no parameter that requires a gradient, so that no step can train it")
    x, y = workload.make_batch(2)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        raise TypeError(f"its make_batch returned {type(x).__name__} and {type(y).__name__}, two tensors are needed")
    if (len(x), len(y)) != (2, 2):
        raise ValueError(f"its make_batch(2) returned {len(x)} rows and {len(y)} targets")
    loss = workload.loss(workload.module(x), y)
    if loss.dim() != 0:
        raise TypeError(f"its loss has shape {tuple(loss.shape)}, a scalar is needed")
    if not loss.requires_grad:
        raise ValueError("its loss does not depend on a parameter (detached, or made under no_grad?)")
    if not loss.isfinite():
        raise ValueError(f"its first loss is {loss.item()}")


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after `seconds`, where signals work: in the main thread of a Unix process."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"no step within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    start, (left, interval) = time.monotonic(), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        # An existing timer, such as a test's limit, continues where it was.
        rest = max(left - (time.monotonic() - start), 1e-3) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, rest, interval)


def require_known(*names: str, besides: Iterable[str] = (), option: str = "model") -> None:
    """Raise BadInput for the first of `names` that isn't in MODELS or `besides`, nor a factory that can be found.

    For the field `option` of a lab's Config: unlike `build`, it takes no time.
    """
    known = [*besides, *MODELS]
    for name in names:
        if name not in known:
            options = f"take one of {', '.join(known)}, or package.module:factory"
            asked = "" if option == "model" else f", which {option} names"
            require(":" in name, f"there is no model {name!r}{asked}: {options}")
            require_findable(name, option)


def _import_factory(name: str) -> Callable[[], Workload]:
    if ":" not in name:
        raise BadInput(f"there is no model {name!r}: take one of {', '.join(MODELS)}, or package.module:factory")
    return imported(name, "model")


def gradient_bytes(module: nn.Module) -> int:
    """Return the bytes of one full set of gradients: what data parallelism moves per step, before any factor."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
