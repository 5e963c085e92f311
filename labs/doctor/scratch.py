"""What a script writes goes to a scratch folder: its own files stay as they are, and it sees what it has written.

`install` replaces the functions of Python that take a path. A path stands for the file in the scratch folder if the
script has written it, for none if it has removed it, and else for the true file. Writing into a file that exists
copies it first. All processes that share the scratch folder see the same: ranks, and workers forked or spawned.

Left alone: caches (scratch_caches), which libraries write and read in many ways, and which are made for that; /dev,
/proc, /sys, the folder of the run (TMPDIR is in it), file descriptors, sockets, FIFOs. A cache that holds a folder of
the script's own is none: HF_HOME=/data/me must not let a script write all over /data/me.

Not seen, so that it is written where the script wants it, or fails because a folder is only in the scratch folder:
programs that the script starts (`tell` is called with their names), libraries in C, C++ or Rust that open files
themselves (HDF5, TensorFlow, a file:// rendezvous), os.posix_spawn with file actions, an import of a library in C that
the script has made. Of these, torch.save, torch.jit, traces of the profiler, safetensors, sqlite3 and memory maps of
pyarrow are taught where to look; so is import, for modules that the script writes.
"""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

from labs.doctor import scratch_caches
from labs.doctor.after_import import after_import
from labs.doctor.scratch_entries import Entries
from labs.doctor.scratch_libraries import TAUGHT, teach_import
from labs.doctor.true_files import CHANGES, READS, copy, make_folders, move, true

