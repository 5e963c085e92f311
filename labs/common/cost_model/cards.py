"""Real cards and their links, from labs/kit/gpus.toml."""

from __future__ import annotations

import math

from labs.common.cost_model.seconds import INFINITE, Cluster, Link
from labs.kit import hardware
from labs.kit.errors import require

REACHED = 0.8
"""Share of a link's or memory's datasheet bandwidth that is reached. For links: "at best 80 to 90 %" in
stas00/ml-engineering, network/README.md, whose NCCL sweeps reach 78 and 82 % inside a node.
"""
HOP_S = {"NVLink": 3.4e-6, "PCIe": 5.7e-6, "network": 9.6e-6}
"""Latency from one GPU of a ring to the next, in s, as NCCL assumes for Simple, its protocol for large messages: hwLat
in NVIDIA/nccl at 01afd20a, src/graph/tuning.cc.
"""
NO_PEER_TO_PEER = ("RTX 3090", "RTX 4090")
"""NVIDIA's driver gives these cards no peer-to-peer, so messages go through host memory:
github.com/NVIDIA/nccl/issues/1127 (RTX 3090), cortwave.github.io/posts/multi-gpu (RTX 4090).
"""


def known() -> list[str]:
    """Return the cards with sourced memory, link and 16-bit peak."""
    return [s.gpu for s in hardware.specs() if not missing(s)]


def missing(spec: hardware.Spec) -> list[str]:
    """Return what gpus.toml lacks for this card."""
    have = {"memory": memory_bytes(spec), "link": spec.link_gb_s, "16-bit peak": peak_flop_s(spec)}
    return [name for name, value in have.items() if not value]


def require_card(name: str) -> hardware.Spec:
    """Return the row of `name`. BadInput names the nearest card, or what has no source."""
    spec = hardware.require_spec(name)
    lacks = " and no ".join(missing(spec))
    require(not lacks, f"{spec.gpu} has no {lacks} with a source in gpus.toml; use one of {', '.join(known())}")
    return spec


def memory_bytes(spec: hardware.Spec) -> float:
    """Return the total that nvidia-smi prints, otherwise the datasheet's; 0 if there is neither."""
    return hardware.usable_bytes(spec.gpu) or 1e9 * (spec.memory_gb or 0)


def peak_flop_s(spec: hardware.Spec) -> float:
    """Return the dense 16-bit peak; 0 if it has no source."""
    return 1e12 * (spec.tflops("bf16") or spec.tflops("fp16") or 0)


def link(spec: hardware.Spec, gpus: int, gb_s: float = 0.0) -> tuple[Link, bool]:
    """Return (bandwidth of one of `gpus` cards in a node, in one direction; whether it is PCIe).

    `gb_s` is your measurement, as busbw of nccl-tests. A bridge joins two cards; more cards talk through PCIe.
    """
    pcie = "NVLink" not in (spec.link or "") or ("bridge" in spec.link and gpus > 2)
    reached = gb_s or REACHED * (spec.link_among(gpus) or math.inf) / 2  # datasheets add both directions
    return Link(1e9 * reached, HOP_S["PCIe" if pcie else "NVLink"]), pcie


def cluster(
    spec: hardware.Spec, gpus: int, gpus_per_node: int, network_gb_s: float, flop_s: float, link_gb_s: float = 0.0
) -> Cluster:
    """Build nodes of this card. `network_gb_s`: line rate of one GPU to other nodes, one direction; 0: one node."""
    inside, pcie = link(spec, min(gpus, gpus_per_node), link_gb_s)
    between = Link(REACHED * 1e9 * network_gb_s, HOP_S["network"]) if network_gb_s else INFINITE
    memory_bytes_s = 1e9 * REACHED * (spec.bandwidth_gb_s or math.inf)
    return Cluster(gpus, gpus_per_node, flop_s, inside, between, memory_bytes_s, memory_bytes(spec), pcie)
