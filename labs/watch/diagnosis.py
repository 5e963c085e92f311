"""Turn the ranks' evidence into one sentence: which rank, which collective, which line.

All ranks of a group must make the same calls in the same order. The first call in their recorders that differs, or that
a rank hasn't made, is where it went wrong. The other ranks (three or more) show which of two ranks is wrong, or else
what followed the same call in earlier steps. If neither decides, the diagnosis says so.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from labs.watch.evidence import FRAME, Call, Frame, RankEvidence

CONSEQUENCE = re.compile(
    r"onnection (closed|reset|refused)|Broken pipe|Timed out waiting|timed? ?out|remote process exited|Socket Timeout"
    r"|DistNetworkError|DistBackendError|NCCL|SignalException|SIGTERM|KeyboardInterrupt|failed to recv",
    re.I,
)
"""Marks an error that only reports another rank's fault."""
MISMATCH = re.compile(r"Detected mismatch between collectives", re.I)
ENDED_BY_OTHERS = ("SIGTERM", "SIGINT")
ANY_SIZE = re.compile(r"scatter|all_?to_?all|_v\b|_v_", re.I)
"""Collectives whose sizes may differ from rank to rank."""
CONTEXT = 6
"""Maximum number of preceding calls to compare with earlier steps."""


@dataclass(frozen=True)
class Diagnosis:
    """Which rank, which collective, which line, and why."""

    kind: str
    """skipped, another collective, shape, dtype, group, finished, elsewhere, data, point to point, died, error, nothing
    wrong, unclear.
    """
    ranks: tuple[int, ...]
    """The ranks that went wrong; all candidates if `sure` is false."""
    collective: str
    """Name of the call that doesn't complete, such as all_reduce."""
    line: Frame | None
    """The faulty call, or the call that the named rank didn't make; for an error, where it was raised."""
    sentences: tuple[str, ...]
    """Which rank, which collective, which line; then why."""
    sure: bool
    collect: str = ""
    """Evidence that would decide it."""

    def __str__(self) -> str:
        """Join the sentences, and what to collect next."""
        return " ".join([*self.sentences, *([f"Collect next: {self.collect}"] if self.collect else [])])


RECORDER = (
    "the recorder of every rank, dumped while it hangs. torch 2.13 keeps 2,000 calls unless TORCH_FR_BUFFER_SIZE is "
    "set before the process group is made."
)
WHO_KILLED = "dmesg shows a kill by the kernel's out-of-memory killer; the scheduler's log shows any other kill."
DETAIL = "the same run with TORCH_DISTRIBUTED_DEBUG=DETAIL, which prints both calls and sizes."


def diagnose(evidence: Sequence[RankEvidence]) -> Diagnosis:
    """Diagnose the evidence of all ranks. Pure; never raises for evidence that `read` returned."""
    job = Job(evidence)
    for look in (
        _nothing_there,
        _all_well,
        _raised,
        _differing_calls,
        _crashed,
        _died,
        _crossed,
        _waiting,
        _only_stacks,
    ):
        if found := look(job):
            return found
    return _unclear(job)


