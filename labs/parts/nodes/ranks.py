"""What ranks on two machines do: meet and tell who they are, or stay until they are told to go."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from labs.parts.elastic import lifeline, loop  # noqa: F401  (loop: loaded before the training that uses it is forked)

VARIABLES = (
    "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
)  # fmt: skip
"""What torchrun tells each rank, in the order in which it is explained."""
GROUP_S = 6.0
"""Seconds that ranks wait for each other here; torch's own default is 30 minutes."""


def meet(folder: str) -> None:
    """Join the process group, add up all ranks' numbers, and write what this rank was told and what came out."""
    _begin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S))  # address, port, rank: from the environment
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)  # a collective proves more than a printed rank
    told = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    _write(Path(folder), {"told": told, "sum": total.item(), "ranks": dist.get_world_size()})
    dist.destroy_process_group()


def stay(folder: str) -> None:
    """Join, and all-reduce every few milliseconds until a file `stop` is there; a note whenever a rank begins."""
    _begin()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_S))
    _write(Path(folder), {"ranks": dist.get_world_size(), "rank": dist.get_rank(), "restart": _restart()})
    while True:
        stop = torch.tensor([float((Path(folder) / "stop").exists())])
        try:
            dist.all_reduce(stop)
        except RuntimeError:  # the other is gone: the agent starts again with who is there
            os._exit(1)
        if stop:  # the same on all ranks
            break
        time.sleep(0.02)
    dist.destroy_process_group()


def _begin() -> None:
    lifeline.hold(os.environ["RANK"])
    torch.set_num_threads(1)


def _restart() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _write(folder: Path, row: dict[str, Any]) -> None:
    """A file of this process, whole at once, with the time of the wall clock."""
    name = f"{os.environ['RANK']}-{os.getpid()}.json"
    (folder / f".{name}").write_text(json.dumps({**row, "time": time.time(), "pid": os.getpid()}))
    os.replace(folder / f".{name}", folder / name)


def notes(folder: Path) -> list[dict[str, Any]]:
    """What ranks have written into `folder`, in the order of time."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")), key=lambda row: row["time"])
