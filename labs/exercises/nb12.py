"""Exercises of notebook 12: a colleague's training script to correct and speed up, and two probes.

An answer to 12.1 is a script. It runs for two epochs, as `python script.py` would run it, while hooks record what it
trains on.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import copy
import functools
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from labs.kit import as_main, supervise
from labs.kit.check import Mistake
from labs.kit.exercise import Exercise, KnownMistake

# 12.1

SLOW = Path(__file__).with_name("slow_training.py")
EPOCH, TEST = 30, 500
"""Steps; test images."""
MEAN, STD, NEAR = 0.12, 1.023, 0.04
"""Of the training images' pixels; the tolerance for rounding and random crops."""
LEAST = 0.55
"""The reference reaches 0.61 to 0.76. With one slow part left it is 0.45 or less."""
RUN_S = 120.0


def fixed_script() -> str:
    """Return the text of slow_training.py after these changes."""
    text = SLOW.read_text()
    for old, new in (
        ("    return right /", "    model.train()\n    return right /"),
        (  # resize once, and in 32 bits; crop and mirror anew each time
            "        self.images, self.labels, self.train = images, labels, train\n",
            "        large = [Image.fromarray(image).resize((36, 36), Image.BICUBIC) for image in images]\n"
            "        pixels = np.stack([np.asarray(ImageOps.autocontrast(image)) for image in large]) / 255.0\n"
            "        self.images = torch.tensor((pixels - 0.3) / 0.35, dtype=torch.float32).unsqueeze(1)\n"
            "        self.labels, self.train = labels, train\n",
        ),
        (
            "        large = Image.fromarray(self.images[i]).resize((36, 36), Image.BICUBIC)\n"
            "        pixels = np.asarray(ImageOps.autocontrast(large)) / 255.0\n",
            "",
        ),
        (
            "        pixels = pixels[y : y + 32, x : x + 32]\n",
            "        image = self.images[i, :, y : y + 32, x : x + 32]\n",
        ),
        ("            pixels = pixels[:, ::-1]\n", "            image = image.flip(2)\n"),
        ("return torch.tensor((pixels - 0.3) / 0.35).unsqueeze(0), int", "return image, int"),
        ("build_model().double().to(device)  # float64, as the images are", "build_model().to(device)"),
        ("  right {validate(model, test_loader):.1%}", ""),  # each epoch ends with one
        (
            'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")\n',
            'parts = {"model": model, "optimizer": optimizer, "schedule": schedule}\n'
            '                torch.save({name: part.state_dict() for name, part in parts.items()}, "last.pt")\n',
        ),
    ):
        text = _edited(text, old, new)
    return text


def _edited(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"this must be in the script once: {old}")
    return text.replace(old, new)


def _augmented_once() -> str:
    text = fixed_script()
    for old, new in (
        ("labels, train\n", "labels, train\n        self.images = [self.crop(image) for image in self.images]\n"),
        ("    def __getitem__(self, i):\n", "    def crop(self, image):\n"),
        ("self.images[i, :, y", "image[:, y"),
        ("return image, int", "return image\n\n    def __getitem__(self, i):\n        return self.images[i], int"),
    ):
        text = _edited(text, old, new)
    return text


def _larger_batches() -> str:
    return _edited(fixed_script(), "train=True), batch_size=100", "train=True), batch_size=500")


def observe(answer: Callable[[], Any]) -> dict[str, Any]:
    """Return what the script trains on, how, what it saves, and the share of its CPU time spent on training."""
    seen = _run(_script(answer()))
    first, second = (set(images) for images in (seen["images"][: EPOCH * 100], seen["images"][EPOCH * 100 :]))
    like = abs(seen["mean"] - MEAN) < NEAR and abs(seen["std"] - STD) < NEAR
    return {
        "the optimizer and its number of parameters": [seen["optimizer"], seen["parameters"]],
        "images in each step": sorted(set(seen["batches"])),
        "optimizer steps in two epochs": len(seen["batches"]),
        "learning rates of the first step, and of the first and last one of epoch 2": [
            seen["lr"][min(i, len(seen["lr"]) - 1)] for i in (0, EPOCH, -1)
        ],
        "mean and standard deviation of the training pixels": "as in the original"
        if like
        else [round(seen["mean"], 2), round(seen["std"], 2)],
        "images of epoch 2 that are, pixel by pixel, images of epoch 1": "few"
        if len(first & second) < 0.5 * len(first)
        else "most",
        "steps with dropout": seen["dropout"],
        "test images after epoch 1 and after epoch 2": [
            min(seen["tested"].get(str(n * EPOCH), 0), TEST) for n in (1, 2)
        ],
        "validation in eval mode": seen["eval"],
        "last.pt has the state of": seen["saved"],
        "bits of a training pixel": seen["bits"],
        f"forward, backward and optimizer take at least {LEAST:.0%} of the CPU time": seen["share"] >= LEAST
        or f"they take {seen['share']:.0%}",
    }


