"""Reference solutions of notebook 11."""

from __future__ import annotations

from labs.kit.measure import paired_ratio

# -- 11.2


def which_way(reports):
    """{number: (way, how many times as fast B is)} for the reports of seat 1."""
    log = {n: report.log for n, report in reports.items()}
    return {
        # line 12: all of A, then all of B, and line 14 falls all the time, as line 15 goes on to
        1: ("blocked", None),
        # line 3: nobody trains with anomaly detection; main without B's change took turns, too
        2: ("debug_baseline", paired_ratio(log[2]["main (ms)"], log[2]["B (ms)"]).value),
        # line 4: four times the samples in a step; line 16 has the same 256 on both sides
        3: ("weak_as_strong", paired_ratio(log[3]["A (ms)"], log[3]["B, 64 per GPU (ms)"]).value),
        # no difference is a result, too
        4: ("sound", paired_ratio(log[4]["A (ms)"], log[4]["B (ms)"]).value),
        # one rank prints, and what it prints is the slowest one's time
        5: ("sound", paired_ratio(log[5]["A (ms)"], log[5]["B (ms)"]).value),
        # line 11: 60,000 samples against 600 batches of 64
        6: ("two_units", paired_ratio(log[6]["A (s)"], log[6]["B (s)"]).value * 600 * 64 / 60_000),
    }
