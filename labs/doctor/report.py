"""The doctor's report: one page in a terminal, the same as one HTML file without network, and JSON for --compare."""

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

from labs.doctor import bounds
from labs.doctor.causes import HOLDS_BACK, OPTION, PARTS, READING
from labs.doctor.diagnosis import (
    COST_SAID,
    FROM_PARTS,
    Finding,
    diagnose,
    healthy,
    hooks_cost,
    line_of,
    memory_growth,
    ms,
    unknown,
    with_steps,
)
from labs.doctor.diagnosis import count as many
from labs.doctor.facts import AS_IS, KINDS, Facts, from_json
from labs.doctor.probes.findings import Finding as Wrong
from labs.doctor.probes.findings import merge
from labs.kit.errors import BadInput, brief
from labs.kit.measure import Estimate, estimate
from labs.kit.monitor import Trace
from labs.kit.record import parse_json, plain, provenance, write_atomic

if TYPE_CHECKING:
    from labs.doctor.rules import Hit

TEMPLATE = Path(__file__).with_name("report_page.html.txt")
VERSION = 1
"""Of the JSON."""
COLUMNS = 112
SHOWN = 6
"""Findings of a kind in the terminal; the HTML has all."""
DIFF_LINES = 6
NEEDED = 50
"""Steps for a page that tells something, by default: warm-up, as they are, and some rounds."""
SMALL, DIFFERENT = 0.005, 0.10
"""Of a step: parts below the first are not drawn; ranks whose parts differ by the second are shown side by side."""
SCATTER = 0.2
"""Of the median step, between its quartiles: it is told."""
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

    facts: list[Facts]
    """Of the ranks that left any."""
    findings: list[Finding]
    healthy: list[str]
    unknown: list[str]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> list[Facts]:
        """Of the ranks whose steps were looked at, by rank."""
        return with_steps(self.facts)

    @property
    def script(self) -> str:
        """Name of its file."""
        return os.path.basename(self.facts[0].script) if self.facts else "the script"

    @property
    def wrong(self) -> list[Wrong]:
        """What makes the training wrong, most severe first, and then what deserves a look."""
        return merge([f.probes for f in self.facts])

    def of_kind(self, kind: str) -> list[Finding]:
        """Findings that hold back, are options, or were read."""
        return [f for f in self.findings if f.kind == kind]

    def entries(self, kind: str) -> list[tuple[Finding, list[str]]]:
        """What is told of these: each with its lines. One entry for lines of which all else is the same."""
        same: dict[Finding, list[str]] = {}
        for f in self.of_kind(kind):
            same.setdefault(replace(f, where=""), []).append(f.where)
        return [(finding, [where for where in lines if where]) for finding, lines in same.items()]


def group_of(facts: Facts) -> tuple[int, int]:
    """Rank and number of ranks: those of torch.distributed, if they are others than what started the run has told."""
    rank, ranks = facts.training.get("group") or (facts.rank, facts.ranks)
    return (rank, ranks) if ranks != facts.ranks else (facts.rank, facts.ranks)


def make(facts: list[Facts], hits: Sequence[Hit] = ()) -> Report:
    """Of the facts that the ranks of one run have left, and of what was read in its source."""
    facts = sorted(facts, key=lambda f: f.rank)
    return Report(
        facts, diagnose(facts, hits), healthy(facts), [*_missing(facts), *unknown(facts)], plain(provenance())
    )


def _missing(facts: Sequence[Facts]) -> Iterator[str]:
    ranks = max((f.ranks for f in facts), default=1)
    here = max((f.local_ranks for f in facts), default=1)
    missing = sorted(set(range(ranks)) - {f.rank for f in facts})
    if missing and here == ranks:
        yield f"ranks that left nothing: {', '.join(map(str, missing))} of {ranks}; what they did is not in here"
    elif missing:
        if len(facts) < here:
            yield f"what {here - len(facts)} of this machine's {many(here, 'rank')} did: they left nothing"
        yield (
            f"what {many(ranks - here, 'rank')} elsewhere did: each machine has a report of its own, with its "
            "number in the name (--out)"
        )
    blind = [str(f.rank) for f in facts if not f.step_s]
    if blind and any(f.step_s for f in facts):
        yield f"ranks whose steps were not seen: {', '.join(blind)}"


