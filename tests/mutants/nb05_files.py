"""Typical mistakes of exercise 05.1: {mistake: (class, words that its feedback must hold)}."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path

import torch


class Files:
    """Right, in parts that the mistakes below exchange."""

    def __init__(self, folder, keep=2):
        self.folder, self.keep = Path(folder), keep

    def save(self, step, state):
        unfinished = self.unfinished()
        try:
            self.write(unfinished, self.packed(step, state))
            os.replace(unfinished, self.folder / self.name(step))
            self.sync_folder()
        finally:
            unfinished.unlink(missing_ok=True)
        self.delete_old()

    def load(self):
        paths = self.newest_first()
        for path in paths:
            if (data := self.checked(path.read_bytes())) is not None:
                return self.unpacked(data)
        if paths:
            raise RuntimeError("all damaged")
        return None

    def unfinished(self):
        return self.folder / "unfinished"

    def name(self, step):
        return f"step-{step}.pt"

    def packed(self, step, state):
        torch.save({"step": step, "state": state}, buffer := io.BytesIO())
        return self.checksum(buffer.getvalue()) + buffer.getvalue()

    def checksum(self, data):
        return hashlib.sha256(data).digest()

    def checked(self, data):
        return data[32:] if self.checksum(data[32:]) == data[:32] else None

    def unpacked(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=True)
        return saved["step"], saved["state"]

    def write(self, path, data):
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync_folder(self):
        descriptor = os.open(self.folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def delete_old(self):
        for old in self.newest_first()[self.keep :]:
            old.unlink()

    def newest_first(self):
        found = [(re.fullmatch(r"step-(\d+)\.pt", p.name), p) for p in self.folder.iterdir()]
        return [p for m, p in sorted(((m, p) for m, p in found if m), key=lambda f: -int(f[0][1]))]


class AsInTheArticle(Files):
    def save(self, step, state):
        torch.save({"step": step, "state": state}, self.folder / self.name(step))
        self.delete_old()

    def load(self):
        paths = self.newest_first()
        return self.unpacked(paths[0].read_bytes()) if paths else None


class StraightOntoTheName(Files):
    def save(self, step, state):
        self.write(self.folder / self.name(step), self.packed(step, state))
        self.sync_folder()
        self.delete_old()


class CopiedOntoTheName(Files):
    def save(self, step, state):
        self.write(self.unfinished(), self.packed(step, state))
        shutil.copy(self.unfinished(), self.folder / f"step-{step}.pt")
        self.unfinished().unlink()
        self.sync_folder()
        self.delete_old()


class FromElsewhere(Files):
    def unfinished(self):
        return Path(tempfile.gettempdir()) / f"unfinished-{os.getpid()}"


class NamedBeforeClosed(Files):
    def save(self, step, state):
        with open(self.unfinished(), "wb") as file:
            file.write(self.packed(step, state))
            os.replace(self.unfinished(), self.folder / self.name(step))
        self.sync_folder()
        self.delete_old()


class NeverSynced(Files):
    def write(self, path, data):
        path.write_bytes(data)


class SyncedBeforeFlushed(Files):
    def write(self, path, data):
        with open(path, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())


class SyncedTooLate(Files):
    def save(self, step, state):
        self.unfinished().write_bytes(self.packed(step, state))
        path = self.unfinished().replace(self.folder / self.name(step))
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        self.sync_folder()
        self.delete_old()


class FolderNotSynced(Files):
    def sync_folder(self):
        pass


class FolderSyncedFirst(Files):
    def write(self, path, data):
        super().write(path, data)
        Files.sync_folder(self)

    def sync_folder(self):
        pass


class OldOnesFirst(Files):
    def save(self, step, state):
        for old in self.newest_first()[self.keep - 1 :]:
            old.unlink()
        super().save(step, state)


class NameFreedFirst(Files):
    """The newest always has one name; the one before is moved away first."""

    def save(self, step, state):
        self.write(self.unfinished(), self.packed(step, state))
        newest, before = self.folder / "newest.pt", self.folder / "before.pt"
        if self.keep == 1:
            before.unlink(missing_ok=True)
        elif newest.exists():
            os.replace(newest, before)
        else:
            newest.unlink(missing_ok=True)
        if self.keep == 1 and newest.exists():
            os.replace(newest, self.folder / "gone")
        os.replace(self.unfinished(), newest)
        (self.folder / "gone").unlink(missing_ok=True)
        self.sync_folder()

    def newest_first(self):
        return [p for name in ("newest.pt", "before.pt") if (p := self.folder / name).exists()]


class NoChecksum(Files):
    def load(self):
        paths = self.newest_first()
        for path in paths:
            with contextlib.suppress(Exception):
                return self.unpacked(path.read_bytes()[32:])
        if paths:
            raise RuntimeError("all damaged")
        return None


class ChecksumOfTheBeginning(Files):
    def checksum(self, data):
        return hashlib.sha256(data[:4096] + len(data).to_bytes(8, "big")).digest()


class NoWayBack(Files):
    def load(self):
        paths = self.newest_first()
        if not paths:
            return None
        if (data := self.checked(paths[0].read_bytes())) is None:
            raise ValueError("checksum differs")
        return self.unpacked(data)


class GivesUp(Files):
    def load(self):
        paths = self.newest_first()
        data = self.checked(paths[0].read_bytes()) if paths else None
        return self.unpacked(data) if data is not None else None


class AllDamagedIsNone(Files):
    def load(self):
        with contextlib.suppress(RuntimeError):
            return super().load()


class RunsCode(Files):
    def unpacked(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=False)
        return saved["step"], saved["state"]


class Pickled(Files):
    def packed(self, step, state):
        return self.checksum(data := pickle.dumps((step, state))) + data

    def unpacked(self, data):
        return pickle.loads(data)


class Swallows(Files):
    def save(self, step, state):
        try:
            super().save(step, state)
        except OSError as error:
            print(f"warning: could not save: {error}")


class LeftWhenFull(Files):
    def save(self, step, state):
        self.write(self.unfinished(), self.packed(step, state))
        os.replace(self.unfinished(), self.folder / self.name(step))
        self.sync_folder()
        self.delete_old()


class LeftWhenKilled(Files):
    def unfinished(self):
        if not hasattr(self, "path"):
            descriptor, path = tempfile.mkstemp(dir=self.folder)
            os.close(descriptor)
            self.path = Path(path)
        return self.path


class OrderOfNames(Files):
    def newest_first(self):
        return sorted(self.folder.glob("step-*.pt"), reverse=True)


class OrderOfTimes(Files):
    def newest_first(self):
        return sorted(self.folder.glob("step-*.pt"), key=lambda p: -p.stat().st_mtime_ns)


class KeepsAll(Files):
    def delete_old(self):
        pass


class KeepsTwo(Files):
    def __init__(self, folder, keep=2):
        super().__init__(folder, 2)


class KeepsOne(Files):
    def __init__(self, folder, keep=2):
        super().__init__(folder, 1)


class EveryNameIsAStep(Files):
    def newest_first(self):
        return sorted(self.folder.glob("step-*.pt"), key=lambda p: -int(p.stem.removeprefix("step-")))


class EveryFileIsMine(Files):
    def newest_first(self):
        def step(path):
            return int("".join(c for c in path.name if c.isdigit()) or 0)

        return sorted((p for p in self.folder.iterdir() if p.is_file()), key=step, reverse=True)


class EmptyFolderRaises(Files):
    def load(self):
        return super().load() if self.newest_first() else self.unpacked((self.folder / "step-0.pt").read_bytes())


class OnlyTheState(Files):
    def unpacked(self, data):
        return super().unpacked(data)[1]


class AllAsFloat(Files):
    def packed(self, step, state):
        return super().packed(step, torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.float, state))


class NoLoad:
    def __init__(self, folder, keep=2):
        pass

    def save(self, step, state):
        pass


MUTANTS = {
    "as in the article": (AsInTheArticle, "straight onto its final name, and it is never synced"),
    "straight onto the name": (StraightOntoTheName, "written straight onto its final name: whoever"),
    "copied onto the name": (CopiedOntoTheName, "copied onto its final name, byte by byte"),
    "from another folder": (FromElsewhere, "and moved: where that is another file system"),
    "named before it is closed": (NamedBeforeClosed, "before it is closed"),
    "never synced": (NeverSynced, "nothing has made sure that its bytes are on the disk"),
    "synced before flushed": (SyncedBeforeFlushed, "os.fsync of step-10.pt comes too early"),
    "synced after the rename": (SyncedTooLate, "os.fsync comes after the rename"),
    "folder not synced": (FolderNotSynced, "the folder is never synced"),
    "folder synced too early": (FolderSyncedFirst, "synced before it has the new name"),
    "old ones deleted first": (OldOnesFirst, "step-9.pt is deleted before the new checkpoint has its name"),
    "name freed first": (NameFreedFirst, "was killed before os.replace(unfinished, newest.pt)"),
    "no checksum": (NoChecksum, "keep a checksum"),
    "checksum of the beginning": (ChecksumOfTheBeginning, "one bit flipped"),
    "no way back to the one before": (NoWayBack, "load() raises ValueError: checksum differs"),
    "None in place of the one before": (GivesUp, "load() gives None, and the training would begin anew"),
    "None if all are damaged": (AllDamagedIsNone, "as if there had never been one"),
    "weights_only=False": (RunsCode, "and torch.load in load() ran it"),
    "pickle": (Pickled, "and pickle in load() ran it"),
    "a full disk is no error": (Swallows, "returns as if all were well"),
    "unfinished file left when full": (LeftWhenFull, "leaves unfinished behind"),
    "unfinished files left when killed": (LeftWhenKilled, "each kill leaves one more"),
    "order of names": (OrderOfNames, '"9" comes after "10"'),
    "order of times": (OrderOfTimes, "the latest time"),
    "keeps all": (KeepsAll, "old ones stay for ever"),
    "keeps two": (KeepsTwo, "with keep=1 there are as many"),
    "keeps one": (KeepsOne, "with keep=2, and the newest checkpoint lost"),
    "every name is a step": (EveryNameIsAStep, "lies beside step-10.pt: load() raises ValueError"),
    "every file is mine": (EveryFileIsMine, "notes.md"),
    "empty folder raises": (EmptyFolderRaises, "from an empty folder raises FileNotFoundError"),
    "only the state": (OnlyTheState, "return (step, state)"),
    "all as float": (AllAsFloat, "is not what was saved"),
    "no load": (NoLoad, "no method load"),
}
