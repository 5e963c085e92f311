"""Logs of NCCL and tables of nvidia-smi as four machines would write them: made by hand, recorded nowhere.

They follow the form of lines that are public in issues of github.com/NVIDIA/nccl; addresses, hosts and process numbers
are invented. A run on GPUs of one's own replaces them: python -m labs.nccl_log nccl.log.
"""

from __future__ import annotations

LABEL = "A sample made by hand: the form is NCCL's, no machine wrote it."


def log(ranks: int, nodes: int, channels: int, inside: str, between: str = "", version: str = "2.27.3") -> str:
    """The lines of `ranks` ranks on `nodes` machines: a ring in rank order on every channel.

    `inside` is the transport between GPUs of a machine, `between` that between machines.
    """
    each = ranks // nodes
    lines = [f"NCCL version {version}+cuda12.9"]

    def say(rank: int, text: str) -> None:
        lines.append(f"node{rank // each}:{4000 + rank}:{4100 + rank} [{rank % each}] NCCL INFO {text}")

    for rank in range(ranks):
        say(rank, f"Using network {between.split('/')[1] if between else 'Socket'}")
        say(
            rank,
            f"comm 0x{0xB94000 + rank:x} rank {rank} nRanks {ranks} nNodes {nodes} localRanks {each} "
            f"localRank {rank % each} MNNVL 0",
        )
    order = "   ".join(map(str, range(ranks)))
    for channel in range(channels):
        say(0, f"Channel {channel:02}/{channels:02} :    {order}")
    for rank in range(ranks):
        below = rank + 1 if rank + 1 < ranks else -1
        say(rank, "Trees " + " ".join(f"[{c}] {below}/-1/-1->{rank}->{rank - 1}" for c in range(channels)))
        right = (rank + 1) % ranks
        for channel in range(channels):
            if rank // each == right // each:
                say(rank, f"Channel {channel:02}/0 : {rank}[{rank % each}] -> {right}[{right % each}] via {inside}")
            else:
                say(
                    rank,
                    f"Channel {channel:02}/0 : {rank}[{rank % each}] -> {right}[{right % each}] [send] via {between}",
                )
        say(rank, "Connected all rings")
    return "\n".join(lines) + "\n"


def topology(gpus: int, way: str, far: str = "", group: int = 0) -> str:
    """`nvidia-smi topo -m` of `gpus` GPUs: `way` between those of a group of `group` (all, if 0), `far` otherwise."""
    group = group or gpus
    head = "\t".join(["", *(f"GPU{k}" for k in range(gpus)), "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    rows = [head]
    for k in range(gpus):
        ways = [" X " if k == j else way if k // group == j // group else far for j in range(gpus)]
        rows.append("\t".join([f"GPU{k}", *ways, "0-63", "0", "N/A"]))
    return "\n".join([*rows, "", "Legend:", "", "  X    = Self", ""])


SAMPLES: dict[str, tuple[str, str]] = {
    "2xRTX4090": (log(2, 1, 2, "SHM/direct/direct"), topology(2, "PHB")),
    "8xA100": (log(8, 1, 24, "P2P/CUMEM/read"), topology(8, "NV12")),
    "8xH100": (log(8, 1, 24, "P2P/CUMEM"), topology(8, "NV18")),
    "2x8xH100": (log(16, 2, 16, "P2P/CUMEM", "NET/IB/0/GDRDMA"), topology(8, "NV18")),
}
"""{name: (log, table of the topology of one machine)}."""
