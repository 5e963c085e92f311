"""Whatever a learner hands to check(), the answer is a short text; nothing random ever passes."""

import contextlib
import functools
import io
import itertools
import math
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from junk import values

from labs.kit.check import Outcome, examine, exercise_ids

ON_RANKS = "00.3 02.1 02.4 03.3 03.4 06.4 07.1 07.2 08.1 08.2 10.1 10.2 10.3".split()
"""Their checkers start processes."""
QUICK_ON_RANKS = "03.3 06.4".split()


def _raise(*_, **__):
    raise RuntimeError("no\n" * 50)


class Evil:
    """Raises whatever is done with it."""

    __repr__ = __eq__ = __len__ = __iter__ = __float__ = __bool__ = __getitem__ = __hash__ = __index__ = _raise
    __getattr__ = _raise


class Agreeable:
    """Equal to everything, and a number."""

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True
    __hash__ = __float__ = lambda *_: 1

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self


class Unspeakable(Exception):
    """An error without a text, of a class without a name."""

    __str__ = __repr__ = _raise


class Odd(BaseException):
    """No Exception."""


ROUND: list = []
ROUND.append(ROUND)
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), [])

MADE = [
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: 1.0,
    lambda: -1,
    lambda: math.nan,
    lambda: math.inf,
    lambda: 10**400,
    lambda: 10**5000,
    lambda: 1j,
    lambda: "x" * 10**5,
    lambda: "\ud800",
    lambda: [],
    lambda: (),
    lambda: {},
    lambda: [*range(10**5)],
    lambda: ROUND,
    lambda: DEEP,
    lambda: (i for i in "abc"),
    itertools.count,
    Evil,
    Agreeable,
    lambda: [Evil()] * 3,
    lambda: (Agreeable(),) * 2,
    lambda: (Agreeable(),) * 3,
    lambda: torch.randn(3),
    lambda: torch.tensor(1.0),
    lambda: torch.full((2, 2), math.nan),
    lambda: torch.empty(3, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.randn(2, dtype=torch.complex64),
    lambda: numpy.array([None, 1]),
    lambda: numpy.float64("nan"),
    lambda: [torch.randn(2)] * 3,
    lambda: ("loader", math.nan),
    lambda: int,
    lambda: sys,
    lambda: torch.nn.Linear(2, 2),
    lambda: range(10**12),
]
"""What random functions return, made anew each time."""

ERRORS = [
    ValueError(),
    Unspeakable(),
    Odd("odd"),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    RecursionError(),
    BaseExceptionGroup("several", [Odd()]),
    ValueError("\ud800\0"),
    ValueError("line\n" * 10_000 + "x" * 10**5),
]


def _raises(error):
    def raises(*_, **__):
        raise type(error)(*error.args)  # a new one, without the last one's traceback

    return raises


def _each_the_cause_of_the_other(*_, **__):
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    raise one


def _calls_itself(*args, **kwargs):
    return _calls_itself(*args, **kwargs)


def _empties(*args, **__):
    for x in args:
        getattr(x, "clear", int)()


def _yields(*_, **__):
    yield 1


async def _waits(*_, **__):
    return 1


class BadSignature:
    """Something to call that inspect cannot look at."""

    __signature__ = "x"

    def __call__(self, *_):
        return 3


made = st.sampled_from(MADE).map(lambda make: lambda *_, **__: make())
constant = values.map(lambda value: lambda *_, **__: value)
several = st.lists(st.sampled_from(MADE), max_size=3).map(lambda many: lambda *_, **__: tuple(m() for m in many))
functions = st.one_of(made, made, constant, several, st.sampled_from(ERRORS).map(_raises))
THINGS = [
    _each_the_cause_of_the_other,
    _calls_itself,
    _empties,
    _yields,
    _waits,
    BadSignature(),
    print,
    int,
    dict,
    len,
    max,
    Evil(),
    Agreeable(),
    ROUND,
    DEEP,
    10**5000,
    "x" * 10**5,
    torch.add,
    staticmethod(len),
    functools.partial(max, 1),
    lambda: 1,
    3.0,
    torch.zeros(2),
    ValueError,
]
things = st.sampled_from(range(len(THINGS))).map(THINGS.__getitem__)  # hypothesis looks into what it samples from


def judge(exercise_id, candidate):
    """The outcome says in a text of a bearable length what is wrong."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        outcome = examine(exercise_id, candidate)
    assert isinstance(outcome, Outcome) and outcome.state == "not yet", outcome
    assert 10 < len(outcome.text) < 3000, outcome.text[:200]
    outcome.text.encode()


@pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("exercise_id", [i for i in exercise_ids() if i not in ON_RANKS])
@settings(max_examples=8)
@given(st.one_of(functions, functions, things))
def test_any_function_gets_an_answer(exercise_id, candidate):
    judge(exercise_id, candidate)


def test_these_were_once_a_traceback_or_a_hang():
    for candidate in (Evil(), BadSignature(), DEEP, 10**5000, _each_the_cause_of_the_other, *map(_raises, ERRORS)):
        judge("00.2", candidate)


@pytest.mark.parametrize(
    "exercise_id", [pytest.param(i, marks=() if i in QUICK_ON_RANKS else pytest.mark.long) for i in ON_RANKS]
)
@settings(max_examples=2)
@given(st.one_of(made, st.sampled_from(ERRORS[:4]).map(_raises)))
def test_any_function_on_ranks_gets_an_answer(exercise_id, candidate):
    judge(exercise_id, candidate)


def test_an_interrupt_ends_the_check_and_is_no_answer():
    with pytest.raises(KeyboardInterrupt):
        examine("00.2", _raises(KeyboardInterrupt()))
