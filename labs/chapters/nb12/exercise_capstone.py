"""Exercise 12.1, the capstone: a slow script made fast. Speed and results are compared with those of the original."""

from __future__ import annotations

import ast
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from labs.chapters.nb12.solution_capstone import SLOW, fast_script
from labs.chapters.nb12.watched import Results
from labs.doctor_trial.in_turn import ROOT, Block, Script, ScriptFailed, run_alone, take_turns
from labs.kit import measure
from labs.kit.check import Exercise, Mistake
from labs.kit.measure import Estimate

DATA = ROOT / "labs" / "common" / "data" / "fashion_mnist_12k.npz"
STEPS, BATCH, TRAIN, TEST = 79, 128, 10_000, 2_000
"""Of one epoch; images."""
EPOCH_S = 150.0
"""A watched epoch of the original takes some 12 s on two quiet cores."""
BLOCK, SECONDS, MOST_ROUNDS = 10, 10.0, 12
"""Steps of a turn: the original validates once in them. Seconds for all turns."""
AS_FAST = 1.25
"""Times the reference's step from which a script is too slow even if no part of it stands out."""
LOOK_S = 0.3
"""So long the cores are looked at, to take the idlest."""
LEFT = 0.1
"""Share of the reference's step from which a part's excess is an illness: the smallest alone takes a quarter of it."""
LOSS = (0.378, 0.584)
"""Nats: test loss after an epoch of the original. Ten seeds gave 0.441 to 0.526; mean and four standard deviations."""
PARTS: dict[str, tuple[str, ...]] = {
    "data": ("data",),
    "evaluation": ("evaluation",),
    "arithmetic": ("forward", "loss", "backward", "optimizer"),
    "own lines": ("prepare", "rest", "synchronise", "print", "copy"),
    "saving": ("save",),
}
"""Where a step's time goes, by the doctor's kinds: each of the five illnesses is in another part."""
FILES = {
    "last.pt": "a crash would lose everything",
    "model.pt": "nothing is left of the training",
    "log.csv": "nobody sees what gradients did",
}
CLOSE = 2e-3
"""Of an image's mean and deviation, which are about 1: rounding in 16 bits is below it."""


# Results


def watched(text: str, seed: int = 0) -> Results:
    """One epoch of this script. Mistake if it fails or takes too long."""
    with tempfile.TemporaryDirectory(prefix="labs-capstone-") as name:
        folder = Path(name)
        script, results, run = folder / "script.py", folder / "results.json", folder / "run"
        script.write_text(text)
        argv = [
            sys.executable,
            "-m",
            "labs.chapters.nb12.watched",
            str(results),
            str(STEPS),
            str(DATA),
            "--",
            str(script),
            "--data",
            str(DATA),
            "--epochs",
            "1",
            "--seed",
            str(seed),
            "--folder",
            str(run),
        ]
        code, said = run_alone(argv, folder, EPOCH_S)
        if code is None:
            raise Mistake(f"one epoch of your script did not end within {EPOCH_S:g} s", "look for a loop without end")
        if code or not results.is_file():
            last = (said.strip().splitlines() or ["it said nothing"])[-1]
            raise Mistake(
                f"your script failed with exit code {code}: {last}",
                "run it: python my_script.py --epochs 1, with the options of the original",
            )
        seen = json.loads(results.read_text())
        least = {"last.pt": 3 * seen["parameters"], "model.pt": seen["parameters"]}  # Adam's two means for each weight
        files = [name for name in FILES if (run / name).is_file() and _holds(run / name) >= least.get(name, 1)]
        return Results(**seen, files=files)


def _holds(path: Path) -> int:
    """Numbers in the tensors of a saved file; bytes of any other one."""
    if path.suffix != ".pt":
        return path.stat().st_size
    import torch

    def count(tree: Any) -> int:
        if isinstance(tree, torch.Tensor):
            return tree.numel()
        if isinstance(tree, Mapping):
            return sum(map(count, tree.values()))
        return sum(map(count, tree)) if isinstance(tree, list | tuple) else 0

    try:
        return count(torch.load(path, map_location="cpu", weights_only=True))
    except Exception:  # cut off, or of classes of its own
        return 0