# Sentences


def answer(report: Report) -> str:
    """The first line: what holds it back most, how much its cure gives at most, and where it is."""
    if wrong := next((f for f in report.wrong if f.wrong), None):
        return f"Wrong: {wrong.title}{wrong.where and f' ({wrong.where.split()[0]})'}."
    if not report.seen:
        return _nothing_seen(report)
    if misled := next((f for f in report.seen if group_of(f)[1] != f.ranks), None):
        return _no_verdict(misled)
    causes, options = report.of_kind(HOLDS_BACK), report.of_kind(OPTION)
    best = next((f for f in causes if f.bound), None)
    if best:
        place = f" ({line_of(best)})" if best.where else ""
        cured = "With one cure it was" if best.name in ONE_SETTING else "Cured, it is"
        return f"{capital(best.what)}{place}. {cured} {priced(best).removeprefix('as tried ')} as fast."
    tried = any(len(f.turns_s) > 1 for f in report.seen)
    looked = "tried" if tried else "looked at"
    said = f"Nothing that was {looked} holds {report.script} back, as far as this run can show."
    if not tried:
        said += " No counterfactual was taken: this says little."
    unpriced = next((f for f in causes if not f.bound), None)
    if unpriced:
        return f"{capital(unpriced.what)}: what that costs, this run cannot price."
    if options:
        said += f" It may become faster all the same: {options[0].name}, {priced(options[0])} as fast."
    return said


def _no_verdict(facts: Facts) -> str:
    """Of a rank whose job has more ranks than the doctor was told of, or fewer."""
    rank, ranks = group_of(facts)
    told = f"{many(facts.ranks, 'rank')} by what started them"
    if ranks < facts.ranks:
        return (
            f"No verdict: there are {told}, and torch.distributed joins {many(ranks, 'rank')}. They train several "
            "models, and each number below is of all of them together."
        )
    return (
        f"No verdict: torch.distributed joins {ranks} ranks, and the doctor was told of {told}: this page is of "
        f"rank {rank} alone, which waits for the others. Start them by torchrun (-m labs.doctor {facts.script}), "
        "srun or mpirun."
    )


def _nothing_seen(report: Report) -> str:
    if not report.facts:
        return "No rank has left anything: the script's process ended before Python could begin."
    if apart := next((f.error for f in report.facts if f.ended == "done" and f.error), ""):
        return f"{report.script}: no step could be looked at: {apart}."
    steps = max(f.steps for f in report.facts)
    how = "; ".join(dict.fromkeys(_rank_of(f, report.facts) + end_of(f) for f in report.facts))
    if steps:
        by_itself = any(f.ended in ("script ended", "exit") and not f.exit_code for f in report.facts)
        short, longer = (" has not trained long enough", ": let it train longer") if by_itself else ("", "")
        few = f"and the first ones only warm up. The doctor needs some {NEEDED} of them{longer}."
        needs = few if steps < NEEDED else f"before all that --steps asks for were taken{longer}."
        return f"{report.script}{short}: {how}, {needs}"
    return f"{report.script}: no step of an optimizer was seen: {how}."


def end_of(facts: Facts) -> str:
    """How the run of a rank ended, in words."""
    code = facts.exit_code
    name = ""
    if code is not None and code < 0:
        name = f" by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f" by signal {-code}"
    text = ENDS.get(facts.ended, "all was measured").format(
        code=code,
        error=facts.error or "see its output",
        signal=name,
        why=facts.error and f" ({facts.error})",
    )
    if facts.ended == "done":
        return text
    trying = f", while {facts.trying!r} was tried" if facts.trying else ""
    after = f" after {many(facts.steps, 'step')}" if facts.steps else ""
    return f"{text}{after}{trying}"


def _rank_of(f: Facts, all_of: Sequence[Facts]) -> str:
    return f"rank {f.rank}: " if len(all_of) > 1 else ""


