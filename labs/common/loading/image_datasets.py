"""One set of images in four formats: a folder of JPEG files, a decoded memory map, tar shards, a cache in RAM.

All are map-style datasets of (uint8 tensor (3, side, side), int label), can be pickled for worker processes, and
name the file that cannot be read. Items of MemoryMap and RamCache are views: clone one before you write into it.

Shards are plain tar files in the layout of the webdataset library (000007.jpg, 000007.cls), which can read them.
Its own reader is not used: it streams shards from first to last (an IterableDataset without length or sampler),
its indexed companion `wids` left the package with version 1.0, and the formats are to be compared under one
sampler. An uncompressed tar file is a concatenation, so an item is one read at a known offset.
"""

from __future__ import annotations

import io
import mmap
import os
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from labs.common.data import DataError
from labs.common.loading.image_files import write_memory_map, write_shards
from labs.kit.errors import require

__all__ = ["JpegFolder", "MemoryMap", "RamCache", "TarShards", "decode", "write_memory_map", "write_shards"]

Item = tuple[Tensor, int]


def decode(file: Path | io.BytesIO, side: int, *, draft: bool = False) -> Tensor:
    """Decode an image and resize it to (3, side, side) uint8; its aspect ratio is not kept. Raises what Pillow raises.

    With `draft`, libjpeg decodes at the smallest of 1/2, 1/4 or 1/8 of the size that is still at least `side`.
    """
    with Image.open(file) as image:
        if draft:
            image.draft("RGB", (side, side))
        image = image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


@contextmanager
def named(what: str) -> Iterator[None]:
    """Say which file it was. DataLoader can rebuild a DataError, made of one string, outside of its worker."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise DataError(f"{what} cannot be read as an image: {e}") from e


class JpegFolder(Dataset[Item]):
    """Image files, each opened, decoded and resized when it is asked for.

    A file that is cut short or is no image raises DataError. JPEG has no checksum: damage inside of the data can
    also decode to wrong pixels, without an error.
    """

    def __init__(self, paths: Sequence[Path | str], labels: Sequence[int], side: int = 224, draft: bool = False):
        require(len(paths) == len(labels) > 0, f"{len(paths)} paths and {len(labels)} labels: one for each, please")
        require(side >= 1, f"side must be at least 1 pixel, not {side}")
        self.side, self.draft = side, draft
        self.paths = np.array([os.fspath(p) for p in paths])  # one block: workers copy no Python object on access
        self.labels = np.asarray(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Item:
        path = str(self.paths[index])
        with named(f"{path} (item {index})"):
            return decode(Path(path), self.side, draft=self.draft), int(self.labels[index])


class TarShards(Dataset[Item]):
    """Uncompressed tar files of pairs NAME.jpg, NAME.cls (the label as text), in the order of the shards.

    Opening reads the header of every member once to learn the offsets. Raises DataError for a file that is no such
    shard.
    """

    def __init__(self, shards: Sequence[Path | str], side: int = 224):
        require(len(shards) > 0, "no shards given")
        self.shards, self.side = [os.fspath(s) for s in shards], side
        members = [(number, *member) for number, shard in enumerate(self.shards) for member in _members(shard)]
        self.places = np.array([m[:3] for m in members], dtype=np.int64)  # (n, 3): shard, offset, bytes
        self.labels = np.array([m[3] for m in members], dtype=np.int64)
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        shard, offset, size = map(int, self.places[index])
        with named(f"{self.shards[shard]} at byte {offset} (item {index})"):
            # pread: forked workers share the open file, and with it the position that read() would move.
            encoded = os.pread(self._file(shard), size, offset)
            return decode(io.BytesIO(encoded), self.side), int(self.labels[index])

    def _file(self, shard: int) -> int:
        if shard not in self._files:
            self._files[shard] = open(self.shards[shard], "rb", buffering=0)  # noqa: SIM115  closed with the dataset
        return self._files[shard].fileno()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # open files cannot be pickled


def _members(shard: str) -> list[tuple[int, int, int]]:
    """(offset, bytes, label) of each image of a shard, in order."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                key, _, kind = member.name.rpartition(".")
                if kind == "jpg":
                    images[key] = (member.offset_data, member.size)
                elif kind == "cls":
                    labels[key] = int(tar.extractfile(member).read())
    except (OSError, ValueError, tarfile.TarError) as e:
        raise DataError(f"{shard} is no uncompressed tar file of images and labels: {e}") from e
    if not images or images.keys() != labels.keys():
        raise DataError(f"{shard} holds {len(images)} images (.jpg) and {len(labels)} labels (.cls): pairs are needed")
    return [(*place, labels[key]) for key, place in images.items()]


class MemoryMap(Dataset[Item]):
    """Decoded images in one .npy file (see `write_memory_map`), mapped into memory, not read.

    Pages come from the disk when they are first touched, a few at a time, and stay in the system's page cache, which
    all processes share. With `ahead` the system is told of each item as a whole before it is touched: worth it if
    files are larger than memory. Raises DataError if the file is missing, cut short or another array.
    """

    def __init__(self, path: Path | str, ahead: bool = False):
        self.path, self.ahead = os.fspath(path), ahead and hasattr(mmap, "MADV_WILLNEED")
        self._rows: np.ndarray | None = None
        self.length = len(self._open())

    def _open(self) -> np.ndarray:
        if self._rows is None:
            try:
                with open(self.path, "rb") as file:
                    np.lib.format.read_magic(file)
                    (n,), _, row = np.lib.format.read_array_header_1_0(file)
                    self._offset, self._stride = file.tell(), row.itemsize
                    # A write into an item stays in this process; torch warns of arrays that cannot be written.
                    self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                rows = np.frombuffer(self._mapped, row, n, self._offset)
                self._images, self._labels, self._rows = rows["image"], rows["label"], rows
            except (OSError, ValueError, IndexError) as e:
                raise DataError(f"{self.path} is no memory map of images: {e}") from e
        return self._rows

    def close(self) -> None:
        """Unmap the file, once no item of it is in use; it is mapped again when an item is asked for."""
        self._rows = self._images = self._labels = self._mapped = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Item:
        self._open()
        if self.ahead:
            start = self._offset + (index % self.length) * self._stride
            page = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._mapped.madvise(mmap.MADV_WILLNEED, page, start + self._stride - page)
        return torch.from_numpy(self._images[index]), int(self._labels[index])

    def __getstate__(self) -> dict[str, Any]:
        """Workers map the file themselves: pickling a mapped array would copy the whole file."""
        return {"path": self.path, "ahead": self.ahead, "length": self.length, "_rows": None}


class RamCache(Dataset[Item]):
    """All items of another dataset, decoded once into shared memory: workers read the same pages, none has a copy.

    Raises DataError if /dev/shm has no room: without this check writing there would end in a bus error.
    """

    def __init__(self, dataset: Dataset[Item]):
        n, (first, _) = len(dataset), dataset[0]
        _need_shared_memory(n * first.nbytes)
        self.images = torch.empty((n, *first.shape), dtype=first.dtype).share_memory_()
        self.labels = torch.empty(n, dtype=torch.int64).share_memory_()
        for i in range(n):
            self.images[i], self.labels[i] = dataset[i]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        return self.images[index], int(self.labels[index])


def _need_shared_memory(size: int, folder: str = "/dev/shm") -> None:
    if not os.path.isdir(folder):  # macOS has other means
        return
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DataError(
            f"{folder} has {free / 1e6:.0f} MB free, the images need {size / 1e6:.0f} MB: take fewer images, "
            "or start the container with --shm-size 2g."
        )