class Job:
    """The evidence of all ranks, and the questions that each check asks about it."""

    def __init__(self, evidence: Sequence[RankEvidence]) -> None:
        self.of = {e.rank: e for e in evidence}
        self.calls = {r: list(e.calls) for r, e in self.of.items() if e.calls}
        """Calls of the ranks whose recorder isn't empty."""
        self.numbered: dict[str, dict[int, dict[int, Call]]] = {}
        """{group: {rank: {number: collective}}}."""
        for r, calls in self.calls.items():
            for call in calls:
                if not call.is_p2p:
                    of_rank = self.numbered.setdefault(f"{call.backend} {call.group}", {})
                    of_rank.setdefault(r, {})[call.number] = call

    def members(self, group: str) -> list[int]:
        """Return the group's ranks that left a recorder: those the recorders list, or else all that used the group."""
        name = group.split(" ", 1)[1]
        known = {r for e in self.of.values() for r in e.groups.get(name, ())}
        recorded = [r for r, e in self.of.items() if e.calls is not None]
        if not known and name in ("0", "default_pg"):
            known = set(recorded)
        return sorted((known & set(recorded)) or self.numbered[group])

    def stack_line(self, rank: int) -> Frame | None:
        """Return where a rank's main thread is in its own code."""
        return next((f for f in self.of[rank].stack or () if f.is_own), None)

    def line(self, rank: int, call: Call) -> Frame | None:
        """Return where a rank made a call; None if not recorded.

        On GPUs, autograd's thread makes DDP's calls, without Python lines. If the call is the last one or unfinished,
        return the main thread's place instead, which is in backward or later.
        """
        is_now = call is self.last(rank) or not call.done
        return _line(call) or (self.stack_line(rank) if is_now else None)

    def at(self, rank: int, call: Call, other: Call | None = None) -> str:
        """Describe that place, preferring a line that `other` doesn't have."""
        if call.own:
            return _at_line(_line_apart(call, other) if other else _line(call))
        line = self.line(rank, call)
        return f"(its main thread is at {line})" if line else _at_line(None)

    def in_torch(self, rank: int) -> str:
        """Return the torch.distributed function that a rank's main thread is in, or ""."""
        inside = []
        for f in self.of[rank].stack or ():
            if f.is_own:
                break
            if f.file.endswith("torch/distributed/distributed_c10d.py"):
                inside.append(f.name)
        return inside[-1] if inside else ""

    def blocked_in(self, rank: int) -> Call | None:
        """Return this rank's first collective that a member of its group hasn't made: the rank waits there."""
        lacking = (c for c in self.calls.get(rank, ()) if not c.is_p2p and self.missing(c))
        return next(lacking, None)

    def missing(self, call: Call) -> list[int]:
        """Return members of the call's group that haven't made it, according to their recorders."""
        group = f"{call.backend} {call.group}"
        of_ranks = self.numbered[group]
        return [r for r in self.members(group) if call.number > max(of_ranks.get(r, ()), default=0)]

    def uses_nccl(self) -> bool:
        """Return whether a rank's last call is NCCL's, whose watchdog aborts processes after a timeout."""
        return any(calls[-1].backend == "nccl" for calls in self.calls.values())

    def last(self, rank: int) -> Call | None:
        """Return a rank's last call."""
        return self.calls[rank][-1] if rank in self.calls else None


# Checks, in order: each recognises one kind of evidence, and returns None if it doesn't apply ------------------------


def _nothing_there(job: Job) -> Diagnosis | None:
    if any(not e.is_silent for e in job.of.values()):
        return None
    said = "No rank left anything that can be read, so the cause is unknown."
    return Diagnosis("unclear", (), "", None, (said,), False, RECORDER)


def _all_well(job: Job) -> Diagnosis | None:
    if any(e.end is None or e.end.exit_code != 0 for e in job.of.values()):
        return None
    said = f"All {len(job.of)} ranks ended with exit code 0: this evidence shows nothing wrong."
    return Diagnosis("nothing wrong", (), "", None, (said,), True)


def _raised(job: Job) -> Diagnosis | None:
    """Find the program's own exception, as opposed to one that reports a lost peer."""
    own = [r for r, e in job.of.items() if e.end and _is_own_error(e.end.error)]
    if not own:
        return None
    own = [r for r in own if _ended_at(job, r) == min(_ended_at(job, s) for s in own)]
    end = job.of[own[0]].end
    assert end is not None
    line = _raised_at(end.traceback) or job.stack_line(own[0])
    waiting, waits = next(
        ((r, c) for r in job.of if r not in own and (c := job.blocked_in(r) or job.last(r))), (-1, None)
    )
    name = waits.name if waits else ""
    at = f" at {line}" if line else ""
    others = [r for r in job.of if r not in own]
    where = f"in {name} {job.at(waiting, waits)}" if waits else ""
    why = f"{_ranks(others)} {_be(others)} {where}, and cannot continue without it." if waits else ""
    first = f"{_ranks(own)} raised {_first_line(end.error)}{at}."
    return Diagnosis("error", tuple(own), name, line, (first, why) if why else (first,), True)


def _is_own_error(error: str) -> bool:
    return bool(error) and not CONSEQUENCE.search(error) and not MISMATCH.search(error)


def _ended_at(job: Job, rank: int) -> int:
    """Count a rank's collectives: of several ranks that raised, the one with the fewest raised first."""
    return sum(not c.is_p2p for c in job.calls.get(rank, ()))


