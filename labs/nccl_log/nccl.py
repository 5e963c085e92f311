"""Parse an NCCL log: ranks, rings, trees, channels, and the transport between each pair of GPUs.

Handles the lines that NCCL 2.4 to 2.28 writes with NCCL_DEBUG=INFO. The format isn't a stable interface, so unknown
lines are skipped and counted. Sources: docs.nvidia.com/deeplearning/nccl/user-guide (environment variables,
troubleshooting) and github.com/NVIDIA/nccl, src.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from labs.kit.errors import require

LINE = re.compile(  # a warning also names its source line: "host:1:2 [0] misc/socket.cc:484 NCCL WARN Connect to ..."
    r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<device>-?\d+)\] (?:\S+:\d+ (?:\([^)]*\) )?)?"
    r"NCCL (?P<level>INFO|WARN|TRACE) ?(?P<text>.*)"
)
LINK = (
    re.compile(  # "Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM/read", older "Ring 00 : 34 -> 33 [send] via NET/Socket/0"
        r"(?:Channel|Ring) (?P<channel>\d+)(?:/\d+)? : (?P<sender>\d+)(?:\[\w+\])? -> (?P<receiver>\d+)(?:\[\w+\])?"
        r"(?: \[(?P<side>send|receive)\])? via (?P<transport>.+)"
    )
)
ORDER = re.compile(  # NCCL truncates it: to 20 ranks up to 2.2x, later to 127 characters that end in "..."
    r"Channel (?P<channel>\d+)/(?P<channels>\d+) :\s+(?P<ranks>\d+(?:\s+\d+)*)(?P<cut>\s*\.\.\.)?\s*$"
)
TREE = re.compile(r"\[(?P<channel>\d+)\] (?P<below>-?\d+(?:/-?\d+)*)->(?P<rank>\d+)->(?P<above>-?\d+)")
RANKS = re.compile(r"rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+)(?: nNodes (?P<nodes>\d+))?")
COMMUNICATOR = re.compile(r"n[rR]anks (?P<ranks>\d+) .*commId (?P<name>0x[0-9a-f]+)")
SET = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>.*?)\.?$")
NETWORK = re.compile(r"Using network (?P<name>.+)")
VERSION = re.compile(r"NCCL version (?P<version>[\d.]+)")
CHOICE = re.compile(  # numbers up to 2.23: "4096 Bytes -> Algo 1 proto 2 time 8.4"
    r"(?:(?P<collective>\w+): )?(?P<size>\d+) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
)
ALGORITHMS = {"0": "Tree", "1": "Ring", "2": "CollNetDirect", "3": "CollNetChain", "4": "NVLS", "5": "NVLSTree"}
PROTOCOLS = {"0": "LL", "1": "LL128", "2": "Simple"}
"""From include/nccl_tuner.h of NVIDIA/nccl; newer versions log the names in capitals."""
PASSED = re.compile(
    r"Connected all|Init START|Init COMPLETE|Setting affinity|Chunksize|threadThresholds|coll channels|"
    r"Bootstrap|NET/|Plugin|PLUGIN|Proxy|Check P2P|TUNER|comm 0x|cudaDriver|Ring \d+ :|Tree \d+ :|"
    r"Trees|isAllDirectP2p|NVLS|CollNet"
)


@dataclass(frozen=True)
class Link:
    """A pair of ranks and the transport from one to the other."""

    sender: int
    receiver: int
    transport: str
    """As NCCL writes it, without "/read" and numbers: P2P/CUMEM, SHM/direct, NET/IB, NET/IB/GDRDMA, NET/Socket."""

    @property
    def family(self) -> str:
        """ "P2P" (between GPUs), "SHM" (through host memory), or "NET" (through a network card)."""
        return self.transport.partition("/")[0]


@dataclass
class Log:
    """The parsed log."""

    version: str = ""
    ranks: int = 0
    nodes: int = 0
    hosts: set[str] = field(default_factory=set)
    communicators: dict[str, int] = field(default_factory=dict)
    """{commId: its ranks}. Each numbers its ranks from 0. `channels` are the largest one's, `links` are all of them's.
    """
    channels: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Order of the ranks in each channel's ring; with many ranks NCCL writes only the first ones."""
    links: dict[Link, set[int]] = field(default_factory=dict)
    """The channels that each link was opened for."""
    trees: dict[int, dict[int, int]] = field(default_factory=dict)
    """{channel: {rank: its parent in the tree, -1 for the root}}."""
    choices: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """{(collective, bytes): (algorithm, protocol)}; the collective is empty if NCCL doesn't log it."""
    variables: dict[str, str] = field(default_factory=dict)
    network: str = ""
    warnings: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    """NCCL's lines; `known` of them were parsed, or are known to be irrelevant."""
    known: int = 0

    def families(self) -> Counter[str]:
        """Count the links of each family."""
        return Counter(link.family for link in self.links)


