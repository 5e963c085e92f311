"""Typical mistakes in exercise 10.3: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from collections import Counter


def _own_line(entry):
    frame = next(f for f in entry["frames"] if "torch" not in f["filename"])
    return f"{frame['filename']}:{frame['line']}"


def _torch_line(entry):
    return f"{entry['frames'][0]['filename']}:{entry['frames'][0]['line']}"


def _third_frame(entry):
    return f"{entry['frames'][2]['filename']}:{entry['frames'][2]['line']}"


def _one_later(dumps, groups):
    """Takes the newest number of the others for the last one that the dead rank called."""
    right = way()(dumps, groups)
    return (*right[:3], right[3] + 1, right[4]) if right and right[1] == "dead" else right


def _what(e):
    return e["profiling_name"], tuple(map(tuple, e["input_sizes"])), tuple(e["input_dtypes"])


def _number(e, place):
    return e["collective_seq_id"]


def way(
    line=_own_line,
    what=_what,
    number=_number,
    only=None,
    files="last",
    usual="most",
    extra=True,
    pick="absent",
    newest=False,
    first=min,
    who="own",
):
    """A post-mortem that is right by default, with as many mistakes as there are arguments."""

    def post_mortem(dumps, groups):
        lost = [r for r in groups["0"] if r not in dumps]
        if lost and files == "first":
            return dead(dumps, lost)
        found = []
        for group, members in groups.items():
            if only and group != only:
                continue
            calls = {}
            for r in members:
                if r in dumps or files == "empty":
                    own = [e for e in dumps.get(r, []) if e["process_group"][0] == group]
                    calls[r] = {number(e, k): e for k, e in enumerate(own, 1)}
            last = {r: max(c, default=0) for r, c in calls.items()}
            for n in sorted({n for c in calls.values() for n in c}):
                here = {r: c[n] for r, c in calls.items() if n in c}
                absent = [r for r in calls if last[r] < n]
                right = Counter(what(e) for e in here.values()).most_common()[0][0]
                if usual == "rank 0":
                    right = what(here[min(here)])
                odd = [r for r in here if what(here[r]) != right]
                began = min(e["time_created_ns"] for e in here.values())
                if odd:
                    e = here[odd[0]]
                    kind = "other size" if e["profiling_name"] == right[0] else "other collective"
                    said = line(e) if who == "own" else line(next(e for r, e in here.items() if r not in odd))
                    found.append((began, odd[0], kind, group, n, said))
                elif absent and len(absent) > len(here) and extra:
                    found.append((began, min(here), "extra", group, n, line(here[min(here)])))
                elif absent:
                    rank = {"absent": absent[0], "waiting": min(here), "highest": max(here, key=last.get)}[pick]
                    k = max(last.values()) if newest else n
                    e = next(c[k] for c in calls.values() if k in c)
                    found.append((began, rank, "missing", group, k, line(e)))
                if odd or absent:
                    break
        if found:
            return first(found)[1:]
        return dead(dumps, lost) if lost and files in ("first", "last") else None

    def dead(dumps, lost):
        e = max((e for entries in dumps.values() for e in entries), key=lambda e: e["time_created_ns"])
        return lost[0], "dead", e["process_group"][0], e["collective_seq_id"], line(e)

    return post_mortem


def _scheduled(dumps, groups):
    """Takes "scheduled" for under way: the rank whose oldest entry is not over."""
    right = way()(dumps, groups)
    if right is None:
        rank = min(dumps)
        e = dumps[rank][-1]
        return rank, "missing", e["process_group"][0], e["collective_seq_id"], _own_line(e)
    return right


def _dictionary(dumps, groups):
    return {"rank": 1}


MUTANTS = {
    "10.3": {
        "the highest number": (way(pick="highest", only="0"), "to have the highest number is no fault"),
        "who waits": (way(pick="waiting"), "it waits for another rank, which has not"),
        "a missing file is always to blame": (way(files="first"), "a missing file alone proves nothing"),
        "missing files are ignored": (way(files="ignored"), "who has no file, if nobody else explains the hang"),
        "names only": (way(what=lambda e: (e["profiling_name"],)), "compare sizes and dtypes, too"),
        "ignores groups": (way(only="0"), "That is why it is behind in group '0'"),
        "a line of torch": (way(line=_torch_line), "is a line of torch itself"),
        "where the others wait": (way(newest=True), "who could go on after the broadcast"),
    }
}
RARER = {
    "scheduled is under way": (_scheduled, "nobody is to blame"),
    "places in the list": (way(number=lambda e, place: place), "not a place in the list"),
    "the latest group": (way(first=max), "the earliest (time_created_ns)"),
    "lines must be the same": (way(what=lambda e: (*_what(e), _own_line(e))), "from another line"),
    "rank 0 is right": (way(usual="rank 0"), "count what is done under each number"),
    "no extra ones": (way(extra=False), "which never called number 21"),
    "an empty file": (way(files="empty"), "'dead', not 'missing'"),
    "the others' line": (way(who="others"), "its own line"),
    "the third frame": (way(line=_third_frame), "functional.py:408 is a line of torch itself"),
    "a dead rank's next number": (_one_later, "the newest number of the others"),
    "a dictionary": (_dictionary, "you return"),
}
"""More mistakes of other kinds, tried by tests/test_exercise_post_mortem.py."""
