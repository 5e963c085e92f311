"""Typical mistakes of exercise 05.1: {mistake: (class, words that its feedback must hold)}."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
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


class NeverSynced(Files):
    def write(self, path, data):
        path.write_bytes(data)


class FolderNotSynced(Files):
    def sync_folder(self):
        pass


class OldOnesFirst(Files):
    def save(self, step, state):
        for old in self.newest_first()[self.keep - 1 :]:
            old.unlink()
        super().save(step, state)


class NoChecksum(Files):
    def load(self):
        paths = self.newest_first()
        for path in paths:
            with contextlib.suppress(Exception):
                return self.unpacked(path.read_bytes()[32:])
        if paths:
            raise RuntimeError("all damaged")
        return None


class AllDamagedIsNone(Files):
    def load(self):
        with contextlib.suppress(RuntimeError):
            return super().load()


class RunsCode(Files):
    def unpacked(self, data):
        saved = torch.load(io.BytesIO(data), weights_only=False)
        return saved["step"], saved["state"]


class Swallows(Files):
    def save(self, step, state):
        try:
            super().save(step, state)
        except OSError as error:
            print(f"warning: could not save: {error}")


MUTANTS = {
    "as in the article": (AsInTheArticle, "straight onto its final name, and it is never synced"),
    "never synced": (NeverSynced, "nothing has made sure that its bytes are on the disk"),
    "folder not synced": (FolderNotSynced, "the folder is never synced"),
    "old ones deleted first": (OldOnesFirst, "step-9.pt is deleted before the new checkpoint has its name"),
    "no checksum": (NoChecksum, "keep a checksum"),
    "None if all are damaged": (AllDamagedIsNone, "as if there had never been one"),
    "weights_only=False": (RunsCode, "and torch.load in load() ran it"),
    "a full disk is no error": (Swallows, "returns as if all were well"),
}
