"""Writing one set of images in other formats: a memory map of decoded images, tar shards of files as they are."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from labs.kit.errors import require


def write_memory_map(dataset: Dataset, path: Path | str) -> Path:
    """Write all items to one .npy file of rows (image, label), for MemoryMap. Whole or not at all; OSError if not."""
    n, (first, _) = len(dataset), dataset[0]
    row = np.dtype([("image", first.numpy().dtype, tuple(first.shape)), ("label", "<i8")])
    header = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (n,)}
    with whole_file(Path(path)) as partial, partial.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for i in range(n):  # written, not mapped: on a full disk writing to a map is a bus error
            image, label = dataset[i]
            file.write(np.array((image.numpy(), label), dtype=row).tobytes())
    return Path(path)


def write_shards(
    paths: Sequence[Path | str], labels: Sequence[int], folder: Path | str, images_per_shard: int = 256
) -> list[Path]:
    """Pack JPEG files, as they are, into tar files in `folder`, for TarShards; returns them in order.

    Each shard is written whole or not at all; OSError if not. The same input gives the same bytes.
    """
    require(len(paths) == len(labels) > 0, f"{len(paths)} paths and {len(labels)} labels: one for each, please")
    require(images_per_shard >= 1, f"images_per_shard must be at least 1, not {images_per_shard}")
    shards = []
    for start in range(0, len(paths), images_per_shard):
        shards.append(Path(folder) / f"{len(shards):06d}.tar")
        with whole_file(shards[-1]) as partial, tarfile.open(partial, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(start, min(start + images_per_shard, len(paths))):
                _add(tar, f"{i:06d}.jpg", Path(paths[i]).read_bytes())
                _add(tar, f"{i:06d}.cls", str(int(labels[i])).encode())
    return shards


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` that becomes `path` if nothing goes wrong, and nothing otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
