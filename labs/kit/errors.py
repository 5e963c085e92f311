"""Input that cannot work, told in one line: what is wrong with it and what to do about it."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class BadInput(ValueError):
    """A value that cannot work. The message is one line and names the fix; nothing has been started."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))  # a value may hold "\n"

    def _render_traceback_(self) -> list[str]:
        """IPython prints this in place of a traceback: the one line is all there is to know."""
        return [f"BadInput: {self}"]


def require(condition: bool, message: str) -> None:
    """Raise BadInput(message) unless `condition`."""
    if not condition:
        raise BadInput(message)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """What is refused inside is refused as a value of `option`: shared code does not know what a lab calls it."""
    try:
        yield
    except BadInput as e:
        raise BadInput(f"{option}: {e}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'? " for the nearest of `known`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def brief(value: Any) -> str:
    """`repr(value)` in one line of some 100 characters, however large it is."""
    return _brief.repr(value)


class _Brief(reprlib.Repr):
    maxstring = maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        digits = int(x.bit_length() * 0.30103) + 1  # Python does not print more than 4300
        return super().repr_int(x, level) if digits < 4000 else f"an integer of {digits} digits"


_brief = _Brief()
