"""The fault behind a message, made on purpose in a few lines, and its cure.

A drill is called as `drill(cured)`. With cured=False what it raises, warns of or prints holds the words of its row in
chart.toml; with cured=True it holds none of them. Those with ranks > 1 run on real ranks with gloo. No drill leaves a
process, a port, a file or a process group behind; none needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from labs.kit.launch import RankFailed, run_on_ranks

Fault = Callable[[bool], object]
SOON = datetime.timedelta(seconds=2)
LONG_S = 60.0  # of a child process; the slowest here imports torch three times


@dataclass(frozen=True)
class Drill:
    """A fault and the number of ranks that it needs; 0: this process, without a process group."""

    fault: Fault
    ranks: int


DRILLS: dict[str, Drill] = {}


def drill(ranks: int = 0) -> Callable[[Fault], Fault]:
    """Register a fault under its function's name."""

    def register(fault: Fault) -> Fault:
        DRILLS[fault.__name__] = Drill(fault, ranks)
        return fault

    return register


def seen(name: str, cured: bool) -> str:
    """What somebody would see: all that the drill `name` raises, warns of and prints, on all its ranks. KeyError."""
    chosen = DRILLS[name]
    if not chosen.ranks:
        return _told(name, cured)
    try:
        return "\n".join(run_on_ranks(_told, chosen.ranks, name, cured, timeout_s=LONG_S))
    except RankFailed as e:  # a rank that is gone, which no `except` on it could see
        return str(e)


def _told(name: str, cured: bool) -> str:
    result = None
    with _stderr() as printed, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = DRILLS[name].fault(cured)
        except (Exception, SystemExit) as e:
            result = f"{type(e).__name__}: {e}"
    told = [*printed, *(f"{w.category.__name__}: {w.message}" for w in warned), str(result or "")]
    return "\n".join(filter(None, told))


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """Collects what is written to stderr, by torch's C++ part as well, which knows no sys.stderr."""
    told: list[str] = []
    with tempfile.TemporaryFile() as file, contextlib.redirect_stderr(io.StringIO()) as printed:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield told
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            told += [printed.getvalue(), file.read().decode("utf-8", "replace")]


# Memory ---------------------------------------------------------------------------------------------------------------


@drill()
def host_memory(cured):
    torch.empty(10**3 if cured else 10**15, dtype=torch.uint8)  # bytes


# Starting ranks -------------------------------------------------------------------------------------------------------


@drill()
def no_address(cured):
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"} if cured else {}
    with mock.patch.dict(os.environ, told):
        if not cured:
            os.environ.pop("MASTER_ADDR", None)
        try:
            dist.init_process_group("gloo", rank=0, world_size=1)
        finally:
            _leave()


@drill()
def group_twice(cured):
    for _ in range(2):
        if cured and dist.is_initialized():
            continue
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except ValueError:
            _leave()
            raise
    _leave()


@drill()
def no_group(cured):
    if cured:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        _leave()


@drill()
def no_nccl(cured):
    try:
        dist.init_process_group("gloo" if cured else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        _leave()


@drill()
def port_taken(cured):
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1", 0 if cured else first.port, is_master=True, wait_for_workers=False)


@drill()
def nobody_listens(cured):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    if not cured:
        del server  # and nobody listens there any more
    dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=SOON)


@drill()
def unknown_host(cured):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.TCPStore("127.0.0.1" if cured else "node-0.invalid", server.port, is_master=False, timeout=SOON)


@drill()
def no_interface(cured):
    with mock.patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth9"}):
        if cured:
            del os.environ["GLOO_SOCKET_IFNAME"]
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        finally:
            _leave()


@drill()
def local_rank_argument(cured):
    parser = argparse.ArgumentParser("train.py")
    parser.add_argument("--epochs", type=int)
    if not cured:
        parser.parse_args(["--local-rank=0", "--epochs", "3"])  # as python -m torch.distributed.launch calls it
    parser.parse_args(["--epochs", "3"])  # as torchrun does, which puts LOCAL_RANK into the environment


@drill()
def no_main_guard(cured):
    loop = "for _ in DataLoader(TensorDataset(torch.ones(4, 1)), num_workers=1, multiprocessing_context='spawn'): pass"
    guard = "if __name__ == '__main__':\n    " if cured else ""
    return _script(f"import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n{guard}{loop}\n")


