"""Typical mistakes in exercise 09.2: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations


def _bars(events):
    return [e for e in events if e["ph"] == "X"]


def _main(events):
    return next(e["tid"] for e in _bars(events) if e["name"].startswith("ProfilerStep"))


def _reduces(events):
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in _bars(events) if e["name"] == "gloo:all_reduce")


def _operators(events, same_thread=True, calls=False):
    main = _main(events)
    chosen = [e for e in _bars(events) if e["cat"] == "cpu_op" and (e["tid"] == main or not same_thread)]
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in chosen if calls or not e["name"].startswith("c10d::"))


def _merged(spans):
    out = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1][1] = max(out[-1][1], b)
        else:
            out.append([a, b])
    return out


def _overlap(spans, others):
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in spans for c, d in others)


def _exposed_us(reduces, operators):
    spans = _merged(reduces)
    return sum(b - a for a, b in spans) - _overlap(spans, _merged(operators))


def _sum(events):
    return sum(b - a for a, b in _reduces(events)) / 1e3


def _under_way(events):
    return sum(b - a for a, b in _merged(_reduces(events))) / 1e3


def _last(events):
    return _exposed_us(_reduces(events)[-1:], _operators(events)) / 1e3


def _tail(events):
    end = max(b for _, b in _reduces(events))
    return max(0.0, end - max(b for a, b in _operators(events) if a < end)) / 1e3


def _twice(events):
    operators = _operators(events)
    return sum(_exposed_us([r], operators) for r in _reduces(events)) / 1e3


def _other_threads(events):
    return _exposed_us(_reduces(events), _operators(events, same_thread=False)) / 1e3


def _calls(events):
    return _exposed_us(_reduces(events), _operators(events, calls=True)) / 1e3


def _nested(events):
    spans = _merged(_reduces(events))
    return (sum(b - a for a, b in spans) - _overlap(spans, _operators(events))) / 1e3


def _microseconds(events):
    return _exposed_us(_reduces(events), _operators(events))


def _whole_backward(events):
    ranges = [(e["ts"], e["ts"] + e["dur"]) for e in _bars(events) if e["name"] == "backward"]
    return _exposed_us(_reduces(events), _operators(events) + ranges) / 1e3


def _hidden(events):
    return _overlap(_merged(_reduces(events)), _merged(_operators(events))) / 1e3


def _idle(events):
    [backward] = [(e["ts"], e["ts"] + e["dur"]) for e in _bars(events) if e["name"] == "backward"]
    return _exposed_us([backward], _operators(events)) / 1e3


def _half(events):
    return _exposed_us(_reduces(events), _operators(events)) / 2e3


MUTANTS = {
    "09.2": {
        "sum of durations": (_sum, "sum of all all-reduces' durations"),
        "only the last": (_last, "the last all-reduce alone"),
        "overlap twice": (_twice, "count the time twice"),
        "another thread": (_other_threads, "hides nothing here"),
        "nested operators twice": (_nested, "taken out twice"),
        "microseconds": (_microseconds, "this is in microseconds"),
        "the range as computing": (_whole_backward, "the wait is in it"),
        "after the last operator": (_tail, "only what comes after backward's last operator"),
    },
}

# Rarer ones
MORE = {
    "09.2": {
        "under way": (_under_way, "with what backward hides"),
        "calls compute": (_calls, "only hands a bucket over"),
        "hidden": (_hidden, "this is the hidden part"),
        "idle": (_idle, "where no all-reduce is under way"),
        "half": (_half, "the exposed time in ms is"),
        "no number": (lambda events: None, "not a number"),
    },
}
