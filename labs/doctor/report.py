"""The report: one page in a terminal, all of it as one HTML file without network, and JSON for --compare."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import statistics
import string
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import OPTION, PARTS, RISK, SLOW, UNPRICED, WRONG
from labs.doctor.findings import Finding, find, healthy, hooks_cost, idle_share, mean_step_s, ms, unknown, with_steps
from labs.doctor.findings import count as many
from labs.doctor.profile import AS_IS, KINDS, Profile, from_json
from labs.kit.errors import BadInput, brief
from labs.kit.measure import Estimate, estimate
from labs.kit.monitor import Trace
from labs.kit.record import parse_json, plain, provenance, write_atomic

if TYPE_CHECKING:
    from labs.doctor.static_rules import Match

TEMPLATE = Path(__file__).with_name("report_page.html.txt")
VERSION = 2  # Of the JSON
COLUMNS = 112
SHOWN = 4  # Findings on the page: the largest problem, and three more
ENOUGH_STEPS = 50  # For a page that tells something, by default: warm-up, as they are, and some rounds
SMALL, DIFFERENT = 0.005, 0.10
"""Of a step: parts below the first are not drawn; ranks whose parts differ by the second are shown side by side."""
SCATTER = 0.2  # Of the median step, between its quartiles: it is reported
PROBLEMS = (WRONG, SLOW, RISK)
ENDS = {
    "script ended": "the script ended by itself",
    "exit": "the script left with exit code {code}",
    "error": "the script failed: {error}",
    "killed": "the script was killed{signal}{why}",
    "stopped": "the run was stopped from outside by {error}",
    "silent": "the script took no step for too long, and was ended{why}",
    "running": "the run was ended from outside",
}


@dataclass(frozen=True)
class Report:
    """Made by `make`, or read by `load`."""

    profiles: list[Profile]  # Of the ranks that left one
    findings: list[Finding]  # The most severe first
    healthy: list[str]
    unknown: list[str]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> list[Profile]:
        """Of the ranks whose steps were measured, by rank."""
        return with_steps(self.profiles)

    @property
    def script(self) -> str:
        """Name of its file."""
        return os.path.basename(self.profiles[0].script) if self.profiles else "the script"

    @property
    def problems(self) -> list[Finding]:
        """What a healthy script doesn't have."""
        return [f for f in self.findings if f.kind in PROBLEMS]


def group_of(profile: Profile) -> tuple[int, int]:
    """Rank and number of ranks: torch.distributed's, if they are others than what has started the run says."""
    rank, ranks = profile.training.get("group") or (profile.rank, profile.ranks)
    return (rank, ranks) if ranks != profile.ranks else (profile.rank, profile.ranks)


def make(profiles: list[Profile], matches: Sequence[Match] = ()) -> Report:
    """Of the profiles that the ranks of one run have left, and of what was read in its source."""
    profiles = sorted(profiles, key=lambda f: f.rank)
    notes = [*_missing(profiles), *unknown(profiles)]
    return Report(profiles, find(profiles, matches), healthy(profiles), notes, plain(provenance()))


def _missing(profiles: Sequence[Profile]) -> Iterator[str]:
    ranks = max((f.ranks for f in profiles), default=1)
    here = max((f.local_ranks for f in profiles), default=1)
    missing = sorted(set(range(ranks)) - {f.rank for f in profiles})
    if missing and here == ranks:
        yield f"ranks that left nothing: {', '.join(map(str, missing))} of {ranks}; what they did isn't in here"
    elif missing:
        if len(profiles) < here:
            yield f"what {here - len(profiles)} of this machine's {many(here, 'rank')} did: they left nothing"
        yield f"what {many(ranks - here, 'rank')} elsewhere did: each machine has a report of its own (--out)"
    blind = [str(f.rank) for f in profiles if not f.step_s]
    if blind and any(f.step_s for f in profiles):
        yield f"ranks whose steps were not seen: {', '.join(blind)}"


# Sentences


def headline(report: Report) -> str:
    """The first line: the largest problem and where it is, or that there is none."""
    wrong = next((f for f in report.findings if f.kind == WRONG), None)
    if report.seen and wrong is None:
        if misled := next((f for f in report.seen if group_of(f)[1] != f.ranks), None):
            return _no_verdict(misled)
        if not report.problems:
            return _no_problem(report)
    if not report.seen and wrong is None:
        return _nothing_seen(report)
    first = wrong or report.problems[0]
    place = f" ({first.line})" if first.where else ""
    price = f". {capital(priced(first))}" if first.gain else ""
    return f"{first.kind.upper()}: {first.what}{place}{price}."


