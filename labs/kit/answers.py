"""What a learner's function returned, as the type that its checker needs."""

from __future__ import annotations

import math
from typing import Any

from labs.kit.check import Mistake


def number(value: Any, example: str) -> float:
    """`value` as a float. Mistake, which shows `example`, if it is none or not finite."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        size = f"a {type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else f"{value!r:.60}"
        raise Mistake(f"you return {size}, not a number", f"return one number, such as {example}") from None
    if not math.isfinite(found):
        raise Mistake(f"you return {found}", f"return a finite number, such as {example}")
    return found
