"""Exercise 05.1: checkpoints that survive kills at every call, a full disk, damaged and foreign files."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import inspect
import io
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labs.chapters.nb05.exercise_drills import Call, Drill, Ended, in_child
from labs.chapters.nb05.exercise_states import a_state, check_same, described, difference, one_thread, same
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake

# -- in which order a save touches its files: what a power cut at the worst moment would leave


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

    @property
    def named(self) -> int:
        """Position of the last call that gave a new file its name, -1 if none did; old ones may be renamed, too."""
        found = (self.renamed(inode) for inode, _ in self.written.values())
        return max((i for i, _ in filter(None, found)), default=-1)

    @property
    def there(self) -> int:
        """Position of the call that gave the largest new file its name; what a pointer to it does comes after that."""
        renamed = self.renamed(max(self.written.values(), key=lambda f: f[1], default=("", 0))[0])
        return renamed[0] if renamed else -1

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
    yield from removed_first(saved, "a training with keep=1 has nothing left")
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
        yield (
            f"{name} is {how}{never}: whoever looks there while save() runs, or after it was killed, finds half a file",
            ORDER,
        )


def _from_elsewhere(saved: Saved) -> Iterator[Finding]:
    for _, call in saved.renames():
        if not Path(call.paths[0]).is_relative_to(saved.folder):
            yield (
                f"the file is made in {Path(call.paths[0]).parent} and moved: where that is another file system, "
                "os.replace() fails, and shutil.move() copies onto the final name byte by byte",
                "put the unfinished file into the folder of the checkpoints",
            )


def removed_first(saved: Saved, then: str) -> Iterator[Finding]:
    """`then`: what is left if it is killed in between."""
    for i, call in enumerate(saved.calls):
        if call.what in ("remove", "unlink") and i < saved.there:
            name = saved.name(call.paths[0]) if call.paths else ""
            if any(name in (known, Path(known).name) for known in saved.before):
                yield (
                    f"{name} is deleted before the new checkpoint has its name: killed in between, {then}",
                    "delete old ones at the very end of save()",
                )


def _not_on_disk(saved: Saved, name: str, inode: str, size: int) -> Iterator[Finding]:
    if not (renamed := saved.renamed(inode)):
        return
    moment, call = renamed
    if call.files[inode] < size:
        yield (
            f"{name} gets its name before it is closed: {size - call.files[inode]} of its {size} bytes are still in "
            "Python's buffer then",
            "leave the `with open(...)` block, then os.replace",
        )
    synced = [(i, c) for i, c in enumerate(saved.calls) if _is_sync(c, inode)]
    if not synced:
        yield (
            f"{name} is renamed, but nothing has made sure that its bytes are on the disk: a power cut can keep the "
            "name and lose the content",
            "file.flush(), os.fsync(file.fileno()), before os.replace",
        )
        return
    if synced[0][0] > moment:
        yield (
            f"os.fsync comes after the rename of {name}: a power cut in between can keep the name and lose the content",
            ORDER,
        )
    on_disk = max((c.files.get(inode, size) for i, c in synced if i < moment), default=size)
    if on_disk < size:
        yield (
            f"os.fsync of {name} comes too early: {size - on_disk} of its {size} bytes are still in Python's "
            "buffer, and os.fsync sees only what the kernel has got",
            "file.flush() before os.fsync",
        )


def _is_sync(call: Call, inode: str | None = None) -> bool:
    """Whether the call brings a file to the disk, or any file."""
    return call.what == "sync" or (call.what in ("fsync", "fdatasync") and (inode is None or inode in call.files))


def _folder_not_on_disk(saved: Saved) -> Iterator[Finding]:
    folder = str(saved.folder.stat().st_ino)
    if any(_is_sync(c, folder) for c in saved.calls[saved.named + 1 :]):
        return
    if any(_is_sync(c, folder) for c in saved.calls):
        yield (
            "the folder is synced before it has the new name, which is not on the disk then",
            "os.replace first, then os.fsync of the folder",
        )
    else:
        yield (
            "the file's bytes are on the disk, its new name may not be: the folder is never synced, and after a "
            "power cut a checkpoint that save() had promised can be missing",
            "after os.replace: fd = os.open(folder, os.O_RDONLY); os.fsync(fd); os.close(fd)",
        )


# -- damaged, foreign and malicious files in the folder


Maker = Callable[..., Any]
Damage = tuple[str, bytes]
"""What was done to a file, and the bytes that are left of it."""
FLIPS = 24
NAMES_TO_TRY = {"hash"}
"""Of builtins whose results another process does not share: text and bytes have another hash() in each."""
EVALUATES = ("eval", "exec")
ran: list[str] = []
"""Notes of code that a file has run."""


def check_damage(cls: Maker, folder: Path) -> None:
    """Steps 8, 9 and 10 with keep=3, then step 10's file is damaged in some forty ways, one after the other."""
    names = {step: _largest(_save(cls, folder, 3, step)) for step in (8, 9, 10)}
    name = names[10]
    kept = shutil.copytree(folder, folder.with_name("kept"))
    for what, data in _damages((folder / name).read_bytes()):
        _as_kept(folder, kept)
        (folder / name).write_bytes(data)
        _judge(cls, folder, f"step 10's file {what}")
    _as_kept(folder, kept)
    _check_two_damaged(cls, folder, [folder / names[step] for step in (9, 10)])
    _as_kept(folder, kept)
    _check_new_process(cls, folder)
    _check_foreign_names(cls, folder, name)
    _as_kept(folder, kept)
    _check_all_damaged(cls, folder)
    _as_kept(folder, kept)
    _check_malicious(cls, folder)


