"""Keep restarted ranks from reading what their predecessors wrote into the agent's store.

With the c10d rendezvous, torchrun's default on one machine, all starts of the ranks share the agent's store. The
addresses that gloo and NCCL put there under fixed names outlive the ranks. After a restart, a rank that is slightly
faster than its peer finds the peer's old address. It then fails ("Gloo connectFullMesh failed ... Connection refused"),
which costs another restart, or it hangs. See https://github.com/pytorch/pytorch/issues/135712. In torch 2.13.0, the
agent makes no new store for a restart, though `_create_c10d_store` relies on it.

On several machines, which may count restarts differently, start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
instead. Then nothing is shared, and `use_fresh_store` does nothing.
"""

from __future__ import annotations

import os
from typing import Any

RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_kept: list[Any] = []  # keeps the server alive as long as this process


def was_restarted() -> bool:
    """Return whether torch's agent has started this job's ranks before."""
    return os.environ.get(RESTART_COUNT, "0") != "0"


def use_fresh_store() -> None:
    """Make `init_process_group` use a store for this start only, held by rank 0. All ranks must call it before that."""
    if os.environ.get(SHARED) != str(True):
        return
    from torch.distributed import PrefixStore, TCPStore  # imported late: a journal begins before torch is loaded

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    ours = PrefixStore(f"start-{os.environ[RESTART_COUNT]}", TCPStore(address, port, is_master=False))
    if os.environ["RANK"] == "0":
        _kept.append(TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True))
        ours.set("port", str(_kept[0].port))
    os.environ["MASTER_PORT"] = ours.get("port").decode()
    os.environ[SHARED] = str(False)  # rank 0's init_process_group finds its own server on that port, and shares it
