"""Report bad input in one line: what is wrong and how to fix it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class BadInput(ValueError):
    """A value that can't work. The message is one line and names the fix. Raised before anything starts."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))  # a value may hold "\n"

    def _render_traceback_(self) -> list[str]:
        """Return the one line that IPython prints instead of a traceback."""
        return [f"BadInput: {self}"]


def require(condition: bool, message: str) -> None:
    """Raise BadInput(message) unless `condition` holds."""
    if not condition:
        raise BadInput(message)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Prefix a BadInput raised inside with `option`, since shared code doesn't know the lab's name for the value."""
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{option}: {e}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for the nearest of `known`, or ""."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def brief(value: Any) -> str:
    """Return `repr(value)`, shortened to one line of about 100 characters."""
    return _brief.repr(value)


class _Brief(reprlib.Repr):
    maxstring = maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        digits = int(x.bit_length() * 0.30103) + 1  # Python refuses to print more than 4300
        return super().repr_int(x, level) if digits < 4000 else f"an integer of {digits} digits"


_brief = _Brief()