def hints(report: Report) -> list[str]:
    """What to do where nothing could be measured."""
    failed = any(f.ended == "error" or (f.ended == "exit" and f.exit_code) for f in report.facts)
    if report.seen or failed or any(f.steps for f in report.facts):
        return []
    return [
        "A step is a call of an optimizer's step(), of torch.optim: a training without one is not seen.",
        "Ranks that the script starts itself (mp.spawn) are not seen: torchrun --nproc-per-node n -m labs.doctor ...",
        "Where the first step comes late, --patience S waits longer for it.",
    ]


def summary(report: Report) -> list[str]:
    """Lines about the step as a whole, how it was run and how that ended, and what spoils results."""
    facts = report.seen
    wrong = [line_of(f) for f in report.findings if f.certainty == "wrong"]
    wrong = [f"Read in the source and wrong, see below: {', '.join(dict.fromkeys(wrong))}."] if wrong else []
    if not facts:
        return wrong + hints(report)
    f, rate = facts[0], bounds.samples_per_s(facts)
    rounds = bounds.beside_s(facts)
    step = estimate(rounds or bounds.steps_s(facts), "s")
    where = f.device_name or f.device
    rates = f", that is {rate}" if rate else "; its samples could not be counted"
    waited = " up to the end of the device's work" if bounds.part_s(f, "device") and not rounds else ""
    ranks = (
        many(f.ranks, "rank") if len(facts) == f.ranks else f"{len(facts)} of {f.ranks} ranks, whose numbers these are,"
    )
    lines = [f"A step takes {step}{waited}{rates}; {ranks} on {where}.", *wrong]
    low, _, high = statistics.quantiles(bounds.even_s(facts), n=4) if len(f.step_s) > 1 else (step.value,) * 3
    others = others_percent(facts)
    if busy := Trace(neighbours_percent=others).disturbance():
        lines.append(
            f"{busy} Bounds, taken in turn, hold for the machine as it was: their intervals are wider, and "
            "some may be others where it is quiet."
        )
    if high - low > SCATTER * step.value:
        by = "" if busy else f": other programs took {others:.0f} % of the CPU"
        by = ": other programs on this machine, perhaps" if math.isnan(others) else by
        lines.append(f"Steps scatter, half of them between {ms(low)} and {ms(high)}{by}. That makes intervals wide.")
    if ends := [_rank_of(g, report.facts) + end_of(g) for g in report.facts if g.ended != "done"]:
        lines.append(f"Not all was measured: {'; '.join(dict.fromkeys(ends))}.")
    return lines


def others_percent(facts: Sequence[Facts]) -> float:
    """Of the usable cores, what programs outside of the run took; of several machines the busiest; NaN if not known."""
    return max((f.machine["others_percent"] for f in facts if "others_percent" in f.machine), default=math.nan)


def parts(facts: Facts) -> list[tuple[str, str, float, float]]:
    """(kind, its name, mean s per step, share of the step), in the order of a step; what is too small is left out."""
    step = sum(facts.step_s) / len(facts.step_s)
    rows = [(k, PARTS[k], bounds.part_s(facts, k)) for k in KINDS]
    return [(k, name, s, s / step) for k, name, s in rows if s >= SMALL * step]


