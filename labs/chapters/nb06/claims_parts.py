"""What notebook 06's records say of a model in two halves: which of them train, and with which loss."""

from __future__ import annotations

from typing import NamedTuple

from labs import broken_split
from labs.kit.claims import gain, last
from labs.kit.measure import Estimate
from labs.kit.record import Records

SPLIT = "broken_split"
ARTICLE, RIGHT = "own input", "gradient sent back"


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
