"""Real JPEG tiles: random crops of the nine photos, cut on first use and kept in a cache that git ignores.

A tile's class is its photo. Crops overlap, so where accuracy matters, split by region instead of at random. The default
1,024 tiles take 41 MB and some seconds to cut, once.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, features

from labs.common import data
from labs.common.data.derived import cache_folder, made_once
from labs.kit.errors import require
from labs.kit.host import core_count

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Tiles:
    """A set of JPEG files, in the order of their names."""

    folder: Path
    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    """Index of the photo (0-8, in the order of labs.common.data.photos) that each tile was cut from."""
    size: tuple[int, int]
    """Width and height of each tile in pixels."""


def tiles(
    count: int = 1024,
    size: tuple[int, int] = (512, 384),
    *,
    quality: int = 87,
    seed: int = 0,
    folder: Path | str | None = None,
    progress: Progress | None = None,
) -> Tiles:
    """Return `count` JPEG tiles of `size` (width, height); cuts them now unless the cache holds them undamaged.

    Tile i depends only on `seed` and i, and has the same bytes wherever Pillow and its JPEG library are the same.

    Args:
        quality: of the JPEG files, 1-95.
        folder: the cache; default `labs.common.data.derived.cache_folder()` / "tiles".
        progress: called with (done, total) while cutting tiles; by default draws a bar on standard error.

    Raises:
        BadInput: a value is out of range.
        DataError: a photo is damaged, or the cache cannot be written; the message names the remedy.
    """
    count, size = int(count), (int(size[0]), int(size[1]))
    n = _check(count, size, quality, seed)
    root = cache_folder() / "tiles" if folder is None else Path(folder).expanduser().absolute()
    name = f"{size[0]}x{size[1]}-quality{quality}-seed{seed}-{count}"
    recipe = {"count": count, "size": size, "quality": quality, "seed": seed, "encoder": _encoder()}

    def cut_all(target: Path) -> None:
        with _shown(progress, count) as report:
            _cut(target, count, size, quality, seed, report)

    kept = made_once(root / name, recipe | {"photos": data.checksums()}, cut_all)
    labels = tuple(i % n for i in range(count))
    return Tiles(kept, tuple(kept / _name(i, label) for i, label in enumerate(labels)), labels, size)


def _check(count: int, size: tuple[int, int], quality: int, seed: int) -> int:
    """Return the number of photos. BadInput if tiles can't be cut from each of them."""
    require(1 <= count <= 999_999, f"count must be 1 to 999,999 tiles, not {count}")
    require(min(size) >= 8, f"size must be at least 8 x 8 pixels, not {size[0]} x {size[1]}")
    require(1 <= quality <= 95, f"quality must be 1 to 95, not {quality}")
    require(seed >= 0, f"seed must not be negative: {seed}")
    widths, heights = zip(*(Image.open(p).size for p in data.photos()), strict=True)
    largest = min(widths), min(heights)
    require(
        size[0] <= largest[0] and size[1] <= largest[1],
        f"size {size[0]} x {size[1]} does not fit into every photo: at most {largest[0]} x {largest[1]}",
    )
    return len(widths)


def _encoder() -> str:
    """Return the versions that determine a JPEG file's bytes."""
    return f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo')}"


def _name(index: int, label: int) -> str:
    return f"{index:06d}_{label}.jpg"


def _cut(target: Path, count: int, size: tuple[int, int], quality: int, seed: int, report: Progress) -> None:
    """Write all tiles, photo by photo, so that each photo is decoded once and only one is in memory."""
    photos, done = data.photos(), 0
    with ThreadPoolExecutor(core_count()) as pool:  # Pillow encodes without holding the GIL
        for label, path in enumerate(photos):
            photo = Image.open(path).convert("RGB")

            def cut(i: int, photo: Image.Image = photo, label: int = label) -> None:
                crop, encoded = photo.crop(box(i, photo.size, size, seed)), io.BytesIO()
                crop.save(encoded, "JPEG", quality=quality)
                (target / _name(i, label)).write_bytes(encoded.getbuffer())

            for _ in pool.map(cut, range(label, count, len(photos))):
                done += 1
                report(done, count)


def box(index: int, photo: tuple[int, int], size: tuple[int, int], seed: int) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of tile `index` in a photo of that size, all in pixels."""
    x, y = np.random.default_rng((seed, index)).integers(0, (photo[0] - size[0] + 1, photo[1] - size[1] + 1))
    return int(x), int(y), int(x) + size[0], int(y) + size[1]


@contextmanager
def _shown(progress: Progress | None, count: int) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from tqdm import tqdm

    with tqdm(total=count, desc="cutting JPEG tiles, once", unit=" tiles", leave=False) as bar:
        yield lambda done, total: bar.update(done - bar.n)