def read(lines: Iterable[str]) -> Log:
    """Parse the lines of a log. BadInput if none of them is NCCL's."""
    log = Log()
    for line in lines:
        if not log.version and (found := VERSION.search(line)):
            log.version = found["version"]
        if found := LINE.search(line):
            log.lines += 1
            log.hosts.add(found["host"])
            if found["level"] == "WARN":
                log.warnings[found["text"]] += 1
            log.known += _take(found["text"].rstrip(), log) or found["level"] == "WARN"
    require(
        log.lines > 0 or bool(log.version),
        "it contains no NCCL lines: start the job with NCCL_DEBUG=INFO and "
        "keep what it prints, or let NCCL write it with NCCL_DEBUG_FILE=nccl-%h-%p.log",
    )
    return log


def _take(text: str, log: Log) -> bool:
    """Parse one line into `log`; return whether it was understood."""
    if found := LINK.search(text):
        link = Link(int(found["sender"]), int(found["receiver"]), _plain(found["transport"]))
        log.links.setdefault(link, set()).add(int(found["channel"]))
    elif found := ORDER.search(text):
        order = tuple(map(int, found["ranks"].split()))[: -1 if found["cut"] else None]  # drops a truncated number
        longest = max(map(len, log.channels.values()), default=0)
        if len(order) > longest:  # the earlier ones belong to a communicator with fewer ranks
            log.channels.clear()
        if len(order) >= longest:
            log.channels[int(found["channel"])] = order
    elif text.startswith("Trees"):
        for tree in TREE.finditer(text):
            log.trees.setdefault(int(tree["channel"]), {})[int(tree["rank"])] = int(tree["above"])
    elif found := CHOICE.search(text):
        names = (ALGORITHMS, found["algorithm"]), (PROTOCOLS, found["protocol"])
        known = {n.upper(): n for n in (*ALGORITHMS.values(), *PROTOCOLS.values())}
        algorithm, protocol = (numbers.get(name, known.get(name.upper(), name)) for numbers, name in names)
        log.choices[found["collective"] or "", int(found["size"])] = algorithm, protocol
    elif found := SET.search(text):
        log.variables[found["name"]] = found["value"]
    elif found := NETWORK.search(text):
        log.network = found["name"]
    else:
        found = PASSED.search(text)
    if made := COMMUNICATOR.search(text):
        log.communicators[made["name"]] = int(made["ranks"])
    if sizes := RANKS.search(text):
        log.ranks = max(log.ranks, int(sizes["ranks"]))
        log.nodes = max(log.nodes, int(sizes["nodes"] or 0))
    return found is not None or text.startswith("Trees")


def _plain(transport: str) -> str:
    """Normalise a transport: "NET/IB/3/GDRDMA" -> "NET/IB/GDRDMA", "SHM/direct/direct" -> "SHM/direct".

    "P2P/CUMEM/read" becomes "P2P/CUMEM". A plugin's network keeps its name: "NET/AWS Libfabric/1/GDRDMA" -> "NET/AWS
    Libfabric/GDRDMA". Terms from before 2.17 become today's.
    """
    transport = {"direct shared memory": "SHM/direct", "P2P/direct pointer": "P2P/direct"}.get(transport, transport)
    parts = [p.partition("(")[0] for p in transport.split(" comm 0x")[0].split("/")]
    return "/".join(dict.fromkeys(p for p in parts if p and not p.isdigit() and p != "read"))


MEANING = {
    "P2P": "from GPU memory to GPU memory, over NVLink or PCIe",
    "SHM": "through the host's memory: this pair does not read each other's memory",
    "NET": "through a network card",
}
DECIDES = {
    "NCCL_P2P_DISABLE": "forbids GPUs to read each other's memory: everything goes through the host",
    "NCCL_IB_DISABLE": "forbids InfiniBand and RoCE: ranks of other machines are reached over TCP",
    "NCCL_SHM_DISABLE": "forbids the host's memory: what cannot go from GPU to GPU takes the network",
    "NCCL_ALGO": "fixes the algorithm for all sizes: NCCL's own choice depends on the size",
    "NCCL_PROTO": "fixes the protocol for all sizes: NCCL's own choice depends on the size",
}
"""Variables that change NCCL's choices. Other variables, and those set to 0, are only listed."""


