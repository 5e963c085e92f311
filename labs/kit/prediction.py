"""A number written down before measuring, kept, and drawn into the figure that shows the measurement."""

from __future__ import annotations

import math
from typing import Any

from labs.kit import room
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
        """One sentence that compares the prediction with a number or an Estimate (value, low, high) of this `kind`.

        With COURSE_ROOM set, both are kept there.
        """
        value = float(getattr(measured, "value", measured))
        low, high = getattr(measured, "low", value), getattr(measured, "high", value)
        room.keep_prediction(self.what, self.unit, float(self), value, low, high, kind)
        if math.isnan(self):
            return f"You made no prediction of the {self.what}."
        said = f"You predicted {float(self):g} {self.unit}".rstrip()
        if low <= self <= high:
            return f"{said}; that is {'exactly' if low == high else 'within'} what was {kind}."
        direction = "above" if self > value else "below"
        return f"{said}; that is {_distance(float(self), value, self.unit)}{direction} what was {kind}."


def _distance(guess: float, value: float, unit: str) -> str:
    """ "12 points " between percentages; else "30 % " between near numbers, "a factor of 20 " between distant ones."""
    if unit in ("%", "points") or value == 0 or guess / value <= 0:
        apart = abs(guess - value)
        return f"{apart:.{0 if apart >= 10 else 1}f} {'points' if unit == '%' else unit} ".replace("  ", " ")
    ratio = guess / value
    if 1 / 3 < ratio < 3:
        return f"{abs(ratio - 1):.0%} "
    factor = max(ratio, 1 / ratio)
    return f"a factor of {factor:.{0 if factor >= 10 else 1}f} "


def predict(value: float | None, what: str, unit: str = "") -> Prediction:
    """Keep a prediction of `what`, in `unit`, also in the room if there is one. None means not decided yet."""
    if value is None or value is Ellipsis or repr(value) == "TODO":
        value = math.nan
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"predict() needs a number for the {what}, for example 1.5, not {value!r}")
    require(not math.isinf(value), f"predict() needs a finite number for the {what}")
    if not math.isnan(value):
        room.keep_prediction(what, unit, float(value))
    return Prediction(value, what, unit)