# DistributedDataParallel ----------------------------------------------------------------------------------------------


@drill(ranks=1)
def many_device_ids(cured):
    DistributedDataParallel(nn.Linear(2, 2), device_ids=None if cured else [0, 1, 2, 3])


@drill(ranks=1)
def device_ids_on_cpu(cured):
    DistributedDataParallel(nn.Linear(2, 2), device_ids=None if cured else [0])


class TwoHeads(nn.Module):
    """(rows, 2) -> (rows, 2), of which forward uses one head alone."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@drill(ranks=2)
def unused_parameters(cured):
    model = TwoHeads()
    model.unused.requires_grad_(not cured)  # what is not trained is not waited for
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()


class Checkpointed(nn.Module):
    """(rows, 2) -> (rows, 2); one layer that is used twice, recomputed each time."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(2, 2), use_reentrant

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x


@drill(ranks=2)
def ready_twice(cured):
    ddp = DistributedDataParallel(Checkpointed(use_reentrant=not cured), find_unused_parameters=not cured)
    ddp(torch.ones(1, 2, requires_grad=True)).sum().backward()


@drill(ranks=2)
def another_depth_per_rank(cured):
    layers = 2 if cured else 2 + dist.get_rank()
    DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))))


@drill(ranks=1)
def bf16_hook_on_gloo(cured):
    hook = default_hooks.fp16_compress_hook if cured else default_hooks.bf16_compress_hook
    DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, hook)


# Collectives ----------------------------------------------------------------------------------------------------------


@drill(ranks=2)
def skipped_collective(cured):
    group = dist.new_group(timeout=SOON)
    if dist.get_rank() == 0 or cured:  # rank 1 has left the loop one batch earlier, say
        dist.all_reduce(torch.ones(1), group=group)
    else:
        time.sleep(2 * SOON.seconds)  # it is alive, and busy with something else


@drill(ranks=2)
def missed_barrier(cured):
    if dist.get_rank() == 0 or cured:  # rank 1 has no batch left, say
        dist.monitored_barrier(timeout=SOON)
    else:
        time.sleep(2 * SOON.seconds)


@drill(ranks=2)
def another_shape_per_rank(cured):
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does: it compares before it sums
    try:
        group = dist.new_group(timeout=SOON)
        dist.all_reduce(torch.ones(2 if cured else 2 + dist.get_rank()), group=group)
    finally:
        dist.set_debug_level(before)


@drill(ranks=2)
def dead_peer(cured):
    group = dist.new_group()
    if dist.get_rank() == 1 and not cured:
        dist.destroy_process_group(group)  # closes its connections, as the end of its process would
    else:
        dist.all_reduce(torch.ones(1), group=group)


# Loading data ---------------------------------------------------------------------------------------------------------


class Lengthless:
    """An index is its item."""

    def __getitem__(self, i):
        return torch.ones(1) * i


class Sized(Lengthless):
    """The same with a length."""

    def __len__(self):
        return 4


@drill()
def dataset_without_length(cured):
    list(DataLoader(Sized() if cured else Lengthless(), shuffle=True))


@drill()
def unequal_samples(cured):
    samples = [torch.ones(3), torch.ones(3 if cured else 4)]
    next(iter(DataLoader(samples, batch_size=2)))


@drill()
def lambda_in_dataset(cured):
    samples = Sized()
    samples.transform = torch.neg if cured else (lambda x: -x)
    list(DataLoader(samples, num_workers=1, multiprocessing_context="spawn"))


@drill()
def lonely_sample(cured):
    model, data = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), TensorDataset(torch.ones(5, 2))
    for (x,) in DataLoader(data, batch_size=2, drop_last=cured):  # the last of 5 samples is alone
        model(x)


# A step ---------------------------------------------------------------------------------------------------------------


@drill()
def label_out_of_range(cured):
    cross_entropy(torch.zeros(1, 10), torch.tensor([9 if cured else 10]))


@drill()
def two_formats(cured):
    layer = nn.Linear(2, 2) if cured else nn.Linear(2, 2).half()
    layer(torch.ones(1, 2))


