"""A temporary folder that goes away with the process that made it, and takes with it what was announced in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labs.kit import guardian
from labs.kit.backstage import SOCKET_PATH_LIMIT


@contextmanager
def guarded_folder(parent: Path | None = None, sockets: bool = False) -> Iterator[Path]:
    """A new folder, removed at the end of the block, or when this process dies, also by SIGKILL.

    Process groups announced in it, as labs.kit.guardian says, are killed then. With `sockets` its path is short enough
    for sockets in it.
    """
    if sockets and len(os.fsencode(tempfile.gettempdir())) >= SOCKET_PATH_LIMIT:
        parent = Path("/tmp")
    root = tempfile.mkdtemp(prefix="labs-", dir=parent)
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", guardian.__file__, root, str(os.getpid())],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd="/",
    )  # fmt: skip
    try:
        yield Path(root)
    finally:
        watch.stdin.close()  # it kills and removes now
        watch.wait(timeout=30)
