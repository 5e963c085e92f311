"""torchrun's options on each machine, wrong settings with their fixes, and the first error in what torchrun prints."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SHORT = {"read_timeout": 2, "join_timeout": 4}
"""Timeouts in s in --rdzv-conf, used with wrong settings; torch's own defaults are 60 and 600."""


def options(node: int, port: int, conf: dict[str, int]) -> dict[str, str]:
    """Return machine `node`'s options. Only `is_host` differs: without it, torchrun guesses who holds the store."""
    conf = {"is_host": int(node == 0), **conf}
    return {
        "--nnodes": "2",
        "--nproc-per-node": "1",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"127.0.0.1:{port}",
        "--rdzv-id": "job",
        "--rdzv-conf": ",".join(f"{name}={value}" for name, value in conf.items()),
        "--local-addr": "127.0.0.1",
    }


@dataclass(frozen=True)
class Wrong:
    """One wrong setting; everything else is right."""

    name: str
    fix: str
    default_wait: str
    """How long the error takes with torch's own timeouts, and which one decides."""
    options: dict[int, dict[str, str]] = field(default_factory=dict)
    """{machine: {option: wrong value}}; {port} is filled in."""
    environment: dict[int, dict[str, str]] = field(default_factory=dict)
    clock_off_s: float = 0.0
    """By how much the second machine's clock is off."""
    later: bool = False
    """Whether the second machine starts only when the first one already waits for it."""
    port_taken: bool = False


WRONG = (
    Wrong(
        "endpoint with another address",
        "the first node's address, as the others see it",
        "60 s (read_timeout)",
        options={1: {"--rdzv-endpoint": "192.0.2.1:{port}"}},  # RFC 5737: no machine has this address
    ),
    Wrong("port already taken", "a port per job", "at once", port_taken=True),
    Wrong(
        "interface that isn't there",
        "a name from `ip addr` in GLOO_SOCKET_IFNAME, or none",
        "at once",
        environment={1: {"GLOO_SOCKET_IFNAME": "eth9"}},
    ),
    Wrong(
        "another --nnodes",
        "the same number everywhere",
        "600 s (join_timeout)",
        options={1: {"--nnodes": "3"}},
        later=True,
    ),
    Wrong("clock five minutes slow", "NTP (chrony) on all nodes", "none", clock_off_s=-300.0, later=True),
)
"""In the order in which you meet them."""

ERROR = re.compile(r"(?:^|[\s.])([A-Z]\w*(?:Error|Exception))(?:: (.+))?$")
"""The last line of a traceback, wherever torchrun's own log prefixes put it."""
WRAPPERS = {"ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "RendezvousConnectionError"}
"""Errors that only wrap the informative one."""


def first_error(text: str) -> str:
    """Return the first error that torchrun and its ranks printed and that isn't a wrapper; "" if there is none."""
    for line in text.splitlines():
        if (found := ERROR.search(line)) and found[1] not in WRAPPERS:
            message = re.sub(r"\[[^]]*?/([\w.]+:\d+)\]", r"[\1]", found[2] or "")  # keeps only the file of a path
            message = re.sub(r"(\[enforce fail at )\S*/", r"\1", message)
            message = re.sub(r",? keys: /.*", "", message)  # names in the store
            return (f"{found[1]}: {message}" if message else found[1])[:200]
    return ""
