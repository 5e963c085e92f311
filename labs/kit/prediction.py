"""A number written down before measuring, kept, and drawn into the figure that shows the measurement."""

from __future__ import annotations

import math
from typing import Any

from labs.kit.cli import require


class Prediction(float):
    """A number the learner wrote down before measuring; NaN where they have not decided yet."""

    what: str
    unit: str

    def __new__(cls, value: float, what: str, unit: str = "") -> Prediction:
        self = super().__new__(cls, value)
        self.what, self.unit = what, unit
        return self

    @property
    def value(self) -> float:
        """The number itself, in `unit`."""
        return float(self)

    def __repr__(self) -> str:
        number = "not made yet" if math.isnan(self) else f"{float(self):g} {self.unit}".rstrip()
        return f"your prediction: {number} ({self.what})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Prediction, (float(self), self.what, self.unit)

    def against(self, measured: Any, kind: str = "measured") -> str:
        """One sentence that compares the prediction with a number or an Estimate (value, low, high) of this `kind`."""
        if math.isnan(self):
            return f"You made no prediction of the {self.what}."
        value = float(getattr(measured, "value", measured))
        low, high = getattr(measured, "low", value), getattr(measured, "high", value)
        said = f"You predicted {float(self):g} {self.unit}".rstrip()
        if low <= self <= high:
            return f"{said}; that is within what was {kind}."
        direction = "above" if self > value else "below"
        return f"{said}; that is {_distance(float(self), value)}{direction} what was {kind}."


def _distance(guess: float, value: float) -> str:
    """ "30 % " between nearby numbers, "a factor of 20 " between distant ones."""
    if value == 0:
        return ""
    ratio = guess / value
    if ratio <= 0 or 1 / 3 < ratio < 3:
        return f"{abs(ratio - 1):.0%} "
    factor = max(ratio, 1 / ratio)
    return f"a factor of {factor:.{0 if factor >= 10 else 1}f} "


def predict(value: float | None, what: str, unit: str = "") -> Prediction:
    """Keep a prediction of `what`, in `unit`. None means not decided yet; it is then drawn nowhere."""
    if value is None or value is Ellipsis or repr(value) == "TODO":
        value = math.nan
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"predict() needs a number for the {what}, for example 1.5, not {value!r}")
    require(not math.isinf(value), f"predict() needs a finite number for the {what}")
    return Prediction(value, what, unit)
