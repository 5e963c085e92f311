"""Reference solution of exercise 09.2."""

from __future__ import annotations


def exposed_ms(events: list[dict]) -> float:
    """Milliseconds in which an all-reduce is under way and the main thread runs no operator."""
    bars = [e for e in events if e["ph"] == "X"]
    main = next(e["tid"] for e in bars if e["name"].startswith("ProfilerStep#"))
    marks = []  # (moment, all-reduces that begin or end there, operators that do)
    for e in bars:
        reduces = e["name"] == "gloo:all_reduce"
        computes = e["cat"] == "cpu_op" and e["tid"] == main and not e["name"].startswith("c10d::")
        marks += [(e["ts"], reduces, computes), (e["ts"] + e["dur"], -reduces, -computes)]
    total_us = before = under_way = running = 0
    for moment, reduces, computes in sorted(marks):
        if under_way and not running:
            total_us += moment - before
        before, under_way, running = moment, under_way + reduces, running + computes
    return total_us / 1000