def _raised_at(traceback: str) -> Frame | None:
    """Return the innermost line of a traceback that is in the training code."""
    frames = (Frame(file, int(line), name) for file, line, name in FRAME.findall(traceback))
    return next((f for f in reversed(list(frames)) if f.is_own), None)


def _differing_calls(job: Job) -> Diagnosis | None:
    """Find a group's first number where ranks made different calls, or the same call from an unusual line."""
    found = [d for group in job.numbered if (d := _first_difference(job, group))]
    if not found:
        return None
    calls = min(found, key=lambda calls: min(c.created_s for c in calls.values()))
    return _difference(job, calls)


def _first_difference(job: Job, group: str) -> dict[int, Call] | None:
    """Return {rank: its call} at the group's first number where the calls don't match."""
    of_ranks = job.numbered[group]
    numbers = sorted(set().union(*of_ranks.values()))
    uneven = any(job.missing(calls[max(calls)]) for calls in of_ranks.values())
    clash = next((n for n in numbers if len({_content(c) for c in _at(of_ranks, n).values()}) > 1), None)
    if clash is None and not uneven:
        return None
    for n in numbers:  # a rank on another path, in a call that looks the same, differs only by its line
        calls = _at(of_ranks, n)
        if n == clash or _left_the_way(job, calls):
            return calls
    return None


def _left_the_way(job: Job, calls: dict[int, Call]) -> bool:
    """Return whether a rank calls from an unusual line while the others are where it has been before.

    A rank that was never there has its own branch, which isn't a fault.
    """
    if len({_where(c) for c in calls.values()}) == 1:
        return False
    astray = _astray(job, calls)
    usual = [c for r, c in calls.items() if r not in astray]
    return any(_was_known(job, r, c) for r in astray for c in usual)


def _at(of_ranks: dict[int, dict[int, Call]], number: int) -> dict[int, Call]:
    return {r: calls[number] for r, calls in of_ranks.items() if number in calls}


def _was_known(job: Job, rank: int, call: Call) -> bool:
    """Return whether `rank` itself has made this call from this line before; otherwise it's a branch of that rank."""
    return any(_where(c) == _where(call) and c.created_s < call.created_s for c in job.calls[rank])


def _content(call: Call) -> tuple:
    """Return what must be the same on all ranks."""
    if ANY_SIZE.search(call.name):
        return (call.name,)
    return call.name, call.sizes, call.dtypes


def _where(call: Call) -> tuple:
    return tuple((f.file, f.line) for f in call.own)


def _sign(call: Call) -> tuple:
    return call.group, _where(call), _content(call)


def _astray(job: Job, calls: dict[int, Call]) -> list[int]:
    """Return the ranks that do something unusual, among ranks whose calls differ. Empty if nothing decides.

    The majority decides, or else what followed the same calls in earlier steps, on any rank.
    """
    votes = Counter(_sign(c) for c in calls.values())
    [(usual, count), *_] = votes.most_common(1)
    if count > len(calls) / 2:
        return [r for r, c in calls.items() if _sign(c) != usual]
    for length in range(CONTEXT, -1, -1):
        before = {r: _before(job, r, c, length) for r, c in calls.items()}
        followers = _followers(job, set(before.values()), calls, length)
        apart = [r for r, c in calls.items() if _sign(c) not in followers]
        if followers and len(apart) < len(calls) and apart:
            return apart
    return []


def _before(job: Job, rank: int, call: Call, length: int) -> tuple:
    signs = [_sign(c) for c in job.calls[rank] if c.record < call.record]
    return tuple(signs[len(signs) - length :]) if len(signs) >= length else ("too short", rank)


def _followers(job: Job, contexts: set[tuple], calls: dict[int, Call], length: int) -> set[tuple]:
    """Return what followed these contexts in earlier calls."""
    found = set()
    for r, call in calls.items():
        signs = [_sign(c) for c in job.calls[r] if c.record < call.record]
        for i in range(length, len(signs)):
            if tuple(signs[i - length : i]) in contexts:
                found.add(signs[i])
    return found


