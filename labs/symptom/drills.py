"""The fault behind a message, made on purpose in a few lines, and its cure.

A drill is called as `drill(cured)`. With cured=False what it raises, warns of or prints holds the words of its row in
catalog.toml; with cured=True it holds none of them. Those with ranks > 1 run on real ranks with gloo. No drill leaves a
process, a port, a file or a process group behind; none needs a GPU. Those here are about ranks; those that need one
process are in drills_program.py, those about the machine in drills_machine.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler

from labs.kit import timeouts
from labs.kit.launch import RankFailed, run_on_ranks
from labs.symptom import drills_machine, drills_program
from labs.symptom.drill_kit import DRILLS, SOON, drill, leave

__all__ = ["DRILLS", "drills_machine", "drills_program", "seen"]  # each module registers its own


def seen(name: str, cured: bool) -> str:
    """What somebody would see: all that the drill `name` raises, warns of and prints, on all its ranks. KeyError."""
    chosen = DRILLS[name]
    if not chosen.ranks:
        return _told(name, cured)
    try:
        return "\n".join(run_on_ranks(_told, chosen.ranks, name, cured, timeout_s=timeouts.CHILD_S))
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
            leave()


@drill()
def group_twice(cured):
    for _ in range(2):
        if cured and dist.is_initialized():
            continue
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        except ValueError:
            leave()
            raise
    leave()


@drill()
def no_group(cured):
    if cured:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        leave()


@drill()
def no_nccl(cured):
    try:
        dist.init_process_group("gloo" if cured else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    finally:
        leave()


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
            leave()


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


# DTensor -------------------------------------------------------------------------------------------


@drill(ranks=1)
def dtensor_and_tensor(cured):
    mesh = init_device_mesh("cpu", (1,))
    weight, x = distribute_tensor(torch.ones(2, 2), mesh), torch.ones(1, 2)
    torch.mm(distribute_tensor(x, mesh, [Replicate()]) if cured else x, weight)


@drill(ranks=1)
def module_prefix(cured):
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    nn.Linear(2, 2).load_state_dict((ddp.module if cured else ddp).state_dict())


# More about ranks


@drill(ranks=1)
def behind_the_wrapper(cured):
    ddp = DistributedDataParallel(TwoHeads())
    return (ddp.module if cured else ddp).used


@drill(ranks=1)
def nothing_for_ddp(cured):
    DistributedDataParallel(nn.Linear(2, 2).requires_grad_(cured))


@drill(ranks=1)
def lazy_parameters(cured):
    model = nn.LazyLinear(2)
    if cured:
        model(torch.ones(1, 2))
    DistributedDataParallel(model)


@drill()
def rank_too_high(cured):
    DistributedSampler(range(4), num_replicas=2, rank=1 if cured else 2)


@drill(ranks=2)
def mesh_too_large(cured):
    init_device_mesh("cpu", (2 if cured else 4,))


@drill(ranks=2)
def gathered_too_small(cured):
    dist.all_gather([torch.empty(2), torch.empty(2 if cured else 1)], torch.ones(2))


@drill()
def foreign_address(cured):
    host = "127.0.0.1" if cured else "192.0.2.1"  # TEST-NET-1: no machine has it
    dist.ProcessGroupGloo.create_device(hostname=host)
