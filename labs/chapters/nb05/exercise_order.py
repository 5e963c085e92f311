"""In which order a save of exercise 05.1 touches its files: what a power cut at the worst moment would leave."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs.chapters.nb05.exercise_drills import Call

Finding = tuple[str, str]
"""What was done, and a hint."""
Files = dict[str, tuple[str, int, str]]
"""{name in the folder: (inode, bytes, checksum)}"""
ORDER = "write to another name in the same folder, flush, os.fsync, close, os.replace, os.fsync of the folder"
RENAMES = ("rename", "replace", "link")


def files_in(folder: Path) -> Files:
    """All files of the folder, and of folders in it."""
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): (str(p.stat().st_ino), p.stat().st_size, _checksum(p)) for p in found}


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Saved:
    """One save that went well: its calls, and the folder before and after it."""

    folder: Path
    calls: list[Call]
    before: Files
    after: Files

    @property
    def written(self) -> dict[str, tuple[str, int]]:
        """{name: (inode, bytes)} of the files that this save made or changed."""
        known = {checksum for _, _, checksum in self.before.values()}
        return {name: (i, size) for name, (i, size, checksum) in self.after.items() if checksum not in known}

    def renames(self) -> Iterator[tuple[int, Call]]:
        yield from ((i, c) for i, c in enumerate(self.calls) if c.what in RENAMES)

    def renamed(self, inode: str) -> tuple[int, Call] | None:
        """The rename that gave a file its final name."""
        return next(((i, c) for i, c in reversed(list(self.renames())) if inode in c.files), None)

    def name(self, path: str) -> str:
        try:
            return str(Path(path).relative_to(self.folder))
        except ValueError:
            return path


def order_faults(saved: Saved) -> Iterator[Finding]:
    """Faults in the order of their weight."""
    yield from _straight_onto_final_names(saved)
    yield from _from_elsewhere(saved)
    yield from _removed_first(saved)
    for name, (inode, size) in saved.written.items():
        yield from _not_on_disk(saved, name, inode, size)
    yield from _folder_not_on_disk(saved)


def _straight_onto_final_names(saved: Saved) -> Iterator[Finding]:
    for name, (inode, _) in saved.written.items():
        if saved.renamed(inode):
            continue
        copied = any(c.what in ("remove", "unlink") and saved.name(c.paths[0]) not in saved.before for c in saved.calls)
        how = "copied onto its final name, byte by byte" if copied else "written straight onto its final name"
        never = ", and it is never synced" * (not any(map(_is_sync, saved.calls)))
        yield (f"{name} is {how}{never}: whoever looks there while save() runs, or after it was killed, finds half a "
               "file", ORDER)  # fmt: skip


def _from_elsewhere(saved: Saved) -> Iterator[Finding]:
    for _, call in saved.renames():
        if not Path(call.paths[0]).is_relative_to(saved.folder):
            yield (f"the file is made in {Path(call.paths[0]).parent} and moved: where that is another file system, "
                   "os.replace() fails, and shutil.move() copies onto the final name byte by byte",
                   "put the unfinished file into the folder of the checkpoints")  # fmt: skip


def _removed_first(saved: Saved) -> Iterator[Finding]:
    last = max((i for i, _ in saved.renames()), default=-1)
    for i, call in enumerate(saved.calls):
        if call.what in ("remove", "unlink") and i < last:
            name = saved.name(call.paths[0]) if call.paths else ""
            if any(name in (known, Path(known).name) for known in saved.before):
                yield (f"{name} is deleted before the new checkpoint has its name: killed in between, a training with "
                       "keep=1 has nothing left", "delete old ones at the very end of save()")  # fmt: skip


def _not_on_disk(saved: Saved, name: str, inode: str, size: int) -> Iterator[Finding]:
    if not (renamed := saved.renamed(inode)):
        return
    moment, call = renamed
    if call.files[inode] < size:
        yield (f"{name} gets its name before it is closed: {size - call.files[inode]} of its {size} bytes are still in "
               "Python's buffer then", "leave the `with open(...)` block, then os.replace")  # fmt: skip
    synced = [(i, c) for i, c in enumerate(saved.calls) if _is_sync(c, inode)]
    if not synced:
        yield (f"{name} is renamed, but nothing has made sure that its bytes are on the disk: a power cut can keep the "
               "name and lose the content", "file.flush(), os.fsync(file.fileno()), before os.replace")  # fmt: skip
        return
    if synced[0][0] > moment:
        yield (f"os.fsync comes after the rename of {name}: a power cut in between can keep the name and lose the "
               "content", ORDER)  # fmt: skip
    on_disk = max((c.files.get(inode, size) for i, c in synced if i < moment), default=size)
    if on_disk < size:
        yield (f"os.fsync of {name} comes too early: {size - on_disk} of its {size} bytes are still in Python's "
               "buffer, and os.fsync sees only what the kernel has got", "file.flush() before os.fsync")  # fmt: skip


def _is_sync(call: Call, inode: str | None = None) -> bool:
    """Whether the call brings a file to the disk, or any file."""
    return call.what == "sync" or (call.what in ("fsync", "fdatasync") and (inode is None or inode in call.files))


def _folder_not_on_disk(saved: Saved) -> Iterator[Finding]:
    last = max((i for i, _ in saved.renames()), default=-1)
    folder = str(saved.folder.stat().st_ino)
    if any(_is_sync(c, folder) for c in saved.calls[last + 1 :]):
        return
    if any(_is_sync(c, folder) for c in saved.calls):
        yield ("the folder is synced before it has the new name, which is not on the disk then",
               "os.replace first, then os.fsync of the folder")  # fmt: skip
    else:
        yield ("the file's bytes are on the disk, its new name may not be: the folder is never synced, and after a "
               "power cut a checkpoint that save() had promised can be missing",
               "after os.replace: fd = os.open(folder, os.O_RDONLY); os.fsync(fd); os.close(fd)")  # fmt: skip