def _no_problem(report: Report) -> str:
    tried = any(len(f.interleaved_s) > 1 for f in report.seen)
    little = "" if tried else " No fix was tried, so that this says little about speed."
    options = [f.name for f in report.findings if f.kind == OPTION]
    more = f" Small gains and choices, see --all: {', '.join(options)}." if options else ""
    return f"{report.script}: no wrong result and no bottleneck was found in these steps.{little}{more}"


def _no_verdict(profile: Profile) -> str:
    """Of a rank whose job has more ranks than the doctor knows of, or fewer."""
    rank, ranks = group_of(profile)
    started = f"{many(profile.ranks, 'rank')} by what started them"
    if ranks < profile.ranks:
        return (
            f"No verdict: there are {started}, and torch.distributed joins {many(ranks, 'rank')}. They train several "
            "models, and each number below is of all of them together."
        )
    return (
        f"No verdict: torch.distributed joins {ranks} ranks, and the doctor knows of {started}: this page is of rank "
        f"{rank} alone, which waits for the others. Start them by torchrun (-m labs.doctor {profile.script}), srun or "
        "mpirun."
    )


def _nothing_seen(report: Report) -> str:
    if not report.profiles:
        return "No rank has left anything: the script's process ended before Python could begin."
    if apart := next((f.error for f in report.profiles if f.ended == "done" and f.error), ""):
        return f"{report.script}: no step could be measured: {apart}."
    steps = max(f.steps for f in report.profiles)
    how = "; ".join(dict.fromkeys(_rank_of(f, report.profiles) + end_of(f) for f in report.profiles))
    if not steps:
        return f"{report.script}: no step of an optimizer was seen: {how}."
    by_itself = any(f.ended in ("script ended", "exit") and not f.exit_code for f in report.profiles)
    short, longer = (" hasn't trained long enough", ": let it train longer") if by_itself else ("", "")
    few = f"and the first ones only warm up. The doctor needs some {ENOUGH_STEPS} of them{longer}."
    needs = few if steps < ENOUGH_STEPS else f"before all that --steps asks for were taken{longer}."
    return f"{report.script}{short}: {how}, {needs}"


def end_of(profile: Profile) -> str:
    """How the run of a rank ended, in words."""
    code, name = profile.exit_code, ""
    if code is not None and code < 0:
        name = f" by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f" by signal {-code}"
    text = ENDS.get(profile.ended, "all was measured").format(
        code=code, error=profile.error or "see its output", signal=name, why=profile.error and f" ({profile.error})"
    )
    if profile.ended == "done":
        return text
    trying = f", while {profile.trying!r} was tried" if profile.trying else ""
    after = f" after {many(profile.steps, 'step')}" if profile.steps else ""
    return f"{text}{after}{trying}"


def _rank_of(f: Profile, profiles: Sequence[Profile]) -> str:
    return f"rank {f.rank}: " if len(profiles) > 1 else ""


def hints(report: Report) -> list[str]:
    """What to do where nothing could be measured."""
    failed = any(f.ended == "error" or (f.ended == "exit" and f.exit_code) for f in report.profiles)
    if report.seen or failed or any(f.steps for f in report.profiles):
        return []
    return [
        "A step is a call of an optimizer's step(), of torch.optim: without one, nothing is seen.",
        "Ranks that the script starts itself (mp.spawn) are not seen: torchrun --nproc-per-node n -m labs.doctor ...",
        "Where the first step comes late, --timeout S waits longer for it.",
    ]


def summary(report: Report) -> list[str]:
    """Lines about the step as a whole, how it was run and how that ended."""
    ranks = report.seen
    if not ranks:
        return hints(report)
    f, rate = ranks[0], gains.samples_per_s(ranks)
    step = estimate(gains.steps_s(ranks), "s")
    rates = f", that is {rate}" if rate else "; its samples could not be counted"
    whose = many(f.ranks, "rank") if len(ranks) == f.ranks else f"{len(ranks)} of {f.ranks} ranks, these numbers'"
    lines = [f"A step takes {step}{rates}; {whose} on {f.device_name or f.device}."]
    low, _, high = statistics.quantiles(gains.even_s(ranks), n=4) if len(f.step_s) > 1 else (step.value,) * 3
    others = others_percent(ranks)
    if busy := Trace(neighbours_percent=others).disturbance():
        lines.append(f"{busy} Gains hold for the machine as it was, with wider intervals.")
    if high - low > SCATTER * step.value:
        by = "" if busy else f": other programs took {others:.0f} % of the CPU"
        by = ": other programs on this machine, perhaps" if math.isnan(others) else by
        lines.append(f"Steps scatter, half of them between {ms(low)} and {ms(high)}{by}. That makes intervals wide.")
    if ends := [_rank_of(g, report.profiles) + end_of(g) for g in report.profiles if g.ended != "done"]:
        lines.append(f"Not all was measured: {'; '.join(dict.fromkeys(ends))}.")
    return lines