@drill()
def backward_twice(cured):
    w = torch.ones(2, requires_grad=True)
    total = 0.0
    for _ in range(2):
        loss = (w * w).sum()
        loss = loss if cured else loss + total
        loss.backward()
        total = loss  # keeps the graph; loss.item() or loss.detach() would not


@drill()
def nothing_to_train(cured):
    layer = nn.Linear(2, 2).requires_grad_(cured)
    layer(torch.ones(1, 2)).sum().backward()


@drill()
def reentrant_without_gradient(cured):
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=not cured)


@drill()
def reentrant_not_said(cured):
    said = {"use_reentrant": False} if cured else {}
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), **said)


@drill()
def overwritten_in_place(cured):
    x = torch.ones(2, requires_grad=True).sigmoid()
    y = x.exp()  # exp keeps its result for backward
    y = y + 1 if cured else y.add_(1)
    y.sum().backward()


@drill()
def nan_in_backward(cured):
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        ((x * x + 1e-12 * cured).sqrt() * x.detach()).backward()  # the slope of a root at 0 is infinite; times 0: NaN


@drill()
def scheduler_first(cured):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in (optimizer, scheduler) if cured else (scheduler, optimizer):
        step.step()


# Mixed precision ------------------------------------------------------------------------------------------------------


def _scaled(model):
    """A scaler, an optimizer and gradients of the scaled loss."""
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    p = next(model.parameters())
    scaler.scale(model(torch.ones(1, 2, dtype=p.dtype)).sum()).backward()
    return scaler, optimizer


@drill()
def unscaled_twice(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    for _ in range(1 if cured else 2):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)


@drill()
def scaler_without_gradients(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2))
    if not cured:
        optimizer.zero_grad()  # between backward and step
    scaler.step(optimizer)


@drill()
def half_parameters(cured):
    scaler, optimizer = _scaled(nn.Linear(2, 2) if cured else nn.Linear(2, 2).half())
    scaler.step(optimizer)


@drill()
def old_autocast(cured):
    with torch.amp.autocast("cpu", torch.bfloat16) if cured else torch.cpu.amp.autocast(dtype=torch.bfloat16):
        pass


# Saving and loading ---------------------------------------------------------------------------------------------------


@drill(ranks=1)
def module_prefix(cured):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    nn.Linear(2, 2).load_state_dict((ddp.module if cured else ddp).state_dict())


class Settings:
    """What should have been saved as a dict."""


@drill()
def pickled_object(cured):
    return _saved_and_loaded({"settings": {} if cured else Settings()})


@drill()
def cut_short(cured):
    return _saved_and_loaded({"weight": torch.ones(1000)}, keep=1.0 if cured else 0.5)


@drill()
def cuda_file_on_cpu(cured):
    with mock.patch("torch.serialization.location_tag", return_value="cuda:0"):  # as if it lay on a GPU when saved
        data = io.BytesIO()
        torch.save(torch.ones(1), data)
    data.seek(0)
    torch.load(data, map_location="cpu" if cured else None)


# Other devices, other tools -------------------------------------------------------------------------------------------


@drill()
def no_cuda(cured):
    torch.zeros(1, device="cpu" if cured else "cuda")


@drill(ranks=1)
def dtensor_and_tensor(cured):
    mesh = init_device_mesh("cpu", (1,))
    weight, x = distribute_tensor(torch.ones(2, 2), mesh), torch.ones(1, 2)
    torch.mm(distribute_tensor(x, mesh, [Replicate()]) if cured else x, weight)


@drill()
def long_dash(cured):
    dashes = "--" if cured else "\N{EM DASH}"
    arguments = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "pip"]
    return _run([*arguments, f"{dashes}quiet"])


# ----------------------------------------------------------------------------------------------------------------------


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _saved_and_loaded(state: object, keep: float = 1.0) -> object:
    """What torch.load makes of the first share `keep` of the bytes that torch.save writes."""
    data = io.BytesIO()
    torch.save(state, data)
    return torch.load(io.BytesIO(data.getvalue()[: int(keep * len(data.getvalue()))]))


def _script(text: str, **environment: str) -> str:
    """What a Python program prints on stderr."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.py")
        path.write_text(textwrap.dedent(text), "utf-8")
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder}
        return _run([sys.executable, str(path)], **caches, **environment)


def _run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONG_S, env={**os.environ, **environment}, check=False
    )
    return done.stderr
