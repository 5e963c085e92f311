"""Patients of the doctor's trial: trainings that are well, some of which look ill, and ones with one line changed.

An illness is in the table if its cure gives 15 % or more, measured in turn (`python -m labs.doctor_trial`), or if it is
read in the source, and no step is slower for it. Each patient is a whole script, which the doctor is given as it is.
Not in it: os.fsync after each line of a log, whose cure gave 1.07 x [0.93, 1.15] on the disk where it was measured, and
SyncBatchNorm on two ranks, which torch has for GPUs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labs.doctor.profile import AS_IS
from labs.doctor_trial.in_turn import Block, Script, take_turns
from labs.kit import measure

LABS = Path(__file__).parents[1]
FASHION, MOBY = LABS / "common" / "data" / "fashion_mnist_12k.npz", LABS / "common" / "data" / "moby_dick.txt"
BY_MEASUREMENT, BY_READING = "measurement", "reading"


@dataclass(frozen=True)
class Change:
    """One line, or part of it, and what stands in its place."""

    old: str
    new: str

    def made(self, text: str) -> str:
        """ValueError unless the old line is there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.old!r} must stand there once, not {text.count(self.old)} times")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Case:
    """A patient."""

    name: str
    base: str
    """The script that is well: a recipe's name, or one of labs/doctor_trial/scripts."""
    illness: Change | None = None
    """None: it is well."""
    names: tuple[str, ...] = ()
    """Findings, or rules, of which any one names the illness. Empty for a patient that is well."""
    looks: str = ""
    """Of one that is well: why somebody might think that it is ill."""
    by: str = BY_MEASUREMENT
    """How it is found: "reading" where no step is slower for it, or no run of some steps can show it."""
    well: tuple[Change, ...] = ()
    """What makes a healthy patient look ill, or is the same in the sick and the cured script."""
    ranks: int = 1
    options: tuple[str, ...] = ()
    """Of the script, besides its data."""
    learns: bool = True
    """Whether the loss falls: some illnesses leave a training fast, and without result."""

    @property
    def is_ill(self) -> bool:
        """Whether there is something to find."""
        return self.illness is not None

    @property
    def cured(self) -> str:
        """The text without the illness."""
        text = source(self.base)
        for change in self.well:
            text = change.made(text)
        return text

    @property
    def text(self) -> str:
        """The script that the doctor is given. ValueError if a line that is to be changed is not there."""
        return self.illness.made(self.cured) if self.illness else self.cured

    @property
    def line(self) -> int:
        """Number, from 1, of the first line that the illness has otherwise; 0 for one that is well."""
        both = zip(self.text.splitlines(), self.cured.splitlines(), strict=False)
        return next((n for n, (a, b) in enumerate(both, 1) if a != b), 0)

    def argv(self, script: Path) -> tuple[str, ...]:
        """`script`, which holds one of the texts, with its options: it trains until it is stopped."""
        data = MOBY if self.base == "train_text" else FASHION
        return (str(script), "--data", str(data), *self.options)

    def write(self, folder: Path, *, cured: bool = False) -> Script:
        """Into `folder`, under the base's name."""
        return self.with_text(folder, self.cured if cured else self.text)

    def with_text(self, folder: Path, text: str) -> Script:
        """The same with another text: one cure of several, or another batch size."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.base}.py"
        path.write_text(text)
        return Script(self.argv(path), self.ranks)


def with_cures(
    case: Case, cures: Mapping[str, str], block: int, rounds: int | measure.Budget, folder: Path
) -> dict[str, list[Block]]:
    """The patient, AS_IS, and its script in each cure's text take blocks of steps in turn: `{name: [one per round]}`.

    ScriptFailed as of `take_turns`. `folder` is left to the caller, with what the scripts wrote.
    """
    texts = {AS_IS: case.text, **cures}
    scripts = {name: case.with_text(folder / str(i), text) for i, (name, text) in enumerate(texts.items())}
    return take_turns(scripts, block, rounds, folder / "runs")


def gains(step_s: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """How many times as fast each cure is: AS_IS / cure, round by round."""
    before = step_s[AS_IS]
    others = {cure: after for cure, after in step_s.items() if cure != AS_IS}
    return {cure: tuple(a / b for a, b in zip(before, after, strict=True)) for cure, after in others.items()}


@cache
def source(base: str) -> str:
    """The text of a script that is well."""
    own = LABS / "doctor_trial" / "scripts" / f"{base}.py"
    return (own if own.is_file() else LABS / "recipes" / f"{base}.py").read_text()


LONG = ("--steps", "1000000", "--cpu")
"""Options of a recipe: longer than anybody looks."""
SINGLE, DDP, IMAGES = "train_single", "train_ddp", "train_images"
STEP = "            step += 1\n"
HISTORY = "history.append(loss.detach())"
DATASET = "dataset = TensorDataset(normalised(images), labels)"
WIDE = Change("build_model(width=8)", "build_model(width=32)")
SLOW_FILES = Change(DATASET, "dataset = Files(images, labels)")


def _step(more: str) -> Change:
    return Change(STEP, f"            step += 1; {more}\n")


def _recipes() -> Iterator[Case]:
    """As they are."""
    yield Case(SINGLE, SINGLE, options=LONG)
    for name, more in (
        (DDP, ()),
        ("train_ddp_amp", ("--precision", "fp32", "--clip", "1")),
        ("train_fsdp", ()),
        ("train_recompute", ("--batch-size", "1000")),
        ("train_ddp_resume", ()),
        ("train_ddp_debug", ()),
        ("train_ddp_hook", ("--hook", "none")),
        ("train_pipeline", ()),
        ("train_tensor_parallel", ()),
        ("train_ddp_fast", ()),
    ):
        yield Case(name, name, ranks=2, options=(*LONG, *more))


def _well() -> Iterator[Case]:
    """Some look ill."""
    yield Case("images", IMAGES)
    yield Case("images_2", IMAGES, ranks=2)
    yield Case("slow_model", IMAGES, looks="steps take long, all cores are busy", well=(WIDE,))
    yield Case(
        "big_batch",
        IMAGES,
        looks="a step takes many times as long as a colleague's",
        well=(Change("batch_size=64", "batch_size=512"),),
    )
    yield Case(
        "workers",
        IMAGES,
        looks="each image is decoded when it is asked for, but workers do it in time",
        well=(SLOW_FILES, Change("workers = 0", "workers = 2"), WIDE),
    )
    yield Case(
        "rare_checkpoint",
        IMAGES,
        looks="a checkpoint is written within the steps that are looked at",
        well=(Change("500, 1000", "500, 20"), WIDE),
    )
    yield Case(
        "rare_validation",
        IMAGES,
        looks="it is validated within the steps that are looked at",
        well=(Change("500, 1000", "40, 1000"), WIDE),
    )
    yield Case(
        "items",
        SINGLE,
        options=LONG,
        looks=".item() in each step: a CPU has no queue to wait for",
        well=(_step("losses = [loss.item(), x.mean().item(), y.max().item()]"),),
    )
    yield Case(
        "prints",
        SINGLE,
        options=LONG,
        looks="it prints in each step, into a file, which costs nothing",
        well=(_step('print("step", step, flush=True)'),),
    )
    yield Case(
        "zeroed",
        SINGLE,
        options=LONG,
        looks="gradients are zeroed in place of being dropped",
        well=(Change("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)"),),
    )
    yield Case("accumulate", "train_accumulate", ranks=2, looks="four backward passes for one step")
    yield Case("plain", "train_plain", looks="it has no DataLoader")
    yield Case("text", "train_text", looks="torch.compile, and sentences of all lengths: padded to one")


def _sick() -> Iterator[Case]:
    """One line changed."""
    yield Case("slow_loader", IMAGES, SLOW_FILES, ("slow_loader",))
    yield Case("slow_loader_2", IMAGES, SLOW_FILES, ("slow_loader",), ranks=2)
    yield Case("archive", IMAGES, Change(DATASET, "dataset = Archive(images, labels, args.data)"), ("slow_loader",))
    yield Case("float64", SINGLE, Change("if args.float64:", "if not args.float64:"), ("float64",), options=LONG)
    yield Case("float64_images", IMAGES, Change("torch.float32)\n", "torch.float64)\n"), ("float64",))
    yield Case(
        "threads",
        DDP,
        Change(
            " torch.manual_seed(args.seed)\n",
            " torch.set_num_threads(2 * os.cpu_count()); torch.manual_seed(args.seed)\n",
        ),
        ("threads",),
        ranks=2,
        options=LONG,
    )
    yield Case(
        "threads_images",
        IMAGES,
        Change("set_num_threads(1)", "set_num_threads(4 * os.cpu_count())"),
        ("threads",),
    )
    yield Case("anomaly", IMAGES, Change("set_detect_anomaly(False)", "set_detect_anomaly(True)"), ("anomaly",))
    yield Case(
        "anomaly_recipe",
        SINGLE,
        Change(" torch.manual_seed(args.seed)\n", " torch.set_anomaly_enabled(True); torch.manual_seed(args.seed)\n"),
        ("anomaly",),
        options=LONG,
    )
    yield Case("validation", IMAGES, Change("500, 1000", "1, 1000"), ("validation",))
    yield Case("checkpoint", IMAGES, Change("500, 1000", "500, 1"), ("checkpoint",))
    yield Case(
        "checkpoint_recipe",
        SINGLE,
        _step("torch.save(optimizer.state_dict(), 'last.pt')"),
        ("checkpoint",),
        options=LONG,
    )
    yield Case("printing", SINGLE, _step("print([p.data for p in model.parameters()])"), ("printing",), options=LONG)
    yield Case(
        "lists",
        SINGLE,
        _step("signs = [p.grad.sign().tolist() for p in model.parameters()]"),
        ("synchronise", "own_code"),
        options=LONG,
    )
    yield Case("statistics", IMAGES, Change(HISTORY, "history.append(statistics(model))"), ("own_code", "synchronise"))
    yield Case("growing", IMAGES, Change(HISTORY, "history = quality(history, output)"), ("growing", "own_code"))
    yield Case("averaging", IMAGES, Change(HISTORY, "average_weights(model, ranks)"), ("exchange",), ranks=2)
    yield Case("tiny_buckets", IMAGES, Change("bucket_cap_mb=25", "bucket_cap_mb=0.0001"), ("exchange",), ranks=2)
    yield Case(
        "straggler",
        IMAGES,
        Change(HISTORY, "history.append(rank and largest_singular_values(model))"),
        ("straggler",),
        ranks=2,
    )
    yield Case(
        "straggler_recipe",
        DDP,
        _step("rank and [torch.linalg.svdvals(p) for p in model.parameters() if p.dim() > 1]"),
        ("straggler",),
        ranks=2,
        options=LONG,
    )
    yield Case(
        "no_no_sync",
        "train_accumulate",
        Change("nullcontext() if last else model.no_sync()", "nullcontext()"),
        ("exchange",),
        ranks=2,
    )
    yield Case("recompiles", "train_text", Change("LENGTH + 1, dtype", "max(map(len, pieces)), dtype"), ("recompiles",))


def _read() -> Iterator[Case]:
    """One line changed, and no step is slower for it: what is read in the source says so."""
    read = {"by": BY_READING, "options": LONG}
    yield Case(
        "find_unused",
        DDP,
        Change(
            "device_ids=[local_rank] if cuda else None)",
            "device_ids=[local_rank] if cuda else None, find_unused_parameters=True)",
        ),
        ("find_unused",),
        ranks=2,
        **read,
    )
    yield Case(
        "no_set_epoch",
        DDP,
        Change("sampler.set_epoch(step // len(loader))", "pass"),
        ("set-epoch-missing",),
        ranks=2,
        **read,
    )
    yield Case(
        "clip_before_unscale",
        "train_ddp_amp",
        Change("            scaler.unscale_(optimizer)", "            pass"),
        ("clip-before-unscale",),
        ranks=2,
        **read,
    )


HEALTHY: tuple[Case, ...] = (*_recipes(), *_well())
SICK: tuple[Case, ...] = (*_sick(), *_read())
BY_NAME = {case.name: case for case in HEALTHY + SICK}
