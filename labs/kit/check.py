"""Predictions that are recorded, and exercises that check themselves by running what the learner wrote.

    guess = predict(1.8, "speed-up of DDP on 2 ranks", unit="x")
    check("03.1", my_function)      # prints "to do", "passed" or "not yet" with what went wrong
    show_solution("03.1")

A checker takes the learner's function and runs in a separate process. It returns if the answer is right and raises
`Mistake` if it knows what went wrong. Any other exception is explained as an error in the learner's code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import linecache
import math
import numbers
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from labs.kit import room, supervise, timeouts
from labs.kit.errors import BadInput, brief, require
from labs.kit.fork_server import start_fork_server


class Prediction(float):
    """A number the learner wrote down before measuring; NaN if they haven't decided yet."""

    what: str
    unit: str

    def __new__(cls, value: float, what: str, unit: str = "") -> Prediction:
        self = super().__new__(cls, value)
        self.what, self.unit = what, unit
        return self

    @property
    def value(self) -> float:
        """The plain number, in `unit`."""
        return float(self)

    def __repr__(self) -> str:
        number = "not made yet" if math.isnan(self) else f"{float(self):g} {self.unit}".rstrip()
        return f"your prediction: {number} ({self.what})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Prediction, (float(self), self.what, self.unit)

    def reveal(self, measured: Any, kind: str = "measured") -> None:
        """Print the guess and a number or Estimate of this `kind`: "You said 2x; measured 1.06x (1.01 to 1.10)."

        With COURSE_ROOM set, saves both there.
        """
        value = float(getattr(measured, "value", measured))
        low, high = (float(getattr(measured, end, value)) for end in ("low", "high"))
        room.keep_prediction(self.what, self.unit, float(self), value, low, high, kind)
        said = "You didn't guess" if math.isnan(self) else f"You said {_with_unit(f'{float(self):g}', self.unit)}"
        interval = f" ({quantity(low)} to {quantity(high)})" if low < high else ""
        counted = isinstance(measured, numbers.Integral)
        answer = _with_unit(f"{measured:,}", self.unit) if counted else quantity(value, self.unit)
        print(f"{said}; {kind} {answer}{interval}.")

    def mark(self, ax: Any, row: float | None = None) -> None:
        """Draw the guess on the x axis of `ax`: a dashed line across it, or across one `row` of horizontal bars."""
        if math.isnan(self):
            return
        color = "#D55E00"
        if row is None:
            ax.axvline(float(self), color=color, linestyle="--")
        else:
            ax.vlines(float(self), row - 0.42, row + 0.42, color=color, linestyle="--", linewidth=2.5)
        place = (float(self), 0.5 if row is None else row + 0.5)
        across = "axes fraction" if row is None else "data"
        ax.annotate(
            "your guess", place, xycoords=("data", across), color=color, ha="center", va="center", fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def quantity(value: float, unit: str = "") -> str:
    """Format `value` with 2 or 3 digits and its unit: "1.06x", "12.3 ms", "0.35 s", "86.0%"."""
    size = abs(value)
    text = f"{value:,.0f}" if size >= 100 or not size else f"{value:.{1 if size >= 10 else 2}f}"
    text = f"{value:.2g}" if 0 < size < 0.1 else text
    return _with_unit(text, unit)


def _with_unit(number: str, unit: str) -> str:
    return f"{number}{unit}" if unit in ("x", "%", "") else f"{number} {unit}"


def predict(value: float | None, what: str, unit: str = "") -> Prediction:
    """Return a Prediction of `what`, in `unit`, and save it in the room if there is one. None means not decided yet."""
    if value is None or value is Ellipsis or repr(value) == "TODO":
        value = math.nan
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number, f"predict() needs a number for the {what}, for example 1.5, not {value!r}")
    require(not math.isinf(value), f"predict() needs a finite number for the {what}")
    if not math.isnan(value):
        room.keep_prediction(what, unit, float(value))
    return Prediction(value, what, unit)


class _Todo:
    """What an exercise's stub returns. A singleton, even after pickling."""

    def __repr__(self) -> str:
        return "TODO"

    def __reduce__(self) -> str:
        return "TODO"


TODO = _Todo()


