"""SIGINT and SIGTERM that wait until it is safe: nothing breaks into the start or the end of a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM instead of letting them break in anywhere; deliver them at the end.

    Yields the list they are noted in, for the caller to look at now and then. Whatever the block raises after
    one was noted is dropped for it. Does nothing outside of the main thread, where no signal arrives.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (None, signal.SIG_IGN):
                before[number] = signal.signal(number, lambda n, frame: noted.append(n))
        yield noted
    except BaseException:
        if not noted:
            raise
    finally:
        for number in reversed(before):  # SIGINT last: from then on it may break in again
            signal.signal(number, before[number])
    if noted:
        if signal.getsignal(noted[0]) is not signal.default_int_handler:
            signal.raise_signal(noted[0])  # whoever handles it may end the process, or raise
        raise _interrupted() from None


def _interrupted() -> KeyboardInterrupt:
    """No subclass: for any other class Python would not end a script by the signal, as a shell expects it."""
    error = KeyboardInterrupt("all ranks have been stopped")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]  # IPython's, instead of the launcher's frames
    return error
