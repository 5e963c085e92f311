"""What does CUDA's out-of-memory error say, and what does a snapshot of the allocator show?

    python -m labs.gpu.out_of_memory --nproc 1 --folder build/oom

About 10 s on an H200. Limits this process to one GiB and doubles a model's batch until an allocation fails. Saves the
error message, the bytes that each line of the program held then, and, on CUDA, the allocator's history, which
https://docs.pytorch.org/memory_viz displays.
"""

from __future__ import annotations

import gzip
import linecache
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labs.kit import _compat, cli
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

LIMIT_BYTES = 2**30


@dataclass(frozen=True)
class Config:
    """Where to write the message and the snapshot."""

    folder: Path = Path("build/oom")
    """Folder for message.txt and snapshot.pickle.gz."""
    smoke: bool = False
    """No effect: the run is already short."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Record the batch that failed, and the bytes allocated at that moment."""
    config.folder.mkdir(parents=True, exist_ok=True)
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        total = torch.cuda.get_device_properties(rank.device).total_memory
        torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total, rank.device)
        _compat.record_memory_history(max_entries=20_000)
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.ReLU())))
    model.to(rank.device)
    rows, message, held, by_line = 256, "", 0, Counter[str]()
    while not message:
        try:
            train(model, rows, rank.device)
        except torch.OutOfMemoryError as error:
            message = str(error)
            if on_gpu:  # while `error` keeps the frames alive, and with them the tensors
                held, snapshot = torch.cuda.memory_allocated(rank.device), _compat.memory_snapshot()
        else:
            rows *= 2
    (config.folder / "message.txt").write_text(message + "\n", encoding="utf-8")
    if on_gpu:
        by_line = held_by_line(snapshot)
        (config.folder / "snapshot.pickle.gz").write_bytes(gzip.compress(pickle.dumps(snapshot), mtime=0))
        _compat.record_memory_history(enabled=None)
        torch.cuda.set_per_process_memory_fraction(1.0, rank.device)
    yield rank.record("failed_batch", "1", rows, message=message.splitlines()[0][:600])
    yield rank.record("allocated_bytes", "B", held)
    for line, size in by_line.most_common():
        yield rank.record("held_bytes", "B", size, line=line)


def held_by_line(snapshot: dict[str, Any]) -> Counter[str]:
    """Bytes of the blocks that tensors hold, by the line of the program that allocated them.

    Autograd's thread runs no Python line: its blocks count as "backward".
    """
    found: Counter[str] = Counter()
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                own = (f for f in block.get("frames", ()) if Path(f["filename"]).name == Path(__file__).name)
                at = next(own, None)
                text = linecache.getline(at["filename"], at["line"]).strip() if at else ""
                found[text or "backward"] += block["size"]
    return found


def train(model: nn.Module, rows: int, device: torch.device) -> None:
    """Run forward and backward. A CPU has no such limit, so above 1024 rows the error is raised for it."""
    if device.type == "cpu" and rows > 1024:
        raise torch.OutOfMemoryError("CUDA out of memory (said on a CPU: nothing was asked for)")
    x = torch.randn(rows, 1024, device=device)
    loss = model(x).square().mean()
    loss.backward()


def answer(records: Records) -> Iterator[str]:
    r = records.one("failed_batch")
    yield f"A batch of {r.value:,.0f} rows failed: {r.case['message']}"


if __name__ == "__main__":
    cli.main()