def others_percent(ranks: Sequence[Profile]) -> float:
    """Of the usable cores, what programs outside of the run took; of several machines the busiest; NaN if not known."""
    return max((f.machine["others_percent"] for f in ranks if "others_percent" in f.machine), default=math.nan)


def parts(profile: Profile) -> list[tuple[str, str, float, float]]:
    """(kind, its name, mean s per step, share of the step), in the order of a step; what is too small is left out.

    On a GPU they are its own times, and what is left of its step: it waits for the host.
    """
    step = statistics.fmean(profile.step_s)
    of = {k: gains.part_s(profile, k) for k in KINDS}
    if profile.device_s:
        of = {k: statistics.fmean(s) for k, s in profile.device_s.items() if s}
        of["idle"] = idle_share(profile) * step
    return [(k, name, of[k], of[k] / step) for k, name in PARTS.items() if of.get(k, 0.0) >= SMALL * step]


def rank_table(ranks: Sequence[Profile]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of parts in ms for each rank; no rows if the ranks don't differ."""
    step = max(statistics.fmean(f.step_s) for f in ranks)
    of = {k: [gains.part_s(f, k) for f in ranks] for k in KINDS}
    of = {k: each for k, each in of.items() if max(each) >= SMALL * step}
    if len(ranks) < 2 or max((max(each) - min(each) for each in of.values()), default=0.0) < DIFFERENT * step:
        return [], []
    shown = [r for r in range(len(ranks)) if r < 4 or r >= len(ranks) - 4]
    rows = [[PARTS[k], *(f"{1e3 * each[r]:.2f}" for r in shown)] for k, each in of.items()]
    return ["ms per step", *(f"rank {ranks[r].rank}" for r in shown)], rows


def machine(ranks: Sequence[Profile]) -> Iterator[str]:
    """Memory by category, threads, cores, a GPU's host, and the doctor's own cost; of one rank."""
    f = ranks[0]
    m, has = f.memory, f.machine
    memory = [f"{name} {_bytes(m[name])}" for name in ("parameters", "gradients", "optimizer", "peak") if m.get(name)]
    if memory:
        yield f"memory of rank {f.rank}: {', '.join(memory)}"
    if has.get("threads"):
        yield f"{many(has['threads'], 'thread')} of torch's in each rank, {many(has.get('cores', 0), 'core')}"
    if not math.isnan(others := others_percent(ranks)):
        yield f"other programs took {others:.0f} % of them"
    if f.device_s:
        host = ", ".join(f"{PARTS[k]} {ms(s)}" for k in KINDS if (s := gains.part_s(f, k)) >= SMALL * mean_step_s([f]))
        yield f"by the host's clock: {host}"
    if (cost := hooks_cost(f)) is not None:
        yield f"the doctor's own cost: {100 * cost:.2g} % of a step ({f.cost.get('calls', 0):.0f} calls in it)"


def method(report: Report) -> str:
    """How the numbers came about, in one paragraph."""
    ranks = report.seen
    if not ranks:
        return ""
    f, turns, p = ranks[0], "", report.provenance
    if rounds := [n for name in f.interleaved_s if name != AS_IS and (n := len(gains.pairs_s(ranks, name)))]:
        low, high = min(rounds), max(rounds)
        each = many(low, "round") if low == high else f"{low} to {high} rounds"
        turns = f", then {len(rounds)} other ways to take a step in turn with it, {each} of each"
    gpus = ", ".join(map(str, p.get("gpus") or []))
    cores, torch = many(p.get("cores") or 0, "core"), f"torch {p.get('torch', '?')}"
    place = ", ".join(filter(None, (p.get("cpu") or "unknown processor", gpus, cores, torch)))
    return (
        f"{many(len(f.step_s), 'step')} as it is{turns}; {f.wall_s:.0f} s in all. An estimated gain is the median over "
        "rounds of as it is / without that part, or with the fix; its intervals together hold the truth in 95 % of "
        "runs. From the step's parts it is arithmetic, with a plain 95 % interval. Gains don't add up. "
        f"{place}, {str(p.get('utc', ''))[:16].replace('T', ' ')} UTC."
    )


# The page in a terminal


def page(report: Report, everything: bool = False) -> str:
    """At most some 40 lines of 112 columns; `everything`: with --all."""
    return "\n".join(_lines(report, everything)) + "\n"


def _lines(report: Report, everything: bool) -> Iterator[str]:
    yield from wrapped(headline(report))
    shown = report.problems
    if not report.seen:
        shown = [f for f in shown if f.kind == WRONG]
    problems = grouped(shown)
    for number, (finding, places) in enumerate(problems[:SHOWN], 1):
        yield from _entry(number, finding, places, brief=number == 1)
    left = len(problems) - SHOWN
    if left > 0 and not everything:
        yield f"  {left} more: --all, or report.html."
    yield from ([""] if problems else [])
    yield from (line for text in summary(report) for line in wrapped(text))
    yield from _step_and_ranks(report)
    if everything:
        options, unpriced = ([f for f in report.findings if f.kind == kind] for kind in (OPTION, UNPRICED))
        for title, entries in ((MORE, problems[SHOWN:]), (OPTIONS, grouped(options)), (NOT_PRICED, grouped(unpriced))):
            yield from _heading(title) if entries else ()
            for number, (finding, places) in enumerate(entries, 1):
                yield from _entry(number, finding, places)
        yield from _texts_of(report)


def _step_and_ranks(report: Report) -> Iterator[str]:
    """Bars of a step's parts, and the ranks side by side if they differ."""
    if ranks := report.seen:
        slowest = max(ranks, key=lambda f: sum(f.step_s))
        yield from _heading(f"Where a step goes{f' (rank {slowest.rank})' if len(ranks) > 1 else ''}")
        for _, name, s, share in parts(slowest):
            yield f"  {name:<32}{ms(s):>9} {100 * share:4.0f} %  {'#' * max(1, round(50 * share))}"
        header, rows = rank_table(ranks)
        if rows:
            yield from _heading("The ranks differ")
            yield from (f"  {row[0]:<32}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in [header, *rows])


def _texts_of(report: Report) -> Iterator[str]:
    for title, texts in ((FINE, report.healthy), (NOT_KNOWN, report.unknown)):
        yield from _heading(title) if texts else ()
        yield from (line for text in texts for line in wrapped(f"- {text}", "  ", "    "))
    if report.seen:
        yield from _heading("Machine and method")
        yield from wrapped("; ".join(machine(report.seen)) + ".", "  ")
        yield from wrapped(method(report), "  ")


MORE, OPTIONS, NOT_PRICED = "More findings", "What a healthy script may use as well", "Seen, not priced"
FINE, NOT_KNOWN = "Tried or measured, and fine", "Not known"


def grouped(findings: Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """One entry for findings of which all but the line is the same."""
    same: dict[Finding, list[str]] = {}
    for f in findings:
        same.setdefault(replace(f, where="", also=()), []).extend([f.where, *f.also])
    return [(finding, [where for where in lines if where]) for finding, lines in same.items()]


def _heading(text: str) -> Iterator[str]:
    yield ""
    yield text.upper()


def _entry(number: int, finding: Finding, places: Sequence[str], brief: bool = False) -> Iterator[str]:
    """`brief`: the headline has said it."""
    notebook = f"; notebook {finding.notebook}" if finding.notebook else ""
    price = f"{priced(finding)}, " if finding.gain else ""
    yield from wrapped(f"{number}. {finding.kind}, {finding.name}: {price}{finding.by}{notebook}", "  ", "     ")
    if not brief:
        yield from wrapped(f"{capital(finding.what)}.", "     ")
    yield from (f"     {cut(where, COLUMNS - 5)}" for where in places)
    yield from wrapped(f"Fix: {finding.fix or 'none is known'}", "     ", "       ")


def priced(finding: Finding) -> str:
    """Its gain in words."""
    return f"estimated gain {finding.gain}" if finding.gain else "not priced"


def wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """Lines of the terminal's width, the first of them with another indent than the rest."""
    rest = first if rest is None else rest
    text = " ".join(text.split())
    return textwrap.wrap(text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def cut(text: str, width: int) -> str:
    """To one line of so many characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def capital(text: str) -> str:
    """As a sentence begins. A name in code stays as it is: nn.DataParallel, zero_grad()."""
    first = text.split(" ", 1)[0]
    return text if any(sign in first for sign in "._(") else text[:1].upper() + text[1:]


def _bytes(n: float) -> str:
    return str(Estimate(n, n, n, 1, "B")).split(" [")[0]


# The page in a browser


def write_html(report: Report, path: Path) -> Path:
    """One file that loads nothing. OSError if it cannot be written."""
    template = string.Template(TEMPLATE.read_text("utf-8"))
    title = escape(f"{report.script}: the doctor's report")
    return write_atomic(Path(path), template.substitute(title=title, main="\n".join(_html(report))))


def _html(report: Report) -> Iterator[str]:
    """Lines of HTML. Whatever is not written here goes through `escape`: a script's text stays text."""
    yield f"<h1>{escape(headline(report))}</h1>"
    if report.profiles:
        yield f'<p class="soft"><code>{escape(shlex.join(report.profiles[0].argv))}</code></p>'
    if ranks := report.seen:
        yield from _html_bar(max(ranks, key=lambda f: sum(f.step_s)))
    for number, (finding, places) in enumerate(grouped(report.findings), 1):
        yield f"<article>\n<h3>{number}. {escape(finding.kind)}: {escape(finding.name)}</h3>"
        if finding.gain:
            yield f'<p class="gain">{escape(priced(finding))}</p>'
        yield f"<p>{escape(capital(finding.what))}.</p>\n<dl>"
        rows = [*(("line", where) for where in places), ("fix", finding.fix), ("known", finding.by)]
        rows += [("notebook", finding.notebook)]
        yield from (f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows if text)
        yield "</dl>\n</article>"
    rest = [*summary(report), *_step_and_ranks(report), *_texts_of(report)]
    yield f"<pre>{escape(chr(10).join(rest))}</pre>"


def _html_bar(profile: Profile) -> Iterator[str]:
    rows = parts(profile)
    order = [row[0] for row in sorted(rows, key=lambda row: -row[2])]
    text = ", ".join(f"{name} {100 * share:.0f} %" for _, name, _, share in rows)
    yield f'<div class="bar" role="img" aria-label="A step: {escape(text)}">'
    for kind, name, _, share in rows:
        label, color = escape(name) if share > 0.12 else "", order.index(kind) if order.index(kind) < 6 else 9
        yield f'<span class="c{color}" style="flex: {share:.4f} 1 0">{label}</span>'
    yield "</div>"


# JSON


def write_json(report: Report, path: Path) -> Path:
    """What `load` reads. OSError if it cannot be written."""
    row = {"doctor": VERSION} | dataclasses.asdict(report)
    return write_atomic(Path(path), json.dumps(row, allow_nan=False) + "\n")


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """report.json and report.html in the folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_json(report, folder / "report.json"), write_html(report, folder / "report.html")


def load(path: str | os.PathLike) -> Report:
    """A report that was written by `write_json`. BadInput names the file, the field and what to do about it."""
    try:
        row = parse_json(Path(path).read_bytes())
    except OSError as e:
        raise BadInput(f"{path} cannot be read ({e.strerror}): give the report.json of an earlier run") from None
    except ValueError as e:
        raise BadInput(f"{path}: {e}: give the report.json of an earlier run") from None
    if not isinstance(row, dict) or row.get("doctor") != VERSION:
        raise BadInput(
            f"{path} is no report of this doctor's (version {VERSION}): run it again on the script as it was"
        )
    for name, read in READERS.items():
        try:
            row[name] = read(row[name])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            again = "run the doctor again on the script as it was"
            raise BadInput(f"{path}, field {name!r}: {brief(str(e))}: {again}") from None
    return Report(**{name: row[name] for name in READERS})


def _finding(row: dict[str, Any]) -> Finding:
    gain = Estimate(**row["gain"]) if row["gain"] is not None else None
    if gain is not None and not all(_number(x) for x in (gain.value, gain.low, gain.high, gain.n)):
        raise ValueError("a gain needs numbers")
    finding = Finding(**row | {"gain": gain, "also": tuple(_texts(row["also"]))})
    _texts([v for k, v in vars(finding).items() if k not in ("gain", "also")])
    return finding


def _profile(row: dict[str, Any]) -> Profile:
    f = from_json(row)
    times = [f.step_s, *f.spans_s.values(), *(t for turns in f.interleaved_s.values() for t in turns)]
    counts = [f.rank, f.ranks, f.local_ranks, f.steps, f.wall_s, *f.samples_factor.values()]
    counts += [n for n in (f.seconds, f.samples) if n is not None]
    if not all(_number(s) and s >= 0 for of in [*times, counts] for s in of):
        raise ValueError("times and counts must be numbers from 0 on")
    _texts([f.script, f.device, f.ended, f.error, *f.argv, *f.planned])
    return f


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(t, str) for t in values):
        raise ValueError("texts are needed")
    return values


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _provenance(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"an object is needed, not {type(values).__name__}")
    return values


READERS = {
    "profiles": lambda rows: [_profile(r) for r in list(rows)],
    "findings": lambda rows: [_finding(r) for r in list(rows)],
    "healthy": _texts,
    "unknown": _texts,
    "provenance": _provenance,
}
