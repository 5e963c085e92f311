"""The report: a page for the terminal, everything in one self-contained HTML file, and JSON for --compare."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import statistics
import string
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from labs.doctor import estimated_gain as gains
from labs.doctor.bottlenecks import OPTION, PARTS, RISK, SLOW, TEXTS, UNPRICED, WRONG, Match
from labs.doctor.findings import Finding, find, healthy, idle_share, ms, unknown, with_steps
from labs.doctor.profile import AS_IS, KINDS, Profile, from_json
from labs.kit.errors import BadInput
from labs.kit.measure import Estimate, estimate
from labs.kit.record import parse_json, plain, provenance, write_atomic

TEMPLATE = Path(__file__).with_name("report_page.html.txt")
VERSION = 3  # Of the JSON
COLUMNS = 112
SHOWN = 4  # Findings on the page: the largest problem, and three more
SMALL, DIFFERENT = 0.005, 0.10
"""Shares of a step: parts below SMALL aren't drawn; ranks whose parts differ by DIFFERENT are shown side by side."""


@dataclass(frozen=True)
class Report:
    """A report, made by `make` or read by `load`."""

    profiles: list[Profile]  # Of the ranks that left one
    findings: list[Finding]  # The most severe first
    healthy: list[str]
    unknown: list[str]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> list[Profile]:
        """Profiles of the ranks whose steps were measured, by rank."""
        return with_steps(self.profiles)

    @property
    def script(self) -> str:
        """The script's file name."""
        return os.path.basename(self.profiles[0].script) if self.profiles else "the script"

    @property
    def problems(self) -> list[Finding]:
        """Findings that a healthy script doesn't have."""
        return [f for f in self.findings if f.kind in (WRONG, SLOW, RISK)]


def group_of(profile: Profile) -> tuple[int, int]:
    """Return (rank, number of ranks), by torch.distributed if its number differs from the launcher's."""
    rank, ranks = profile.training.get("group") or (profile.rank, profile.ranks)
    return (rank, ranks) if ranks != profile.ranks else (profile.rank, profile.ranks)


def make(profiles: list[Profile], matches: Sequence[Match] = ()) -> Report:
    """Make a report from the profiles of one run's ranks, and the matches found in its source."""
    profiles = sorted(profiles, key=lambda f: f.rank)
    return Report(profiles, find(profiles, matches), healthy(profiles), unknown(profiles), plain(provenance()))


# Sentences


def headline(report: Report) -> str:
    """Return the first line: the largest problem and where it is, or that there is none."""
    first, texts = next(iter(report.problems), None), TEXTS["headline"]
    failed = any(f.ended == "error" for f in report.profiles)
    if not report.seen and (failed or first is None or first.kind != WRONG):
        steps = max((f.steps for f in report.profiles), default=-1)
        how = "; ".join(dict.fromkeys(map(end_of, report.profiles)))
        name = "nothing" if steps < 0 else "few_steps" if steps else "no_step"
        return texts[name].format(script=report.script, how=how)
    misled = next((f for f in report.seen if group_of(f)[1] != f.ranks), None)
    if misled is not None and (first is None or first.kind != WRONG):
        return texts["other_ranks"].format(joined=group_of(misled)[1], ranks=misled.ranks, script=report.script)
    if first is None:
        tried = any(len(f.interleaved_s) > 1 for f in report.seen)
        options = ", ".join(f.name for f in report.findings if f.kind == OPTION)
        more = texts["options"].format(options=options) if options else ""
        return texts["fine"].format(script=report.script) + ("" if tried else texts["not_tried"]) + more
    place = f" ({first.line})" if first.where else ""
    price = f". Estimated gain {first.gain}" if first.gain else ""
    return f"{first.kind.upper()}: {first.what}{place}{price}."


