"""What a learner reads when their code fails: the mistake by name, or their own lines of the traceback."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
MAX_FRAMES = 5


class Mistake(Exception):
    """A mistake that a checker recognised: what was done, and a hint at what to do instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}\n    Hint: {self.hint}" if self.hint else self.what


def describe_error(error: BaseException, candidate: Callable[..., Any]) -> str:
    """The error in one line, the learner's own frames, and a hint. Frames of other code are left out."""
    root = _root(error)
    text = f"{type(root).__name__}: {root}".strip().rstrip(":")
    frames = list(_remote_frames(str(error), candidate))  # raised on a rank: its text holds a traceback
    if frames:
        text = _last_error_line(str(error))
    frames = frames or list(_own_frames(root, candidate))
    lines = [f"your code raised {_first_line(text)}" if frames else f"running it raised {_first_line(text)}"]
    lines += [f"    line {number}, in {name}:  {source}".rstrip(": ") for number, name, source in frames[-MAX_FRAMES:]]
    lines += [f"    Hint: {hint}"] if (hint := _hint(text)) else []
    return "\n".join(lines)


def _root(error: BaseException) -> BaseException:
    """The exception that started it all, when one was raised from another."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "an error"
    return line if len(line) <= 300 else line[:297] + "..."


def _learner_file(filename: str, candidate: Callable[..., Any]) -> bool:
    """True for the file (or notebook cell) that holds the candidate, and for other cells of a notebook."""
    code = getattr(candidate, "__code__", None)
    own = code.co_filename if code else None
    library = filename.startswith(sysconfig.get_paths()["purelib"])
    return filename == own or (not library and ("ipykernel_" in filename or filename.startswith("<ipython-input")))


def _own_frames(error: BaseException, candidate: Callable[..., Any]) -> Iterator[tuple[int, str, str]]:
    """(line number, function, source line) of the frames of this process that belong to the learner."""
    for frame in traceback.extract_tb(error.__traceback__):
        if _learner_file(frame.filename, candidate):
            yield frame.lineno or 0, frame.name, frame.line or ""


def _remote_frames(text: str, candidate: Callable[..., Any]) -> Iterator[tuple[int, str, str]]:
    """The same from a traceback that arrived as text; the rank had no source of a notebook's cell, we do."""
    for match in FRAME.finditer(text):
        if _learner_file(match["file"], candidate):
            line = linecache.getline(match["file"], int(match["line"])).strip()
            yield int(match["line"]), match["name"], line


def _last_error_line(text: str) -> str:
    """The "ValueError: ..." line that ends the first traceback in `text`."""
    lines = text[FRAME.search(text).start() :].splitlines()  # type: ignore[union-attr]
    ends = (s for s in lines[1:] if re.match(r"[A-Za-z_][\w.]*(:|$)", s) and not s.startswith("File "))
    return next(ends, lines[-1])


HINTS = {
    r"NameError": "is the name spelled right, and imported or defined in this notebook?",
    r"NoneType": "a value is None: does the function end without `return`?",
    r"default process group has not been initialized": "this must run on ranks that have joined the group.",
    r"initialize the default process group twice": "a process joins the default group once.",
    r"element 0 of tensors does not require grad": "was the loss, or its input, detached?",
    r"backward through the graph a second time": "each backward() needs a forward pass of its own.",
    r"must match|shapes cannot be multiplied|size mismatch": "print the shapes just before.",
    r"[Tt]imed? ?out|Connection closed by peer": "do all ranks call the same collectives, in the same order?",
    r"unexpected keyword argument|positional argument": "compare the call with the function's signature.",
}


def _hint(text: str) -> str:
    return next((hint for pattern, hint in HINTS.items() if re.search(pattern, text)), "")
