"""JSON that every program reads alike: finite numbers, no name twice, whole characters, not nested without end."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Iterable
from typing import Any

DEEPEST = 50  # brackets in brackets; Python's own limit depends on who calls
LARGEST = sys.float_info.max


def parse(line: bytes) -> Any:
    """The value in one line of JSON. ValueError says in one line what is wrong with it."""
    try:
        return json.loads(line.decode(), object_pairs_hook=_each_name_once)
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 text (byte {e.start + 1})") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON ({e.msg})") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except Twice as e:
        raise ValueError(f"field {e} is there twice") from None
    except ValueError:  # Python refuses more than 4300 digits, since they take it minutes
        raise ValueError("not JSON (a number of thousands of digits)") from None


class Twice(ValueError):
    """A name that an object has twice: programs differ in which of the two they take."""


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise Twice(brief(next(name for name in names if names.count(name) > 1)))
    return values


def problem(value: Any, depth: int = 0) -> str:
    """Why `value` would not be the same when written and read again; "" if it would. A tuple comes back as a list."""
    match value:
        case None | bool():
            return ""
        case str():
            return "" if value.isascii() or _is_text(value) else f"{brief(value)} holds half of a surrogate pair"
        case int() | float():
            return "" if abs(value) <= LARGEST else f"{brief(value)} is no finite number"
        case dict() if not all(isinstance(key, str) for key in value):
            return f"{brief(next(key for key in value if not isinstance(key, str)))} is no name of a field"
        case dict() | list() | tuple() if depth == DEEPEST:
            return "it is nested too deeply"
        case dict():
            return _first((*value, *value.values()), depth)
        case list() | tuple():
            return _first(value, depth)
    return f"{type(value).__name__} is no JSON value"


def _first(values: Iterable[Any], depth: int) -> str:
    return next(filter(None, (problem(v, depth + 1) for v in values)), "")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(value: Any) -> str:
    """`repr(value)` in one line of some 100 characters, however large it is."""
    return _brief.repr(value)


class _Brief(reprlib.Repr):
    maxstring = maxother = 60

    def repr_int(self, x: int, level: int) -> str:
        digits = int(x.bit_length() * 0.30103) + 1  # Python does not print more than 4300
        return super().repr_int(x, level) if digits < 4000 else f"an integer of {digits} digits"


_brief = _Brief()
