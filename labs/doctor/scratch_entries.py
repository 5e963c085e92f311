"""What os.scandir gives of a folder of which the script has written or removed a part."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Any

from labs.doctor.true_files import true


class Entries:
    """What os.scandir gives: an iterator that can be closed."""

    def __init__(self, scratch: Any, path: Any, place: str) -> None:
        seen, written = scratch.names(place)
        self._iterator = iter([Entry(scratch, path, place, name) for name in (*seen, *written)])

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Entry:
        return next(self._iterator)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""


class Entry:
    """What os.scandir gives of each: os.DirEntry cannot be made."""

    def __init__(self, scratch: Any, path: Any, place: str, name: str) -> None:
        self._scratch, self._place = scratch, os.path.join(place, name)
        self.name = os.fsencode(name) if isinstance(path, bytes) else name
        self.path = os.path.join(path, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Of what the script sees there."""
        place = self._scratch.followed(self._place) if follow_symlinks else self._place
        return true.lstat(self._scratch.at(place))

    def inode(self) -> int:
        """Its number in its file system."""
        return self.stat(follow_symlinks=False).st_ino

    def is_symlink(self) -> bool:
        """Whether it is one itself."""
        return self._is(stat.S_IFLNK, False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Or leads to one."""
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Or leads to one."""
        return self._is(stat.S_IFREG, follow_symlinks)

    def _is(self, kind: int, follow: bool) -> bool:
        try:
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        except OSError:
            return False
