"""Values that no program should get, and the one profile with which the property tests draw them: every run alike."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, configuration, settings
from hypothesis import strategies as st

configuration.set_hypothesis_home_dir(Path(__file__).parents[1] / "build" / "hypothesis")
settings.register_profile(
    "course",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("course")

RAW = [
    "null",
    "true",
    "0",
    "-0.0",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "1e-400",
    "9" * 400,
    "9" * 5000,
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"\\n"',
    '"\\u202e"',
    '"<script>"',
    '"$\\\\foo$"',
    '"' + "x" * 3000 + '"',
    "[]",
    "{}",
    "[[]]",
    "[null]",
    '{"a": 1, "a": 2}',
    '{"value": 1}',
    "[" * 60 + "]" * 60,
    "[" * 990 + "]" * 990,
    "[" * 60_000,
]
"""JSON, or nearly, in the place of any value of a file."""

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
"""What JSON can hold."""


def with_junk(row: dict, name: str, raw: str) -> bytes:
    """`row` as a line of JSON in which the value of `name` is the text `raw`."""
    fields = (f"{json.dumps(k)}: {raw if k == name else json.dumps(v)}" for k, v in row.items())
    return ("{" + ", ".join(fields) + "}").encode()


def damaged(draw: st.DrawFn, lines: list[bytes]) -> bytes:
    """The lines of a file after one or two accidents."""
    lines = [*lines]
    for _ in range(draw(st.integers(1, 2))):
        k, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        at = draw(st.integers(0, max(0, len(lines[k]) - 1)))
        match draw(st.sampled_from("byte cut double swap junk insert".split())):
            case "byte":
                lines[k] = lines[k][:at] + bytes([draw(st.integers(0, 255))]) + lines[k][at + 1 :]
            case "cut":
                lines[k] = lines[k][:at]
            case "double":
                lines.insert(k, lines[k])
            case "swap":
                lines[k], lines[other] = lines[other], lines[k]
            case "insert":
                lines[k] = lines[k][:at] + draw(st.sampled_from([b"\0", b"\xff", b"\r\n", b"\n", b"{"])) + lines[k][at:]
            case "junk":
                lines[k] = _junk_in(draw, lines[k])
    bom = draw(st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf"]))
    return bom + draw(st.sampled_from([b"\n", b"\n", b"\r\n"])).join(lines) + b"\n"


def _junk_in(draw: st.DrawFn, line: bytes) -> bytes:
    try:
        row = json.loads(line)
        return with_junk(row, draw(st.sampled_from(sorted(row))), draw(st.sampled_from(RAW)))
    except (ValueError, TypeError, AttributeError):  # another accident came first
        return line


@contextmanager
def nothing_starts() -> Iterator[None]:
    """A process that is started here is an AssertionError."""
    never = AssertionError("a process was started")
    with mock.patch("subprocess.Popen", side_effect=never), mock.patch.object(os, "fork", side_effect=never):
        yield
