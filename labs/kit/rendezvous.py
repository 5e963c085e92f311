"""How the ranks of one machine find each other: a store in the launching process, on a port the system chooses.

The elastic agent's own "c10d" rendezvous serves many machines and begins with a random pause of up to 0.3 s, so
that they do not all start at once. Here there is one.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "labs-one-machine"
ADDRESS = "127.0.0.1"


class OneMachine(RendezvousHandler):
    """Complete at once: the only agent there is has rank 0 of 1."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.run_id = parameters.run_id
        listener = socket.create_server((ADDRESS, 0))  # not reachable from other machines
        self.port = listener.getsockname()[1]
        # The store closes the descriptor.
        self.store = TCPStore(ADDRESS, self.port, is_master=True, timeout=timedelta(seconds=60),
                              wait_for_workers=False, master_listen_fd=listener.detach())  # fmt: skip

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to this store, too, instead of making one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Store, rank and number of agents, and where ranks find the store."""
        where = RendezvousStoreInfo(ADDRESS, self.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, where)

    def get_backend(self) -> str:
        """The name under which this class is registered."""
        return BACKEND

    def get_run_id(self) -> str:
        """As given by the launcher."""
        return self.run_id

    def is_closed(self) -> bool:
        """Never: there is one rendezvous per run, without restarts."""
        return False

    def set_closed(self) -> None:
        """Nobody else would have to hear of it."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits to join."""
        return 0

    def shutdown(self) -> bool:
        """Close the port."""
        del self.store
        return True


if BACKEND not in rendezvous_handler_registry._registry:
    rendezvous_handler_registry.register(BACKEND, OneMachine)
