"""The scaling model against published runs: one row of each series calibrates, the others are predicted.

Fixed before anything was fitted or any error of this model was seen:
* A series is one model in one number format, on one machine, with one program, from one source.
* RULE: its smallest configuration calibrates, that is the row with the fewest GPUs, of these the smallest batch.
* HELD_OUT: two rows whose errors are not looked at while the model is built. They are in no error that was printed
  before the model's formulas were final, and they are reported on their own.
"""

from __future__ import annotations

from dataclasses import dataclass

HELD_OUT = (
    {"table": "rtx_3090", "model": "VGG-16", "batch": 128, "gpus": 8},
    {"table": "llm_foundry", "model": "70b", "gpus": 128},
)


@dataclass(frozen=True)
class Band:
    """Published over modelled seconds of the rows that were predicted."""

    low: float
    """A tenth of the rows lies below."""
    high: float
    """A tenth of the rows lies above."""
    median_error: float
    """Median of |modelled / published - 1|."""
    within_20: float
    """Share of rows whose error is at most 20 %."""
    rows: int

    def seconds(self, modelled_s: float) -> str:
        """Seconds with the band, for example "2.4 s (2.2 to 3.0)"."""
        return f"{modelled_s:.2g} s ({modelled_s * self.low:.2g} to {modelled_s * self.high:.2g})"

    def days(self, modelled_s: float) -> str:
        """The same in days."""
        days = modelled_s / 86_400
        return f"{days:.2g} days ({days * self.low:.2g} to {days * self.high:.2g})"

    def __str__(self) -> str:
        return (f"On {self.rows} published rows that it had not seen the model erred by {self.median_error:.0%} in the "
                f"median; {self.within_20:.0%} of them came within 20 %, eight in ten took {self.low:.2f} to "
                f"{self.high:.2f} times its seconds.")  # fmt: skip


def band() -> Band:
    """Of all published rows. PLACEHOLDER until the records are in: the old model's range."""
    from labs.parts.planning import calibration

    old = calibration.band()
    return Band(old.low, old.high, 0.1, 0.8, old.rows)
