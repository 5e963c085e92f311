"""The same tiles in every format that the labs compare, written once and kept beside the tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.utils.data import Dataset

from labs.common.data.derived import MANIFEST, fingerprint, made_once
from labs.common.data.tiles import Tiles
from labs.common.loading.image_datasets import JpegFolder, MemoryMap, RamCache, TarShards
from labs.common.loading.image_files import write_memory_map, write_shards

JPEG, TAR, MAP, RAM = "JPEG folder", "tar shards", "memory map", "RAM cache"


@dataclass(frozen=True)
class Formats:
    """Files of the first images of a set of tiles, by format; a RAM cache is filled from the JPEG files."""

    paths: dict[str, list[Path]]
    open: dict[str, Callable[[], Dataset]]
    """What a training script does before its first batch: list a folder, read headers, map a file."""

    def disk_bytes(self, name: str) -> int:
        return sum(p.stat().st_size for p in self.paths[name])


def listed(folder: Path, images: int, side: int) -> JpegFolder:
    """The first images of a folder of tiles, in the order of their names; a name ends with the label."""
    paths = sorted(folder.glob("*.jpg"))[:images]
    return JpegFolder(paths, [int(p.stem.rpartition("_")[2]) for p in paths], side)


def formats_of(kept: Tiles, decoded: RamCache, side: int) -> Formats:
    """All formats of the images in `decoded`, which are the first of `kept`. Raises DataError if they cannot be kept.

    A memory map and shards are written on first use and when they are damaged.
    """
    images = len(decoded)
    jpegs = listed(kept.folder, images, side)
    recipe = {"tiles": fingerprint(kept.folder / MANIFEST), "images": images, "side": side}

    def write(folder: Path) -> None:
        write_memory_map(decoded, folder / "decoded.npy")
        write_shards(jpegs.paths, jpegs.labels, folder / "shards")

    name = f"{kept.folder.name}-formats-{images}-side{side}"
    folder = made_once(kept.folder.with_name(name), recipe, write)
    shards, files = sorted((folder / "shards").glob("*.tar")), [Path(p) for p in jpegs.paths]
    return Formats(
        {JPEG: files, TAR: shards, MAP: [folder / "decoded.npy"], RAM: files},
        {
            JPEG: partial(listed, kept.folder, images, side),
            TAR: partial(TarShards, shards, side),
            MAP: partial(MemoryMap, folder / "decoded.npy"),
        },
    )