@dataclass(frozen=True)
class Exercise:
    """An exercise: its task, its checker and a reference solution."""

    task: str
    checker: Callable[[Callable[..., Any]], None]
    reference: Callable[..., Any]
    timeout_s: float = timeouts.EXERCISE_S


@dataclass(frozen=True)
class Outcome:
    """Result of one check. `state` is "to do", "passed" or "not yet"; the learner reads `text`."""

    state: str
    text: str

    @property
    def feedback(self) -> str:
        """What was wrong, without the exercise's id; "" if nothing was."""
        return self.text.partition(" not yet: ")[2] if self.state == "not yet" else ""


def check(exercise_id: str, candidate: Any, solutions: bool = False) -> None:
    """Run `candidate` against exercise `exercise_id` and print the outcome.

    Errors in the learner's code are explained, not raised. With `solutions`, checks the reference instead of the
    candidate, and raises AssertionError if it fails.
    """
    outcome = examine(exercise_id, get_exercise(exercise_id).reference if solutions else candidate)
    print(outcome.text)
    if not solutions:
        room.keep_outcome(exercise_id, outcome.state, outcome.feedback)
    assert outcome.state == "passed" or not solutions, f"the reference solution fails: {outcome.text}"


def examine(exercise_id: str, candidate: Any) -> Outcome:
    """Return the outcome that `check` prints."""
    exercise = get_exercise(exercise_id)
    if _is_todo(candidate):
        return Outcome("to do", f"{exercise_id} to do: {exercise.task}")
    problem = _signature_problem(candidate, exercise.reference) or _run(exercise, candidate)
    if problem is TODO:
        return Outcome("to do", f"{exercise_id} to do: {exercise.task}")
    if problem:
        return Outcome("not yet", f"{exercise_id} not yet: {problem}")
    return Outcome("passed", f"{exercise_id} passed: {exercise.task}")


def _run(exercise: Exercise, candidate: Callable[..., Any]) -> Any:
    """Return None if the checker accepts the candidate, TODO if the candidate still returns it, otherwise the feedback.

    Runs in a separate process, which is killed together with its ranks after the exercise's timeout.
    """
    import cloudpickle

    from labs.kit.rank_process import cells_here

    try:
        body = cloudpickle.dumps((exercise.checker, candidate, cells_here()))
    except Exception as error:
        return f"it can't be sent to another process: {_first_line(error_text(error))}.\n    Hint: {UNSENDABLE}"
    server = start_fork_server()
    server.wait_until_warm(lambda: None)
    folder = server.run_folder()
    try:
        with supervise.forked(_judge, body, folder, method="forkserver") as child:
            child.join(exercise.timeout_s)
            code = child.exitcode
        print((folder / "output").read_text("utf-8", "replace") if (folder / "output").exists() else "", end="")
        if code is None:
            return f"it did not finish within {exercise.timeout_s:g} s.\n    Hint: {TOO_LONG}"
        if (folder / "result").exists():
            return cloudpickle.loads((folder / "result").read_bytes())
        how = f"os._exit({code})" if code >= 0 else signal.Signals(-code).name
        return _left(how)
    finally:
        supervise.clear(folder)


def _left(how: str) -> str:
    return (
        f"your code ends the whole process ({how}), so nothing after it would run.\n"
        "    Hint: return the answer; if something can't be done, raise an error that says why."
    )


def _judge(body: bytes, folder: Path) -> None:
    """Run the checker in its own process; write its verdict and everything printed into `folder`."""
    import cloudpickle

    from labs.kit.rank_process import know_cells, own_children

    supervise.announce(folder, "0")  # so that it's killed with the kernel
    out = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    own_children(folder)
    start_fork_server(forked=True).ready.touch()  # before torch starts threads, which a fork would lack
    checker, candidate, cells = cloudpickle.loads(body)
    know_cells(cells)
    found: Any = None
    try:
        checker(_watch_for_todo(candidate))
    except _ReturnedTodo:
        found = TODO
    except Mistake as mistake:
        found = str(mistake)
    except SystemExit:
        found = _left("exit() or SystemExit")
    except BaseException as error:  # a learner's class may not derive from Exception
        found = TODO if "_ReturnedTodo" in error_text(error) else describe_error(error, candidate)
    (folder / "new").write_bytes(cloudpickle.dumps(found))
    (folder / "new").replace(folder / "result")
    sys.stdout.flush()
    os._exit(0)  # despite anything the learner's code has left running


