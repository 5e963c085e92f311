"""Folders that are caches: made to be written at any time, by any program, and read by libraries in C."""

from __future__ import annotations

import os
from collections.abc import Mapping

USUAL = ("~/.cache", "~/.triton")
HOMES = ("HF_HOME", "TORCH_HOME", "TORCH_EXTENSIONS_DIR")
"""Variables that name one; so do all with CACHE in their name."""


def named_by(variable: str, value: str) -> str | None:
    """The cache that a variable of the environment names; None if its value is no path."""
    if os.sep not in value or not (variable in HOMES or "CACHE" in variable):
        return None
    return os.path.expanduser(value)


def usual(environment: Mapping[str, str]) -> list[str]:
    """Those that every user has, and those that the environment names."""
    named = [named_by(variable, value) for variable, value in environment.items()]
    return [*map(os.path.expanduser, USUAL), *filter(None, named)]


def with_links(cache: str) -> list[str]:
    """Where it truly is, and where links in it lead: on clusters ~/.cache/huggingface often leads to a larger disk."""
    try:
        names = os.listdir(cache)
    except OSError:
        names = []
    inside = [os.path.join(cache, name) for name in names]
    return [os.path.realpath(path) for path in (cache, *filter(os.path.islink, inside))]


def holds(folder: str, place: str) -> bool:
    """Whether a place is this folder or below it."""
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)
