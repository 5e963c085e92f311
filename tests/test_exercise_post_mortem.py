"""Exercise 10.3: right post-mortems of other styles pass, every mistake has its name, the cases are what they say."""

from __future__ import annotations

import os
import sys

import pandas as pd
import pytest
from mutants.nb10_post_mortem import RARER, way
from speeds import first

from labs.chapters.nb10 import dump_cases
from labs.chapters.nb10.exercise_post_mortem import KINDS, check_post_mortem, last_entries
from labs.chapters.nb10.solution_post_mortem import line, what
from labs.kit import answers
from labs.kit.check import Mistake, examine


def along_the_clock(dumps, groups):
    """Each number of each group in the order in which the first rank came to it; the first that is not right."""
    events = sorted((e["time_created_ns"], r, e) for r, entries in dumps.items() for e in entries)
    names = [(e["process_group"][0], e["collective_seq_id"]) for _, _, e in events]
    newest = {}
    for (group, n), (_, r, _) in zip(names, events, strict=True):
        newest[group, r] = n
    for group, n in dict.fromkeys(names):
        here = {r: e for (g, k), (_, r, e) in zip(names, events, strict=True) if (g, k) == (group, n)}
        absent = sorted(r for r in groups[group] if r in dumps and newest.get((group, r), 0) < n)
        seen = [what(e) for e in here.values()]
        usual = max(seen, key=seen.count)
        for r, e in here.items():
            if what(e) != usual:
                return r, "other " + ("size" if what(e)[0] == usual[0] else "collective"), group, n, line(e)
        if len(absent) > len(here):
            [(r, e)] = here.items()
            return [r, "extra", group, n, line(e)]
        if absent:
            return absent[0], "missing", group, n, line(next(iter(here.values())))
    if lost := set(groups["0"]) - set(dumps):
        return lost.pop(), "dead", *names[-1], line(events[-1][2])
    return None


def with_pandas(dumps, groups):
    """A table of all entries, a group for each number."""
    t = pd.DataFrame(
        [
            {
                "rank": r,
                "group": e["process_group"][0],
                "n": e["collective_seq_id"],
                "what": what(e),
                "t": e["time_created_ns"],
                "line": line(e),
            }
            for r, es in dumps.items()
            for e in es
        ]
    )
    found = []
    for (group, n), rows in t.groupby(["group", "n"]):
        usual, ranks = rows.what.mode()[0], set(groups[group]) & set(dumps)
        odd, last = rows[rows.what != usual], t[t.group == group].groupby("rank").n.max().to_dict()
        absent = [r for r in ranks if last.get(r, 0) < n]
        if len(odd):
            o = odd.iloc[0]
            kind = "other size" if o.what[0] == usual[0] else "other collective"
            found.append((rows.t.min(), int(o["rank"]), kind, group, n, o.line))
        elif absent and 2 * len(absent) > len(ranks):
            found.append((rows.t.min(), int(rows["rank"].iloc[0]), "extra", group, n, rows.line.iloc[0]))
        elif absent:
            found.append((rows.t.min(), absent[0], "missing", group, n, rows.line.iloc[0]))
    if found:
        return tuple(min(found)[1:])
    e = t.sort_values("t").iloc[-1]
    return next(((r, "dead", e.group, e.n, e.line) for r in groups["0"] if r not in dumps), None)


@pytest.mark.parametrize("right", first(1, [along_the_clock, with_pandas, way()]))
def test_right_post_mortems_of_any_style_pass(right):
    check_post_mortem(right)


@pytest.mark.parametrize("name", first(3, RARER))
def test_rarer_mistakes_have_their_name(name):
    wrong, words = RARER[name]
    with pytest.raises(Mistake) as found:
        check_post_mortem(wrong)
    assert words in str(found.value)


def test_cases_hold_every_kind_and_some_are_recorded():
    every = dump_cases.cases()
    assert {c.answer[1] for c in every if c.answer} == set(KINDS)
    assert sum(c.answer is None for c in every) >= 3
    assert sum(c.name.startswith("recorded") for c in every) == 5
    for case in every:
        for entries in case.dumps.values():
            assert entries and all(set(e) == set(dump_cases.FIELDS) for e in entries)


def test_no_group_of_two_decides_by_majority():
    """Where ranks do different things under one number, most of them agree: the answer is one."""
    for case in dump_cases.cases():
        if case.answer and case.answer[1].startswith("other"):
            group, number = case.answer[2:4]
            seen = [
                what(e)
                for es in case.dumps.values()
                for e in es
                if (e["process_group"][0], e["collective_seq_id"]) == (group, number)
            ]
            assert 2 * max(map(seen.count, seen)) > len(seen) >= 3, case.name


def test_an_answer_may_change_what_it_was_given():
    def emptied(dumps, groups):
        found = along_the_clock(dumps, groups)
        dumps.clear()
        groups.clear()
        return found

    check_post_mortem(emptied)
    assert "group '1' number  3" in last_entries()


@pytest.mark.drill
def test_gloo_records_today_what_the_file_says(monkeypatch, tmp_path):
    monkeypatch.setattr(dump_cases, "FILE", tmp_path / "dumps.json")
    dump_cases._from_file.cache_clear()
    try:
        dump_cases._record()
        for case in dump_cases._from_file():
            assert along_the_clock(case.dumps, case.groups) == case.answer, case.name
    finally:
        dump_cases._from_file.cache_clear()


def test_leaving_the_process_is_told(monkeypatch):
    monkeypatch.setattr(answers, "RUN_S", 15.0)
    for leave in (lambda dumps, groups: os._exit(3), lambda dumps, groups: sys.exit()):
        outcome = examine("10.3", leave)
        assert outcome.state == "not yet", outcome.text
