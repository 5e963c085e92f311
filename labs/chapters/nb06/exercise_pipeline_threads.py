"""Run functions in threads that end, also when a learner's code does not."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from labs.kit.check import Mistake


class Stopped(BaseException):
    """Raised in a thread that has to end. Not an Exception, so that `except Exception` cannot swallow it."""


def together(calls: Sequence[Callable[[], Any]], limit_s: float, stop: Callable[[], None] = lambda: None) -> bool:
    """Run each call in a thread of its own; False if one was not done after `limit_s` seconds, and was ended.

    `stop` wakes those that wait. A call handles its own exceptions. A thread that sleeps in C ends when it wakes.
    """
    threads = [threading.Thread(target=_quiet, args=(call,), daemon=True) for call in calls]
    for t in threads:
        t.start()
    until = time.monotonic() + limit_s
    try:
        for t in threads:
            t.join(max(0.0, until - time.monotonic()))
        return not any(t.is_alive() for t in threads)
    finally:  # an interrupt passes here as well
        stop()
        _end([t for t in threads if t.is_alive()])


def _quiet(call: Callable[[], Any]) -> None:
    with contextlib.suppress(Stopped):
        call()


def _end(threads: Sequence[threading.Thread]) -> None:
    until = time.monotonic() + 1.0
    for t in threads:
        while t.is_alive() and time.monotonic() < until:
            # Python's only way to end a thread from outside: it raises there before the next bytecode.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(t.ident or 0), ctypes.py_object(Stopped))
            t.join(0.05)


def in_time(call: Callable[[], Any], limit_s: float, late: Mistake) -> Any:
    """What `call()` returns or raises; `late` is raised if that takes more than `limit_s` seconds."""
    ended: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except Stopped:
            raise
        except BaseException as e:
            ended.append((None, e))

    if not together([run], limit_s) or not ended:
        raise late
    value, error = ended[0]
    if error is not None:
        raise error
    return value
