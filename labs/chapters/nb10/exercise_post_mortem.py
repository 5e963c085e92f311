"""Exercise 10.3: which rank did what, from Flight Recorder's dumps alone; on recorded jobs and made ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labs.chapters.nb10 import dump_cases
from labs.chapters.nb10.dump_cases import Answer, Case, Entry
from labs.chapters.nb10.solution_post_mortem import line, post_mortem, what
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.errors import brief

KINDS = ("missing", "other collective", "other size", "extra", "dead")
Function = Callable[..., Any]


def check_post_mortem(f: Function) -> None:
    """Every case in turn; the first wrong answer is explained by what the dumps say about it."""
    [answers] = on_ranks(_ask, 1, f, when="")
    for case, got in zip(dump_cases.cases(), answers, strict=True):
        if isinstance(got, str):
            raise Mistake(f"you return {got}", 'return (rank, kind, group, number, "file.py:line"), or None')
        if got != case.answer:
            _explain(case, got)


def _ask(f: Function) -> list[Any]:
    return [_plain(f(case.dumps, case.groups)) for case in dump_cases.cases()]


def _plain(answer: Any) -> Any:
    """None, the five values, or what was returned, as text: it travels between processes."""
    if answer is None:
        return None
    try:
        rank, kind, group, number, where = answer
        rank, number = (min(max(int(n), -1), 10**6) for n in (rank, number))
        return rank, str(kind)[:50], str(group)[:50], number, str(where)[:100]
    except Exception:  # a learner's own class may raise anything
        return brief(answer)


def _explain(case: Case, got: Answer) -> None:
    """Mistake that says what is wrong with this answer."""
    if got is None:
        _overlooked(case)
    if got[1] not in KINDS:
        raise Mistake(f"{got[1]!r:.40} is no kind", f"there are {', '.join(map(repr, KINDS))}, and None for nobody")
    if case.answer is None:
        raise Mistake(
            f'"{case.name}": you blame rank {got[0]} ({got[1]}), and all ranks have called the same, equally often in '
            "every group: nobody is to blame, a step is slow",
            'gloo writes "scheduled" into every entry, also where the collective is over; and one rank may well call '
            "the same collective from another line",
        )
    if got[0] != case.answer[0]:
        _wrong_rank(case, got)
    _wrong_deed(case, got)


def _overlooked(case: Case) -> None:
    _, kind, group, number, _ = case.answer
    hint = {
        "missing": "compare the ranks' last numbers, in each group",
        "extra": "one rank alone has this number: most ranks never called it",
        "dead": "who has no file, if nobody else explains the hang?",
        "other collective": "compare the names under the same number of the same group",
        "other size": "compare sizes and dtypes, too, under the same number of the same group",
    }[kind]
    raise Mistake(f'"{case.name}": you blame nobody; something is wrong with number {number} of group {group!r}', hint)


def _wrong_rank(case: Case, got: tuple) -> None:
    """Who was blamed did nothing wrong, and the dumps say why."""
    blamed, (rank, kind, group, number, _) = got[0], case.answer
    at = f"number {number} of group {group!r}"
    you = f'"{case.name}": you blame rank {blamed}'
    if blamed not in case.groups["0"]:
        raise Mistake(f"{you}, and there is no such rank", "ranks are the keys of dumps, and those in groups")
    if blamed not in case.dumps:
        raise Mistake(
            f"{you}, whose file is missing; a missing file alone proves nothing, and the others' show what happened",
            "look at the files that there are; only if they explain nothing, the rank without one is dead",
        )
    if kind == "dead":
        raise Mistake(
            f"{you}, and all ranks that have a file came equally far, and called the same",
            "one rank has no file, and nobody else explains the hang",
        )
    there, own = _call(case, blamed, group, number), _call(case, blamed, got[2], got[3])
    theirs = [e for r in case.dumps if (e := _call(case, r, got[2], got[3]))]
    if got[1].startswith("other") and own and all(what(e) == what(own) for e in theirs):
        raise Mistake(
            f"{you} ({got[1]}), and under number {got[3]} of group {got[2]!r} it calls what the others call, "
            f"{_words(own)}",
            "names, sizes and dtypes count; one rank may well call the same collective from another line",
        )
    if kind in ("other collective", "other size") and there:
        odd = _call(case, rank, group, number)
        alike = [r for r in case.dumps if (e := _call(case, r, group, number)) and what(e) == what(there)]
        raise Mistake(
            f"{you}, which does under {at} what {len(alike)} ranks do, {_words(there)}; one does {_words(odd)}",
            "count what is done under each number: the majority is right, here",
        )
    if kind == "extra":
        raise Mistake(
            f"{you}, which never called {at}; nor did most others",
            "the majority is right, here: to blame is the one that called it",
        )
    newest = {r: max((e["collective_seq_id"] for e in _of(case, r, got[2])), default=0) for r in case.dumps}
    ahead = newest[blamed] == max(newest.values()) > min(newest.values())
    first = "to have the highest number is no fault; " if ahead else ""
    if there:
        raise Mistake(
            f"{you}, and it has called {at}; {first}it waits for another rank, which has not"
            + ("" if got[2] == group else f". That is why it is behind in group {got[2]!r}"),
            "who waits has called; to blame is who has not. Numbers count in each group for itself, and of all that "
            "looks wrong the earliest (time_created_ns) is the cause",
        )
    raise Mistake(
        f"{you}, and what went wrong first is {at}, which this rank "
        + (f"is not in; {first}it waits, in another group" if blamed not in case.groups[group] else "never came to"),
        "of all that looks wrong, in any group, the earliest (time_created_ns) is the cause",
    )


def _wrong_deed(case: Case, got: tuple) -> None:
    """The right rank, and something wrong about what it did."""
    rank, kind, group, number, where = case.answer
    you = f'"{case.name}": rank {rank} it is'
    if got[2] != group:
        raise Mistake(
            f"{you}, and what went wrong first is number {number} of group {group!r}, not of {got[2]!r}",
            "numbers count in each group for itself; the earliest thing (time_created_ns) is the cause",
        )
    if got[3] != number and not (kind == "dead" != got[1]):
        newest = max(e["collective_seq_id"] for r in case.dumps for e in _of(case, r, group))
        later = kind == "missing" and got[3] == newest
        raise Mistake(
            f"{you}, and its number is {number}, not {got[3]}"
            + (": that is the newest one of the others, who could go on after the broadcast" if later else ""),
            "the first collective that this rank did not call is one after its own last collective_seq_id in that "
            "group (which is not a place in the list: its beginning may be overwritten); the others may be further"
            if kind == "missing"
            else "the newest number of the others: they have called it and wait, and it has not"
            if kind == "dead"
            else "the first number under which it did something else; numbers are collective_seq_id, not places in the "
            "list, whose beginning may be overwritten",
        )
    if got[1] != kind:
        raise Mistake(
            f"{you}, with number {number} of group {group!r}; {_why(case)}: {kind!r}, not {got[1]!r}",
            "compare its entry of that number with the others': is there one, its name, its sizes and "
            "dtypes; has it a file?",
        )
    named = got[4].rpartition(":")[0]
    if "torch/" in named or named.endswith(("distributed_c10d.py", "c10d_logger.py")):
        raise Mistake(
            f"{you}, and {got[4]} is a line of torch itself",
            "frames come innermost first: take the first one whose file is not torch's",
        )
    raise Mistake(
        f"{you}, and the line is {where}, not {got[4]}",
        "the line of the others, who have called it: the innermost frame that is not torch's"
        if kind in ("missing", "dead")
        else "its own line: the innermost frame that is not torch's",
    )


def _why(case: Case) -> str:
    rank, kind, group, number, _ = case.answer
    if kind == "dead":
        return "it has no file"
    if kind == "missing":
        return "it never called that"
    own = _call(case, rank, group, number)
    others = [e for r in case.groups[group] if r != rank and (e := _call(case, r, group, number))]
    if kind == "extra":
        return f"it alone calls that, {_words(own)}"
    return f"it does {_words(own)}, and another rank {_words(others[0])}"


def _of(case: Case, rank: int, group: str) -> list[Entry]:
    return [e for e in case.dumps.get(rank, []) if e["process_group"][0] == group]


def _call(case: Case, rank: int, group: str, number: int) -> Entry | None:
    return next((e for e in _of(case, rank, group) if e["collective_seq_id"] == number), None)


def _words(e: Entry) -> str:
    return f"{e['profiling_name'].removeprefix('gloo:')} of {e['input_sizes']} {' '.join(e['input_dtypes'])}"


def last_entries(which: int = 0, count: int = 2) -> str:
    """The last entries of each rank in a case, for a look."""
    case = dump_cases.cases()[which]
    rows = [f"groups: {case.groups}"]
    for rank in case.groups["0"]:
        for e in case.dumps.get(rank, [])[-count:]:
            rows.append(
                f"rank {rank}: group {e['process_group'][0]!r} number {e['collective_seq_id']:2}  "
                f"{e['profiling_name']:16} {e['input_sizes']!s:7} {e['state']}  {line(e)}"
            )
    return "\n".join(rows)


EXERCISE = Exercise("a post-mortem from dumps alone", check_post_mortem, post_mortem)
