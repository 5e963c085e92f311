"""Python's own functions for files, as they are before the scratch folder takes their place."""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import types

READS = ("stat", "lstat", "access", "readlink", "statvfs", "listxattr", "getxattr", "pathconf")
"""Functions of os that look at a path, which comes first."""
CHANGES = ("chmod", "chown", "lchown", "truncate", "utime", "setxattr", "removexattr", "mkfifo", "mknod")
"""Functions of os that change a file in place, or make one."""
true = types.SimpleNamespace(
    open_file=io.open,
    FileIO=io.FileIO,
    **{
        name: getattr(os, name)
        for name in (
            *READS,
            *CHANGES,
            "open",
            "mkdir",
            "rmdir",
            "unlink",
            "remove",
            "rename",
            "replace",
            "link",
            "symlink",
            "listdir",
            "scandir",
            "chdir",
            "getcwd",
            "getcwdb",
            "putenv",
            "system",
        )
        if hasattr(os, name)
    },
)
"""Python's own functions. Those of os.path call what is replaced, so that none of them is used here but for names."""


def make_folders(path: str) -> None:
    """Those that are not there. os.makedirs calls what is replaced."""
    try:
        true.mkdir(path)
    except FileExistsError:
        pass
    except FileNotFoundError:
        make_folders(os.path.dirname(path))
        make_folders(path)


def copy(old: str, new: str) -> None:
    """With mode and times; a link as a link. With true functions alone."""
    found = true.lstat(old)
    if stat.S_ISLNK(found.st_mode):
        true.symlink(true.readlink(old), new)
        return
    with true.open_file(old, "rb") as source, true.open_file(new, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    true.chmod(new, stat.S_IMODE(found.st_mode) | stat.S_IWUSR)
    true.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))


def move(old: str, new: str) -> None:
    """A file also onto another disk, as the scratch folder may be on another one than what the script sees."""
    try:
        true.replace(old, new)
    except OSError as e:
        if e.errno != errno.EXDEV or stat.S_ISDIR(true.lstat(old).st_mode):
            raise
        part = f"{new}.{os.getpid()}.part"
        copy(old, part)
        true.replace(part, new)
        true.unlink(old)
