"""What ranks on two machines do: meet and tell who they are, or stay until they are told to go."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import launch

from labs.common.elastic import loop  # noqa: F401  (loop: loaded before the training that uses it is forked)
from labs.kit import supervise

VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)
"""What torchrun tells each rank, in the order in which it is explained."""
GROUP_S = 6.0
"""Seconds that ranks wait for each other here; torch's own default is 30 minutes."""
STAY_S = 60.0
"""The same where nothing is wrong, and a slow machine is to be waited for."""


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
    dist.init_process_group("gloo", timeout=timedelta(seconds=STAY_S))  # a peer that dies is noticed without a timeout
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


def facts(folder: str) -> None:
    """What a program of an article would meet on this rank: each a name, whether it works, and what was said."""
    _begin()
    address = os.environ.pop("MASTER_ADDR")
    found = {"init without an address": _said(lambda: dist.init_process_group("gloo", rank=0, world_size=1))}
    os.environ["MASTER_ADDR"] = address
    found["main(rank, world_size) without arguments"] = _said(_wants_arguments)
    package = "torch.multiprocessing"
    runs = importlib.util.find_spec(f"{package}.__main__") is not None
    found[f"python -m {package}"] = (runs, "" if runs else f"{package} is a package without a __main__")
    torch.multiprocessing.start_processes(_argument, args=(2, folder), nprocs=2, start_method="fork")
    first = sorted(path.read_text() for path in Path(folder).glob("argument-*"))
    found["spawn passes the rank first"] = (first == ["0", "1"], f"two processes were given {' and '.join(first)}")
    there = "multiprocessing as multiprocessing" in inspect.getsource(torch)
    found["import torch brings torch.multiprocessing"] = (there, "torch/__init__.py imports it" if there else "")
    old = str(getattr(launch.main, "__deprecated__", ""))
    found["torch.distributed.launch is current"] = (not old, " ".join(old.split())[:120])
    _write(Path(folder), {"facts": found})


def _said(call: Callable[[], object]) -> tuple[bool, str]:
    """Whether `call` works, and its error in one line."""
    try:
        call()
    except Exception as e:
        return False, f"{type(e).__name__}: {' '.join(str(e).split())}"[:160]
    return True, ""


def _wants_arguments() -> None:
    def main(rank: int, world_size: int) -> None: ...

    main()  # as a launcher calls it: rank and world size are in the environment


def _argument(first: int, ranks: int, folder: str) -> None:
    (Path(folder) / f"argument-{os.getpid()}").write_text(str(first))


def _begin() -> None:
    supervise.hold(os.environ["RANK"])
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
