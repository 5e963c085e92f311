"""What each torchrun of a job is told, right and wrong: one wrong setting at a time, with the cure of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHORT = {"read_timeout": 2, "join_timeout": 4, "last_call_timeout": 1}
"""Seconds in --rdzv-conf; torch's own defaults are 60, 600 and 30."""


def meet_at(
    node: int,
    addresses: tuple[str, str],
    port: int,
    *,
    nodes: int = 2,
    ranks: int = 2,
    job: str = "job",
    conf: dict[str, int] | None = None,
) -> dict[str, str]:
    """torchrun's options on machine `node`. Only two of them differ between machines."""
    is_host = int(node == 0)  # the store is on the first machine, and nobody has to guess it
    conf = {"is_host": is_host, **(SHORT if conf is None else conf)}
    return {
        "--nnodes": f"{nodes}",  # how many torchruns belong to the job
        "--nproc-per-node": f"{ranks}",  # how many ranks each of them starts
        "--rdzv-backend": "c10d",  # they meet in a store, and agree there who is who
        "--rdzv-endpoint": f"{addresses[0]}:{port}",  # where the store is: the same on all
        "--rdzv-id": job,  # which job: the same on all
        "--rdzv-conf": ",".join(f"{name}={value}" for name, value in conf.items()),
        "--local-addr": addresses[node],  # how others reach this machine
    }


def as_arguments(flags: dict[str, str]) -> list[str]:
    """As on a command line."""
    return [word for pair in flags.items() for word in pair]


@dataclass(frozen=True)
class Wrong:
    """One wrong setting. Leaving it out is the cure that is tried."""

    name: str
    """As in records: a word or two."""
    what: str
    """What is wrong, in words, for a table."""
    cure: str
    """What to do, in words."""
    waits: str
    """How long the user waits with torch's own defaults, with the option that decides it."""
    flags: dict[int, dict[str, str]] = field(default_factory=dict)
    """{machine: {option: wrong value}}; {nobody}, {port} and {closed} are filled in."""
    environment: dict[int, dict[str, str]] = field(default_factory=dict)
    """{machine: {variable: wrong value}}."""
    clock_off_s: float = 0.0
    """The second machine's clock is off by this."""
    later: bool = False
    """The second machine is started when the first one already waits for it."""
    missing: bool = False
    """The second machine is never started."""
    port: str = ""
    """"taken" by another program."""


CONNECT = "60 s (read_timeout)"
JOIN = "600 s (join_timeout)"
WRONG = (
    Wrong(
        "wrong address",
        "node 1 is sent to an address that nobody has",
        "the first node's address, as seen from the others",
        CONNECT,
        flags={1: {"--rdzv-endpoint": "{nobody}:{port}"}},
    ),
    Wrong(
        "wrong port",
        "node 1 is sent to a port where nobody listens",
        "the same endpoint on all nodes",
        CONNECT,
        flags={1: {"--rdzv-endpoint": "{first}:{closed}"}},
    ),
    Wrong(
        "port taken",
        "another program has the port",
        "a port of its own for each job, or ':0' on one machine",
        "at once",
        port="taken",
    ),
    Wrong(
        "no such interface",
        "GLOO_SOCKET_IFNAME names an interface that is not there",
        "a name from `ip addr`, or no such variable",
        "at once",
        environment={1: {"GLOO_SOCKET_IFNAME": "eth9"}},
    ),
    Wrong(
        "another nnodes",
        "node 0 waits for 2 nodes, node 1 for 3",
        "one number on all nodes",
        JOIN,
        flags={1: {"--nnodes": "3"}},
        later=True,
    ),
    Wrong(
        "another rdzv-id",
        "the nodes name two jobs",
        "one id for all nodes of a job, another for each job",
        JOIN,
        flags={1: {"--rdzv-id": "another"}},
    ),
    Wrong(
        "missing node",
        "node 1 is never started",
        "start it, or --nnodes 1:2 if the training can do with fewer",
        JOIN,
        missing=True,
    ),
    Wrong(
        "clock off",
        "node 1's clock is 5 minutes slow",
        "let the nodes keep time by NTP (chrony)",
        JOIN,
        clock_off_s=-300.0,
        later=True,
    ),
)
"""In the order in which a user meets them."""

NAMES = tuple(w.name for w in WRONG)
ERROR = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception))(?:: (.+))?$")
"""The last line of a traceback, wherever torchrun's own log prefixes put it."""
WRAPPERS = {"ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "RendezvousConnectionError"}
"""What is raised around the error that tells something."""
LONGEST = 200


def first_telling_line(text: str) -> str:
    """The first error in what torchrun and its ranks printed that is not one around another; "" if there is none."""
    for line in text.splitlines():
        if (found := ERROR.search(line)) and found[1] not in WRAPPERS:
            said = re.sub(r"\[[^]]*?/([\w.]+:\d+)\]", r"[\1]", found[2] or "")  # of a path, the file
            said = re.sub(r"(\[enforce fail at )\S*/", r"\1", said)
            said = re.sub(r",? keys: /.*", "", said)  # names in the rendezvous' store; they look like paths of a disk
            return (f"{found[1]}: {said}" if said else found[1])[:LONGEST]
    return ""
