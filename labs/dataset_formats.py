"""What do an image data set's format and its augmentation cost?

    python -m labs.dataset_formats --nproc 1

About 6 s on 2 CPU cores, once the files exist. One process reads the same images from each format in turn, all from
files in the page cache: JPEG files, the same files shrunk to a short side of 256 pixels, tar shards of the shrunk
files, and a memory map of decoded 224 x 224 images. It also augments images from the shrunk files.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge
from PIL import Image, ImageEnhance

from labs.common.data.derived import MANIFEST, fingerprint, made_once
from labs.common.data.tiles import tiles
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

JPEG, SMALL, SHARDS, MAP = "JPEG", "JPEG, short side 256", "tar shards", "memory map"
SIDE, SHORT, PER_SHARD = 224, 256, 256
Picture = Image.Image


@dataclass(frozen=True)
class Config:
    """How many images to read, and how often."""

    images: Annotated[int, Ge(64)] = 512
    """Images in each format; the originals have 512 x 384 pixels."""
    rounds: Annotated[int, Ge(2)] = 12
    """Number of rounds; each format takes one turn per round."""
    smoke: bool = False
    """Use 64 images and two rounds."""


def resize(image: Picture) -> Picture:
    """Resize the whole image to a square, ignoring its aspect ratio."""
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def random_resized_crop(image: Picture) -> Picture:
    """Crop at random, from 8 % of the area up and from 3:4 to 4:3, as torchvision's RandomResizedCrop does."""
    draw = np.random.default_rng().uniform
    area, ratio = draw(0.08, 1) * image.width * image.height, np.exp(draw(np.log(3 / 4), np.log(4 / 3)))
    width, height = min(image.width, (area * ratio) ** 0.5), min(image.height, (area / ratio) ** 0.5)
    x, y = draw(0, image.width - width), draw(0, image.height - height)
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=(x, y, x + width, y + height))


def crop_and_flip(image: Picture) -> Picture:
    """Crop at random, then flip horizontally half of the time."""
    image = random_resized_crop(image)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if np.random.default_rng().random() < 0.5 else image


def crop_flip_jitter(image: Picture) -> Picture:
    """Also change brightness, contrast and saturation: each is a pass over all pixels."""
    image = crop_and_flip(image)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = enhance(image).enhance(np.random.default_rng().uniform(0.6, 1.4))
    return image


AUGMENTATIONS = {"resize": resize, "crop, flip": crop_and_flip, "crop, flip, jitter": crop_flip_jitter}


def shrink(path: Path, target: Path) -> None:
    """Write the image, resized to a short side of SHORT pixels, to `target`."""
    with Image.open(path) as image:
        scale = SHORT / min(image.size)
        size = round(scale * image.width), round(scale * image.height)
        image.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(target, "JPEG", quality=87)


def write_all(paths: list[Path], folder: Path) -> None:
    """Write the shrunk files, the shards and the memory map into `folder`."""
    (folder / "small").mkdir()
    for path in paths:
        shrink(path, folder / "small" / path.name)
    small = sorted((folder / "small").iterdir())
    for start in range(0, len(small), PER_SHARD):
        with tarfile.open(folder / f"{start // PER_SHARD:06d}.tar", "w") as tar:
            for path in small[start : start + PER_SHARD]:
                tar.add(path, path.name)
    decoded = np.lib.format.open_memmap(folder / "decoded.npy", "w+", np.uint8, (len(paths), SIDE, SIDE, 3))
    for i, path in enumerate(small):
        decoded[i] = np.asarray(resize(Image.open(path).convert("RGB")))
    decoded.flush()


