"""Verdicts of notebook 08 on cards and what they train: datasheets, two divisions, and the model of cost."""

from __future__ import annotations

from labs import cost
from labs.chapters.nb08.figures_cost import GPT_3, GPT_3_TOKENS, largest_alone, published_days
from labs.kit import hardware
from labs.kit.claims import Verdict, ends, verdict
from labs.kit.record import Records
from labs.parts.planning import parallel_cost

A100S = ("A100 40GB SXM", "A100 80GB SXM")
EIGHT = 8
SMALL = 1e9
"""Parameters up to which a model is small, here: GPT-2's largest has 1.5e9 (Radford et al. 2019)."""
MEDIUM = 1e10
"""And medium: one of 7e9 is what many fine-tune."""
YEAR_DAYS = 365.25


@verdict("B21")
def _(evidence: Records) -> Verdict:
    states = 100e9 * parallel_cost.STATE_BYTES
    cards = sorted(states / (1e9 * hardware.spec(name).memory_gb) for name in A100S)
    alone = max(map(largest_alone, A100S))
    word = "holds" if alone >= 100e9 else "depends"
    return Verdict(
        word,
        "Weights, gradients and Adam's moments of 100 billion parameters take "
        f"{states / 1e12:.1f} TB: {ends([f'{n:.0f}' for n in cards])} A100, if each byte is kept once and "
        f"before activations. One of 80 GB has room for those of {alone / 1e9:.0f} billion.",
        "modelled",
    )


@verdict("B23")
def _(evidence: Records) -> Verdict:
    alone = largest_alone("RTX 4090")
    word = "holds" if alone >= MEDIUM else "depends" if alone >= SMALL else "does not hold"
    return Verdict(
        word,
        f"By memory: 24 GB hold the states of {alone / 1e9:.1f} billion parameters with Adam in FP32 "
        f"and no activation. Enough for a small model; a medium one of {MEDIUM / 1e9:.0f} billion needs "
        "several cards, or LoRA.",
        "modelled",
    )


@verdict("B32")
def _(evidence: Records) -> Verdict:
    found = cost.divisions(GPT_3, GPT_3_TOKENS, "A100 80GB SXM", EIGHT)
    years = published_days(EIGHT) / YEAR_DAYS
    fits, soon = found.times_too_large <= 1, years <= 1
    word = "holds" if fits and soon else "does not hold"
    return Verdict(
        word,
        f"States of {found.states_bytes / 1e12:.1f} TB over {found.memory_bytes / 1e12:.2f} TB of "
        f"memory: {found.times_too_large:.1f} times too large. Computing alone takes "
        f"{found.days() / YEAR_DAYS:.1f} years at the peak of all eight, {years:.0f} at the efficiency that "
        "was published.",
        "modelled",
    )