def many(n: float, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{n:g} {noun}{'' if n == 1 else 's'}"


def end_of(profile: Profile) -> str:
    """Say how the run of a rank ended."""
    text = TEXTS["end"][profile.ended].format(code=profile.exit_code, error=profile.error or "see its output")
    if profile.ended == "error" and "RANK" in text and profile.ranks == 1:
        return f"{text}: start it with torchrun --nproc-per-node 2 -m labs.doctor"
    return text if profile.ended == "done" else f"{text} after {many(profile.steps, 'step')}"


def summary(report: Report) -> list[str]:
    """Return lines on the step as a whole, its ranks and how their runs ended; without steps, a hint what to do."""
    ranks = report.seen
    if not ranks:
        failed = any(f.steps or f.ended == "error" or f.exit_code for f in report.profiles)
        hint = "A step is a call of step() of an optimizer of torch.optim, in a rank that torchrun, srun or you start, "
        return [] if failed else [f"{hint}not in one that the script starts (mp.spawn). --timeout S waits for it."]
    f, rate = ranks[0], gains.samples_per_s(ranks)
    step = estimate(gains.steps_s(ranks), "s")
    rates = f", that is {rate}" if rate else "; its samples could not be counted"
    whose = many(f.ranks, "rank") if len(ranks) == f.ranks else f"{len(ranks)} of {f.ranks} ranks"
    lines = [f"A step takes {step}{rates}; {whose} on {f.device_name or f.device}."]
    if ends := [f"rank {g.rank}: {end_of(g)}" for g in report.profiles if g.ended != "done"]:
        lines.append(f"Not all was measured: {'; '.join(ends)}.")
    return lines


def parts(profile: Profile) -> list[tuple[str, str, float, float]]:
    """Return (kind, its name, mean s per step, share of the step) in a step's order, without parts below SMALL.

    On a GPU these are its own times, and "idle" is the rest of its step: other work, or waiting for the host.
    """
    step = statistics.fmean(profile.step_s)
    of = {k: gains.part_s(profile, k) for k in KINDS}
    if profile.device_s:
        of = {**{k: s for k, [s] in profile.device_s.items()}, "idle": idle_share(profile) * step}
    return [(k, name, of[k], of[k] / step) for k, name in PARTS.items() if of.get(k, 0.0) >= SMALL * step]


def rank_table(ranks: Sequence[Profile]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of parts in ms, for at most 8 ranks; both empty if the ranks don't differ."""
    step = max(statistics.fmean(f.step_s) for f in ranks)
    of = {k: each for k in KINDS if max(each := [gains.part_s(f, k) for f in ranks]) >= SMALL * step}
    if len(ranks) < 2 or max(max(each) - min(each) for each in of.values()) < DIFFERENT * step:
        return [], []
    shown = [r for r in range(len(ranks)) if r < 4 or r >= len(ranks) - 4]
    rows = [[PARTS[k], *(f"{1e3 * each[r]:.2f}" for r in shown)] for k, each in of.items()]
    return ["ms per step", *(f"rank {ranks[r].rank}" for r in shown)], rows


def method(report: Report) -> str:
    """Describe machine and method, by the first rank's profile."""
    f, p = report.seen[0], report.provenance
    place = [p.get("cpu") or "unknown processor", *map(str, p.get("gpus") or []), f"torch {p.get('torch', '?')}"]
    host = ", ".join(f"{PARTS[k]} {ms(s)}" for k in KINDS if (s := gains.part_s(f, k)))
    ways, rounds = len(f.interleaved_s) - 1, len(f.interleaved_s.get(AS_IS, []))
    turns = f", then {ways} other ways in turn with it, {many(rounds, 'round')}" if rounds else ""
    return (
        f"{', '.join(place)}, {many(f.machine.get('cores', 0), 'core')}, {many(f.machine.get('threads', 0), 'thread')} "
        f"in each rank, {str(p.get('utc', ''))[:16].replace('T', ' ')} UTC. "
        + (f"By the host's clock: {host}. " if f.device_s else "")
        + f"{many(len(f.step_s), 'step')} as it is{turns}; {f.wall_s:.0f} s in all. An estimated gain is the median "
        "over rounds of as it is / without that part; its intervals together hold the truth in 95 % of runs. From the "
        "step's parts it is arithmetic, with a plain 95 % interval. Gains don't add up."
    )


# The page in a terminal


def page(report: Report, everything: bool = False) -> str:
    """Return the page: at most about 40 lines of 112 columns, and more with `everything` (--all)."""
    return "\n".join(_lines(report, everything)) + "\n"


def _lines(report: Report, everything: bool) -> Iterator[str]:
    yield from wrapped(headline(report))
    problems = grouped(f for f in report.problems if report.seen or f.kind == WRONG)
    for number, (finding, places) in enumerate(problems[:SHOWN], 1):
        yield from _entry(number, finding, places, brief=number == 1)
    if len(problems) > SHOWN and not everything:
        yield f"  {len(problems) - SHOWN} more: --all, or report.html."
    yield ""
    yield from (line for text in summary(report) for line in wrapped(text))
    yield from _step_and_ranks(report)
    if everything:
        options, unpriced = (grouped(f for f in report.findings if f.kind == kind) for kind in (OPTION, UNPRICED))
        more = {"MORE FINDINGS": problems[SHOWN:], "OPTIONAL SPEEDUPS": options, "SEEN, NOT PRICED": unpriced}
        for title, entries in more.items():
            yield from ("", title) if entries else ()
            for number, (finding, places) in enumerate(entries, 1):
                yield from _entry(number, finding, places)
        how = [method(report)] if report.seen else []
        more = {"TRIED OR MEASURED, AND FINE": report.healthy, "NOT KNOWN": report.unknown, "MACHINE AND METHOD": how}
        for title, texts in more.items():
            yield from ("", title) if texts else ()
            yield from (line for text in texts for line in wrapped(f"- {text}", "  ", "    "))
    for f in report.profiles:
        yield from ("", f"LAST LINES OF ITS OUTPUT (RANK {f.rank})") if f.output else ()
        yield from (f"  {line}" for line in f.output)


def _step_and_ranks(report: Report) -> Iterator[str]:
    """Yield bars for a step's parts, and the ranks side by side if they differ."""
    if ranks := report.seen:
        slowest = max(ranks, key=lambda f: sum(f.step_s))
        yield from ("", f"WHERE A STEP GOES{f' (RANK {slowest.rank})' if len(ranks) > 1 else ''}")
        for _, name, s, share in parts(slowest):
            yield f"  {name:<32}{ms(s):>9} {100 * share:4.0f} %  {'#' * max(1, round(50 * share))}"
        header, rows = rank_table(ranks)
        yield from ("", "THE RANKS DIFFER") if rows else ()
        yield from (f"  {row[0]:<32}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in [header, *rows] if rows)


def grouped(findings: Iterator[Finding] | Sequence[Finding]) -> list[tuple[Finding, list[str]]]:
    """Return (finding, its lines), with findings that differ only in the line merged."""
    same: dict[Finding, list[str]] = {}
    for f in findings:
        same.setdefault(replace(f, where="", also=()), []).extend([f.where, *f.also])
    return [(finding, [where for where in lines if where]) for finding, lines in same.items()]


def _entry(number: int, finding: Finding, places: Sequence[str], brief: bool = False) -> Iterator[str]:
    """Yield the lines of one finding; `brief` leaves out what the headline says."""
    notebook = f"; notebook {finding.notebook}" if finding.notebook else ""
    price = f"estimated gain {finding.gain}, " if finding.gain else ""
    yield from wrapped(f"{number}. {finding.kind}, {finding.name}: {price}{finding.by}{notebook}", "  ", "     ")
    if not brief:
        yield from wrapped(f"{finding.what}.", "     ")
    yield from (f"     {where}"[:COLUMNS] for where in places)
    yield from wrapped(f"Fix: {finding.fix or 'none is known'}", "     ", "       ")


def wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    """Wrap a text to COLUMNS, with indent `first` for the first line and `rest` for the others."""
    rest = first if rest is None else rest
    text = " ".join(text.split())
    return textwrap.wrap(text, COLUMNS, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


# The page in a browser


def html(report: Report) -> str:
    """Return a page that loads nothing. All text is escaped, so a script's output can't add HTML."""
    command = shlex.join(report.profiles[0].argv) if report.profiles else ""
    texts = {"title": headline(report), "command": command, "text": page(report, everything=True)}
    return string.Template(TEMPLATE.read_text("utf-8")).substitute({k: escape(text) for k, text in texts.items()})


# JSON


def save(report: Report, folder: Path) -> tuple[Path, Path]:
    """Write report.json and report.html to `folder`, creating it, and return their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"doctor": VERSION} | dataclasses.asdict(report)
    written = write_atomic(folder / "report.json", json.dumps(row, allow_nan=False) + "\n")
    return written, write_atomic(folder / "report.html", html(report))


def load(path: str | os.PathLike) -> Report:
    """Read a report that `save` wrote. Raises BadInput, which names the file and what to do about it."""
    try:
        row = parse_json(Path(path).read_bytes())
        if row.pop("doctor") != VERSION:
            raise ValueError("another version of the doctor has written it")
        report = Report(**row | {"profiles": list(map(from_json, row["profiles"]))})
        return replace(report, findings=list(map(_finding, row["findings"])))
    except OSError as e:
        raise BadInput(f"{path} cannot be read ({e.strerror}): give the report.json of an earlier run") from None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BadInput(f"{path} is no report of this doctor ({e}): run it again on the script as it was") from None


def _finding(row: dict[str, Any]) -> Finding:
    gain = Estimate(**row["gain"]) if row["gain"] is not None else None
    return Finding(**row | {"gain": gain, "also": tuple(row["also"])})
