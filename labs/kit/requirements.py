"""Check which torch is installed and whether the course can use it. Needs only the standard library."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERSION = re.compile(r"\d+(?:\.\d+)*")


def numbers(version: str) -> tuple[int, ...]:
    """Parse a version: (2, 9, 1) for "2.9.1+cu128", (2, 9) for "2.9.0a0+git1a2b". () without a leading number."""
    found = VERSION.match(version)
    parts = [int(part) for part in found[0].split(".")] if found else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def project(root: Path = ROOT) -> dict[str, Any]:
    """Read pyproject.toml. FileNotFoundError if labs was installed without its repository."""
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


def installed(name: str) -> str | None:
    """Return a package's version in this Python; None if it isn't installed. Imports nothing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _by_its_own_file(name)


def _by_its_own_file(name: str) -> str | None:
    """Read torch/version.py of a torch built in its source folder, which pip doesn't know."""
    spec = importlib.util.find_spec(name) if name == "torch" else None
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = path.read_text("utf-8") if path and path.is_file() else ""
    found = re.search(r"""^__version__[^=]*= *["']([^"']+)""", text, re.MULTILINE)
    return found[1] if found else None


def tested(root: Path = ROOT) -> str:
    """Return the torch version in constraints.txt. FileNotFoundError if labs was installed without its repository."""
    lines = (root / "constraints.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line.startswith("torch==")).removeprefix("torch==")


def torch_problem(version: str | None, root: Path = ROOT) -> str:
    """Return why this torch can't be used, in one line with the fix; "" if it can, or if that is unknown."""
    try:
        found = project(root)
    except FileNotFoundError:
        return ""
    if version is None:
        return "torch is not installed in this Python: run `make lab`, which installs it"
    oldest = found["tool"]["course"]["oldest-torch"]
    if numbers(version) < numbers(oldest):
        return (
            f"torch {version} is older than {oldest}, the oldest that the course can use: take a newer image of "
            f"this machine, or run `python -m pip install torch=={tested(root)}`"
        )
    return ""
