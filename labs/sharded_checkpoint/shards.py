"""A checkpoint in which every rank writes its own part, made safe: new folder, checksums, one rename at the end.

torch.distributed.checkpoint (DCP) writes a file per rank and, last, `.metadata`, which says what lies where. It
keeps no checksum: a flipped bit, or one rank's file of an older save, loads without a word (see the lab
`sharded_checkpoint`). `.metadata` is a pickle, which can run any code when it is loaded: checksums find accidents, not
attacks. Load only what you wrote.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from labs.common.checkpoints import Damaged
from labs.common.checkpoints.files import fsync_folder

SUMS, PARTIAL = "SHA256SUMS", ".partial"


def state_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Model and optimizer as DCP takes them: this rank's shards, under names that do not depend on the ranks."""
    model, states = get_state_dict(module, optimizer)
    return {"model": model, "optimizer": states}


def put_back(module: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """What `state_of` gave and `load` filled goes back into model and optimizer."""
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def tensors(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of nested dicts, with their names joined by dots."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        else:
            yield from tensors(value, f"{prefix}{name}.")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(state: dict[str, Any]) -> int:
    """Bytes of all tensors of `state` that this rank holds."""
    return sum(local(t).numel() * t.element_size() for _, t in tensors(state))


def save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write `state` to `folder`, which must not exist; all ranks of `group` call it. It appears whole or not at all.

    A folder is never written twice: a rank killed meanwhile would leave new and old files side by side, which load.
    Raises CheckpointException or OSError, on every rank, if one of them cannot write.
    """
    partial = folder.with_name(folder.name + PARTIAL)

    def begin() -> None:
        if folder.exists():
            raise FileExistsError(errno.EEXIST, "a checkpoint is never written twice: give a new folder", str(folder))
        shutil.rmtree(partial, ignore_errors=True)  # of a job that died

    def finish() -> None:
        os.rename(partial, folder)
        fsync_folder(folder.parent)

    _by_first(begin, group)
    dcp.save(state, checkpoint_id=partial, process_group=group)
    seal(partial, group)
    _by_first(finish, group)


def load(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` in place, however many ranks saved them. Damaged, on all ranks, names a file."""
    verify(folder, group)
    dcp.load(state, checkpoint_id=folder, process_group=group)


def seal(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the SHA-256 of every file to SHA256SUMS. Each rank reads its share of them."""
    sums = _shared(lambda name: _sha256(folder / name), _files(folder), group)

    def write() -> None:
        with (folder / SUMS).open("w", encoding="utf-8") as file:
            file.writelines(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
            file.flush()
            os.fsync(file.fileno())
        fsync_folder(folder)

    _by_first(write, group)


def verify(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raise Damaged, on every rank, if a file is missing or not as it was written. Each rank reads its share."""
    if not (folder / SUMS).is_file():
        raise Damaged(folder, f"has no {SUMS}: the save was not finished")
    expected = _expected(folder)
    found = _shared(lambda name: _sha256(folder / name), sorted(expected), group)
    for name, digest in sorted(expected.items()):
        if found[name] != digest:
            raise Damaged(
                folder / name, "is missing" if not found[name] else "is not as it was written: its SHA-256 has changed"
            )


def _expected(folder: Path) -> dict[str, str]:
    """{name: SHA-256} as SHA256SUMS has it. Damaged if it is no such list, or leaves a file out: it would pass."""
    lines = (folder / SUMS).read_bytes().decode(errors="replace").splitlines()
    rows = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in lines]
    if not rows or not all(rows):
        raise Damaged(folder / SUMS, "is not as it was written: it holds other lines than a SHA-256 and a name")
    expected = {row[2]: row[1] for row in rows}
    if left_out := [name for name in _files(folder) if name not in expected]:
        raise Damaged(folder / SUMS, f"does not name {left_out[0]}: it was cut off, or that file is another save's")
    return expected


def _by_first(work: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """`work` on the group's first rank while the others wait. Its OSError is raised on all: none waits for ever."""
    error = None
    if dist.get_rank(group) == 0:
        try:
            work()
        except OSError as e:
            error = e
    told: list[OSError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, error, group)
    if told[0] is not None:
        raise told[0]


def _shared(read: Callable[[str], str], names: list[str], group: dist.ProcessGroup | None) -> dict[str, str]:
    """`read(name)` of every name, each done by one rank of the group."""
    ranks, results = dist.get_world_size(group), [{}] * dist.get_world_size(group)
    mine = {name: read(name) for name in names[dist.get_rank(group) :: ranks]}
    dist.all_gather_object(results, mine, group)
    return {name: digest for part in results for name, digest in part.items()}


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != SUMS)


def _sha256(path: Path) -> str:
    """Hexadecimal; "" if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