def rank_table(facts: Sequence[Facts]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of parts in ms for each rank; no rows if the ranks do not differ."""
    kinds = [k for k in KINDS if any(bounds.part_s(f, k) >= SMALL * sum(f.step_s) / len(f.step_s) for f in facts)]
    step = max(sum(f.step_s) / len(f.step_s) for f in facts)
    ranges = [max(bounds.part_s(f, k) for f in facts) - min(bounds.part_s(f, k) for f in facts) for k in kinds]
    if len(facts) < 2 or not ranges or max(ranges) < DIFFERENT * step:
        return [], []
    chosen = facts if len(facts) <= 8 else [*facts[:4], *facts[-4:]]
    rows = [[PARTS[k], *(f"{1e3 * bounds.part_s(f, k):.2f}" for f in chosen)] for k in kinds]
    return ["ms per step", *(f"rank {f.rank}" for f in chosen)], rows


def machine(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """(What, value with unit): memory by category, threads, cores, GPU, and the doctor's own cost; of one rank."""
    f = facts[0]
    m, has, whose = f.memory, f.machine, f" of rank {f.rank}" if len(facts) > 1 else ""
    memory = [f"{name} {_bytes(m[name])}" for name in ("parameters", "gradients", "optimizer", "peak") if m.get(name)]
    rows = [(f"memory{whose}", ", ".join(memory))] if memory else []
    if (grows := memory_growth(f)) is not None:
        rows.append(("memory's growth", f"{grows} per step"))
    if has.get("threads"):
        share = f", {has['cpu_share']:.2g} of them busy with this rank" if has.get("cpu_share") is not None else ""
        each = " in each rank" if f.local_ranks > 1 else ""
        threads = f"{many(has['threads'], 'thread')} of torch's{each}"
        others = others_percent(facts)
        share += "" if math.isnan(others) else f"; other programs took {others:.0f} % of the CPU"
        rows.append(("processor", f"{threads}, {many(has.get('cores', 0), 'core')}{share}"))
    if has.get("gpu_percent") is not None:
        power = f", {has['power_w']:.0f} W" if has.get("power_w") else ""
        rows.append((f"GPU{whose}", f"some kernel ran {has['gpu_percent']} % of the time{power}"))
    if f.device_s:
        rows.append(("on its stream", ", ".join(f"{k} {ms(sum(s) / len(s))}" for k, s in f.device_s.items() if s)))
    if (cost := hooks_cost(f)) is not None:
        often = f"{f.cost.get('calls', 0):.0f} calls in a step"
        rows.append(
            (
                "the doctor's own cost",
                f"{100 * cost:.2g} % of a step ({often})"
                + (": too much for parts to be exact" if cost > COST_SAID else ""),
            )
        )
    return rows


def method(report: Report) -> str:
    """How the numbers came about, in one paragraph."""
    facts = report.seen
    if not facts:
        return ""
    f = facts[0]
    turns = ""
    if rounds := [n for name in f.turns_s if name != AS_IS and (n := len(bounds.pairs_s(facts, name)))]:
        low, high = min(rounds), max(rounds)
        each = many(low, "round") if low == high else f"{low} to {high} rounds"
        turns = f", then {many(len(rounds), 'counterfactual')} in turn with it, {each} of each"
    p = report.provenance
    place = p.get("cpu") or "unknown processor"
    gpus = ", ".join(map(str, p.get("gpus") or []))
    place = ", ".join(filter(None, (place, gpus, many(p.get("cores") or 0, "core"), f"torch {p.get('torch', '?')}")))
    return (
        f"{many(len(f.step_s), 'step')} as it is{turns}; {f.wall_s:.0f} s in all. Measured in turn: the median over "
        "rounds of as it is / counterfactual. 'At most' is without the thing: a cure that changes nothing else gives "
        "no more; 'as tried' is one setting of several. All these intervals together hold the truth in 95 % of runs. "
        "'About', from the step's parts, is arithmetic, if nothing else changed, with a plain 95 % interval. Bounds do "
        "not add up. Without --let-it-write, what the script writes goes to a scratch folder, but caches are written "
        f"where they belong. {place}, "
        f"{str(p.get('utc', ''))[:16].replace('T', ' ')} UTC."
    )


# The page in a terminal


def page(report: Report) -> str:
    """At most some 60 lines of 112 columns."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield from wrapped(answer(report))
    if wrong := report.wrong:
        yield from _heading("What is wrong, or deserves a look")
        for number, finding in enumerate(wrong, 1):
            yield from wrapped(f"{number}. {finding.title}.", "  ", "     ")
            yield from (f"     {cut(where, COLUMNS - 5)}" for where in (finding.where, *finding.also) if where)
            yield from wrapped(f"Fix: {finding.fix}.", "     ", "       ") if finding.fix else ()
        yield ""
    yield from (line for text in summary(report) for line in wrapped(text))
    if facts := report.seen:
        slowest = max(facts, key=lambda f: sum(f.step_s))
        yield from _heading(f"Where a step goes{f' (rank {slowest.rank})' if len(facts) > 1 else ''}")
        yield from _bars(slowest)
        if rank_table(facts)[1]:
            yield from _heading("The ranks differ")
            yield from _ranks(facts)
    for kind, title in TITLES.items():
        found = [entry for entry in report.entries(kind) if entry[0].certainty != LOOK]
        if found:
            yield from _heading(title)
        for number, (finding, places) in enumerate(found[:SHOWN], 1):
            yield from _entry(number, finding, places)
        if len(found) > SHOWN:
            yield f"    and {len(found) - SHOWN} more, in report.html"
    looks = list(_worth_a_look(report))
    for title, texts in (("Healthy", report.healthy), (LOOKS, looks), ("Not known", report.unknown)):
        if texts:
            yield from _heading(title)
            yield from (line for text in texts for line in wrapped(f"- {text}", "  ", "    "))
    if report.seen:
        yield from _heading("Machine and method")
        yield from wrapped("; ".join(f"{what}: {value}" for what, value in machine(report.seen)) + ".", "  ")
        yield from wrapped(method(report), "  ")


def _worth_a_look(report: Report) -> Iterator[str]:
    """One line for each rule; a healthy training has some of them."""
    lines: dict[str, list[str]] = {}
    for f in report.findings:
        if f.certainty == LOOK:
            lines.setdefault(f.name, []).append(line_of(f))
    for name, places in lines.items():
        yield f"{name}: {', '.join(places[:3])}{' and others' if len(places) > 3 else ''}"


LOOK = "look at it"
"""Certainty of what is right in some trainings and wrong in others."""
LOOKS = "Worth a look: right in some trainings and wrong in others (reasons and cures are in report.html)"
TITLES = {
    HOLDS_BACK: "What holds it back, and what a cure gives at most",
    OPTION: "What a healthy training may use, too",
    READING: "Read in the source, or seen and not priced",
}


def _heading(text: str) -> Iterator[str]:
    yield ""
    yield text.upper()


def _bars(facts: Facts) -> Iterator[str]:
    for _, name, s, share in parts(facts):
        yield f"  {name:<32}{ms(s):>9} {100 * share:4.0f} %  {'#' * max(1, round(50 * share))}"


def _ranks(facts: Sequence[Facts]) -> Iterator[str]:
    header, rows = rank_table(facts)
    for row in [header, *rows] if rows else []:
        yield f"  {row[0]:<32}" + "".join(f"{cell:>9}" for cell in row[1:])


def _entry(number: int, finding: Finding, places: Sequence[str]) -> Iterator[str]:
    price = f"{priced(finding)}, {finding.by}" if finding.bound else known(finding)
    notebook = f"; notebook {finding.notebook}" if finding.notebook else ""
    yield from wrapped(f"{number}. {finding.name}: {price}{notebook}", "  ", "     ")
    yield from wrapped(f"{capital(finding.what)}.", "     ")
    yield from (f"     {cut(where, COLUMNS - 5)}" for where in places)
    yield from _cure(finding.cure)


def priced(finding: Finding) -> str:
    """Its bound: "at most" where the thing was taken away, "about" by arithmetic, "as tried" for a setting of many."""
    if finding.by == FROM_PARTS:
        return f"about {finding.bound}"
    return f"as tried {finding.bound}" if finding.name in ONE_SETTING else f"at most {finding.bound}"


ONE_SETTING = {
    "larger_batch",
    "tiny_batches",
    "half_precision",
    "float64",
    "fused_optimizer",
    "optimizer_loop",
    "compile",
    "python_overhead",
    "threads",
    "more_threads",
}
"""What was tried is a cure itself, with one batch, one precision, one number of threads: another may give more."""


def known(finding: Finding) -> str:
    """How it is known, of one without a price."""
    return f"{finding.by}: {finding.certainty}" if finding.certainty else f"{finding.by}, not priced"


def _cure(cure: str) -> Iterator[str]:
    """Words, or of a diff the lines that it changes."""
    lines = cure.strip("\n").splitlines()
    if len(lines) < 2:
        yield from wrapped(f"Cure: {cure or 'none is known'}", "     ", "       ")
        return
    changed = [line for line in lines if line[:1] in "+-" and not line.startswith(("+++", "---"))]
    yield from (f"     {cut(line, COLUMNS - 5)}" for line in changed[:DIFF_LINES])
    if len(changed) > DIFF_LINES:
        yield "     ... the whole of it is in report.html"


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
    page = string.Template(TEMPLATE.read_text("utf-8"))
    title = escape(f"{report.script}: what holds it back")
    return write_atomic(Path(path), page.substitute(title=title, main="\n".join(_main(report))))


def _main(report: Report) -> Iterator[str]:
    """Lines of HTML. Whatever is not written here goes through `escape`: a script's text stays text."""
    yield f"<h1>{escape(answer(report))}</h1>"
    for finding in report.wrong:
        yield f"<p><strong>{escape(finding.title)}.</strong> <code>{escape(finding.where)}</code>"
        yield f"{escape(finding.fix)}</p>"
    yield from (f"<p>{escape(line)}</p>" for line in summary(report))
    if report.facts:
        yield f'<p class="soft"><code>{escape(shlex.join(report.facts[0].argv))}</code></p>'
    if facts := report.seen:
        yield from _html_parts(max(facts, key=lambda f: sum(f.step_s)), len(facts) > 1)
        yield from _html_ranks(*rank_table(facts))
    most = max([2.0, *(f.bound.high for f in report.findings if f.bound)])
    for kind, title in TITLES.items():
        if entries := report.entries(kind):
            yield f"<h2>{escape(title)}</h2>"
            for number, (finding, places) in enumerate(entries, 1):
                yield from _html_finding(number, finding, places, most)
    for title, texts in (("Healthy", report.healthy), ("Not known", report.unknown)):
        if texts:
            yield f"<h2>{title}</h2>\n<ul>"
            yield from (f"<li>{escape(text)}</li>" for text in texts)
            yield "</ul>"
    if facts:
        yield '<h2>Machine and method</h2>\n<div class="wide"><table><tbody>'
        for what, value in machine(facts):
            yield f'<tr><th scope="row">{escape(what)}</th><td>{escape(value)}</td></tr>'
        yield f'</tbody></table></div>\n<p class="soft">{escape(method(report))}</p>'


def _html_parts(facts: Facts, many_ranks: bool) -> Iterator[str]:
    """A step as a bar, and as a table."""
    rows = parts(facts)
    if not rows:
        return
    color, said = _colors(rows), ", ".join(f"{name} {100 * share:.0f} %" for _, name, _, share in rows)
    yield f"<h2>Where a step goes{f' (rank {facts.rank})' if many_ranks else ''}</h2>"
    yield f'<div class="bar" role="img" aria-label="A step: {escape(said)}">'
    for kind, name, _, share in rows:
        label = escape(name) if share > 0.12 else ""
        yield f'<span class="c{color.get(kind, 9)}" style="flex: {share:.4f} 1 0">{label}</span>'
    yield '</div>\n<div class="wide"><table><thead><tr><th scope="col">part</th><th scope="col" class="n">per step</th>'
    yield '<th scope="col" class="n">share</th></tr></thead><tbody>'
    for kind, name, s, share in rows:
        swatch = f'<span class="swatch c{color.get(kind, 9)}"></span>'
        yield f'<tr><th scope="row">{swatch}{escape(name)}</th><td class="n">{ms(s)}</td>'
        yield f'<td class="n">{100 * share:.0f} %</td></tr>'
    yield "</tbody></table></div>"


def _html_ranks(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Their parts side by side."""
    if not rows:
        return
    first, *others = map(escape, header)
    heads = "".join(f'<th scope="col" class="n">{cell}</th>' for cell in others)
    yield '<h2>The ranks differ</h2>\n<div class="wide"><table><thead><tr>'
    yield f'<th scope="col">{first}</th>{heads}</tr></thead><tbody>'
    for first, *others in rows:
        cells = "".join(f'<td class="n">{escape(cell)}</td>' for cell in others)
        yield f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _html_finding(number: int, finding: Finding, places: Sequence[str], most: float) -> Iterator[str]:
    yield f"<article>\n<h3>{number}. {escape(finding.name)}</h3>"
    if finding.bound:
        yield f'<p><span class="bound">{escape(priced(finding))} as fast</span>'
        yield f' <span class="soft">{escape(finding.by)}</span></p>'
        as_it_is, low, high, at = (
            f"{10 + 2.8 * _place_on_axis(x, most):.1f}"
            for x in (1.0, finding.bound.low, finding.bound.high, finding.bound.value)
        )
        yield '<svg viewBox="0 0 300 24" preserveAspectRatio="xMinYMid meet" aria-hidden="true">'
        yield '<line class="axis" x1="10" x2="290" y1="8" y2="8"></line>'
        yield f'<line class="axis" x1="{as_it_is}" x2="{as_it_is}" y1="2" y2="14"></line>'
        yield f'<text x="{as_it_is}" y="23" text-anchor="middle">as it is</text>'
        yield f'<text x="290" y="23" text-anchor="end">{most:.3g} x</text>'
        yield f'<line class="range" x1="{low}" x2="{high}" y1="8" y2="8"></line>'
        yield f'<circle cx="{at}" cy="8" r="5"></circle></svg>'
    else:
        yield f'<p class="soft">{escape(known(finding))}</p>'
    yield f"<p>{escape(capital(finding.what))}.</p>\n<dl>"
    yield from (f"<dt>line</dt><dd><code>{escape(where)}</code></dd>" for where in places)
    cure = escape(finding.cure)
    yield f"<dt>cure</dt><dd>{f'<code>{cure}</code>' if chr(10) in cure else cure}</dd>"
    if finding.notebook:
        yield f"<dt>notebook</dt><dd>{escape(finding.notebook)}</dd>"
    yield "</dl>\n</article>"


def _colors(rows: Sequence[tuple[str, str, float, float]]) -> dict[str, int]:
    """A colour for each of the six largest parts; the others are grey."""
    return {kind: i for i, (kind, *_) in enumerate(sorted(rows, key=lambda row: -row[2])[:6])}


def _place_on_axis(x: float, most: float) -> float:
    """0 to 100 for 0.8 to `most` times as fast, on a logarithmic axis: twice as fast is as far from 1 as half."""
    low = math.log(0.8)
    return round(100 * min(1.0, max(0.0, (math.log(max(x, 0.01)) - low) / (math.log(most) - low))), 1)


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
            raise BadInput(
                f"{path}, field {name!r}: {brief(str(e))}: run the doctor again on the script as it was"
            ) from None
    return Report(**{name: row[name] for name in READERS})


def _finding(row: dict[str, Any]) -> Finding:
    bound = Estimate(**row["bound"]) if row["bound"] is not None else None
    if bound is not None and not all(_number(x) for x in (bound.value, bound.low, bound.high, bound.n)):
        raise ValueError("a bound needs numbers")
    finding = Finding(**row | {"bound": bound})
    return _texts(finding, [v for k, v in vars(finding).items() if k != "bound"])


def _facts(row: dict[str, Any]) -> Facts:
    facts = from_json(row)
    times = [facts.step_s, *facts.spans_s.values(), *(t for turns in facts.turns_s.values() for t in turns)]
    counts = [facts.rank, facts.ranks, facts.local_ranks, facts.steps, facts.wall_s, *facts.samples_factor.values()]
    counts += [] if facts.seconds is None else [facts.seconds]
    if not all(_number(s) and s >= 0 for of in [*times, counts] for s in of):
        raise ValueError("times and counts must be numbers from 0 on")
    if facts.samples is not None and not (_number(facts.samples) and facts.samples > 0):
        raise ValueError("samples must be a number above 0")
    return _texts(facts, [facts.script, facts.device, facts.ended, facts.error, *facts.argv, *facts.planned])


def _texts(value: Any, texts: Sequence[Any]) -> Any:
    if not all(isinstance(t, str) for t in texts):
        raise ValueError("texts are needed")
    return value


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"a list is needed, not {type(values).__name__}")
    return values


def _dict(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ValueError(f"an object is needed, not {type(values).__name__}")
    return values


READERS = {
    "facts": lambda rows: [_facts(r) for r in _list(rows)],
    "findings": lambda rows: [_finding(r) for r in _list(rows)],
    "healthy": lambda rows: _texts(rows, _list(rows)),
    "unknown": lambda rows: _texts(rows, _list(rows)),
    "provenance": _dict,
}
