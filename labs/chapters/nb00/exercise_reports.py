"""Exercise 00.1: reports of machines, each with one fault or none, and a checker of who diagnoses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labs.kit import hardware
from labs.kit.check import Mistake

Report = dict[str, Any]
HEALTHY = {
    "device": "cpu",
    "card": None,
    "ranks": 2,
    "usable cores": 2,
    "busy before the run (%)": 1,
    "SM clock when idle (MHz)": None,
    "SM clock under load (MHz)": None,
    "FP32 product (TFLOP/s)": 0.11,
    "TF32 product (TFLOP/s)": None,
    "published FP32 peak (TFLOP/s)": None,
    "triad: its arrays together (MiB)": 192,
    "caches (MiB)": 33,
    "triad (GB/s)": 24,
    "pass: arithmetic (µs)": 1700,
    "pass: memory (µs)": 360,
    "pass: operators": 20,
    "host time of an operator (µs)": 5,
    "pass: measured (µs)": 2100,
}


def _gpu(card: str, load_mhz: int, fp32: float, tf32: float | None, **other: Any) -> Report:
    """A healthy machine with one GPU and one rank, made up but for the published peak, bandwidth and L2 cache."""
    spec = hardware.spec(card)
    return (
        HEALTHY
        | {
            "device": "cuda",
            "card": card,
            "ranks": 1,
            "usable cores": 16,
            "SM clock when idle (MHz)": 210,
            "SM clock under load (MHz)": load_mhz,
            "FP32 product (TFLOP/s)": fp32,
            "TF32 product (TFLOP/s)": tf32,
            "published FP32 peak (TFLOP/s)": spec.fp32,
            "triad: its arrays together (MiB)": 1536,
            "caches (MiB)": spec.l2_mib,
            "triad (GB/s)": round(0.85 * spec.bandwidth_gb_s),
            "pass: arithmetic (µs)": 5300,
            "pass: memory (µs)": 1200,
            "pass: operators": 49,
            "host time of an operator (µs)": 7,
            "pass: measured (µs)": 7100,
        }
        | other
    )


SMALL_PASS = {"pass: arithmetic (µs)": 3, "pass: memory (µs)": 2, "pass: operators": 20, "pass: measured (µs)": 160}
REPORTS: dict[str, Report] = {
    "A": _gpu("A100 80GB SXM", 1395, 118.0, 119.0),
    "B": HEALTHY | {"usable cores": 1, "pass: measured (µs)": 4300},
    "C": HEALTHY | {"triad: its arrays together (MiB)": 6, "triad (GB/s)": 96},
    "D": _gpu(
        "H100 SXM",
        1410,
        24.0,
        170.0,
        **{"busy before the run (%)": 97, "triad (GB/s)": 1400, "pass: measured (µs)": 15000},
    ),
    "E": _gpu("H100 SXM", 1830, 51.0, 330.0, **SMALL_PASS),
    "F": _gpu("A100 40GB SXM", 1395, 18.9, 121.0),
}
"""Made up, each with one fault or none: for an exercise, not from any machine."""

CAUSES = {
    "tf32": "what is called FP32 went through TF32",
    "cores": "ranks share a core",
    "cache": "the triad measured a cache, not memory",
    "busy": "another program uses the device",
    "overhead": "the pass is too small: its time goes into calls of operators",
    "healthy": "no fault",
}


@dataclass(frozen=True)
class Case:
    """A report, its cause, and what tells: for a learner who says something else."""

    report: Report
    cause: str
    tells: str


def cases() -> list[Case]:
    """The reports of the notebook and others, some of which look like a fault and are none."""
    told = {
        "A": ("tf32", "the FP32 rate is far above the card's published FP32 peak, and near the TF32 rate"),
        "B": ("cores", "2 ranks on 1 usable core take turns"),
        "C": ("cache", "its arrays have 6 MiB together, and the caches 33 MiB"),
        "D": ("busy", "the card was 97 % busy before the run began"),
        "E": ("overhead", "20 operators of 7 µs take 140 µs; arithmetic takes 3 µs and memory 2 µs"),
        "F": ("healthy", "its clock is low when idle, as it should be, and high under load"),
    }
    found = [Case(REPORTS[name], *answer) for name, answer in told.items()]
    return [
        *found,
        Case(HEALTHY, "healthy", "nothing is out of line: 20 operators of 5 µs take 100 µs of 2,100 µs"),
        Case(
            _gpu("RTX 4090", 2600, 74.0, 75.0, **{"busy before the run (%)": 2}),
            "healthy",
            "FP32 is as fast as TF32, and below the published FP32 peak: this card's two peaks are equal",
        ),
        Case(
            _gpu("T4", 1500, 7.1, None, **{"caches (MiB)": 4}),
            "healthy",
            "this card has no TF32, and FP32 is below its peak",
        ),
        Case(
            _gpu(
                "L4",
                1900,
                27.0,
                52.0,
                **{
                    "caches (MiB)": 48,
                    "pass: arithmetic (µs)": 300,
                    "pass: memory (µs)": 1900,
                    "pass: measured (µs)": 2300,
                },
            ),
            "healthy",
            "the pass is limited by memory: 1,900 µs, and 49 operators of 7 µs take 343 µs",
        ),
        Case(
            _gpu("H100 SXM", 1800, 52.0, 330.0, **{"pass: memory (µs)": 200}),
            "healthy",
            "the pass is limited by arithmetic: 5,300 µs, and 49 operators of 7 µs take 343 µs",
        ),
        Case(
            _gpu("L4", 1900, 52.0, 53.0, **{"caches (MiB)": 48}),
            "tf32",
            "the FP32 rate is above the card's published FP32 peak, 30.3: FP32 units cannot do that",
        ),
        Case(
            _gpu("A100 40GB SXM", 1395, 12.0, 80.0, **{"busy before the run (%)": 60}),
            "busy",
            "the card was 60 % busy before the run began",
        ),
        Case(HEALTHY | {"ranks": 4, "usable cores": 3}, "cores", "4 ranks on 3 usable cores take turns"),
        Case(HEALTHY | {"ranks": 4, "usable cores": 4}, "healthy", "4 ranks have 4 cores"),
        Case(
            _gpu("A100 80GB PCIe", 1380, 17.0, 110.0, **{"triad: its arrays together (MiB)": 24, "triad (GB/s)": 4100}),
            "cache",
            "its arrays have 24 MiB together, and the caches 40 MiB",
        ),
        Case(
            _gpu("H100 SXM", 1800, 52.0, 330.0, **{"triad: its arrays together (MiB)": 45, "triad (GB/s)": 5200}),
            "cache",
            "its arrays have 45 MiB together, and the caches 50 MiB",
        ),
        Case(
            HEALTHY | {"pass: arithmetic (µs)": 40, "pass: memory (µs)": 60, "pass: measured (µs)": 150},
            "overhead",
            "20 operators of 5 µs take 100 µs; memory takes 60 µs and arithmetic 40 µs",
        ),
        Case(
            _gpu("H100 SXM", 1800, 210.0, 330.0),
            "tf32",
            "the FP32 rate is three times the card's published FP32 peak: FP32 units cannot do that",
        ),
    ]


def check_diagnosis(f: Callable[[Report], str]) -> None:
    """Each report gets its cause."""
    for case in cases():
        got = f(dict(case.report))
        if not isinstance(got, str) or got not in CAUSES:
            raise Mistake(f"you return {got!r:.60}", f"one of the words {', '.join(CAUSES)}")
        if got != case.cause:
            raise Mistake(f"you say {got!r} of {_which(case.report)}{_against(got, case.report)}", case.tells)


def _against(word: str, r: Report) -> str:
    """What in the report speaks against `word`."""
    calls_us = r["pass: operators"] * r["host time of an operator (µs)"]
    return {
        "tf32": ", whose FP32 rate is not above a published FP32 peak",
        "cores": f", where {r['ranks']} ranks have {r['usable cores']} usable cores",
        "cache": f", with {r['triad: its arrays together (MiB)']} MiB of arrays and {r['caches (MiB)']} MiB of caches",
        "busy": f", which was {r['busy before the run (%)']} % busy before the run",
        "overhead": f", where calls take {calls_us} µs, arithmetic {r['pass: arithmetic (µs)']} µs and memory "
        f"{r['pass: memory (µs)']} µs",
        "healthy": ", and it has a fault",
    }[word]


def _which(report: Report) -> str:
    name = next((f"report {name}" for name, known in REPORTS.items() if known == report), None)
    if name is not None:
        return name
    differs = {key: value for key, value in report.items() if value != HEALTHY[key]}
    if report["device"] == "cuda":
        return f"a report of a {report['card']}, {report['FP32 product (TFLOP/s)']:g} TFLOP/s in FP32"
    return "a CPU's report with " + (", ".join(f"{k} = {v}" for k, v in differs.items()) or "nothing out of line")
