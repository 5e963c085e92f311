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
LONGEST = 1500  # characters of what a learner reads: nobody reads the ten thousand numbers that a function returned


class Mistake(Exception):
    """A mistake that a checker recognised: what was done, and a hint at what to do instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        what = shown(self.what)
        return f"{what}\n    Hint: {self.hint}" if self.hint else what


def shown(text: str, most: int = LONGEST) -> str:
    """`text` as any screen and file can take it: no half of a surrogate pair, at most `most` characters."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return cut.encode("utf-8", "backslashreplace").decode()


def say(error: BaseException) -> str:
    """`str(error)`, or what takes its place if a learner's own class cannot give it."""
    try:
        return str(error)
    except Exception as e:
        return f"(its text cannot be shown: its __str__ raises {type(e).__name__})"


def describe_error(error: BaseException, candidate: Callable[..., Any]) -> str:
    """The error in one line, the learner's own frames, and a hint. Frames of other code are left out."""
    root = _root(error)
    text, whole = f"{type(root).__name__}: {say(root)}".strip().rstrip(":"), say(error)
    frames = list(_remote_frames(whole, candidate))  # raised on a rank: its text holds a traceback
    if frames:
        text = _last_error_line(whole)
    frames = frames or list(_own_frames(root, candidate))
    lines = [f"your code raised {_first_line(text)}" if frames else f"running it raised {_first_line(text)}"]
    lines += [_in_one_line(*frame) for frame in frames[-MAX_FRAMES:]]
    lines += [f"    Hint: {hint}"] if (hint := _hint(text)) else []
    return "\n".join(lines)


def _root(error: BaseException) -> BaseException:
    """The exception that started it all, when one was raised from another."""
    seen = set[int]()
    while error.__cause__ is not None and id(error) not in seen:  # two may name each other
        seen.add(id(error))
        error = error.__cause__
    return error


def _in_one_line(number: int, name: str, source: str) -> str:
    return shown(f"    line {number}, in {name}:  {source}".rstrip(": "), 300)


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "an error"
    return shown(line, 300)


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