def _difference(job: Job, calls: dict[int, Call]) -> Diagnosis:
    """Diagnose calls that should be the same but aren't."""
    astray = _astray(job, calls)
    if not astray:
        return _either(job, calls)
    usual = next(r for r in calls if r not in astray)
    theirs, its = calls[usual], calls[astray[0]]
    others = [r for r in calls if r not in astray]
    how = "most ranks do" if len(others) > len(calls) / 2 else "was done here in earlier steps"
    kind = _kind(job, theirs, its, astray[0])
    at_theirs, at_its = job.at(usual, theirs, its), job.at(astray[0], its, theirs)
    who, rest = _ranks(astray), _ranks(others, "r")
    if kind == "skipped":
        line = _line_apart(theirs, its) or job.line(usual, theirs)
        said = (
            f"{who} did not call {_named(theirs)} {at_theirs}, where {rest} {_be(others)}.",
            f"{who} {_be(astray)} already in {its.name} {at_its}, which came after it in earlier steps.",
        )
        return Diagnosis(kind, tuple(astray), theirs.name, line, said, True)
    meet = f"Both are number {its.number} of group {its.group}, so they meet"
    if kind == "group":
        meet = "Each waits in its group for the other"
    line = _line_apart(its, theirs) or job.line(astray[0], its)
    said = (
        f"{who} called {_described(its, theirs)} {at_its}; {rest} called {_described(theirs, its)} {at_theirs}.",
        f"{meet}; the second is what {how}.",
    )
    return Diagnosis(kind, tuple(astray), its.name, line, said, True)


def _either(job: Job, calls: dict[int, Call]) -> Diagnosis:
    """Diagnose differing calls if nothing shows which one is right."""
    r, a = next(iter(calls.items()))
    s, b = next((s, c) for s, c in calls.items() if _sign(c) != _sign(a))
    said = (
        f"Rank {r} called {_described(a, b)} {job.at(r, a, b)}, rank {s} called {_described(b, a)} "
        f"{job.at(s, b, a)}: number {a.number} of group {a.group} is not the same on all ranks.",
        "No earlier step and no third rank shows which of them is wrong.",
    )
    more = "more steps (TORCH_FR_BUFFER_SIZE above 2000), or a run on 3 ranks."
    return Diagnosis(_kind(job, a, b, s), (r, s), a.name, job.line(r, a), said, False, more)


def _kind(job: Job, theirs: Call, its: Call, rank: int) -> str:
    """Say how `its` differs from `theirs`."""
    if its.group != theirs.group:
        return "group"
    if its.name == theirs.name and its.own and _where(its) == _where(theirs):
        return "shape" if its.sizes != theirs.sizes else "dtype"
    known = [_sign(c) for r in job.calls for c in job.calls[r] if c.record < its.record]
    if _sign(its) in known and _sign(theirs) in known:
        return "skipped"
    if its.name == theirs.name and _where(its)[:1] == _where(theirs)[:1] and _content(its) != _content(theirs):
        return "shape" if its.sizes != theirs.sizes else "dtype"
    return "another collective"


def _crashed(job: Job) -> Diagnosis | None:
    """Find a rank that a signal ended inside a collective, as gloo does if sizes don't match. It leaves no dump.

    Its stack is known, its sizes aren't. The others' last call is known, and what they called there in earlier steps.
    """
    crashed = [r for r, e in job.of.items() if "Aborted" in e.crash and job.in_torch(r) and not job.uses_nccl()]
    alive = {r: calls[-1] for r, calls in job.calls.items() if r not in crashed}
    if not crashed or not alive:
        return None
    rank, call = next(iter(alive.items()))
    where = tuple((f.file, f.line) for f in job.of[crashed[0]].stack or () if f.is_own)
    here, name = job.stack_line(crashed[0]), job.in_torch(crashed[0])
    why = "gloo ended the process: what it received was larger than what it was ready for."
    if call.own and where != _where(call):
        return _crashed_elsewhere(job, crashed, call, alive)
    earlier = [c for c in job.calls[rank] if call.own and _where(c) == where and c.record < call.record]
    if not earlier:
        ranks = tuple(sorted({*crashed, *alive}))
        first = f"{_ranks(ranks)} called {name} {_at_line(here)}; {_ranks(crashed, 'r')} crashed there."
        said = (first, f"{why} Nothing shows whose size is wrong.")
        return Diagnosis("shape", ranks, call.name, here, said, False, DETAIL)
    usual = earlier[-1]
    if _content(usual) != _content(call):
        astray = [r for r, c in alive.items() if _content(c) == _content(call)]
        kind = "shape" if usual.sizes != call.sizes else "dtype"
        said = (
            f"{_ranks(astray)} called {_described(call, usual)} at {_line(call)}; earlier it was "
            f"{_described(usual, call)}.",
            f"{_ranks(crashed)} met it there and crashed: {why}",
        )
        return Diagnosis(kind, tuple(astray), call.name, _line(call), said, True)
    said = (
        f"{_ranks(crashed)} called {name} at {here} with another size or type than {_ranks(alive, 'r')}, whose "
        f"{size(call)} are those of earlier steps.",
        f"{_ranks(crashed)} crashed there: {why}",
    )
    return Diagnosis("shape", tuple(crashed), call.name, here, said, True)