def check_results(found: Results, original: Results) -> None:
    """Mistake that says which result was changed."""
    if not found.samples or not found.means:
        raise Mistake(
            "no training was seen: no module was called with gradients before an optimizer's step",
            "keep a model that is called, and an optimizer of torch.optim that steps",
        )
    if found.parameters != original.parameters:
        raise Mistake(
            f"your model has {found.parameters:,} parameters, the original {original.parameters:,}",
            "a smaller model is faster, and another model",
        )
    if found.optimizer != original.optimizer:
        raise Mistake(
            f"the optimizer is {found.optimizer}, the original's {original.optimizer}: another training",
            "what is asked is the same training in less time",
        )
    if found.threads > original.threads:
        raise Mistake(
            f"torch computes with {found.threads} threads, in the original with {original.threads}: what is "
            "faster by that is so on a colleague's cores",
            "torch.set_num_threads(1) stays",
        )
    _check_batches(found, original)  # first: what is looked at after so many steps is not there after fewer
    _check_images(found, original)
    if original.drops and found.drops is False:
        raise Mistake(
            "two training passes over the same images give the same: the original's dropout is gone, or the "
            "model trains in evaluation mode",
            "what is asked is the same model, in less time",
        )
    for name, mine, theirs in (("learning rate", found.lr, original.lr), ("weight decay", found.decay, original.decay)):
        # Not ==: a learning rate in a tensor, as a compiled or captured optimizer wants it, is rounded to FP32
        if odd := [x for x in mine if not math.isclose(x, theirs[0], rel_tol=1e-6)]:
            some = "" if len(odd) == len(mine) else " of some parameters"
            raise Mistake(
                f"the {name}{some} is {odd[0]:g}, the original's {theirs[0]:g}: another training",
                "what is asked is the same training in less time",
            )
    if found.tested < TEST:
        raise Mistake(
            f"after the last step the model sees {found.tested} of the {TEST} test images: what is printed "
            "is no longer the original's result",
            "validate less often, and on all of them",
        )
    for name in sorted(set(FILES) - set(found.files)):
        raise Mistake(
            f"after an epoch {name} is missing or does not hold all: {FILES[name]}",
            "write it less often; do not leave it out",
        )
    if not LOSS[0] <= found.loss <= LOSS[1]:
        way = "worse" if not found.loss <= LOSS[1] else "better"
        raise Mistake(
            f"after {STEPS} steps the test loss is {found.loss:.3f} nats: {way} than the seeds of the "
            f"original make likely, {LOSS[0]:.3f} to {LOSS[1]:.3f}",
            "look at zero_grad, train() and eval(), dropout, the optimizer",
        )


def _check_batches(found: Results, original: Results) -> None:
    usual = statistics.mode(found.samples)
    if usual != BATCH:
        raise Mistake(
            f"a step takes {usual} images, the original's {BATCH}: {found.steps} optimizer steps for "
            f"{original.steps}, which is another training",
            "a larger batch needs another learning rate, and gives other results",
        )
    if sum(found.samples) != sum(original.samples):
        raise Mistake(
            f"an epoch trains on {sum(found.samples):,} images, the original's on {sum(original.samples):,}",
            "drop_last leaves some out; a subset is another data set",
        )


def _check_images(found: Results, original: Results) -> None:
    for name in ("means", "deviations"):
        mine, theirs = np.array(getattr(found, name)), np.array(getattr(original, name))
        if mine.shape != theirs.shape or np.abs(mine - theirs).max() > CLOSE:
            raise Mistake(
                f"the images that the model is given are not the original's: their {name} over the pixels differ",
                "resize and normalise as before, once for each image; each image once in an epoch",
            )
    first, in_file = np.array(found.first), np.array(original.first)
    if len(first) == len(in_file) and np.abs(first - in_file).max() <= CLOSE:
        raise Mistake(
            "the first step takes the first images of the file, in their order: they are no longer shuffled, "
            "which is another training",
            "shuffle=True, or torch.randperm anew in each epoch",
        )


# Speed


@dataclass(frozen=True)
class Speed:
    """Steps of the original, of the learner's script and of the reference, taken in turn."""

    gain: Estimate
    """Original / yours."""
    slower: Estimate
    """Yours / reference."""
    step_s: Mapping[str, float]
    """Of "original", "yours", "reference"."""
    left: Mapping[str, Estimate]
    """By part: what the reference does not need of it, as a share of the reference's step."""
    size_s: Mapping[str, float]
    """The same of the original, in seconds."""

    @property
    def ill(self) -> list[str]:
        """Parts with an illness that is surely left, the costliest first."""
        most = sorted(self.left, key=lambda part: -self.left[part].value)
        return [part for part in most if self.left[part].low > LEFT]


def compared(text: str, seconds: float = SECONDS) -> Speed:
    """Mistake if the learner's script does not train on."""
    with tempfile.TemporaryDirectory(prefix="labs-capstone-") as name:
        folder, scripts = Path(name), {}
        for who, of in (("original", SLOW.read_text()), ("yours", text), ("reference", fast_script())):
            path = folder / f"{who}.py"
            path.write_text(of)
            scripts[who] = Script((str(path), "--data", str(DATA), "--epochs", "1000"))
        try:
            with one_core():
                taken = take_turns(scripts, BLOCK, measure.Budget(seconds, most=MOST_ROUNDS), folder / "runs")
        except ScriptFailed as e:
            raise Mistake(f"{e.name}: {e.why}, within 1000 epochs", "--epochs must mean what it did") from None
    return judged(taken)