def in_words(log: Log) -> Iterator[str]:
    """Yield sentences that explain the log."""
    version = f"NCCL {log.version}" if log.version else "NCCL, version not logged"
    ranks = f"{log.ranks} ranks" if log.ranks else "number of ranks not logged"
    nodes = log.nodes or len(log.hosts)
    machines = f"{nodes} machine{'s' if nodes != 1 else ''}"
    yield f"{version}; {ranks}; {'ran on' if log.nodes else 'lines from'} {machines}."
    if len(log.communicators) > 1:
        sizes = Counter(log.communicators.values())
        named = ", ".join(f"{n} of {size}" for size, n in sorted(sizes.items(), reverse=True))
        yield (
            f"{len(log.communicators)} communicators ({named} ranks): each numbers its ranks from 0, so the rings "
            "are of the largest and the links of all together."
        )
    if log.channels:
        orders = Counter(log.channels.values())
        order, times = orders.most_common(1)[0]
        others = f" (the order of {times} of {len(log.channels)})"
        cut = f" and so on (NCCL wrote {len(order)} of {log.ranks} ranks)" if len(order) < log.ranks else ""
        ring, many = " -> ".join(map(str, order)), "s" * (len(log.channels) > 1)
        yield f"NCCL set up {len(log.channels)} channel{many}, each with a ring: {ring}{cut}{others}."
    for family, n in sorted(log.families().items()):
        kinds = Counter(link.transport for link in log.links if link.family == family)
        named = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())
        yield f"{n} of {len(log.links)} links ({named}) go {MEANING.get(family, f'over {family}')}."
    yield from _findings(log)
    if log.trees:
        roots = sorted({rank for tree in log.trees.values() for rank, above in tree.items() if above == -1})
        yield (
            f"{len(log.trees)} trees, with rank {' or '.join(map(str, roots))} at the top. NCCL picks ring or tree "
            "by message size."
        )
    yield from _choices(log)
    for name, value in log.variables.items():
        decides = name in DECIDES and value != "0"
        yield f"{name}={value} is set: it {DECIDES[name]}." if decides else f"{name}={value} is set."
    for text, n in log.warnings.most_common(3):
        yield f"Warned{f' {n} times' if n > 1 else ''}: {text}"
    if log.lines and log.known < log.lines:
        yield f"{log.lines - log.known} of {log.lines} NCCL lines were not understood."


def _choices(log: Log) -> Iterator[str]:
    """Yield the algorithm and protocol of each collective, by ranges of logged sizes."""
    for collective in dict.fromkeys(name for name, _ in log.choices):
        sizes = sorted(size for name, size in log.choices if name == collective)
        runs: list[tuple[tuple[str, str], list[int]]] = []
        for size in sizes:
            choice = log.choices[collective, size]
            if not runs or runs[-1][0] != choice:
                runs.append((choice, []))
            runs[-1][1].append(size)
        parts = [
            f"{algorithm} with {protocol} "
            + (f"from {_size(of[0])} to {_size(of[-1])}" if len(of) > 1 else f"at {_size(of[0])}")
            for (algorithm, protocol), of in runs
        ]
        yield f"For {collective or 'collectives'}, NCCL chose {'; '.join(parts)}."
    if log.lines and not log.choices:
        yield "The log doesn't say which algorithm ran: add NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING."


def _size(size: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} B"


def _findings(log: Log) -> Iterator[str]:
    families = log.families()
    if families["NET"]:
        kinds = {link.transport for link in log.links if link.family == "NET"}
        if any("Socket" in kind for kind in kinds):
            yield "The network is TCP, not InfiniBand or RoCE: its bytes pass the CPU."
        elif any("GDRDMA" not in kind for kind in kinds):
            yield (
                "Some network links are without GPUDirect RDMA (no GDRDMA in the line): their bytes take a detour "
                "through the host's memory."
            )
    if families["SHM"] and not families["P2P"]:
        yield (
            "No pair of GPUs talks directly. On consumer cards without peer-to-peer that is as good as it gets; on "
            "cards with NVLink it is a finding."
        )
    elif families["SHM"]:
        yield "Some pairs talk directly, others through the host: a ring is as fast as its slowest link."
    if log.nodes == 1 and families["NET"]:
        yield "Ranks of one machine use a network card to reach each other: are P2P and SHM switched off?"


WAYS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe bridge",
    "NODE": "two PCIe bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
"""Abbreviations of `nvidia-smi topo -m`, from its own legend, fastest first."""


def read_topology(text: str) -> dict[tuple[str, str], str]:
    """Parse `nvidia-smi topo -m` into {("GPU0", "GPU1"): "NV12", ...}, each pair of GPUs once.

    BadInput if it contains no table of GPUs.
    """
    text = re.sub(r"\x1b\[[\d;]*m", "", text)  # nvidia-smi underlines the header
    rows = [line.split() for line in text.splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), None)
    require(head is not None, "no table of GPUs is in it: it should hold what `nvidia-smi topo -m` prints")
    found = {}
    for row in rows:
        if row and row[0].startswith("GPU") and "X" in row:
            for other, way in zip(head, row[1:], strict=False):
                if other.startswith("GPU") and other > row[0] and way != "X":
                    found[row[0], other] = way
    require(
        bool(found) or head == ["GPU0"] or len([h for h in head if h.startswith("GPU")]) <= 1,
        "the table of GPUs could not be read: it should hold what `nvidia-smi topo -m` prints",
    )
    return found


def topology_in_words(topology: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield what the table means for a ring over these GPUs."""
    ways = Counter(topology.values())
    for way, n in ways.most_common():
        family = "NV" if way.startswith("NV") else way
        links = f" ({way[2:]} links each)" if family == "NV" else ""
        yield f"{n} pair{'s' if n != 1 else ''} of GPUs: {way}, {WAYS.get(family, 'a way without a name here')}{links}."
    if len(ways) > 1:
        yield "The pairs differ: take GPUs of one group for a job that needs fewer than all (CUDA_VISIBLE_DEVICES)."