class _ReturnedTodo(Exception):
    """The candidate returned TODO when it ran."""


def _watch_for_todo(candidate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `candidate` wrapped so that returning TODO raises. Generators and classes are returned unchanged."""
    if not inspect.isfunction(candidate) or inspect.isgeneratorfunction(candidate):
        return candidate

    @functools.wraps(candidate)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = candidate(*args, **kwargs)
        if type(result).__name__ == "_Todo":  # by name: this may run in another process
            raise _ReturnedTodo("_ReturnedTodo")
        return result

    return watched


def _is_todo(candidate: Any) -> bool:
    """Return whether `candidate` is TODO, or a function (or class with a method) that mentions it. Runs nothing."""
    if isinstance(candidate, _Todo) or _is_stub(candidate):
        return True
    if isinstance(candidate, type):
        return any(_is_todo(member) for member in vars(candidate).values())
    if not isinstance(candidate, FunctionType | MethodType):
        return False
    return any(name == "TODO" or candidate.__globals__.get(name) is TODO for name in _names(candidate.__code__))


def _is_stub(candidate: Any) -> bool:
    """Return whether a function's body is `...`. A lambda that returns None is an answer."""

    def stub() -> None: ...

    code = getattr(candidate, "__code__", None)
    return getattr(code, "co_code", None) == stub.__code__.co_code and candidate.__name__ != "<lambda>"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _signature_problem(candidate: Any, reference: Callable[..., Any]) -> str | None:
    if not callable(candidate):
        return (
            f"check() needs the function itself, not {type(candidate).__name__} {brief(candidate)}.\n"
            "    Hint: leave out the parentheses after the function's name."
        )
    wanted = inspect.signature(reference)
    slots = [object() for p in wanted.parameters.values() if p.default is p.empty and p.kind in (0, 1)]
    try:
        given = inspect.signature(candidate)
    except (ValueError, TypeError):  # a builtin without a signature, an object with a strange one
        return None
    try:
        given.bind(*slots)
    except TypeError:
        name = getattr(candidate, "__name__", "the function")
        return f"{name} must take the arguments ({', '.join(wanted.parameters)}); yours takes {shown(str(given), 300)}."
    return None


TOO_LONG = "look for a loop that never ends, or a rank that waits for a collective the others never call."
UNSENDABLE = "your function uses something that belongs to this process, such as a lock, an open file or a generator."


def exercise_ids() -> list[str]:
    """Return the ids of all exercises of the course, in order."""
    labs = Path(__file__).parents[1]
    names = [f"labs.exercises.{p.stem}" for p in sorted((labs / "exercises").glob("nb*.py"))]
    return sorted(i for name in names for i in importlib.import_module(name).EXERCISES)


def get_exercise(exercise_id: str) -> Exercise:
    """Return the exercise with this id, for example "03.1". BadInput lists the valid ids."""
    notebook = str(exercise_id).partition(".")[0]
    with contextlib.suppress(ModuleNotFoundError, KeyError):
        return importlib.import_module(f"labs.exercises.nb{notebook}").EXERCISES[exercise_id]
    raise BadInput(f"there is no exercise {exercise_id!r}; there are {', '.join(exercise_ids())}")


def show_solution(exercise_id: str) -> None:
    """Show the source of the reference solution. In a room, only after the instructor has revealed it."""
    exercise = get_exercise(exercise_id)
    if not room.revealed(exercise_id):
        print(f"{exercise_id}: not revealed yet by your instructor; try it, and ask for a hint if you are stuck")
        return
    source = inspect.getsource(exercise.reference).rstrip()
    try:
        from IPython import get_ipython
        from IPython.display import Markdown, display
    except ImportError:
        get_ipython = None
    if get_ipython is not None and hasattr(get_ipython(), "kernel"):
        display(Markdown(f"```python\n{source}\n```"))
    else:
        print(source)


FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
MAX_FRAMES = 5
LONGEST = 1500  # characters shown to a learner, for functions that return ten thousand numbers


class Mistake(Exception):
    """A mistake that a checker recognised: what is wrong, and a hint at what to do instead."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        what = shown(self.what)
        return f"{what}\n    Hint: {self.hint}" if self.hint else what


def shown(text: str, most: int = LONGEST) -> str:
    """Cut `text` to `most` characters and escape lone surrogates, so that every screen and file accepts it."""
    cut = text if len(text) <= most else text[: most - 3] + "..."
    return cut.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return `str(error)`, or a replacement if the learner's class raises in __str__."""
    try:
        return str(error)
    except Exception as e:
        return f"(its text cannot be shown: its __str__ raises {type(e).__name__})"


def describe_error(error: BaseException, candidate: Callable[..., Any]) -> str:
    """Return the error in one line, the learner's frames and a hint."""
    root = _root(error)
    text, whole = f"{type(root).__name__}: {error_text(root)}".strip().rstrip(":"), error_text(error)
    frames = list(_remote_frames(whole, candidate))  # if it was raised on a rank, its text holds a traceback
    if frames:
        text = _last_error_line(whole)
    frames = frames or list(_own_frames(root, candidate))
    lines = [f"your code raised {_first_line(text)}" if frames else f"running it raised {_first_line(text)}"]
    lines += [_in_one_line(*frame) for frame in frames[-MAX_FRAMES:]]
    lines += [f"    Hint: {hint}"] if (hint := _hint(text)) else []
    return "\n".join(lines)


def _root(error: BaseException) -> BaseException:
    """Return the first exception of a chain of `raise ... from`."""
    seen = set[int]()
    while error.__cause__ is not None and id(error) not in seen:  # two exceptions may name each other as cause
        seen.add(id(error))
        error = error.__cause__
    return error


def _in_one_line(number: int, name: str, source: str) -> str:
    return shown(f"    line {number}, in {name}:  {source}".rstrip(": "), 300)


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "an error"
    return shown(line, 300)


def _learner_file(filename: str, candidate: Callable[..., Any]) -> bool:
    """Return whether a file holds the candidate, or another cell of a notebook."""
    code = getattr(candidate, "__code__", None)
    own = code.co_filename if code else None
    library = filename.startswith(sysconfig.get_paths()["purelib"])
    return filename == own or (not library and ("ipykernel_" in filename or filename.startswith("<ipython-input")))


def _own_frames(error: BaseException, candidate: Callable[..., Any]) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, function, source line) of this process's frames that belong to the learner."""
    for frame in traceback.extract_tb(error.__traceback__):
        if _learner_file(frame.filename, candidate):
            yield frame.lineno or 0, frame.name, frame.line or ""


