"""Range and spacing of the number formats that training uses, from the layout of their bits.

A number is sign x (1 + mantissa / 2^m) x 2^exponent, with m mantissa bits; near zero, where the exponent cannot fall
further, the 1 is left out ("subnormal"). A helper module, not a lab.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One floating-point format. Sizes are of positive numbers."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int
    """Bits in memory. TF32 has 19, kept in 32: it is how a matrix unit reads FP32."""
    infinity: bool = True
    """Whether the highest exponent is kept for infinity and NaN (IEEE 754), or holds numbers too and one NaN."""
    dtype: torch.dtype | None = None
    """None if tensors cannot have it."""

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent's bits."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def lowest_exponent(self) -> int:
        """Exponent of the smallest normal number, and of all subnormal ones."""
        return 1 - self.bias

    @property
    def highest_exponent(self) -> int:
        """Exponent of the largest number."""
        return self.bias if self.infinity else self.bias + 1

    @property
    def smallest_subnormal(self) -> float:
        """The least number above 0: the spacing of all subnormal ones."""
        return 2.0 ** (self.lowest_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """The least number with all its mantissa bits; below it digits are lost."""
        return 2.0**self.lowest_exponent

    @property
    def largest(self) -> float:
        """The greatest finite number."""
        lost = 1 if self.infinity else 2  # without infinities the last mantissa of all is the NaN
        return (2 - lost * self.spacing_at_1) * 2.0**self.highest_exponent

    @property
    def spacing_at_1(self) -> float:
        """From 1 to the next number; torch.finfo calls it eps."""
        return 2.0**-self.mantissa_bits

    @property
    def decimal_digits(self) -> float:
        """Significant decimal digits that the mantissa is worth, its leading 1 included."""
        return (self.mantissa_bits + 1) * math.log10(2)

    def spacing(self, exponent: int) -> float:
        """Distance of neighbours between 2^exponent and 2^(exponent + 1): inf above the largest number."""
        if exponent > self.highest_exponent:
            return math.inf
        return 2.0 ** (max(exponent, self.lowest_exponent) - self.mantissa_bits)


# FP8: Micikevicius et al. 2022, arXiv:2209.05433, table 1. TF32: NVIDIA A100 white paper, 2020.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("fp32", 8, 23, 32, dtype=torch.float32),
        Format("tf32", 8, 10, 32),
        Format("bf16", 8, 7, 16, dtype=torch.bfloat16),
        Format("fp16", 5, 10, 16, dtype=torch.float16),
        Format("fp8 e4m3", 4, 3, 8, infinity=False, dtype=torch.float8_e4m3fn),
        Format("fp8 e5m2", 5, 2, 8, dtype=torch.float8_e5m2),
    )
}


def spacings(name: str, first: int = -150, last: int = 130) -> list[tuple[int, float]]:
    """(exponent, spacing) of every power of two from 2^first to 2^last at which the format has numbers."""
    f = FORMATS[name]
    least = f.lowest_exponent - f.mantissa_bits
    return [(e, f.spacing(e)) for e in range(max(first, least), min(last, f.highest_exponent) + 1)]


def table() -> list[dict[str, float | int | str]]:
    """One row per format, for a table."""
    names = ("smallest_subnormal", "smallest_normal", "largest", "spacing_at_1", "decimal_digits")
    return [
        {"format": f.name, "exponent bits": f.exponent_bits, "mantissa bits": f.mantissa_bits}
        | {name.replace("_", " "): getattr(f, name) for name in names}
        for f in FORMATS.values()
    ]
