"""The illnesses of the clinic, one row each: the line that is changed, what shows it, what cures it, who teaches it.

An illness is in the table only if its cure gives 15 % or more here, measured in turn. Some of
what CPU cores do not feel walks in as a healthy patient that only looks ill.
"""

from __future__ import annotations

import difflib
import inspect
import random
import re
from dataclasses import dataclass
from functools import cache

from labs.clinic import training
from labs.kit.errors import require


@dataclass(frozen=True)
class Illness:
    """One changed line of `train`; `cause` is None for a patient that is well."""

    name: str
    cause: str
    """The answer in words."""
    healthy: str
    """Part of a line of `train`"""
    sick: str
    """What stands in its place"""
    key: str
    """The measurement that shows it"""
    sign: str
    """and what is read there."""
    blind: tuple[str, ...]
    """Measurements that one may plausibly buy, and that do not name it."""
    symptom: str
    teaches: str
    """Notebook."""
    words: tuple[str, ...] = ()
    """Further words that name it in a free answer."""


KEPT = "history.append(loss.detach())"
DATA = "in_memory(images, labels, folder)"
ILLNESSES = (
    Illness(
        "slow_loader",
        "every image is decoded each time it is asked for",
        DATA,
        "decoded_when_asked(images, labels, folder)",
        "same_batch",
        "data",
        ("traffic", "disk", "cores"),
        "the device waits before each step; memory is modest",
        "02",
        ("decode", "decoding", "png", "loader", "dataset"),
    ),
    Illness(
        "archive",
        "each batch opens a compressed archive anew and unpacks all of it",
        DATA,
        "read_when_asked(images, labels, folder)",
        "disk",
        "reads",
        ("traffic", "ops", "cores"),
        "the device waits before each step; many bytes are read",
        "02",
        ("npz", "unpack", "compressed", "page"),
    ),
    Illness(
        "tiny_batches",
        "batches of 4: what a step costs whatever its size is paid sixteen times as often",
        "batch_size=64",
        "batch_size=4",
        "batch",
        "tiny",
        ("memory", "disk", "arrivals"),
        "steps are short, an epoch is long",
        "01",
        ("batch", "small batch", "batch size"),
    ),
    Illness(
        "float64",
        "everything is computed in 64 bits",
        "set_default_dtype(torch.float32)",
        "set_default_dtype(torch.float64)",
        "census",
        "float64",
        ("disk", "same_batch", "cores"),
        "all parts of a step are slow alike",
        "04",
        ("double", "dtype", "64 bit", "precision"),
    ),
    Illness(
        "threads",
        "twice as many threads as the machine has cores, on one core",
        "set_num_threads(1)",
        "set_num_threads(2 * os.cpu_count())",
        "cores",
        "threads",
        ("same_batch", "disk", "traffic"),
        "top shows a busy core; forward and backward crawl",
        "02",
        ("oversubscription", "num_threads", "omp"),
    ),
    Illness(
        "anomaly",
        "autograd's anomaly detection was left on",
        "set_detect_anomaly(False)",
        "set_detect_anomaly(True)",
        "census",
        "anomaly",
        ("disk", "same_batch", "traffic"),
        "forward and backward are slow, the arithmetic is the same",
        "01",
        ("detect_anomaly", "debug"),
    ),
    Illness(
        "validation",
        "the validation runs after every step",
        "validate_every = 500",
        "validate_every = 1",
        "ops",
        "extra forwards",
        ("same_batch", "traffic", "disk"),
        "time is lost between the steps' own parts",
        "01",
        ("evaluate", "evaluation", "eval"),
    ),
    Illness(
        "statistics",
        "the median of every weight and gradient is logged each step",
        KEPT,
        "history.append(statistics(model))",
        "ops",
        "foreign operator",
        ("same_batch", "traffic", "disk"),
        "time is lost between the steps' own parts",
        "01",
        ("median", "logging weights", "monitoring", "item"),
    ),
    Illness(
        "growing",
        "what was seen in all steps so far is kept, and sorted again in each step",
        KEPT,
        "history = quality(history, output)",
        "memory",
        "grows",
        ("same_batch", "traffic", "disk"),
        "it began fast; memory climbs",
        "05",
        ("history", "graph", "leak", "detach"),
    ),
    Illness(
        "fsync",
        "each row of the log is forced to disk",
        "durable=False",
        "durable=True",
        "disk",
        "fsync",
        ("same_batch", "traffic", "ops"),
        "the core is idle part of the time, the wire too",
        "05",
        ("log", "logging", "flush"),
    ),
    Illness(
        "checkpoint",
        "a checkpoint is written after each step",
        "save_every = 1000",
        "save_every = 1",
        "disk",
        "writes",
        ("same_batch", "traffic", "cores"),
        "the disk is busy all the time",
        "05",
        ("save", "saving", "state"),
    ),
    Illness(
        "sync_batchnorm",
        "BatchNorm is synchronised over the ranks, though a rank's batch is large enough",
        "DistributedDataParallel(model,",
        "DistributedDataParallel(synchronised(model),",
        "traffic",
        "collectives",
        ("same_batch", "disk", "memory"),
        "forward takes as long as backward",
        "03",
        ("syncbatchnorm", "batchnorm", "batch norm", "normalisation"),
    ),
    Illness(
        "averaging",
        "the weights are averaged over the ranks although DDP has averaged the gradients",
        KEPT,
        "history.append(average_weights(model))",
        "traffic",
        "bytes",
        ("same_batch", "disk", "memory"),
        "ranks wait for each other more than once a step",
        "03",
        ("average", "all_reduce", "sync", "twice"),
    ),
    Illness(
        "tiny_buckets",
        "a bucket for every gradient: as many exchanges as there are parameters",
        "bucket_cap_mb=25",
        "bucket_cap_mb=0.0001",
        "traffic",
        "buckets",
        ("same_batch", "disk", "memory"),
        "backward is long",
        "07",
        ("bucket", "buckets", "bucket_cap_mb"),
    ),
    Illness(
        "straggler",
        "the last rank computes singular values that the others do not wait to see, but wait for",
        KEPT,
        "history.append(largest_singular_values(model) if rank == ranks - 1 else 0)",
        "arrivals",
        "late",
        ("steps", "same_batch", "disk"),
        "all ranks have the same step time; rank 0 seems to wait for the wire",
        "08",
        ("late", "slow rank", "imbalance", "svd"),
    ),
)
WELL = (
    Illness("healthy", "nothing", "", "", "", "", (), "it has always been like that", "09", ("well", "fine", "none")),
    Illness(
        "wide",
        "nothing: it is a larger model",
        "width=8",
        "width=16",
        "",
        "",
        (),
        "steps take long, top shows 100 %",
        "09",
    ),
    Illness(
        "long_steps",
        "nothing: its batches are larger",
        "batch_size=64",
        "batch_size=128",
        "",
        "",
        (),
        "steps take twice as long as a colleague's",
        "09",
    ),
    Illness(
        "items",
        "nothing: three `.item()` in a step cost a CPU nothing, there is no queue to wait for",
        KEPT,
        "history.append([loss.item(), output.max().item(), x.mean().item()])",
        "",
        "",
        (),
        "a colleague has seen .item() in the loop",
        "09",
    ),
    Illness(
        "zeroed",
        "nothing worth it: gradients are zeroed in place of being dropped",
        "zero_grad()",
        "zero_grad(set_to_none=False)",
        "",
        "",
        (),
        "a blog says that set_to_none doubles the speed",
        "09",
    ),
)
BY_NAME = {illness.name: illness for illness in ILLNESSES + WELL}


