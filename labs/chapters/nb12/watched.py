"""A training that is looked at while it runs, unchanged: what it trains on, with what, and what it has learned.

python -m labs.chapters.nb12.watched RESULTS.json STEPS TEST_DATA.npz -- train.py [its arguments]
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from labs.kit import as_main

SIZE = 32


@dataclass
class Results:
    """Of one training."""

    steps: int = 0
    """Optimizer steps in all."""
    parameters: int = 0
    """Numbers that the optimizer changes."""
    optimizer: str = ""
    lr: list[float] = field(default_factory=list)
    """Learning rates of all groups, at the first step."""
    decay: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """In each step."""
    means: list[float] = field(default_factory=list)
    """Of each image that was trained on, sorted."""
    deviations: list[float] = field(default_factory=list)
    """The same of their standard deviations."""
    first: list[float] = field(default_factory=list)
    """Means of the images of the first step, in the order in which they came."""
    threads: int = 0
    """With which torch computed, at most."""
    workers: int = 0
    """Processes that the script had started, at most: those of a loader, as a rule."""
    drops: bool | None = None
    """Whether a training pass over the same images gives something else each time, as dropout makes it; None: not
    looked at, since the step that was asked for was not reached."""
    tested: int = 0
    """Images that the model was called with, without gradients, after the last step."""
    loss: float = float("nan")
    """Mean in nats over the test images, after the step that was asked for."""
    files: list[str] = field(default_factory=list)
    """Of those that the original writes, the ones that are there and hold something."""
    zeroed: bool = False
    """Whether gradients were zeroed in place."""
    reads: float = 0.0
    """Share of the steps after which `.item()` was called."""


def prepared(images: np.ndarray) -> np.ndarray:
    """(N, 28, 28) bytes -> (N, 1, 32, 32) float64, as the slow script's data set makes them."""
    small = [Image.fromarray(image).resize((SIZE, SIZE), Image.BICUBIC) for image in images]
    small = [np.asarray(ImageOps.autocontrast(image)) for image in small]
    return ((np.stack(small) / 255.0 - 0.286) / 0.353)[:, None]


class Watch:
    """Hooks of torch that note what `Results` holds."""

    def __init__(self, steps: int, test_data: str) -> None:
        import torch

        self.torch, self.at, self.test_data = torch, steps, test_data
        self.found, self.depth, self.now = Results(), 0, 0
        self.model: Any = None
        self.reads: set[int] = set()
        self.within = False

    def install(self) -> None:
        """For the rest of this process."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim import Optimizer
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_post_hook(self._after_step)
        zero_grad, item = Optimizer.zero_grad, self.torch.Tensor.item

        def zeroing(optimizer: Any, set_to_none: bool = True) -> None:
            self.found.zeroed |= not set_to_none
            zero_grad(optimizer, set_to_none)

        def reading(tensor: Any) -> Any:
            if self.model is not None and self.model.training:
                self.reads.add(self.found.steps)
            return item(tensor)

        Optimizer.zero_grad, self.torch.Tensor.item = zeroing, reading

    def _outermost(self, module: Any) -> bool:
        return not self.torch.compiler.is_compiling() and any(True for _ in module.parameters())

    def _before_forward(self, module: Any, args: tuple) -> None:
        if not self._outermost(module):
            return
        self.depth += 1
        if self.depth > 1 or self.within or not args:
            return
        if self.torch.is_grad_enabled():
            self.model = module
            x = args[0].detach().double().flatten(1)
            self.now += len(x)
            self.found.means += x.mean(1).tolist()
            self.found.deviations += x.std(1).tolist()
        else:
            self.found.tested += len(args[0])

    def _after_forward(self, module: Any, args: tuple, output: Any) -> None:
        if self._outermost(module):
            self.depth -= 1

    def _after_step(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        found = self.found
        found.steps += 1
        found.samples.append(self.now)
        found.threads = max(found.threads, self.torch.get_num_threads())
        found.workers = max(found.workers, len(multiprocessing.active_children()))
        self.now = found.tested = 0
        if found.steps == 1:
            found.first = list(found.means)  # sorted at the end only
            found.parameters = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
            found.optimizer = type(optimizer).__name__
            found.lr = [float(g["lr"]) for g in optimizer.param_groups]
            found.decay = [float(g.get("weight_decay", 0.0)) for g in optimizer.param_groups]
        if found.steps == self.at and self.model is not None:
            found.loss = self._test_loss()

    def _test_loss(self) -> float:
        """Of the model as it is now, with images prepared as the slow script does. Random state is untouched."""
        torch, model = self.torch, self.model
        with np.load(self.test_data) as arrays:
            images, labels = prepared(arrays["x_test"]), torch.from_numpy(arrays["y_test"].astype(np.int64))
        like = next(model.parameters())
        self.within, training = True, model.training
        with torch.no_grad():
            x = torch.from_numpy(images).to(like.dtype)
            self.found.drops = self._drops(x[:128])
            model.eval()
            outputs = torch.cat([model(part) for part in x.split(500)]).double()
            loss = torch.nn.functional.cross_entropy(outputs, labels).item()
        model.train(training)
        self.within = False
        return loss

    def _drops(self, x: Any) -> bool:
        """Two passes in the mode in which the model is; what they change in its buffers is put back."""
        buffers = [(b, b.clone()) for b in self.model.buffers()]
        with self.torch.random.fork_rng(devices=[]):
            once, again = self.model(x), self.model(x)
        for buffer, kept in buffers:
            buffer.copy_(kept)
        return not self.torch.equal(once, again)

    def save(self, path: Path) -> None:
        """At the end."""
        self.found.means.sort()
        self.found.deviations.sort()
        self.found.reads = len(self.reads) / max(1, self.found.steps)
        row = asdict(self.found)
        del row["files"]  # whoever started this looks at them
        path.write_text(json.dumps(row))


def main() -> None:
    """Become the script, and leave what was seen."""
    results, steps, test_data, _, *argv = sys.argv[1:]
    watch = Watch(int(steps), test_data)
    watch.install()
    me, path = os.getpid(), Path(results).absolute()
    atexit.register(lambda: watch.save(path) if os.getpid() == me else None)
    as_main.run(argv)


if __name__ == "__main__":
    main()