def _save(cls: Maker, folder: Path, keep: int, step: int) -> Saved:
    before = files_in(folder)
    cls(folder, keep).save(step, a_state(step))
    return Saved(folder, [], before, files_in(folder))


def _largest(saved: Saved) -> str:
    """Name of the file with the tensors."""
    return max(saved.written, key=lambda name: saved.written[name][1])


def _uses(cls: Maker, names: Collection[str]) -> bool:
    """Whether a method of the class mentions one of these names."""
    members = [f for _, f in inspect.getmembers(cls, inspect.isfunction)] if inspect.isclass(cls) else [cls]
    return any(set(names) & set(f.__code__.co_names) for f in map(inspect.unwrap, members) if inspect.isfunction(f))


def _check_new_process(cls: Maker, folder: Path) -> None:
    """Only for classes that ask for it, since a process that is not a copy of this one takes a third of a second."""
    if not _uses(cls, NAMES_TO_TRY):
        return
    step, error = on_ranks(_load_there, 1, cls, str(folder), when="")[0]
    if step != 10:
        what = f"raises {error}" if error else f"gives step {step}"
        raise Mistake(
            f"the folder is whole, and load() in a new process {what}",
            "hash() of text and bytes differs from process to process; hashlib.sha256(data) does not",
        )


def _load_there(cls: Maker, folder: str) -> tuple[Any, str]:
    try:
        loaded = cls(Path(folder), 3).load()
        return (loaded[0] if isinstance(loaded, (tuple, list)) and loaded else None), ""
    except Exception as error:
        return None, described(error)


def _as_kept(folder: Path, kept: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)