def _remote_frames(text: str, candidate: Callable[..., Any]) -> Iterator[tuple[int, str, str]]:
    """Yield the same from a traceback that arrived as text. The rank lacked the text of notebook cells; we have it."""
    for match in FRAME.finditer(text):
        if _learner_file(match["file"], candidate):
            line = linecache.getline(match["file"], int(match["line"])).strip()
            yield int(match["line"]), match["name"], line


def _last_error_line(text: str) -> str:
    """Return the line "ValueError: ..." that ends the first traceback in `text`."""
    lines = text[FRAME.search(text).start() :].splitlines()  # type: ignore[union-attr]
    ends = (s for s in lines[1:] if re.match(r"[A-Za-z_][\w.]*(:|$)", s) and not s.startswith("File "))
    return next(ends, lines[-1])


HINTS = {
    r"NameError": "is the name spelled right, and imported or defined in this notebook?",
    r"NoneType": "a value is None: does the function end without `return`?",
    r"default process group has not been initialized": "run this on ranks that have joined the group.",
    r"initialize the default process group twice": "a process joins the default group once.",
    r"element 0 of tensors does not require grad": "was the loss, or its input, detached?",
    r"backward through the graph a second time": "each backward() needs its own forward pass.",
    r"must match|shapes cannot be multiplied|size mismatch": "print the shapes just before.",
    r"[Tt]imed? ?out|Connection closed by peer": "do all ranks call the same collectives, in the same order?",
    r"unexpected keyword argument|positional argument": "compare the call with the function's signature.",
}


def _hint(text: str) -> str:
    return next((hint for pattern, hint in HINTS.items() if re.search(pattern, text)), "")