def _crashed_elsewhere(job: Job, crashed: list[int], call: Call, alive: dict[int, Call]) -> Diagnosis:
    """Diagnose ranks in two calls that don't match, one of them known only from a stack."""
    here, name = job.stack_line(crashed[0]), job.in_torch(crashed[0])
    where = tuple((f.file, f.line) for f in job.of[crashed[0]].stack or () if f.is_own)
    rank = next(iter(alive))
    before = [c for c in job.calls[rank] if c.record < call.record]
    known_here, known_call = (any(_where(c) == w for c in before) for w in (where, _where(call)))
    both = (
        f"{_ranks(crashed)} called {name} {_at_line(here)}; {_ranks(alive, 'r')} called {call.name} at {_line(call)}.",
    )
    why = "They met, and gloo ended the first, whose call got more than it was ready for."
    follows = [_where(b) for a, b in itertools.pairwise(before) if _sign(a) == _sign(before[-1])]
    usual = [w for w in (where, _where(call)) if w in follows]
    if len(usual) == 1:
        wrong = crashed if usual[0] == _where(call) else list(alive)
        line, what = (here, name) if wrong is crashed else (_line(call), call.name)
        kind = "another collective"
        if known_here and known_call:
            kind, line, what = "skipped", *((_line(call), call.name) if wrong is crashed else (here, name))
        why = (
            f"{why} In earlier steps the call of {_ranks(list(alive) if wrong is crashed else crashed, 'r')} came here."
        )
        return Diagnosis(kind, tuple(wrong), what, line, (*both, why), True)
    said = (*both, f"{why} Nothing shows which of them is wrong.")
    return Diagnosis("another collective", tuple(sorted({*crashed, *alive})), name, here, said, False, DETAIL)


def _died(job: Job) -> Diagnosis | None:
    """Find a rank that left nothing, or that a signal ended."""
    crashed = [r for r, e in job.of.items() if e.crash and not ("Aborted" in e.crash and job.uses_nccl())]
    killed = [*crashed, *(r for r, e in job.of.items() if e.end and e.end.signal not in ("", *ENDED_BY_OTHERS))]
    gone = [r for r, e in job.of.items() if e.is_silent]
    dead = sorted({*killed, *gone})
    if not dead:
        return None
    others = [r for r in job.of if r not in dead]
    calls = {r: c for r in others if (c := job.last(r))}
    waiting = min(calls, key=lambda r: calls[r].number, default=-1)
    waits = calls.get(waiting)
    errors = [e.end.error for r, e in job.of.items() if r in others and e.end]
    lost = any(re.search(r"onnection (closed|reset|refused)|Broken pipe|remote process exited", e) for e in errors)
    line = job.line(waiting, waits) if waits else next((f for r in others if (f := job.stack_line(r))), None)
    name = waits.name if waits else ""
    how = "was ended by " + (job.of[dead[0]].crash or job.of[dead[0]].end.signal) if killed else "left nothing"
    where = f"{name} {job.at(waiting, waits)}" if waits else f"its code at {line}" if line else ""
    at = f"; {_ranks(others, 'r')} {_be(others)} in {where}" if where else ""
    if killed or lost:
        why = "A connection broke: the process at its other end is gone." if lost else "A signal ended it."
        why = f"{why} If it was SIGKILL: {WHO_KILLED}"
        return Diagnosis("died", tuple(dead), name, line, (f"{_ranks(dead)} {how}{at}.", why), True)
    said = (
        f"{_ranks(dead)} {how}{at}.",
        "No rank lost a connection: it may be killed, hang, or its files are elsewhere.",
    )
    more = f"files and exit code of {_ranks(dead, 'r')}, dmesg there, whether it runs."
    return Diagnosis("died", tuple(dead), name, line, said, False, more)


