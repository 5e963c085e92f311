"""Exercise 08.1: an all-reduce over two speeds, on real ranks, and the seconds that it should take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from labs.chapters.nb08.solution_levels import two_levels
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.rank import Rank
from labs.two_levels.two_levels import Nodes, sent_between, sent_by_level

Function = Callable[..., Any]
LAYOUTS = ((2, 2), (2, 3), (3, 2))  # (nodes, ranks per node)
NUMBERS = 49_152  # 192 KiB: far above gloo's headers; any number of parts up to 3 divides it
CASES = ((12, 3e6, 3e6), (1_200_000, 2e8, 2e7), (600_000, 1e7, 9e8))  # numbers, byte/s inside, byte/s across
BASE = 8  # rank r's numbers are BASE**r: the sum's digits say whose numbers are in it
SLACK = 1.05  # of the bytes: headers


def check_two_levels(f: Function) -> None:
    """The sum, the bytes that leave each node, then the seconds, on three layouts."""
    found = {layout: on_ranks(_trial, layout[0] * layout[1], f, *layout, when=_where(layout)) for layout in LAYOUTS}
    for layout, ranks in found.items():
        _check_sum(layout, ranks)
    for layout, ranks in found.items():
        _check_bytes(layout, ranks[0]["sent"])
    _check_seconds(found)


def _where(layout: tuple[int, int]) -> str:
    return f"on {layout[0]} nodes of {layout[1]} ranks"


def _trial(f: Function, nodes: int, per_node: int) -> dict[str, Any]:
    """On a rank: what becomes of a vector, what was sent, what is predicted."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("across", "inside"))
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    x = torch.full((NUMBERS,), float(BASE**rank))
    f(x, inside, across, 1e8, 1e7)
    zeros = torch.zeros(NUMBERS)
    who = Rank(rank, ranks, rank, ranks, torch.device("cpu"), "gloo", ())
    return {
        "sums": sorted(set(x.tolist()))[:9],
        "seconds": [f(torch.zeros(n), inside, across, i, a) for n, i, a in CASES],
        "sent": sent_between(lambda: f(zeros, inside, across, 1e8, 1e7), who),
    }


