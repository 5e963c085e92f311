"""What notebook 06's records say of the parts: who holds them, who trains them, and how ranks add up vectors."""

from __future__ import annotations

from typing import NamedTuple

from labs import broken_split, point_to_point
from labs.chapters.nb06.claims_parallel import PIPELINE, chains
from labs.kit.claims import gain, last, pairs
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records

HYBRID, SUMS, SPLIT = "hybrid_parallel", "point_to_point", "broken_split"
ARTICLE, RIGHT = "own input", "gradient sent back"
MB = 1e6
RANKS = (4, 8)  # beyond two, where rank 0's part grows and a ring's does not
NUMBERS = 840  # a multiple of 4 and 8: a ring's parts are equally long


# -- labs.hybrid_parallel


class Mixed(NamedTuple):
    """One scheme on a mesh of copies x parts."""

    name: str
    copies: int
    parts: int
    error: float
    """Of the gradient, against one process"""
    held: list[float]
    """Bytes of parameters on each of the ranks that share one copy"""
    counted: bool
    """Whether the bytes sent along both axes are those of the closed forms, on every rank"""
    sent: dict[str, float]
    """{axis: most bytes that a rank sends along it}"""


def mixed(evidence: Records) -> list[Mixed]:
    """The schemes of the last launch on a mesh with more than one copy and part. LookupError if there is none."""
    run = last(evidence, HYBRID, "gradient_relative_error")
    errors = [r for r in run.where("gradient_relative_error") if r.case["dp"] > 1 and r.case["parts"] > 1]
    if not errors:
        raise LookupError(f"launch({HYBRID!r}, nproc=4), with more than one copy and more than one part, is needed")
    return [_mixed(run, r) for r in errors]


def _mixed(run: Records, error: Record) -> Mixed:
    case, sent, counted = error.case, {}, True
    bytes_sent = run.where("sent_bytes", **case)
    for r in bytes_sent:
        if r.kind != "modelled":
            form = [x for x in bytes_sent if x.kind == "modelled" and x.case == r.case]
            counted &= [x.samples for x in form] == [r.samples]
            sent[r.case["axis"]] = sent.get(r.case["axis"], 0.0) + max(r.samples)
    if not sent:
        raise LookupError(f"launch({HYBRID!r}) counted no bytes of {case['scheme']!r}")
    held = run.one("bytes_per_rank", what="parameters", **case).samples[: case["parts"]]
    return Mixed(case["scheme"], case["dp"], case["parts"], max(error.samples), list(held), counted, sent)


def errors(evidence: Records) -> float:
    """Largest relative error of a pipeline's gradients against one process."""
    runs = chains(evidence, "gradient_relative_error").values()
    found = [max(r.samples) for run in runs for r in run.where("gradient_relative_error")]
    if not found:
        raise LookupError(f"launch({PIPELINE!r}) did not compare gradients")
    return max(found)


# -- labs.broken_split


class Halves(NamedTuple):
    """One way to connect the halves: parameter tensors that get a gradient, by half, and what comes of it."""

    first: list[float]
    second: list[float]
    moved: float
    """The first half's parameters: how far, relative to their size"""
    accuracy: float

    @property
    def all_train(self) -> bool:
        """Whether both halves do, in every run."""
        return min(self.first) >= broken_split.predict(RIGHT)[0] and min(self.second) >= broken_split.predict(RIGHT)[1]


def halves(evidence: Records) -> dict[str, Halves]:
    """{way: what came of it}. LookupError if one way was not tried."""
    run = last(evidence, SPLIT, "moved", way=RIGHT, loss="logits")  # the last way: the others were tried, too
    return {way: _halves(run, way) for way in broken_split.Way.__args__}


def _halves(run: Records, way: str) -> Halves:
    case = {"way": way, "loss": "logits"}
    trained = [list(run.one("trained_parameters", half=half, **case).samples) for half in ("first", "second")]
    moved = run.one("moved", half="first", **case).value
    return Halves(*trained, moved, run.one("test_accuracy", **case).value)


class Losses(NamedTuple):
    """The same training with logits read as logits, and read as probabilities."""

    change: Estimate
    """Test accuracy, as probabilities less as logits, seed by seed, in points"""
    accuracy: tuple[float, float]
    first: tuple[float, float]
    """Loss of the first batch, in nats"""


def losses(evidence: Records) -> Losses:
    """LookupError if the article's loss was not tried."""
    run = last(evidence, SPLIT, "first_loss", way=RIGHT, loss="as probabilities")
    cases = [{"way": RIGHT, "loss": loss} for loss in ("as probabilities", "logits")]
    wrong, right = (run.one("test_accuracy", **c) for c in cases)
    first = [run.one("first_loss", **c).value for c in cases]
    return Losses(gain(wrong, right), (wrong.value, right.value), (first[0], first[1]))


# -- labs.point_to_point


class Sum(NamedTuple):
    """A sum over ranks by send and recv, against all_reduce."""

    way: str
    size: int
    ranks: int
    time: Estimate
    """Its seconds over those of all_reduce"""

    @property
    def slower(self) -> bool:
        """Whether it is shown to take longer than all_reduce."""
        return self.time.low > 1

    @property
    def faster(self) -> bool:
        """Whether it is shown to take less time than all_reduce."""
        return self.time.high < 1


def sums(evidence: Records) -> list[Sum]:
    """Every way and size of the last launch, in its order. LookupError if there is nothing to compare."""
    run = last(evidence, SUMS, "seconds", way="all_reduce")
    timed = [r for r in run.where("seconds") if r.kind != "modelled"]
    by = {r.case["size"]: r for r in timed if r.case["way"] == "all_reduce"}
    others = [r for r in timed if r.case["way"] != "all_reduce"]
    if not others:
        raise LookupError(f"launch({SUMS!r}) timed no sum by send and recv")
    return [
        Sum(r.case["way"], r.case["size"], r.layout.get("world_size", 0), pairs(r, by[r.case["size"]])) for r in others
    ]


def counted(evidence: Records) -> bool:
    """Whether every rank sent as many bytes as the closed forms say. LookupError if none were counted."""
    run = last(evidence, SUMS, "sent_bytes", way="all_reduce")
    found = {(r.kind == "modelled", r.case["way"], r.case["size"]): r.samples for r in run.where("sent_bytes")}
    return all(found.get((not m, way, size)) == samples for (m, way, size), samples in found.items())


def busiest(way: str, ranks: int) -> float:
    """What the rank sends that sends most, in lengths of the vector; closed form."""
    return max(point_to_point.predict(way, NUMBERS, rank, ranks) for rank in range(ranks)) / (4 * NUMBERS)