def _crossed(job: Job) -> Diagnosis | None:
    """Find a cycle of ranks whose oldest open send or receive doesn't match its peer's. Only NCCL records these."""
    heads = {r: head for r, calls in job.calls.items() if (head := next((c for c in calls if not c.done), None))}
    waits_for = {}
    for r, head in heads.items():
        if not head.is_p2p or len(head.peers) != 2:
            continue
        of_group = job.of[r].groups.get(head.group) or tuple(sorted(job.of))
        ends = [of_group[i] for i in head.peers if i < len(of_group)]
        peer = next((e for e in ends if e != r), None)
        other = heads.get(peer) if peer is not None else None
        if other and not (other.is_p2p and other.peers == head.peers and other.name != head.name):
            waits_for[r] = peer
    for start in waits_for:
        path = [start]
        while (after := waits_for.get(path[-1])) is not None and after not in path:
            path.append(after)
        if after == start and len(path) > 1:
            call, ranks = heads[start], tuple(sorted(path))
            first = f"{_ranks(ranks)} wait for each other: rank {start} is in {call.name} {job.at(start, call)}."
            why = "Each does it first, and what the other needs comes after it: one must do the opposite first."
            return Diagnosis("point to point", ranks, call.name, job.line(start, call), (first, why), True)
    return None


def _waiting(job: Job) -> Diagnosis | None:
    """Find ranks that wait in a collective which others haven't called; those may wait for someone else in turn."""
    blocked = {r: c for r in job.calls if (c := job.blocked_in(r))}
    if not blocked:
        return None
    free = sorted({m for c in blocked.values() for m in job.missing(c) if m not in blocked})
    if not free:
        return _circle(job, blocked)
    waiting = {r: c for r, c in blocked.items() if set(job.missing(c)) & set(free)}
    call = min(waiting.values(), key=lambda c: c.created_s)
    late = [r for r in job.missing(call) if r in free]
    waits = [r for r, c in waiting.items() if _sign(c)[0] == call.group and c.number == call.number]
    at = next((r for r in waits if job.line(r, waiting[r])), waits[0])
    line, who = job.line(at, waiting[at]), _ranks(late)
    where = f"in which {_ranks(waits, 'r')} {_verb(waits)} {job.at(at, waiting[at])}"
    kind, why = _instead(job, late)
    if kind == "point to point":
        return _nobody_sends(job)
    return Diagnosis(kind, tuple(late), call.name, line, (f"{who} did not call {_named(call)}, {where}.", why), True)


def _instead(job: Job, late: list[int]) -> tuple[str, str]:
    """Return what ranks do instead of the collective that the others wait for: (kind, sentence)."""
    rank = late[0]
    end, line, who = job.of[rank].end, job.stack_line(rank), f"Rank {rank}"
    if end and end.exit_code == 0:
        return "finished", f"{who} has ended, with exit code 0: it had less to do than the others."
    if end and end.exit_code is not None:
        return "died", f"{who} has ended, with exit code {end.exit_code}, and left no error."
    inside = job.in_torch(rank)
    if inside in ("recv", "irecv", "send", "isend", "batch_isend_irecv"):
        return "point to point", ""
    loader = any("torch/utils/data/dataloader.py" in f.file for f in job.of[rank].stack or ())
    if loader:
        return "data", f"{who} waits for its data loader{f' at {line}' if line else ''}."
    if line:
        return "elsewhere", f"{who} is at {line}{f', in {inside}' if inside else ''}."
    return "elsewhere", f"Nothing shows where {who.lower()} is."


def _circle(job: Job, blocked: dict[int, Call]) -> Diagnosis:
    """Diagnose ranks that wait for each other in two groups."""
    first = min(blocked)
    ring = {first: blocked[first]}
    while (after := next(m for m in job.missing(ring[max(ring, key=list(ring).index)]))) not in ring:
        ring[after] = blocked[after]
    wrong = _astray(job, ring)
    if not wrong:
        return _either(job, ring)
    return _difference(job, ring)