def _check_sum(layout: tuple[int, int], found: list[dict[str, Any]]) -> None:
    where, n = _where(layout), layout[0] * layout[1]
    right = float(sum(BASE**r for r in range(n)))
    sums = [r["sums"] for r in found]
    if all(s == [right] for s in sums):
        return
    if all(s == [float(BASE**r)] for r, s in enumerate(sums)):
        raise Mistake(
            f"{where} every rank still has its own numbers in x: nothing was written into it",
            "an all-gather writes into the tensors that you give it: give it views of x, or copy the result into x",
        )
    if all(s == [right / n] for s in sums):
        raise Mistake(f"{where} you return the mean; the sum is asked", "do not divide by the number of ranks")
    per = layout[1]
    own_node = [float(sum(BASE**p for p in range(r // per * per, r // per * per + per))) for r in range(n)]
    if all(s == [want] for s, want in zip(sums, own_node, strict=True)):
        raise Mistake(
            f"{where} every rank ends with the sum of its own node: the other nodes' numbers are missing",
            "sum over `across` between the two steps inside the node",
        )
    columns = [float(sum(BASE**p for p in range(r % per, n, per))) for r in range(n)]
    if all(s == [want] for s, want in zip(sums, columns, strict=True)):
        raise Mistake(
            f"{where} every rank ends with the sum over `across` alone: the ranks of its own node are missing",
            "begin inside the node: reduce-scatter",
        )
    if any(right in s and len(s) > 1 for s in sums):
        raise Mistake(
            f"{where} a part of x holds the sum, the rest does not: the parts were not put together again",
            "each rank has the sum of one part: an all-gather inside the node makes it whole",
        )
    times = [s[0] / right for s in sums if len(s) == 1]
    if len(times) == n and len(set(times)) == 1 and times[0] == int(times[0]):
        raise Mistake(f"{where} the result is {times[0]:g} times the sum", "who has added what is there already?")
    raise Mistake(
        f"{where} x does not hold the sum of all ranks ({[s[:3] for s in sums][:2]} on ranks 0 and 1; rank r gave "
        f"{BASE}^r)",
        "reduce-scatter inside, all-reduce across, all-gather inside: with the same parts in the same order",
    )


def _check_bytes(layout: tuple[int, int], sent: list[dict[int, int]] | None) -> None:
    if sent is None:
        return  # this kernel does not count
    (m, k), size, nodes = layout, 4 * NUMBERS, Nodes(*layout, 1e8, 1e7)
    least, leaves = 2 * (m - 1) / m * size, max(sent_by_level(sent, nodes)[1])
    case = f"{_where(layout)} {leaves / size:.2f} times the vector leave a node, {least / size:.2f} are enough"
    if leaves > SLACK * least:
        if abs(leaves - k * least) < 0.05 * k * least:
            raise Mistake(
                f"{case}: every rank sends a whole vector across",
                "after a reduce-scatter each of a node's ranks holds one part of the node's sum: send that alone",
            )
        n = m * k
        if abs(leaves - 2 * (n - 1) / n * size) < 0.05 * size:
            raise Mistake(
                f"{case}: that is one flat ring over all ranks",
                "sum inside the node first: then what crosses does not grow with the ranks of a node",
            )
        raise Mistake(case, "only parts of the node's sum have to leave it")
    if leaves < 0.95 * least:
        raise Mistake(f"{case}: how can the sum be right?", "send the numbers in their own format")
    mine = [sum(b for peer, b in peers.items() if not nodes.same(r, peer)) for r, peers in enumerate(sent)]
    if min(mine) < 0.05 * least / k:
        idle = sum(b < 0.05 * least / k for b in mine)
        raise Mistake(
            f"{_where(layout)} {idle} of {m * k} ranks send nothing across: one rank of each node does it for all",
            "inside the node that takes 2 S / inside_b_s, not 2 (k-1)/k S: let each rank carry its own part",
        )


Slip = tuple[Callable[[float, int, int, float, float], float], str, str]
SLIPS: tuple[Slip, ...] = (
    (lambda s, k, m, i, a: 2 * (k - 1) / k * s / i + 2 * (m - 1) / m * s / k / a,
     "the k ranks of a node share one network card: you give each of them one of its own",
     "each rank sends 1/k of the vector's share, and k ranks send at once through one card"),
    (lambda s, k, m, i, a: max(2 * (k - 1) / k * s / i, 2 * (m - 1) / m * s / a),
     "you take the longer of the two levels: that is right where both go on at once",
     "here one phase begins when the one before has ended: add them"),
    (lambda s, k, m, i, a: (k - 1) / k * s / i + (m - 1) / m * s / a,
     "half of it: a ring's all-reduce is a reduce-scatter and an all-gather",
     "2 (n-1)/n of the vector, for each level"),
    (lambda s, k, m, i, a: 2 * (k - 1) / k * s / i + (m - 1) / m * s / a,
     "half of what crosses is missing: between nodes an all-reduce goes on, too", "2 (m-1)/m of the vector"),
    (lambda s, k, m, i, a: (k - 1) / k * s / i + 2 * (m - 1) / m * s / a,
     "inside the node there are two phases, and you count one", "reduce-scatter, and all-gather"),
    (lambda s, k, m, i, a: (2 * (k - 1) / k * s / i + 2 * (m - 1) / m * s / a) / 4,
     "this is the time of as many bytes as there are numbers: an FP32 number has four",
     "x.nbytes, or x.numel() * x.element_size()"),
    (lambda s, k, m, i, a: 8 * (2 * (k - 1) / k * s / i + 2 * (m - 1) / m * s / a),
     "this is 8 times as long: you take byte/s for bit/s", "both speeds are in bytes per second"),
    (lambda s, k, m, i, a: 2 * (m * k - 1) / (m * k) * s / min(i, a),
     "this is the time of one flat ring over all ranks, at the speed of its slowest link",
     "your function sums in three phases: add their times"),
    (lambda s, k, m, i, a: 2 * (m - 1) / m * s / a,
     "you count what crosses and leave out what is sent inside the node",
     "it is fast, not free: in one of the cases the inside is the slower one"),
    (lambda s, k, m, i, a: 2 * s / i + 2 * s / a,
     "2 S for each level is the limit for many ranks", "with few, it is 2 (n-1)/n"),
)  # fmt: skip


def _seconds(s: float, k: int, m: int, i: float, a: float) -> float:
    return 2 * (k - 1) / k * s / i + 2 * (m - 1) / m * s / a


def _check_seconds(found: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
    cases, got = [], []
    for (m, k), ranks in found.items():
        for rank in ranks[:1]:
            cases += [(4.0 * n, k, m, i, a) for n, i, a in CASES]
            got += rank["seconds"]
    for value in got:
        if isinstance(value, bool) or not hasattr(value, "__float__"):
            raise Mistake(
                f"the sum and the bytes are right; you return {value!r:.60}, not a number of seconds",
                "return 2 (k-1)/k ... + 2 (m-1)/m ...",
            )
    got = [float(v) for v in got]
    if _alike(got, [_seconds(*case) for case in cases]):
        return
    for wrong, what, hint in SLIPS:
        if _alike(got, [wrong(*case) for case in cases]):
            raise Mistake(f"the sum and the bytes are right, the seconds are not: {what}", hint)
    size, k, m, inside, across = cases[1]
    raise Mistake(
        f"the sum and the bytes are right, the seconds are not: for {size / 1e6:g} MB on {m} nodes of {k} ranks, "
        f"{inside / 1e6:g} MB/s inside and {across / 1e6:g} MB/s across, you return {got[1]:.4g} s",
        "write down, for each phase, the bytes that the busiest connection carries",
    )


def _alike(got: list[float], want: list[float]) -> bool:
    return all(abs(g - w) <= 1e-3 * abs(w) for g, w in zip(got, want, strict=True))


EXERCISE = Exercise("an all-reduce over two speeds, and its seconds", check_two_levels, two_levels)