UNTOUCHED = ("/dev", "/proc", "/sys")
MOST_LINKS = 40  # that lead to links, as in Linux
OF_A_LINK = {"lstat", "readlink", "lchown"}
"""They look at a link itself, not at what it leads to."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def install(folder: str, tell: Callable[[str], None] = lambda words: None, own: Sequence[str] = ()) -> Scratch:
    """From now on, and in all processes that come from this one. `tell`: what of this script cannot be seen, in words.

    `folder` is made; the folder in which it is, is the run's. `own`: folders of the script's, in no cache.
    """
    scratch = Scratch(folder, tell, own)
    scratch.install()
    return scratch


class Scratch:
    """A scratch folder. Absolute names without links in their folders are called places."""

    def __init__(self, folder: str, tell: Callable[[str], None] = lambda words: None, own: Sequence[str] = ()) -> None:
        self.folder, self.tell = os.path.realpath(folder), tell
        self.own = tuple(map(os.path.realpath, own))
        self.written = os.path.join(self.folder, "written")
        """Below it, by their place: files that were written, folders that were made or hold such files."""
        self.gone = os.path.join(self.folder, "gone")
        """For each true folder of which something was removed, a folder that holds these names."""
        for path in (self.written, self.gone):
            make_folders(path)
        self.untouched: tuple[str, ...] = (*UNTOUCHED, os.path.dirname(self.folder))
        self._below = tuple(path + "/" for path in self.untouched)
        self._folders: dict[str, str] = {}
        self._gone_in: dict[str, str] = {}
        self._told: set[str] = set()
        self._used = False
        self._caches: set[str] = set()
        self.undo = ExitStack()
        for cache in scratch_caches.usual(os.environ):
            self.leave_alone(cache)

    def leave_alone(self, cache: str) -> None:
        """It is written where it is, unless it holds a folder of the script's own, or what the script has written."""
        if cache in self._caches:  # torch names the same one again and again
            return
        self._caches.add(cache)
        for path in scratch_caches.with_links(cache):
            if any(scratch_caches.holds(path, own) for own in self.own) or self.names(path)[1]:
                continue
            if self._lexists(self.written + path):
                make_folders(path)
            self.untouched = (*self.untouched, path)
            self._below = (*self._below, path + "/")

    # Where a path leads

    def place(self, path: Any, dir_fd: int | None = None) -> str:
        """Of a path as the script has it. Its last part may be a link."""
        name = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(name):
            name = os.path.join(true.readlink(f"/proc/self/fd/{dir_fd}"), name)  # Linux; elsewhere OSError
        name = self.seen(os.path.abspath(name))
        folder, last = os.path.split(name)
        return os.path.join(self._folder(folder), last)

    def seen(self, name: Any) -> Any:
        """A name as the script knows it: of a file in the scratch folder, that of its place."""
        written = os.fsencode(self.written) if isinstance(name, bytes) else self.written
        return (name[len(written) :] or name[:0] + name[:1]) if name.startswith(written) else name

    def _folder(self, folder: str) -> str:
        """Without links. Known ones are kept, as a dataset is opened file by file."""
        if folder not in self._folders:
            above, last = os.path.split(folder)
            if not last:
                return folder
            place = os.path.join(self._folder(above), last)
            self._folders[folder] = place  # ends a circle of links
            target = self._link(place)
            if target is not None:
                self._folders[folder] = self._folder(os.path.normpath(os.path.join(os.path.dirname(place), target)))
        return self._folders[folder]

    def _link(self, place: str) -> str | None:
        """Where a link leads; None if there is none."""
        try:
            return true.readlink(self.at(place))
        except OSError:
            return None

    def followed(self, place: str) -> str:
        """The place that links lead to."""
        return self._found(place)[0]

    def _found(self, place: str) -> tuple[str, str]:
        """The place that links lead to, and where it truly is."""
        for _ in range(MOST_LINKS):
            at = self.at(place)
            try:
                target = true.readlink(at)
            except OSError:
                return place, at
            folder, last = os.path.split(os.path.normpath(os.path.join(os.path.dirname(place), self.seen(target))))
            place = os.path.join(self._folder(folder), last)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)

    def is_untouched(self, place: str) -> bool:
        """Whether the script may write there."""
        return place.startswith(self._below) or place in self.untouched

    def at(self, place: str) -> str:
        """Where it truly is. A name in the scratch folder that is not there, if it was removed."""
        if self.is_untouched(place):
            return place
        written = self.written + place
        try:
            found = true.lstat(written)
        except OSError:
            return written if self.is_gone(place) else place
        # A true folder of which only parts were written stays what it is.
        return place if stat.S_ISDIR(found.st_mode) and self._true_kind(place) == stat.S_IFDIR else written

    def _true_kind(self, place: str) -> int:
        """Of what is truly there and was not removed; 0 if nothing is."""
        try:
            return 0 if self.is_gone(place) else stat.S_IFMT(true.lstat(place).st_mode)
        except OSError:
            return 0

    def kind(self, place: str) -> int:
        """Of what the script sees there; 0 if nothing is."""
        try:
            return stat.S_IFMT(true.lstat(self.at(place)).st_mode)
        except OSError:
            return 0

    def _gone_of(self, folder: str) -> str:
        if folder not in self._gone_in:
            self._gone_in[folder] = os.path.join(self.gone, hashlib.sha1(os.fsencode(folder)).hexdigest())
        return self._gone_in[folder]

    def is_gone(self, place: str) -> bool:
        """Whether the script has removed what is truly there."""
        folder, name = os.path.split(place)
        try:
            true.lstat(f"{self._gone_of(folder)}/{name}")
        except OSError:
            return False
        return True

    def _remove(self, place: str) -> None:
        """What is truly there is seen no longer."""
        self._folders.clear()
        if self._lexists(place):
            folder, name = os.path.split(place)
            make_folders(self._gone_of(folder))
            os.close(true.open(os.path.join(self._gone_of(folder), name), os.O_CREAT | os.O_WRONLY, 0o600))

    @staticmethod
    def _lexists(path: str) -> bool:
        try:
            true.lstat(path)
        except OSError:
            return False
        return True

    # Reading and writing

    def to_read(self, path: Any, dir_fd: int | None = None, *, follow: bool = True) -> Any:
        """The path to look at instead of `path`: itself, if the script has written nothing there."""
        if not self._is_name(path):
            return path
        place = self.place(path, dir_fd)
        found = self._found(place)[1] if follow else self.at(place)
        name = os.fsdecode(path)
        if found == name:  # most often
            return path
        if dir_fd is None and found == os.path.abspath(name) and not true.getcwd().startswith(self.written):
            return path  # no link has led elsewhere: the script's own words are as good
        return os.fsencode(found) if isinstance(path, bytes) else found

    def to_write(self, path: Any, dir_fd: int | None = None, *, keep: bool = True, follow: bool = True) -> Any:
        """The path to write to instead of `path`. `keep`: what is in the file is needed, so that it is copied."""
        if not self._is_name(path):
            return path
        place = self.place(path, dir_fd)
        place = self.followed(place) if follow else place
        kind = self._true_kind(place)
        if self.is_untouched(place) or kind not in (0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            return place
        written = self.new(place)
        if kind == stat.S_IFREG and keep and not self._lexists(written):
            part = f"{written}.{os.getpid()}.part"  # two ranks may do so at once
            copy(place, part)
            true.replace(part, written)
        elif kind == stat.S_IFDIR:
            with suppress(FileExistsError):
                true.mkdir(written)
        return os.fsencode(written) if isinstance(path, bytes) else written

    def new(self, place: str) -> str:
        """Where to write it. Its folder is made, if the script sees one."""
        there = place if self.is_untouched(place) else self.written + place
        if self.kind(os.path.dirname(place)) == stat.S_IFDIR:
            make_folders(os.path.dirname(there))
        return there

    @staticmethod
    def _is_name(path: Any) -> bool:
        if isinstance(path, int):
            return False
        name = os.fsdecode(path)
        return bool(name) and "\0" not in name

    def names(self, place: str) -> tuple[list[str], list[str]]:
        """Of what the script sees in a folder: the true ones, then those that are in the scratch folder."""
        written, seen = [], []
        with suppress(OSError):
            written = true.listdir(self.written + place)
        if self._true_kind(place) == stat.S_IFDIR:
            removed = set(written)
            with suppress(OSError):
                removed |= set(true.listdir(self._gone_of(place)))
            seen = [name for name in true.listdir(place) if name not in removed]
        return seen, written

    def is_unused(self) -> bool:
        """Whether nothing at all was written or removed so far, by any process."""
        self._used = self._used or any(map(true.listdir, (self.written, self.gone)))
        return not self._used

    def _is_full(self, place: str) -> bool:
        return any(map(len, self.names(place)))

    def is_plain(self, place: str) -> bool:
        """Whether nothing of this folder was written or removed."""
        return self.is_untouched(place) or not (
            self._lexists(self.written + place) or self.is_gone(place) or self._lexists(self._gone_of(place))
        )

    # Instead of Python's own functions

    def install(self) -> None:
        """Undone by `remove`."""
        replaced: dict[int, tuple[Callable, Any]] = {}

        def put(owner: Any, name: str, new: Any) -> None:
            old = getattr(owner, name)
            new = new if isinstance(new, type) else self._told_as_the_script_knows_it(new, old)
            replaced[id(old)] = (old, new)
            self.undo.enter_context(mock.patch.object(owner, name, new))

        put(builtins, "open", self.open_file)
        self.undo.enter_context(mock.patch.object(io, "open", builtins.open))
        put(io, "FileIO", _file_io(self))
        put(io, "open_code", lambda path: self.open_file(path, "rb"))
        for name in READS:
            if hasattr(os, name):
                put(os, name, functools.partial(self._reading, getattr(true, name), name not in OF_A_LINK))
        for name in CHANGES:
            if hasattr(os, name):
                put(os, name, functools.partial(self._changing, getattr(true, name), name not in OF_A_LINK))
        for name in (
            "open",
            "mkdir",
            "rmdir",
            "unlink",
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
        ):
            put(os, name, getattr(self, name))
        put(os, "remove", self.unlink)
        start = self._starting(subprocess.Popen.__init__)
        self.undo.enter_context(mock.patch.object(subprocess.Popen, "__init__", start))
        self.undo.enter_context(mock.patch.object(shutil, "_use_fd_functions", False))  # rmtree by names
        for known in (os.supports_follow_symlinks, os.supports_fd):
            known |= {new for old, new in replaced.values() if old in known}
        self._put_where_they_were_taken(replaced)
        teach_import(self)
        for name, teach in TAUGHT.items():
            after_import(name, functools.partial(teach, self))

    def remove(self) -> None:
        """All is as it was."""
        self.undo.close()

    def _put_where_they_were_taken(self, replaced: dict[int, tuple[Callable, Any]]) -> None:
        """Modules that said `from os import replace` have the old one."""
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType) or name in ("os", "io", "posix", "_io", "builtins", __name__):
                continue
            for attribute, value in list(vars(module).items()):
                if id(value) in replaced and replaced[id(value)][0] is value:
                    self.undo.enter_context(mock.patch.object(module, attribute, replaced[id(value)][1]))

    def _told_as_the_script_knows_it(self, function: Callable, old: Callable) -> Callable:
        """Errors name the script's files, not ours."""

        @functools.wraps(old)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except OSError as e:
                for name, path in zip(("filename", "filename2"), args, strict=False):
                    if getattr(e, name) is not None and not isinstance(path, int):
                        setattr(e, name, os.fspath(path))
                raise

        return call

    def _reading(
        self, function: Callable, follows: bool, path: Any = ".", *args: Any, dir_fd: Any = None, **kwargs: Any
    ) -> Any:
        follows = follows and kwargs.get("follow_symlinks", True)
        try:
            found = self.to_read(path, dir_fd, follow=follows)
        except OSError:  # links in a circle
            if function is true.access:
                return False
            raise
        return function(found, *args, **kwargs)

    def _changing(
        self, function: Callable, follows: bool, path: Any, *args: Any, dir_fd: Any = None, **kwargs: Any
    ) -> Any:
        follows = follows and kwargs.get("follow_symlinks", True)
        return function(self.to_write(path, dir_fd, follow=follows), *args, **kwargs)

    def open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Built in."""
        if isinstance(file, int) or kwargs.get("opener") or len(args) > 5:
            return true.open_file(file, mode, *args, **kwargs)
        found = self._opened(file, mode)
        opened = true.open_file(found, mode, *args, **kwargs)
        if found is not file:
            raw = opened
            while not isinstance(raw, true.FileIO):
                raw = raw.buffer if hasattr(raw, "buffer") else raw.raw
            raw.name = os.fspath(file)  # as the script knows it
        return opened

    def _opened(self, file: Any, mode: str) -> Any:
        if not set(mode) & set("wax+"):
            return self.to_read(file)
        self._refuse_if(file, exclusive="x" in mode)
        return self.to_write(file, keep="w" not in mode)

    def _refuse_if(self, path: Any, dir_fd: int | None = None, *, exclusive: bool) -> None:
        """Of what is only truly there, the system would not know that it is there."""
        if exclusive and self._is_name(path) and self.kind(self.place(path, dir_fd)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """Of os."""
        if not flags & WRITING:
            return true.open(self.to_read(path, dir_fd), flags, mode)
        exclusive = bool(flags & os.O_EXCL and flags & os.O_CREAT)
        self._refuse_if(path, dir_fd, exclusive=exclusive)
        anew = flags & os.O_TRUNC and flags & os.O_CREAT
        return true.open(self.to_write(path, dir_fd, keep=not anew), flags, mode)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        """Of os."""
        if not self._is_name(path):
            return true.mkdir(path, mode)
        self._refuse_if(path, dir_fd, exclusive=True)
        true.mkdir(self.new(self.place(path, dir_fd)), mode)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Of os."""
        place = self._there(path, dir_fd)
        if self.is_untouched(place):
            return true.rmdir(place)
        if self.kind(place) != stat.S_IFDIR:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if self._is_full(place):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if self._lexists(self.written + place):
            true.rmdir(self.written + place)
        self._remove(place)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Of os; remove, too."""
        place = self._there(path, dir_fd)
        if self.is_untouched(place) or self._true_kind(place) in (stat.S_IFIFO, stat.S_IFSOCK):
            return true.unlink(place)
        if self.kind(place) == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if self._lexists(self.written + place):
            true.unlink(self.written + place)
        self._remove(place)

    def _there(self, path: Any, dir_fd: int | None) -> str:
        place = self.place(path, dir_fd) if self._is_name(path) else ""
        if not place or not self.kind(place):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return place

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Of os; replace, too."""
        old, new = self._there(src, src_dir_fd), self.place(dst, dst_dir_fd)
        if old == new:
            return
        folder, onto = self.kind(old) == stat.S_IFDIR, self.kind(new)
        wrong = (
            errno.ENOENT
            if self.kind(os.path.dirname(new)) != stat.S_IFDIR
            else errno.ENOTEMPTY
            if old.startswith(new + os.sep)
            else errno.ENOTEMPTY
            if folder and onto == stat.S_IFDIR and self._is_full(new)
            else (errno.EINVAL if folder else errno.ENOTDIR)
            if new.startswith(old + os.sep)
            else errno.EISDIR
            if onto == stat.S_IFDIR and not folder
            else errno.ENOTDIR
            if onto not in (0, stat.S_IFDIR) and folder
            else 0
        )
        if wrong:
            raise OSError(wrong, os.strerror(wrong), src, None, dst)
        if self.is_untouched(old):
            return move(old, self.new(new))
        if folder:
            self._copy_tree(old)
        if self._lexists(self.written + old):
            move(self.written + old, self.new(new))
        else:
            copy(old, self.new(new))
        self._remove_tree(old)

    replace = rename

    def _copy_tree(self, place: str) -> None:
        """All that the script sees below, in the scratch folder."""
        make_folders(self.written + place)
        for name in self.names(place)[0] + self.names(place)[1]:
            inner = os.path.join(place, name)
            if self.kind(inner) == stat.S_IFDIR:
                self._copy_tree(inner)
            elif self.at(inner) == inner:
                copy(inner, self.written + inner)

    def _remove_tree(self, place: str) -> None:
        """What is truly there, with all below, is seen no longer."""
        if self._true_kind(place) == stat.S_IFDIR:
            for name in true.listdir(place):
                self._remove_tree(os.path.join(place, name))
        self._remove(place)

    def link(self, src: Any, dst: Any, **kwargs: Any) -> None:
        """Of os. Of a true file a copy is made."""
        old, new = self._there(src, None), self.new(self.place(dst))
        self._refuse_if(dst, exclusive=True)
        if self.kind(old) == stat.S_IFDIR:
            true.link(true.getcwd(), new)  # raises what the system says
        if self.at(old) == old and not self.is_untouched(old):
            copy(old, new)
        else:
            true.link(self.at(old), new, **kwargs)

    def symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        """Of os. It leads where the script says; `followed` knows what is there."""
        self._refuse_if(dst, dir_fd, exclusive=True)
        true.symlink(os.fsdecode(src), self.new(self.place(dst, dir_fd)))
        self._folders.clear()

    def listdir(self, path: Any = ".") -> list:
        """Of os."""
        if path is None or not self._is_name(path):
            return true.listdir(path)
        place = self.followed(self.place(path))
        if self.is_plain(place):
            return true.listdir(self.to_read(path))
        if self.kind(place) != stat.S_IFDIR:
            return true.listdir(self.at(place))  # raises what the system says
        names = [name for some in self.names(place) for name in some]
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def scandir(self, path: Any = ".") -> Any:
        """Of os."""
        if path is None or not self._is_name(path):
            return true.scandir(path)
        place = self.followed(self.place(path))
        if self.is_plain(place):
            return true.scandir(self.to_read(path))
        if self.kind(place) != stat.S_IFDIR:
            return true.scandir(self.at(place))
        return Entries(self, os.fspath(path), place)

    def chdir(self, path: Any) -> None:
        """Of os."""
        true.chdir(self.to_read(path))

    def getcwd(self) -> str:
        """Of os."""
        return self.seen(true.getcwd())

    def getcwdb(self) -> bytes:
        """Of os."""
        return os.fsencode(self.getcwd())

    def putenv(self, name: Any, value: Any) -> None:
        """Of os, which calls it when the script sets os.environ[name]: it may name a cache."""
        true.putenv(name, value)
        cache = scratch_caches.named_by(os.fsdecode(name), os.fsdecode(value))
        if cache is not None:
            self.leave_alone(cache)

    # What cannot be seen

    def system(self, command: Any) -> int:
        """Of os."""
        self._tell_of(os.fsdecode(command).split()[:1])
        return true.system(command)

    def _starting(self, function: Callable) -> Callable:
        def call(process: Any, args: Any, *more: Any, **kwargs: Any) -> None:
            whole = isinstance(args, str | bytes | os.PathLike)
            args = args if whole else list(args)
            function(process, args, *more, **kwargs)
            if not _asked_by_torch():  # what could not be started has written nothing
                self._tell_of(os.fsdecode(args).split()[:1] if whole else args[:1])

        return functools.wraps(function)(call)

    def _tell_of(self, program: list) -> None:
        name = os.path.basename(os.fsdecode(program[0])) if program else "?"
        if name not in self._told:
            self._told.add(name)
            self.tell(f"it starts a program ({name}): what that one does and writes is not seen, and stays written")


def _file_io(scratch: Scratch) -> type:
    """io.FileIO that opens what the script sees; what Python's own `open` makes is one of these, too."""

    class Kind(type(true.FileIO)):
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, true.FileIO)

    class FileIO(true.FileIO, metaclass=Kind):
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            file = file if isinstance(file, int) or opener else scratch._opened(file, mode)
            super().__init__(file, mode, closefd, opener)

    return FileIO


def _asked_by_torch() -> bool:
    """Whether torch, or Python for itself, starts this program: nothing of it is the script's."""
    frame = sys._getframe(2)
    while frame is not None and _is_pythons_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and f"{os.sep}torch{os.sep}" in frame.f_code.co_filename


def _is_pythons_own(file: str) -> bool:
    """Or ours."""
    return file == __file__ or (file.startswith(os.path.dirname(subprocess.__file__)) and "-packages" not in file)