def _script(given: Any) -> str:
    """Return the text of the script, given as text or as a path. Mistake if it isn't a Python program."""
    if isinstance(given, os.PathLike) or (isinstance(given, str) and "\n" not in given):
        if not Path(given).is_file():
            raise Mistake(f"there is no file {given}", "return the path of your script")
        given = Path(given).read_text()
    if not isinstance(given, str):
        raise Mistake(f"you return {type(given).__name__}", "return the path of your script")
    try:
        ast.parse(given)
    except SyntaxError as e:
        raise Mistake(f"line {e.lineno} of your script is no Python: {e.msg}", "run it first") from None
    return given


@functools.cache
def _run(text: str) -> dict[str, Any]:
    """Run two epochs of the script on one CPU, and return what was seen. Mistake if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="labs-capstone-") as name:
        folder = Path(name)
        (folder / "script.py").write_text(text)
        command = [sys.executable, "-m", "labs.exercises.nb12", "seen.json", "script.py", "--epochs", "2"]
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        done = supervise.run(command, RUN_S, cwd=folder, env=env)
        if done.returncode is None:
            raise Mistake(f"two epochs of your script take more than {RUN_S:g} s", "--epochs must mean what it did")
        if done.returncode or not (folder / "seen.json").is_file():
            last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
            raise Mistake(f"your script failed: {last}", "run it: python my_training.py --epochs 2")
        seen = json.loads((folder / "seen.json").read_text())
        if len(seen["cpu_s"]) < 2:
            raise Mistake("no optimizer of torch.optim took a step", "keep the training loop")
        return seen | {"saved": _saved(folder / "last.pt")}


def _saved(path: Path) -> list[str]:
    """Return which parts of the training state a checkpoint holds."""
    found: set[str] = set()

    def look(tree: Any) -> None:
        if not isinstance(tree, Mapping):
            return
        found.update(part for key, part in (("param_groups", "optimizer"), ("last_epoch", "schedule")) if key in tree)
        if any(str(key).endswith("running_mean") for key in tree):
            found.add("model")
        for part in tree.values():
            look(part)

    if path.is_file():
        look(torch.load(path, map_location="cpu", weights_only=True))
    return sorted(found)


class Watch:
    """PyTorch hooks that record what a script trains on, within the script's process."""

    def __init__(self) -> None:
        self.depth = 0
        self.batch: list[int] = []
        self.sums = [0.0, 0.0, 0.0]
        self.seen: dict[str, Any] = {
            "optimizer": "", "parameters": 0, "batches": [], "lr": [], "images": [], "dropout": 0, "tested": {},
            "eval": True, "bits": 0, "cpu_s": [], "core_s": [],
        }  # fmt: skip

    def install(self) -> None:
        """Register the hooks."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_post_hook(self._after_step)

    def _before_forward(self, module: Any, args: tuple[Any, ...]) -> None:
        if not any(True for _ in module.parameters()):
            return
        self.depth += 1
        if self.depth > 1 or not args:
            return
        x, step = args[0].detach(), str(len(self.seen["batches"]))
        if not torch.is_grad_enabled():
            self.seen["tested"][step] = self.seen["tested"].get(step, 0) + len(x)
            self.seen["eval"] &= not module.training
            return
        if not self.batch:
            self.begun_s = time.process_time()
        self.batch.append(len(x))
        self.drops = any(part.training for part in module.modules() if isinstance(part, torch.nn.Dropout))
        self.seen["images"] += [hashlib.md5(image.half().numpy().tobytes()).hexdigest() for image in x]
        self.seen["bits"] = max(self.seen["bits"], 8 * x.element_size())
        numbers = x.double()
        self.sums = [
            s + more.item()
            for s, more in zip(
                self.sums, (torch.ones_like(numbers).sum(), numbers.sum(), numbers.square().sum()), strict=True
            )
        ]

    def _after_forward(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        self.depth -= any(True for _ in module.parameters())

    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        seen = self.seen
        seen["optimizer"] = type(optimizer).__name__
        seen["parameters"] = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        seen["lr"].append(round(float(optimizer.param_groups[0]["lr"]), 9))
        seen["batches"].append(sum(self.batch))
        seen["dropout"] += self.drops
        seen["core_s"].append(time.process_time() - self.begun_s)
        seen["cpu_s"].append(_cpu_s())
        self.batch = []

    def save(self, path: Path) -> None:
        """Write what the hooks recorded, at the end of the script."""
        n, total, squares = self.sums
        cpu_s, mean = self.seen["cpu_s"], total / max(n, 1)
        late = cpu_s[EPOCH:] or cpu_s  # of the second epoch
        more = {"mean": mean, "std": max(squares / max(n, 1) - mean**2, 0) ** 0.5}
        more["share"] = sum(self.seen["core_s"][EPOCH + 1 :]) / (late[-1] - late[0]) if len(late) > 1 else 0.0
        path.write_text(json.dumps(self.seen | more))


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its DataLoader workers."""
    total = time.process_time()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def main() -> None:
    """Run the script in this process, and save what the hooks record."""
    results, *argv = sys.argv[1:]
    watch, me, path = Watch(), os.getpid(), Path(results).absolute()
    watch.install()
    atexit.register(lambda: watch.save(path) if os.getpid() == me else None)
    as_main.run(argv)


