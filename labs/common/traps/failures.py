"""The one line that says why a DataLoader failed."""

from __future__ import annotations

import time
import traceback

WORDS = 200
"""Longest text of an error in a record, in characters."""


def words(error: BaseException) -> str:
    """The one line that says it: of an error from a worker the last line, otherwise what torch says of the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):
        return lines[-1][:WORDS]
    of_worker = "" if isinstance(error, ConnectionError | EOFError) else loader_error(error)
    return (of_worker or lines[0])[:WORDS]


def loader_error(error: BaseException) -> str:
    """torch's words, if `error` says that a worker died or took too long, otherwise nothing.

    The signal or exit code is in the cause. A connection that breaks is the first sign of a worker that dies while
    its batch is on its way; torch raises why it died moments later, from its handler of SIGCHLD.
    """
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader"):
        cause = str(error.__cause__ or "")
        return cause if cause.startswith("DataLoader worker") else str(error)
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, ConnectionError | EOFError) or "_try_get_data" not in frames:
        return ""
    try:
        time.sleep(0.5)
    except RuntimeError as death:
        return str(death)
    return f"DataLoader worker closed its connection ({type(error).__name__})"
