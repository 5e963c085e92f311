"""Predictions that are kept, and exercises that check themselves by running what the learner wrote.

    guess = predict(1.8, "speed-up of DDP on 2 ranks", unit="x")
    check("03.1", my_function)      # prints "to do", "passed" or "not yet" with what went wrong
    show_solution("03.1")

A checker is a function of one argument, the learner's function. It returns when all is well and raises
`Mistake` when it knows what went wrong; anything else that escapes from it is explained as an error in the
learner's code.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

from labs.kit import room
from labs.kit.cli import BadInput
from labs.kit.feedback import Mistake, describe_error, say, shown
from labs.kit.prediction import Prediction, predict
from labs.kit.strict_json import brief

__all__ = ["TODO", "Exercise", "Mistake", "Outcome", "Prediction", "check", "examine", "exercise_ids",
           "get_exercise", "predict", "show_solution"]  # fmt: skip


class _Todo:
    """What an exercise's stub returns. There is one, also after pickling."""

    def __repr__(self) -> str:
        return "TODO"

    def __reduce__(self) -> str:
        return "TODO"


TODO = _Todo()


@dataclass(frozen=True)
class Exercise:
    """What is asked, how it is judged, and one answer."""

    title: str
    checker: Callable[[Callable[..., Any]], None]
    reference: Callable[..., Any]
    timeout_s: float = 25.0


@dataclass(frozen=True)
class Outcome:
    """Result of one check: state is "to do", "passed" or "not yet"; text is what the learner reads."""

    state: str
    text: str

    @property
    def feedback(self) -> str:
        """What was found wrong, without the exercise's id; "" if nothing was."""
        return self.text.partition(" not yet: ")[2] if self.state == "not yet" else ""


def check(exercise_id: str, candidate: Any, solutions: bool = False) -> None:
    """Run `candidate` against exercise `exercise_id` and print the outcome.

    Errors in the learner's code are explained, never raised. With `solutions` the reference is judged in the
    candidate's place, and AssertionError is raised if it does not pass.
    """
    outcome = examine(exercise_id, get_exercise(exercise_id).reference if solutions else candidate)
    print(outcome.text)
    if not solutions:
        room.keep_outcome(exercise_id, outcome.state, outcome.feedback)
    assert outcome.state == "passed" or not solutions, f"the reference solution fails: {outcome.text}"


def examine(exercise_id: str, candidate: Any) -> Outcome:
    """What `check` prints, as a value."""
    exercise = get_exercise(exercise_id)
    if _is_todo(candidate):
        return Outcome("to do", f"{exercise_id} to do: {exercise.title}")
    problem = _signature_problem(candidate, exercise.reference) or _run(exercise, candidate)
    if problem is TODO:
        return Outcome("to do", f"{exercise_id} to do: {exercise.title}")
    if problem:
        return Outcome("not yet", f"{exercise_id} not yet: {problem}")
    return Outcome("passed", f"{exercise_id} passed: {exercise.title}")


def _run(exercise: Exercise, candidate: Callable[..., Any]) -> Any:
    """None if the checker is content, TODO if the candidate still returns it, otherwise the feedback."""
    try:
        with _time_limit(exercise.timeout_s):
            exercise.checker(_watch_for_todo(candidate))
    except _ReturnedTodo:
        return TODO
    except Mistake as mistake:
        return str(mistake)
    except _TimeUp:
        return f"it did not finish within {exercise.timeout_s:g} s.\n    Hint: {TOO_LONG}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a learner's own class may be no Exception
        return TODO if "_ReturnedTodo" in say(error) else describe_error(error, candidate)
    return None


class _ReturnedTodo(Exception):
    """The candidate returned TODO when it ran."""


def _watch_for_todo(candidate: Callable[..., Any]) -> Callable[..., Any]:
    """`candidate`, except that returning TODO raises. Generators and classes pass through untouched."""
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
    """True for TODO itself and for a function, or a class with a method, that still mentions it: nothing is run."""
    if isinstance(candidate, _Todo):
        return True
    if isinstance(candidate, type):
        return any(_is_todo(member) for member in vars(candidate).values())
    if not isinstance(candidate, FunctionType | MethodType):
        return False
    return any(name == "TODO" or candidate.__globals__.get(name) is TODO for name in _names(candidate.__code__))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _signature_problem(candidate: Any, reference: Callable[..., Any]) -> str | None:
    if not callable(candidate):
        return (f"check() needs the function itself, not {type(candidate).__name__} {brief(candidate)}.\n"
                "    Hint: leave out the parentheses after the function's name.")  # fmt: skip
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


class _TimeUp(BaseException):
    """Not an Exception, so that a learner's `except Exception` cannot swallow it."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeUp in the main thread after `seconds`; elsewhere only the launcher's own limit holds.

    The alarm acts as an interrupt does, since a launch that is running ends its ranks before it lets one through.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    rang: list[bool] = []

    def ring(*_: Any) -> None:
        rang.append(True)
        if signal.getsignal(signal.SIGINT) in (None, signal.SIG_IGN):
            raise _TimeUp
        signal.raise_signal(signal.SIGINT)

    with _alarm(ring, seconds):
        try:
            yield
        except KeyboardInterrupt:
            if not rang:
                raise
            raise _TimeUp from None


@contextmanager
def _alarm(ring: Callable[..., None], seconds: float) -> Iterator[None]:
    """Call `ring` after `seconds`; an alarm that a test runner has set goes on afterwards."""
    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            left = max(0.01, remaining - (time.monotonic() - started))
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def exercise_ids() -> list[str]:
    """Ids of all exercises of the course, in order."""
    found = sorted((Path(__file__).parents[1] / "chapters").glob("nb*/exercises.py"))
    modules = [importlib.import_module(f"labs.chapters.{p.parent.name}.exercises") for p in found]
    return sorted(i for m in modules for i in m.EXERCISES)


def get_exercise(exercise_id: str) -> Exercise:
    """The exercise with this id, for example "03.1". BadInput names the ids there are."""
    notebook = str(exercise_id).partition(".")[0]
    try:
        return importlib.import_module(f"labs.chapters.nb{notebook}.exercises").EXERCISES[exercise_id]
    except (ModuleNotFoundError, KeyError):
        raise BadInput(f"there is no exercise {exercise_id!r}; there are {', '.join(exercise_ids())}") from None


def show_solution(exercise_id: str) -> None:
    """Show the source of the reference solution, highlighted in a notebook; in a room, once it is revealed there."""
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