def _only_stacks(job: Job) -> Diagnosis | None:
    """Diagnose by stacks alone, if no recorder shows a difference: gloo doesn't record send and receive."""
    return _nobody_sends(job)


def _nobody_sends(job: Job) -> Diagnosis | None:
    """Find ranks that wait in recv (or send) while no rank does the opposite."""
    names = {r: job.in_torch(r) for r in job.of}
    ways = {"recv": ("recv", "irecv"), "send": ("send", "isend")}
    for way, words in ways.items():
        inside = [r for r, name in names.items() if name in words]
        opposite = [r for r, name in names.items() if name in ways["send" if way == "recv" else "recv"]]
        if not inside or opposite:
            continue
        line, done = job.stack_line(inside[0]), "receive" if way == "recv" else "send"
        rest = [r for r in names if r not in inside]
        busy = [r for r in rest if not names[r] and not (job.of[r].end and job.of[r].end.exit_code is not None)]
        missing = "sends" if way == "recv" else "receives"
        first = f"{_ranks(inside)} all {done} {_at_line(line)}, and no rank {missing}."
        if len(inside) == 1:
            first = f"Rank {inside[0]} waits in {way} {_at_line(line)}, and no rank {missing}."
        if busy:
            where = f"{_be(busy)} {_at_line(job.stack_line(busy[0]))}"
            why = f"{_ranks(busy)} {where} and may still come."
            return Diagnosis("point to point", tuple(inside), way, line, (first, why), False, "the stacks, later.")
        why = f"{_ranks(rest)} wait elsewhere or have ended, so it waits for ever."
        if len(inside) > 1:
            why = "Each waits for the other, for ever: one of the two must do the opposite first."
        return Diagnosis("point to point", tuple(inside), way, line, (first, why), True)
    return None


def _unclear(job: Job) -> Diagnosis:
    lines = {r: job.stack_line(r) or (c and _line(c)) for r in job.of if (c := job.last(r)) or job.of[r].stack}
    where = "; ".join(f"rank {r}: {line}" for r, line in lines.items() if line)
    if job.numbered and not any(e.calls is None for e in job.of.values()):
        said = (
            f"All ranks have made the same calls, and wait in none that another lacks ({where}).",
            "One may be slow, or hang below Python; nothing shows which.",
        )
        more = "a second dump some seconds later, py-spy dump --native."
        return Diagnosis("unclear", (), "", None, said, False, more)
    without = [r for r, e in job.of.items() if e.calls is None]
    said = (f"The cause is unknown: {_ranks(without) or 'no rank'} left no recorder ({where or 'and no stack'}).",)
    return Diagnosis("unclear", (), "", None, said, False, RECORDER)


# Wording -------------------------------------------------------------------------------------------------------------


def _ranks(ranks: Iterable[int], letter: str = "R") -> str:
    found = sorted(set(ranks))
    if len(found) > 6:
        return f"{len(found)} ranks ({', '.join(map(str, found[:5]))}, ...)"
    return f"{letter}ank{'s' * (len(found) > 1)} {' and '.join(map(str, found))}" if found else ""


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _at_line(line: Frame | None) -> str:
    return f"at {line}" if line else "(its line was not recorded)"


def _line(call: Call) -> Frame | None:
    return next(iter(call.own), None)


def _line_apart(call: Call, other: Call) -> Frame | None:
    """Return the innermost line of `call` that `other` doesn't have: a helper that both use shows nothing."""
    theirs = set(_where(other))
    return next((f for f in call.own if (f.file, f.line) not in theirs), _line(call))


def _named(call: Call) -> str:
    return f"{call.name} (number {call.number} of group {call.group})"


def size(call: Call) -> str:
    """Format the sizes and number formats that a call sends, such as 3x4 Float numbers."""
    return f"{' '.join('x'.join(map(str, s)) or '1' for s in call.sizes) or 'no'} {' '.join(call.dtypes)} numbers"


def _described(call: Call, other: Call) -> str:
    """Describe the call by what distinguishes it from the other."""
    words = [call.name]
    if call.name == other.name and _content(call) != _content(other):
        words.append(f"of {size(call)}")
    if call.group != other.group:
        words.append(f"in group {call.group}")
    return " ".join(words)


def _first_line(error: str) -> str:
    return (error.splitlines() or [""])[0][:200].rstrip(".")
