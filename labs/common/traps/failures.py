"""The one line that says why a DataLoader failed."""

from __future__ import annotations

import time
import traceback

WORDS = 200
"""Maximum length of an error text in a record, in characters."""


def words(error: BaseException) -> str:
    """Return the decisive line: the last one of an error from a worker, otherwise what torch says about the worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith("Caught "):
        return lines[-1][:WORDS]
    of_worker = "" if isinstance(error, ConnectionError | EOFError) else loader_error(error)
    return (of_worker or lines[0])[:WORDS]


def loader_error(error: BaseException) -> str:
    """Return torch's message if `error` says that a worker died or took too long; otherwise "".

    The signal or exit code is in the cause. If a worker dies while its batch is on its way, the first sign is a broken
    connection; moments later, torch's SIGCHLD handler raises the reason.
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