def _damages(data: bytes) -> Iterator[Damage]:
    n, draw = len(data), random.Random(0)
    yield from ((f"is cut to {size} of {n} bytes", data[:size]) for size in (n - 1, n // 2, 20, 0))
    yield f"has its {n} bytes, all of them zero, as a power cut can leave it", bytes(n)
    yield "is one that another program has written, with torch.save({'epoch': 3})", _foreign()
    yield "holds text", b"step 10\n"
    for place in (*(round((i + 0.5) * n / FLIPS) for i in range(FLIPS)), *(draw.randrange(n) for _ in range(8))):
        flipped = bytearray(data)
        flipped[place] ^= 1 << draw.randrange(8)
        yield f"has one bit flipped, in byte {place} of {n}", bytes(flipped)


def _foreign() -> bytes:
    file = io.BytesIO()
    torch.save({"epoch": 3}, file)
    return file.getvalue()


ONE_BEFORE = "step 9's file is whole, and load() has to give that"


def _judge(cls: Maker, folder: Path, when: str) -> None:
    try:
        loaded = cls(folder, 3).load()
    except Exception as error:
        raise Mistake(f"{when}: load() raises {described(error)}", ONE_BEFORE) from error
    if same(loaded, (9, a_state(9))) or same(loaded, (10, a_state(10))):
        return
    if loaded is None:
        raise Mistake(f"{when}: load() gives None, and the training would begin anew", ONE_BEFORE)
    if same(loaded, (8, a_state(8))):
        raise Mistake(f"{when}: load() goes back to step 8", ONE_BEFORE)
    what = ""
    if isinstance(loaded, (tuple, list)) and len(loaded) == 2 and isinstance(loaded[1], dict):
        what = f", with another {difference(loaded[1], a_state(10))}"
    raise Mistake(
        f"{when}: load() gives it as if it were good{what}",
        "keep a checksum of the bytes with them (hashlib.sha256), and compare it before you load; torch.load "
        "checks none",
    )


def _check_two_damaged(cls: Maker, folder: Path, paths: list[Path]) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    try:
        loaded = cls(folder, 3).load()
    except Exception as error:
        raise Mistake(
            f"steps 9 and 10 are damaged, step 8 is whole, and load() raises {described(error)}",
            "go on to the one before until one is whole",
        ) from error
    if not same(loaded, (8, a_state(8))):
        raise Mistake(
            "steps 9 and 10 are damaged, step 8 is whole, and load() does not give step 8",
            "go on to the one before until one is whole",
        )


def _check_foreign_names(cls: Maker, folder: Path, name: str) -> None:
    """Files that others leave: notes, a copy of the best, what an editor keeps."""
    path = folder / name
    for other in ("notes.md", re.sub(r"\d+", "best", name), f"{name}.bak", f"copy of {Path(name).name}"):
        if other != name and not (folder / other).exists():
            (folder / other).parent.mkdir(parents=True, exist_ok=True)
            (folder / other).write_bytes(_foreign())
            beside, hint = (
                f"a file {other} lies beside {path.name}",
                "look only at names that save() makes: re.fullmatch",
            )
            try:
                loaded = cls(folder, 3).load()
            except Exception as error:
                raise Mistake(f"{beside}: load() raises {described(error)}", hint) from error
            if not same(loaded, (10, a_state(10))):
                raise Mistake(f"{beside}, and load() no longer gives step 10", hint)


def _check_all_damaged(cls: Maker, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _check_raises(
        cls,
        folder,
        "load() gives None, as if there had never been one",
        "raise RuntimeError; None means that there are none",
    )
    _check_raises(
        cls,
        folder,
        "load() has raised, but gives None when it is called again, as a restart does",
        "leave damaged files there",
    )


def _check_raises(cls: Maker, folder: Path, what: str, hint: str) -> None:
    """Mistake unless load() raises; `what` says what it means that it gives None, where all files are damaged."""
    try:
        loaded = cls(folder, 3).load()
    except Exception:
        return
    if loaded is None:
        raise Mistake(
            f"all three checkpoints are damaged, and {what}: the training begins anew, and overwrites what "
            "could be repaired",
            hint,
        )
    raise Mistake("all three checkpoints are cut in half, and load() gives one of them", "check before you load")


class _Malicious:
    """Unpickled by a loader that allows all, it runs a function. This one only leaves a note."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _leave_a_note, ("pickle",)


def _leave_a_note(by: str) -> None:
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    ran.append("torch.load" if any(name.endswith("torch/serialization.py") for name in frames) else by)


def _check_malicious(cls: Maker, folder: Path) -> None:
    state = a_state(11) | {"extra": _Malicious()}
    ran.clear()
    in_child(lambda: cls(folder, 3).save(11, state))
    with contextlib.suppress(Exception), _evaluations_noted():  # to refuse is as good as to go back to step 10
        cls(folder, 3).load()
    if ran:
        raise Mistake(
            f"someone made a file that runs code on the machine that loads it, and {ran[0]} in load() ran it",
            "torch.load(file, weights_only=True): tensors, numbers, text, dicts and lists, nothing else"
            if ran[0] not in EVALUATES
            else "int(text), json.loads(text) or struct.unpack read data; eval and exec run it",
        )


@contextlib.contextmanager
def _evaluations_noted() -> Iterator[None]:
    """Within, eval() and exec() leave a note if anything but a library calls them."""
    real = {name: getattr(builtins, name) for name in EVALUATES}

    def noting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code.co_filename
            if not caller.startswith((sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")):
                ran.append(name)
            return real[name](*args, **kwargs)

        return call

    for name in EVALUATES:
        setattr(builtins, name, noting(name))
    try:
        yield
    finally:
        for name in EVALUATES:
            setattr(builtins, name, real[name])


# -- all checks, in order


CALLS_KILLED = 24
"""A save that makes more calls than this is killed at so many of them, spread evenly."""


def check_checkpoints(cls: Maker) -> None:
    """In order: an ordinary training, the order of calls, kills, a full disk, damaged and foreign files."""
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as made, quiet, one_thread():
        folders = (Path(made).resolve() / f"training-{i}" for i in range(10_000))
        drills = _Drills(cls, folders)
        _check_ordinary(cls, drills.fresh())
        drills.check_order()
        drills.check_kills()
        drills.check_full_disk()
        drills.check_two_kept()
        check_damage(cls, drills.fresh())


def _check_ordinary(cls: Maker, folder: Path) -> None:
    for method in ("save", "load"):
        if not callable(getattr(cls(folder, 2), method, None)):
            raise Mistake(f"your class has no method {method}", "save(self, step, state) and load(self)")
    _check_empty(cls, folder)
    for step in (0, 8, 9, 10):
        cls(folder, 2).save(step, a_state(step))
        loaded = cls(folder, 2).load()
        if step == 10 and same(loaded, (9, a_state(9))):
            raise Mistake(
                'after save(9, ...) and save(10, ...) load() gives step 9: as text, "9" comes after "10"',
                "compare steps as numbers, or write them with leading zeros",
            )
        check_same(loaded, step, f"after save({step}, state)")
    _check_order_in_time(cls, folder)
    _check_keep(cls, folder)


def _check_empty(cls: Maker, folder: Path) -> None:
    hint = "return None where there is no checkpoint yet: a new training starts there"
    try:
        nothing = cls(folder, 2).load()
    except (OSError, LookupError, ValueError, RuntimeError) as error:
        raise Mistake(f"load() from an empty folder raises {described(error)}", hint) from error
    if nothing is not None:
        raise Mistake(f"load() from an empty folder returns {nothing!r:.60}, not None", hint)
    (folder / "notes.md").write_text("lr 0.1 diverges")
    try:
        nothing = cls(folder, 2).load()
    except Exception as error:
        raise Mistake(f"load() from a folder with nothing but notes.md raises {described(error)}", hint) from error
    if nothing is not None:
        raise Mistake(f"load() from a folder with nothing but notes.md returns {nothing!r:.60}, not None", hint)


def _check_order_in_time(cls: Maker, folder: Path) -> None:
    for path in sorted(folder.rglob("*")):  # step 9's files become the youngest
        os.utime(path, (1e9, 1e9 + (path.name.find("10") < 0)))
    if same(cls(folder, 2).load(), (9, a_state(9))):
        raise Mistake(
            "you take the file with the latest time: whoever copies or touches the files changes that",
            "the newest checkpoint is the one with the largest step",
        )


def _check_keep(cls: Maker, folder: Path) -> None:
    saves = [_save(cls, folder, 2, step) for step in (11, 12)]
    if not all(saved.written for saved in saves):
        raise Mistake("save() writes no file into the folder", "the folder is all that a new process has")
    foreign = _foreign_files(folder, _largest(saves[-1]))
    usual = len(files_in(folder))
    _make_younger(saves[0], than=saves[1])
    try:
        saves.append(_save(cls, folder, 2, 13))
    except Exception as error:
        others = " and ".join(path.name for path in foreign)
        raise Mistake(
            f"{others} lie in the folder, and save() raises {described(error)}",
            "look only at names that save() makes: re.fullmatch",
        ) from error
    for path in foreign:
        if not path.exists():
            raise Mistake(f"save() has deleted {path.name}, which is not yours", "delete only names that save() makes")
    if len(files_in(folder)) > usual:
        raise Mistake(
            f"after one more save with keep=2 there are {len(files_in(folder)) - len(foreign)} files, before "
            f"it there were {usual - len(foreign)}: old ones stay for ever",
            "delete all but the newest `keep`",
        )
    _check_which_stay(saves, files_in(folder))
    (folder / _largest(saves[-1])).unlink()
    loaded = None
    with contextlib.suppress(Exception):
        loaded = cls(folder, 2).load()
    if not same(loaded, (12, a_state(12))):
        raise Mistake(
            "with keep=2, and the newest checkpoint lost, load() does not give the one before",
            "keep the newest `keep` checkpoints, with all that load() needs of each",
        )
    cls(folder, 1).save(14, a_state(14))
    if len(files_in(folder)) >= usual:
        raise Mistake(
            "with keep=1 there are as many checkpoints in the folder as with keep=2",
            "how many may stay is an argument: use keep",
        )


def _foreign_files(folder: Path, name: str) -> list[Path]:
    """Files that others have put into the folder, one of them with a name almost like `name`."""
    found = [folder / other for other in ("notes.md", re.sub(r"\d+", "best", name)) if other != name]
    for path in found:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_foreign())
    return found


def _make_younger(saved: Saved, than: Saved) -> None:
    """Change the times of what two saves made, as whoever copies or touches files does."""
    for age, one in enumerate((saved, than)):
        for name in one.written:
            for path in (one.folder / name, *(one.folder / p for p in Path(name).parents if p.name)):
                if path.exists():
                    os.utime(path, (1e9 - age, 1e9 - age))


def _check_which_stay(saves: list[Saved], now: Files) -> None:
    """Mistake unless of steps 11, 12 and 13 the first has gone, with all that its save made."""
    left = {checksum for _, _, checksum in now.values()}
    here = [[name for name in s.written if s.after[name][2] in left] for s in saves]
    if here[0] and not here[1]:
        raise Mistake(
            "after save(11, ...), save(12, ...) and save(13, ...) with keep=2 step 11 is there and step 12 "
            "is gone: step 11's file was touched since, and has the later time",
            "the newest are those with the largest steps, whatever their files' times",
        )
    if here[0]:
        raise Mistake(
            f"after save(11, ...), save(12, ...) and save(13, ...) with keep=2 {here[0][0]} is still there: "
            "three checkpoints stay",
            "count the new one among the newest `keep`",
        )


class _Drills:
    """Saves of step 10 over step 9 with keep=1, or over steps 8 and 9 with keep=2, each in a process of its own."""

    def __init__(self, cls: Maker, folders: Iterator[Path]) -> None:
        self.cls, self.folders = cls, folders
        members = (getattr(f, "__func__", f) for f in vars(cls).values()) if inspect.isclass(cls) else [cls]
        self.using = [inspect.unwrap(f).__globals__ for f in members if inspect.isfunction(f)]
        self.base = self.fresh()
        self.save(self.base, 8)
        self.save(self.base, 9)
        self.sizes: list[int] = []
        self.calls: list[Call] = []
        self.steady = 0

    def fresh(self, like: Path | None = None) -> Path:
        """A new folder, empty or with the files of another."""
        folder = next(self.folders)
        shutil.copytree(like, folder) if like else folder.mkdir()
        return folder

    def save(
        self, folder: Path, step: int, drill: Drill | None = None, state: dict[str, Any] | None = None, keep: int = 1
    ) -> Ended:
        state = state or a_state(step)
        return in_child(lambda: self.cls(folder, keep).save(step, state), drill or Drill(), self.using)

    def check_order(self) -> None:
        """Of a state that fits into Python's buffer, where flush() alone gets it out in time, and of a usual one."""
        for state in ({"step": 10}, a_state(10)):
            folder = self.fresh(self.base)
            before = files_in(folder)
            ended = self.save(folder, 10, state=state)
            if ended.error:
                raise Mistake(f"save() raises {ended.error} in a process of its own")
            saved = Saved(folder, ended.calls, before, files_in(folder))
            self.sizes = [size for _, size in saved.written.values()]
            self.calls, self.steady = ended.calls, len(saved.after)
            for what, hint in order_faults(saved):
                raise Mistake(what, hint)

    def check_kills(self) -> None:
        """Whenever it is killed: step 10, or step 9 still; and a later save leaves no more files than usual."""
        step = max(1, len(self.calls) // CALLS_KILLED)
        kills = [(Drill(kill_at_call=i), _words(self.calls[i])) for i in range(0, len(self.calls), step)]
        kills += [(Drill(kill_at_byte=b), f"after {b} bytes of a file") for b in self.bytes()]
        most: tuple[int, Path | None, str] = (0, None, "")
        for drill, when in kills:
            folder = self.fresh(self.base)
            self.save(folder, 10, drill)
            self.check_survived(folder, f"save(10, state) with keep=1 was killed {when}")
            most = max(most, (len(files_in(folder)), folder, when), key=lambda m: m[0])
        if most[1]:
            self.check_cleans_up(most[1], most[2])
        self.check_first_save_killed()

    def check_first_save_killed(self) -> None:
        folder, (_, half, _) = self.fresh(), self.bytes()
        self.save(folder, 10, Drill(kill_at_byte=half))
        when = f"the very first save was killed after {half} bytes of a file"
        hint = "an unfinished file is no checkpoint"
        try:
            loaded = self.cls(folder, 1).load()
        except Exception as error:
            raised = described(error)
            raise Mistake(f"{when}: load() then raises {raised}, and no restart gets further", hint) from error
        if loaded is not None:
            raise Mistake(f"{when}: load() then gives {loaded!r:.40}, not None", hint)

    def bytes(self) -> list[int]:
        largest = max(self.sizes, default=1)
        return [0, largest // 3, largest - 1]

    def check_survived(self, folder: Path, when: str) -> None:
        try:
            loaded = self.cls(folder, 1).load()
        except Exception as error:
            raise Mistake(f"{when}: load() then raises {described(error)}", "step 9 has to be there still") from error
        if not same(loaded, (10, a_state(10))) and not same(loaded, (9, a_state(9))):
            gives = "None" if loaded is None else f"{loaded!r:.40}"
            raise Mistake(
                f"{when}: load() then gives {gives}, neither step 9 nor step 10",
                "the old one stays until the new one is complete under its name",
            )

    def check_cleans_up(self, folder: Path, when: str) -> None:
        left = set(files_in(folder))
        for step in (11, 12):
            self.save(folder, step)
        stale = sorted(left & set(files_in(folder)))
        if stale and len(files_in(folder)) > self.steady:
            raise Mistake(
                f"a save was killed {when}, and {stale[0]} stays in the folder for ever: each kill leaves one more",
                "one fixed name for the unfinished file, or delete stale ones in save()",
            )

    def check_full_disk(self) -> None:
        for drill, when in self.fulls():
            folder = self.fresh(self.base)
            before, ended = files_in(folder), self.save(folder, 10, drill)
            if not ended.error:
                self.check_saved_all_the_same(folder, drill, ended, when)
                continue
            if new := sorted(set(files_in(folder)) - set(before)):
                raise Mistake(
                    f"{when}: save() raises, and leaves {new[0]} behind, on a disk without room",
                    "remove the unfinished file in `finally`",
                )
            self.check_survived(folder, f"{when} in save(10, state) with keep=1")

    def fulls(self) -> list[tuple[Drill, str]]:
        fulls = [(Drill(full_at_byte=b), f"the disk is full after {b} bytes") for b in self.bytes()]
        return [*fulls, (Drill(fsync_fails=True), "the disk is full, as os.fsync finds out")]

    def check_two_kept(self) -> None:
        """With keep=2 step 8 is there until step 10 is: killed or on a full disk, two are left still."""
        base = self.fresh()
        self.save(base, 8, keep=2)
        before = files_in(base)
        self.save(base, 9, keep=2)
        newest = _largest(Saved(base, [], before, files_in(base)))
        folder, before = self.fresh(base), files_in(base)
        saved = Saved(folder, self.save(folder, 10, keep=2).calls, before, files_in(folder))
        for what, hint in removed_first(saved, "a training with keep=2 has one left, and nothing if that is damaged"):
            raise Mistake(what, hint)
        for drill, when in self.fulls():
            folder = self.fresh(base)
            if not self.save(folder, 10, drill, keep=2).error:
                continue  # it never wrote so much: with keep=1 that was looked at
            (folder / newest).unlink(missing_ok=True)
            loaded = None
            with contextlib.suppress(Exception):
                loaded = self.cls(folder, 2).load()
            if not same(loaded, (8, a_state(8))):
                raise Mistake(
                    f"{when} in save(10, state) with keep=2: steps 8 and 9 were there, and of step 8 nothing "
                    "is left that load() can give",
                    "delete old ones at the very end of save()",
                )

    def check_saved_all_the_same(self, folder: Path, drill: Drill, ended: Ended, when: str) -> None:
        """Mistake if a save that failed returns; it need not, if it never wrote so much, or never called os.fsync."""
        failed = drill.fsync_fails and any("fsync" in c.what or c.what == "fdatasync" for c in ended.calls)
        if failed or not same(self.cls(folder, 1).load(), (10, a_state(10))):
            raise Mistake(
                f"{when}, and save() returns as if all were well: nobody learns that nothing is saved",
                "let the OSError through: `try ... finally`, not `except`",
            )


def _words(call: Call) -> str:
    return f"before os.{call.what}({', '.join(Path(p).name for p in call.paths)})"
