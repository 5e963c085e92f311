"""The data that all labs train on. It is part of the repository, so nothing is downloaded.

Loading checks every file against `SHA256SUMS`. Authors and licences: `ATTRIBUTION.md`.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parent

FASHION_CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
"""Name of each Fashion-MNIST label 0-9. Source: the data set's README, https://github.com/zalandoresearch/fashion-mnist"""


class DataError(RuntimeError):
    """A data file is missing, or isn't the file that this course was written with."""


@dataclass(frozen=True)
class FashionMNIST:
    """A stratified part of Fashion-MNIST: grey images of clothes, ten classes of equal size.

    Images are uint8, 0 (background) to 255, shape (N, 28, 28); labels are uint8, shape (N,).
    """

    x_train: np.ndarray
    """(10000, 28, 28) uint8"""
    y_train: np.ndarray
    """(10000,) uint8, 0-9: see FASHION_CLASSES"""
    x_test: np.ndarray
    """(2000, 28, 28) uint8"""
    y_test: np.ndarray
    """(2000,) uint8, 0-9"""


def fashion_mnist(folder: Path = FOLDER) -> FashionMNIST:
    """Return 10,000 training and 2,000 test images with their labels. Raises DataError."""
    with np.load(checked("fashion_mnist_12k.npz", folder), allow_pickle=False) as arrays:
        return FashionMNIST(**{name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")})


def moby_dick(folder: Path = FOLDER) -> str:
    """Return the text of *Moby-Dick*: 1,191,933 ASCII characters, 80 distinct ones. Raises DataError."""
    return checked("moby_dick.txt", folder).read_bytes().decode("ascii")


def photos(folder: Path = FOLDER) -> list[Path]:
    """Return the paths of nine JPEG photographs (longest side at most 1600 px), sorted. Raises DataError."""
    return [checked(name, folder) for name in sorted(checksums(folder)) if name.startswith("photos/")]


def checked(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of the data file `name` after checking its content.

    Raises:
        DataError: the file is missing or differs; the message names the file and the remedy.
    """
    path = folder / name
    remedy = f"restore it with `git checkout -- labs/common/data/{name}`, or reinstall the course"
    if not path.is_file():
        raise DataError(f"{path} is missing: {remedy}.")
    found, expected = hashlib.sha256(path.read_bytes()).hexdigest(), checksums(folder)[name]
    if found != expected:
        raise DataError(f"{path} is damaged (sha256 {found[:12]}..., expected {expected[:12]}...): {remedy}.")
    return path


@cache
def checksums(folder: Path = FOLDER) -> dict[str, str]:
    """Return the expected sha256 (hexadecimal) of each data file, by its path inside `folder`."""
    lines = (folder / "SHA256SUMS").read_text(encoding="ascii").splitlines()
    return {name.removeprefix("./"): digest for digest, name in (line.split() for line in lines)}
