"""Small package indexes on this disk, whose wheels have torch's names and nothing in them: for pip to choose from."""

from __future__ import annotations

import html
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlparse

LINUX, ARM, MACOS = "linux", "linux on ARM", "macOS"
PLATFORMS = {
    LINUX: ("manylinux_2_28_x86_64", "manylinux1_x86_64", "linux_x86_64"),
    ARM: ("manylinux_2_28_aarch64",),
    MACOS: ("macosx_11_0_arm64",),
}
"""The tags of wheels that fit a system, in short: a real one takes many more."""


@dataclass(frozen=True)
class Wheel:
    """A package file, as far as its name tells."""

    version: str
    """After a "+" the build: "1.13.1+cu116". With equal numbers, one with a build counts as newer (PEP 440)."""
    python: str
    """Tag of the Python that it is built for: "cp38" is CPython 3.8."""
    platform: str
    """Tag of the operating system and processor."""

    @property
    def file(self) -> str:
        """Its name, by which pip judges it."""
        return f"torch-{self.version}-{self.python}-{self.python}-{self.platform}.whl"

    def fits(self, python: str, system: str) -> bool:
        """Whether its tags are those of this Python ("3.8") and a system of PLATFORMS."""
        return self.python == tag(python) and self.platform in PLATFORMS[system]


def tag(python: str) -> str:
    """ "3.8" as wheels have it: "cp38"."""
    return "cp" + python.replace(".", "")


def _main(version: str, python: str) -> tuple[Wheel, ...]:
    return tuple(Wheel(version, python, tags[0]) for tags in PLATFORMS.values())


_1_13 = tuple(Wheel(version, "cp38", "manylinux1_x86_64") for version in ("1.12.1", "1.13.1"))
_2_9 = (*_1_13, Wheel("2.4.1", "cp38", "manylinux1_x86_64"), *_main("2.9.0", "cp311"), *_main("2.9.1", "cp311"))
INDEXES = {
    "main-1.13": _1_13,
    "main-2.9": _2_9,
    "main-2.10": (*_2_9, *_main("2.10.0", "cp311")),
    "cu116": tuple(Wheel(f"{version}+cu116", "cp38", "linux_x86_64") for version in ("1.12.1", "1.13.1")),
    "cu126": tuple(Wheel(f"{version}+cu126", "cp311", "manylinux_2_28_x86_64") for version in ("2.9.0", "2.9.1")),
}
"""Made up after the real ones: of the main index three states, by its newest version, and two of PyTorch's own.

Source of the versions: pytorch.org/get-started/previous-versions. What the real indexes hold today is not asked.
"""


def write_index(folder: Path, wheels: Iterable[Wheel]) -> str:
    """Write a page with links to `wheels`, and the wheels, as PEP 503 has them. Returns the URL for --index-url."""
    project = folder / "torch"
    project.mkdir(parents=True)
    links = []
    for wheel in wheels:
        _write(project / wheel.file, wheel)
        links.append(f'<a href="{quote(wheel.file)}">{html.escape(wheel.file)}</a><br>\n')
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>\n", "utf-8")
    return folder.absolute().as_uri()


def _write(path: Path, wheel: Wheel) -> None:
    """A wheel without a line of code: the three files that pip wants to see."""
    folder = f"torch-{wheel.version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {wheel.version}\n")
        tags = f"{wheel.python}-{wheel.python}-{wheel.platform}"
        archive.writestr(
            f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: made up\nRoot-Is-Purelib: false\nTag: {tags}\n"
        )
        archive.writestr(f"{folder}/RECORD", "")


def origin(url: str) -> tuple[str, str]:
    """(index, file) of the URL of a wheel in an index of `write_index`."""
    parts = [unquote(part) for part in urlparse(url).path.split("/")]
    return parts[-3], parts[-1]