# 12.2

STALE, UNPAIRED = "stale gradients", "order of labels doesn't matter"
Step = Callable[[Tensor, Tensor], object]


def find_faults(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, x: Tensor, y: Tensor) -> list[str]:
    """Try one training step from the same state on three inputs; model and optimizer are then as before."""
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    numbers = torch.get_rng_state()

    def restore() -> None:
        weights, moments = copy.deepcopy(state)  # loading doesn't always copy
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        torch.set_rng_state(numbers)

    def weights_after(y: Tensor, gradient: float | None = None) -> Tensor:
        for p in model.parameters():
            p.grad = None if gradient is None else torch.full_like(p, gradient)
        step(x, y)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        restore()
        return weights

    plain = weights_after(y)
    found = [STALE] if not torch.allclose(weights_after(y, gradient=1.0), plain) else []
    found += [UNPAIRED] if torch.allclose(weights_after(y.roll(1)), plain) else []
    model.zero_grad()
    return found


def _without(restored: str) -> Callable[..., list[str]]:
    """Return the reference, except that it doesn't restore one thing."""

    def answer(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, x: Tensor, y: Tensor) -> list[str]:
        part = {"model": model, "optimizer": optimizer}.get(restored)
        load, set_state = getattr(part, "load_state_dict", None), torch.set_rng_state
        if part is None:
            torch.set_rng_state = lambda state: None
        else:
            part.load_state_dict = lambda state: None
        try:
            return find_faults(model, optimizer, step, x, y)
        finally:
            torch.set_rng_state = set_state
            if part is not None:
                part.load_state_dict = load

    return answer


def _gradients_left(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, x: Tensor, y: Tensor) -> list[str]:
    left = []

    def looked_at(x: Tensor, y: Tensor) -> None:
        step(x, y)
        left.append(STALE)  # some gradient exists

    return sorted({*find_faults(model, optimizer, looked_at, x, y), *left})


CASES: dict[str, tuple[bool, bool, float, float]] = {
    "a right step": (True, True, 0.0, 0.0),
    "no zero_grad()": (False, True, 0.0, 0.0),
    "a loss that broadcasts": (True, False, 0.0, 0.0),
    "both": (False, False, 0.0, 0.0),
    "a right step with momentum": (True, True, 0.9, 0.0),
    "a right step with dropout": (True, True, 0.0, 0.5),
}
"""Whether gradients are cleared and labels are paired; momentum, dropout."""


def observe_faults(answer: Callable[..., Any]) -> dict[str, Any]:
    """Return which faults are found in each step, and whether model and optimizer are as before."""
    seen: dict[str, Any] = {}
    for name, case in CASES.items():
        model, optimizer, step, x, y = _training(*case)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        faults = sorted(answer(model, optimizer, step, x, y))
        after = model.state_dict(), optimizer.state_dict()["state"]
        seen[f"{name}: model and optimizer are as before"] = _same(before, after)
        seen[f"{name}: faults"] = faults
    return seen


def _training(clears: bool, pairs: bool, momentum: float, dropout: float) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(x: Tensor, y: Tensor) -> None:
        if clears:
            optimizer.zero_grad()
        output = model(x).squeeze(1) if pairs else model(x)
        (output - y).square().mean().backward()
        optimizer.step()

    x, y = torch.randn(32, 8), torch.linspace(-1, 1, 32)
    step(x, y)  # so that momentum has a state
    optimizer.zero_grad()
    return model, optimizer, step, x, y


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return all(map(_same, a, b)) if isinstance(a, tuple) else a == b


EXERCISES = {
    "12.1": Exercise(
        "12.1",
        45,
        "a script made right and fast",
        observe,
        fixed_script,
        (
            KnownMistake(
                "all epochs train on the same crops: what was random runs only once",
                "do once what gives the same each time, and leave the random part in __getitem__",
                _augmented_once,
            ),
            KnownMistake(
                "larger batches mean fewer optimizer steps, which is another training",
                "keep the batch size; the exercise wants the same training in less time",
                _larger_batches,
            ),
        ),
        timeout_s=600.0,
    ),
    "12.2": Exercise(
        "12.2",
        20,
        "two probes",
        observe_faults,
        find_faults,
        (
            KnownMistake(
                "the model isn't as it was: each trial starts where the last one ended",
                "load a copy of model.state_dict() after each trial",
                _without("model"),
            ),
            KnownMistake(
                "the optimizer isn't as it was: its momentum comes from the last trial",
                "load a copy of optimizer.state_dict() after each trial",
                _without("optimizer"),
            ),
            KnownMistake(
                "two trials of the same step draw different dropout masks",
                "torch.get_rng_state() before, torch.set_rng_state() after each trial",
                _without("random numbers"),
            ),
            KnownMistake(
                "gradients that are there after a step are no fault: zero_grad() may come first",
                "put other gradients there before the step, and see whether the update differs",
                _gradients_left,
            ),
        ),
    ),
}

if __name__ == "__main__":
    main()