@contextmanager
def one_core() -> Iterator[None]:
    """This process, and what it starts, runs on the idlest of its cores, where the system allows it.

    On others, workers of a loader would hide an illness of the data: the others are a colleague's.
    """
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    cores, busy = os.sched_getaffinity(0), psutil.cpu_percent(LOOK_S, percpu=True)
    os.sched_setaffinity(0, {min(cores, key=lambda core: busy[core] if core < len(busy) else 0.0)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def judged(taken: Mapping[str, list[Block]]) -> Speed:
    """What blocks of steps in turn say; parts are compared round by round, too."""
    step = {who: [b.step_s for b in blocks] for who, blocks in taken.items()}

    def part_s(who: str, part: str) -> list[float]:
        return [sum(b.spans_s.get(kind, 0.0) for kind in PARTS[part]) for b in taken[who]]

    def beyond(who: str, part: str) -> Estimate:
        rounds = zip(part_s(who, part), part_s("reference", part), step["reference"], strict=True)
        return measure.estimate([(mine - theirs) / whole for mine, theirs, whole in rounds])

    medians = {who: statistics.median(s) for who, s in step.items()}
    return Speed(
        measure.paired_ratio(step["original"], step["yours"]),
        measure.paired_ratio(step["yours"], step["reference"]),
        medians,
        {part: beyond("yours", part) for part in PARTS},
        {part: medians["reference"] * beyond("original", part).value for part in PARTS},
    )


def check_speed(speed: Speed, herrings: str) -> None:
    """Mistake that says how large the illness is that is left, and not where. What noise may be is let through."""
    if not (speed.ill or speed.slower.low > AS_FAST):
        return
    mine, theirs = (1e3 * speed.step_s[who] for who in ("yours", "reference"))
    what = f"results are the original's, {speed.gain} as fast; a step takes {mine:.0f} ms, {theirs:.0f} would do"
    if not speed.ill:
        raise Mistake(what + ", and no part of it stands out" + herrings, "python -m labs.doctor my_script.py")
    by_size = sorted(speed.size_s, key=lambda part: -speed.size_s[part])
    worst = speed.ill[0]
    size, left = 1e3 * speed.size_s[worst], theirs * speed.left[worst].value
    some = "one illness is left, the" if len(speed.ill) == 1 else f"{len(speed.ill)} are left, the costliest is the"
    raise Mistake(
        f"{what}: {some} {ORDINAL[by_size.index(worst)]} of the five, {left:.1f} ms of each step "
        f"({size:.1f} ms in the original){herrings}",
        "python -m labs.doctor my_script.py: the picture of a step has a part of about that size",
    )


ORDINAL = ("largest", "second largest", "third largest", "fourth largest", "smallest")


def herrings_cured(found: Results, original: Results) -> str:
    """What was changed though it costs nothing here; begins with "; ", or is empty."""
    cured = []
    if original.zeroed and not found.zeroed:
        cured.append("gradients are no longer zeroed in place")
    if found.reads < 0.5 < original.reads:
        cured.append("values are no longer read in each step")
    if not cured:
        return ""
    return (
        f"; {' and '.join(cured)}: no illness here, the fast script does it as the original did "
        "(reading a value waits for a GPU's queue, and a CPU has none)"
    )


def workers_here(found: Results) -> str:
    """That the script's own processes take the training's core; begins with "; ", or is empty.

    Which part of a step they slow is chance: more often the arithmetic that they interrupt than the wait for data.
    """
    if not found.workers:
        return ""
    some = "its worker shares" if found.workers == 1 else f"its {found.workers} workers share"
    return (
        f"; {some} the one core with the training, as the others are your colleague's, and what is done there may "
        "show in any part of a step"
    )


def script_of(f: Callable[[], Any]) -> str:
    """The text that `f` returns, or that is in the file whose path it returns. Mistake if it is no program."""
    given = f()
    if isinstance(given, os.PathLike) or (isinstance(given, str) and "\n" not in given):
        path = Path(given)
        if not path.is_file():
            raise Mistake(f"there is no file {path}", "return the path of your script, or its text")
        given = path.read_text()
    if not isinstance(given, str):
        raise Mistake(f"you return {type(given).__name__}, no script", "return the path of your script, or its text")
    try:
        ast.parse(given)
    except SyntaxError as e:
        raise Mistake(f"line {e.lineno} of your script is no Python: {e.msg}", "run it first") from None
    return given


def check_capstone(f: Callable[[], Any]) -> None:
    """Results first, since a fast script that does something else is no cure; then speed, in turn."""
    text = script_of(f)
    original = original_results()
    found = watched(text)
    check_results(found, original)
    herrings = herrings_cured(found, original)
    check_speed(compared(text), herrings + workers_here(found))
    if herrings:
        print("12.1:" + herrings[1:])


def original_results() -> Results:
    """What an epoch of the original does, as far as it does not depend on its seed: kept, for it takes long to run.

    `first` is what it would be without shuffling.
    """
    kept = json.loads(Path(__file__).with_name("slow_results.json").read_text())
    with np.load(DATA) as arrays:
        from labs.chapters.nb12.watched import prepared

        images = prepared(arrays["x_train"]).reshape(TRAIN, -1)
    means, deviations = np.sort(images.mean(1)).tolist(), np.sort(images.std(1, ddof=1)).tolist()
    first = images[:BATCH].mean(1).tolist()
    return Results(**{**kept, "first": first, "means": means, "deviations": deviations, "files": list(FILES)})


EXERCISE = Exercise("a slow script made fast", check_capstone, fast_script, 400.0)
