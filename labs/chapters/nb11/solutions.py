"""Reference solutions of notebook 11."""

from __future__ import annotations

from labs.kit.measure import paired_ratio

# -- 11.1


def judge(records):
    """(verdict, reason) on: with 4 workers a DataLoader loads at least 1.05 times as fast as without."""
    gains = {}
    for data in dict.fromkeys(r.case["data"] for r in records.where("load_time")):
        for kind in ("measured", "recorded"):  # what a model says, or a paper, is no measurement of this
            found = [[r for r in records.where("load_time", data=data, workers=n) if r.kind == kind] for n in (0, 4)]
            if [len(f) for f in found] != [1, 1]:
                continue
            without, with_4 = ([s / {"s": 1, "ms": 1e3}[f[0].unit] for s in f[0].samples] for f in found)
            if len(without) == len(with_4) >= 6:  # fewer rounds have no interval of 95 %
                gains[data] = paired_ratio(without, with_4)  # round by round: what slows both cancels
    if not gains:
        return "not tried yet", "no data were loaded both without workers and with 4, in 6 rounds or more"
    said = ", ".join(f"{data}: {gain} times as fast with 4 workers" for data, gain in gains.items())
    if all(gain.low >= 1.05 for gain in gains.values()):
        return "holds", said
    if all(gain.high < 1.05 for gain in gains.values()):
        return "does not hold", said
    return "depends", said


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