def readers(paths: list[Path], folder: Path) -> dict[str, Callable[[], Iterator[np.ndarray]]]:
    """Return one epoch iterator per format: all images in random order, shards in stored order."""
    small, shards = sorted((folder / "small").iterdir()), sorted(folder.glob("*.tar"))
    mapped = np.load(folder / "decoded.npy", mmap_mode="r")

    def from_files(files: list[Path], augment: Callable[[Picture], Picture]) -> Iterator[np.ndarray]:
        for i in np.random.default_rng(0).permutation(len(files)):
            with Image.open(files[i]) as image:
                yield np.array(augment(image.convert("RGB")))

    def from_shards() -> Iterator[np.ndarray]:
        for shard in shards:
            with tarfile.open(shard) as tar:
                for member in tar:
                    yield np.array(resize(Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")))

    def from_map() -> Iterator[np.ndarray]:
        for i in np.random.default_rng(0).permutation(len(mapped)):
            yield np.array(mapped[i])  # the copy reads the pages

    return {
        f"{JPEG}; resize": lambda: from_files(paths, resize),
        **{f"{SMALL}; {name}": lambda f=f: from_files(small, f) for name, f in AUGMENTATIONS.items()},
        f"{SHARDS}; resize": from_shards,
        f"{MAP}; none": from_map,
    }


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield bytes on disk and images per second of each format."""
    if rank.rank == 0:
        images = 64 if config.smoke else config.images
        cut = tiles(progress=lambda done, total: rank.progress(done, total, "cutting tiles, once"))
        recipe = {"tiles": fingerprint(cut.folder / MANIFEST), "images": images, "short side": SHORT}
        paths = list(cut.paths[:images])
        folder = made_once(cut.folder.with_name(f"formats-{images}"), recipe, lambda f: write_all(paths, f))
        sizes = {
            JPEG: sum(p.stat().st_size for p in paths),
            SMALL: sum(p.stat().st_size for p in (folder / "small").iterdir()),
            SHARDS: sum(p.stat().st_size for p in folder.glob("*.tar")),
            MAP: (folder / "decoded.npy").stat().st_size,
        }
        for name, size in sizes.items():
            yield rank.record("disk_bytes", "B", size, rank=0, format=name, images=images)
        rounds, per_turn = (2, 4) if config.smoke else (config.rounds, 24)
        rates = measured(readers(paths, folder), rounds, per_turn, rank)
        for name, samples in rates.items():
            kind, _, augmentation = name.partition("; ")
            yield rank.record("images_per_s", "1/s", samples, rank=0, format=kind, augmentation=augmentation)
    rank.barrier()


def measured(
    sources: dict[str, Callable[[], Iterator[np.ndarray]]], rounds: int, per_turn: int, rank: Rank
) -> dict[str, list[float]]:
    """Return images per second, taking turns; the first turn brings the files into the page cache and isn't counted."""
    streams = {name: endless(source) for name, source in sources.items()}
    found: dict[str, list[float]] = {name: [] for name in sources}
    for done in range(rounds + 1):
        for name, stream in streams.items():
            count = per_turn * (16 if name.startswith(MAP) else 1)
            start = time.perf_counter()
            for _ in range(count):
                next(stream)
            if done:
                found[name].append(count / (time.perf_counter() - start))
        rank.progress(done, rounds, f"round {done} of {rounds}")
    return found


def endless(source: Callable[[], Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Repeat epochs forever."""
    while True:
        yield from source()


def over(records: Records, a: tuple[str, str], b: tuple[str, str]) -> measure.Estimate:
    """Return images per second of (format, augmentation) `a` over those of `b`, paired by round."""
    rates = (records.one("images_per_s", format=f, augmentation=g).samples for f, g in (a, b))
    return measure.paired_ratio(*rates)


def category(records: Records) -> str:
    """Say whether shrinking and augmentation change the rate by more than 10 %, and which format is fastest."""
    shrunk = over(records, (SMALL, "resize"), (JPEG, "resize"))
    jitter = over(records, (SMALL, "crop, flip, jitter"), (SMALL, "resize"))
    fastest = max(records.where("images_per_s"), key=lambda r: r.value).case["format"]
    return f"shrunk {'faster' if shrunk.value > 1.1 else 'not faster'}, augmentation " + (
        f"{'costs' if jitter.value < 0.9 else 'is cheap'}, fastest: {fastest}"
    )


def answer(records: Records) -> Iterator[str]:
    """Yield the ratios, and MB on disk."""
    yield f"Shrunk files give {over(records, (SMALL, 'resize'), (JPEG, 'resize'))} the images/s of the originals."
    yield f"The memory map gives {over(records, (MAP, 'none'), (SMALL, 'resize'))} those of the shrunk files."
    jitter = over(records, (SMALL, "crop, flip, jitter"), (SMALL, "resize"))
    yield f"With random crop, flip and color jitter, shrunk files give {jitter} the images/s of plain resizing."
    disk = ", ".join(f"{r.case['format']} {r.value / 1e6:.0f} MB" for r in records.where("disk_bytes"))
    yield f"On disk: {disk}."


if __name__ == "__main__":
    cli.main()