def draw(seed: int) -> Illness:
    """The patient of a seed: as many seeds in a row as there are kinds hold each once, in an order of their own."""
    require(seed >= 0, f"seed must not be negative: {seed}")
    kinds = ILLNESSES + WELL
    turn, place = divmod(seed, len(kinds))
    return random.Random(f"clinic {turn}").sample(kinds, len(kinds))[place]


@cache
def healthy_source() -> str:
    """The text of `training.train`."""
    return inspect.getsource(training.train)


def source(illness: Illness) -> str:
    """The text of a patient's training. ValueError if the line is not there, exactly once."""
    if not illness.healthy:
        return healthy_source()
    if healthy_source().count(illness.healthy) != 1:
        raise ValueError(f"{illness.name}: {illness.healthy!r} must stand in train once")
    return healthy_source().replace(illness.healthy, illness.sick)


def line(illness: Illness) -> int:
    """Number, from 1, of the line of `train` that differs; 0 for none."""
    both = zip(healthy_source().splitlines(), source(illness).splitlines(), strict=True)
    return next((n for n, (a, b) in enumerate(both, 1) if a != b), 0)


def cure(illness: Illness) -> str:
    """The cure as a difference: the sick line out, the healthy one in."""
    if not illness.healthy:
        return "nothing to change"
    sick, well = source(illness).splitlines(), healthy_source().splitlines()
    n = line(illness) - 1
    return f"- {sick[n].strip()}\n+ {well[n].strip()}"


def treated(patient: Illness, named: str) -> str:
    """The patient's text with the line that `named` would have changed put back: no other text if it is another one."""
    return healthy_source() if named == patient.name and patient in ILLNESSES else source(patient)


@cache
def _vocabulary() -> dict[str, str]:
    """{word or words: the illness that they mean}"""
    known: dict[str, str] = {}
    for illness in ILLNESSES + WELL[:1]:
        for word in (illness.name, illness.cause, *illness.words):
            known.setdefault(_plain(word), illness.name)
    return known


def _plain(text: str) -> str:
    return re.sub(r"[\s_\-]+", " ", text.casefold()).strip()


def recognised(answer: str) -> str | None:
    """Name of the illness that a free answer means, "healthy" for none; None if it means none or more than one.

    A name, a word of the table, the cause or the changed line itself; small slips of the pen are forgiven.
    """
    text, known = _plain(answer), _vocabulary()
    if text in known:
        return known[text]
    if line := next((i.name for i in ILLNESSES if i.sick in answer), None):
        return line
    words = [w for w in known if re.search(rf"\b{re.escape(w)}(s|es|d|ed)?\b", text)]
    meant = {known[w] for w in words if not any(w != longer and w in longer for longer in words)}
    if meant:
        return meant.pop() if len(meant) == 1 else None
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.8)
    return known[near[0]] if near else None
