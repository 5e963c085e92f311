"""Seeded damage to the bytes of a checkpoint, and who notices it: torch.load, the CRC-32 of its zip, or `load`."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from labs.common.checkpoints.files import Damaged, load, load_latest
from labs.common.checkpoints.resume import differences

Damage = Literal["truncate", "flip", "foreign", "older"]
Verdict = Literal["noticed", "harmless", "silent"]
KINDS: tuple[Damage, ...] = Damage.__args__
VERDICTS: tuple[Verdict, ...] = Verdict.__args__


def damaged(data: bytes, other: bytes, kind: Damage, draw: random.Random) -> bytes:
    """`data` with one damage at a place that `draw` chooses, never equal to `data`.

    `older` is a whole checkpoint of another step, `other`; `foreign` is another program's file.
    """
    if kind == "truncate":
        return data[: draw.randrange(len(data))]
    if kind == "older":
        return other
    if kind == "foreign":
        return _foreign(draw)
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _foreign(draw: random.Random) -> bytes:
    file = io.BytesIO()
    torch.save({"weights": torch.full((draw.randrange(1, 1000),), 0.5)}, file)
    return draw.choice([file.getvalue(), b"", b"step,loss\n1,2.3\n", bytes(draw.randrange(1, 10_000))])


@dataclass(frozen=True)
class Trial:
    """One damaged file and what each reader made of it."""

    kind: Damage
    verdicts: dict[str, Verdict]
    message: str
    """What `load` says about the file."""
    fallback: int | None
    """Step that `load_latest` finds in its folder."""


READERS = ("torch.load", "CRC-32, torch.load", "load")


def trials(folder: Path, count: int, seed: int) -> Iterator[Trial]:
    """Damage the last checkpoint of `folder` `count` times, each kind in turn; it is as it was afterwards.

    `folder` holds two at least: one of them is what is left when the last is damaged.
    """
    *_, (_, previous), (path, last) = ((p, p.read_bytes()) for p in sorted(folder.glob("step-*.pt")))
    draw, right = random.Random(seed), load(path)[1]
    try:
        for i in range(count):
            kind = KINDS[i % len(KINDS)]
            path.write_bytes(damaged(last, previous, kind, draw))
            verdicts = {reader: verdict(reader, path, right) for reader in READERS}
            found = load_latest(folder, on_damaged=(messages := []).append)
            message = messages[0].problem if messages else "nothing"
            yield Trial(kind, verdicts, message, found[0] if found else None)
    finally:
        path.write_bytes(last)


def verdict(reader: str, path: Path, right: Any) -> Verdict:
    """Whether `reader` raises; if not, whether what it gives is the state that was written."""
    try:
        state = _read(reader, path)
    except Exception:  # torch.load raises RuntimeError, KeyError, UnpicklingError, EOFError and others
        return "noticed"
    return "harmless" if next(differences(state, right), None) is None else "silent"


def _read(reader: str, path: Path) -> Any:
    if reader == "load":
        return load(path)[1]
    if reader == "CRC-32, torch.load" and zipfile.ZipFile(path).testzip():
        raise Damaged(path, "fails its CRC-32")
    return torch.load(path, map_location="cpu", weights_only=True)
