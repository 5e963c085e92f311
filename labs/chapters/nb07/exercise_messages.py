"""Exercise 07.1: an all-reduce of few rounds, from messages, on real ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from labs.chapters.nb07.traffic import messages_noted, rounds
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake

Function = Callable[..., Any]
RANKS = (2, 3, 4, 6)
SHORT, LONG = 5, 1_000_003  # numbers; no number of ranks above 1 divides the second, and its 4 MB fit into no buffer
BASE = 8  # of the short vector, rank r's numbers are BASE**r: the sum's digits say whose numbers are in it


def most_rounds(ranks: int) -> int:
    """log2 of the largest power of two that is not above `ranks`, and two more if that leaves ranks over."""
    power = ranks.bit_length() - 1
    return power if ranks == 1 << power else power + 2


def check_all_reduce_small(f: Function) -> None:
    """The sum on 2, 3, 4 and 6 ranks, then the rounds, then one rank alone."""
    found = {n: _run(f, n) for n in RANKS}
    for n in (4, 6, 3, 2):
        _check_rounds(n, found[n])
    _run(f, 1)


def _run(f: Function, ranks: int) -> list[dict[str, Any]]:
    try:
        found = on_ranks(_reduce, ranks, f, when=f"on {ranks} ranks")
    except Mistake as mistake:
        if "wait for each other" not in mistake.what:
            raise
        both = (
            "dist.send returns when the other rank receives. If both send first, neither does: begin with "
            "dist.isend, then receive, then wait() for the send"
        )
        nobody = f"a partner such as rank ^ step must be below {ranks}: of a rank that is not there nothing ever comes"
        first = nobody if ranks & (ranks - 1) else both  # what hangs on 3 ranks has worked on 2
        raise Mistake(mistake.what, f"{first}. And each message needs a receive with the same length") from None
    _check_sum(ranks, found)
    return found


def _reduce(f: Function) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    short = torch.full((SHORT,), float(BASE**rank))
    with messages_noted() as notes:
        f(short)
    every = [torch.randn(LONG, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    long = every[rank].clone()
    with messages_noted() as more:
        f(long)
    total = sum(x.double() for x in every)
    magnitudes = sum(x.double().abs() for x in every)
    # n - 1 additions, each rounded to 2^-24 of a partial sum that is not above the sum of magnitudes
    return {
        "short": short.tolist(),
        "events": notes.events,
        "bits": hashlib.sha256(long.numpy().tobytes()).hexdigest(),
        "right": bool(((long - total).abs() <= ranks * 2**-24 * magnitudes).all()),
        "changed": notes.changed or more.changed,
        "forgotten": notes.forgotten + more.forgotten,
        "collectives": notes.collectives + more.collectives,
    }


def _check_sum(n: int, found: list[dict[str, Any]]) -> None:
    where, want = f"on {n} ranks" if n > 1 else "on one rank", [float(sum(BASE**r for r in range(n)))] * SHORT
    if called := [c for r in found for c in r["collectives"]]:
        raise Mistake(
            f"you call a collective ({called[0]}): this exercise is to build one",
            "dist.isend, dist.irecv, dist.send and dist.recv are enough",
        )
    if any(r["forgotten"] for r in found):
        raise Mistake(
            f"{where} {sum(r['forgotten'] for r in found)} messages are begun and never waited for: what they "
            "bring may not be there yet",
            "work = dist.irecv(...), then work.wait() before you read",
        )
    if any(r["changed"] for r in found):
        raise Mistake(
            "you change a tensor while it is being sent: what arrives may be half of each",
            "wait() for the send before you add to x, or send a clone",
        )
    if n > 1 and all(r["short"] == [float(BASE**i)] * SHORT for i, r in enumerate(found)):
        raise Mistake(
            f"{where} every rank still has its own numbers in x: nothing was written into it",
            "x += other works in place; x = x + other makes a new tensor, which the caller never sees",
        )
    for rank, r in enumerate(found):
        if r["short"] != want:
            raise Mistake(
                f"{where} rank {rank} ends with {_whose(r['short'], n)}, not with every rank's once",
                "partner = rank ^ step works for powers of two. Other ranks hand their numbers to one of "
                "those before, and get the sum afterwards"
                if n & (n - 1)
                else "draw on paper who holds whose numbers after each round",
            )
    if not all(r["right"] for r in found):
        raise Mistake(
            f"{where} the sum of {SHORT} numbers is right, that of {LONG:,} is not",
            "does every message carry the whole vector, and is each waited for?",
        )
    if len({r["bits"] for r in found}) > 1:
        raise Mistake(
            f"{where} the ranks' sums differ in their last bits: each adds in an order of its own, and models "
            "that are updated with them drift apart",
            "a + b is b + a, but (a + b) + c is not a + (b + c): let all ranks add in the same order",
        )


def _whose(x: list[float], n: int) -> str:
    """In words, whose numbers are in a short vector."""
    if len(set(x)) > 1:
        return f"other sums in other places ({', '.join(f'{v:g}' for v in x)})"
    if not (0 <= x[0] < BASE**n and x[0] == int(x[0])):
        return f"{x[0]:g} (rank r gave {BASE}^r)"
    times = [int(x[0]) // BASE**r % BASE for r in range(n)]
    return ", ".join(f"rank {r}'s numbers {k} times" for r, k in enumerate(times) if k != 1)


def _check_rounds(n: int, found: list[dict[str, Any]]) -> None:
    logs = [r["events"] for r in found]
    took, most = rounds(logs), most_rounds(n)
    if took <= most:
        return
    sends = [(rank, e[2]) for rank, log in enumerate(logs) for e in log if e[0] == "send"]
    case = f"on {n} ranks it takes {took} rounds, {most} are enough"
    if all((to - rank) % n == 1 for rank, to in sends) or all((rank - to) % n == 1 for rank, to in sends):
        raise Mistake(
            f"{case}: this is a ring, in which what a rank knows goes to one neighbour only",
            "a ring sends few bytes. For few rounds, let each rank tell a rank twice as far away in each",
        )
    if any(all(hub in pair for pair in sends) for hub in range(n)):
        raise Mistake(
            f"{case}: all messages go to one rank or come from it, one after the other",
            "while two ranks talk, the others can talk, too",
        )
    if len(sends) == 2 * (n - 1):
        raise Mistake(
            f"{case}: this is a tree, up to one rank and down again",
            "on the way up half of the ranks are idle: let both partners have the sum after each round",
        )
    if len(sends) == n * (n - 1):
        raise Mistake(
            f"{case}: every rank sends to every other, and it can send one message at a time",
            "pass on sums: after one round a rank can speak for two",
        )
    if not n & (n - 1) and len(sends) == 2 * n * most == n * took:
        raise Mistake(
            f"{case}: in half of the rounds parts of the sum are made, and in the other half they are handed round",
            "that sends few bytes (a reduce-scatter, then an all-gather). For few rounds each message holds the whole "
            "vector, and both partners add",
        )
    if took == 2 * most:
        raise Mistake(
            f"{case}: of two ranks that exchange, one sends only after it has received",
            "both at once: dist.isend, then dist.recv, then wait() for the send",
        )
    raise Mistake(case, "after k rounds a rank can hold the sum of 2^k ranks")
