"""Records of labs.activation_checkpointing in the shapes that figures and claims need."""

from __future__ import annotations

from typing import Any

from labs.kit.measure import Estimate, paired_ratio
from labs.kit.record import Record, Records

CHEN_2016 = "T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174 (2016), abstract"
KORTHIKANTI_2022 = (
    "V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198 (2022)"
)
OPENAI = "README of github.com/cybertronai/gradient-checkpointing; huggingface.co/docs/transformers, grad_checkpointing"


def published_prices() -> Records:
    """What others say that checkpointing adds to a step's time, in %; a range has two samples."""
    rows = (("OpenAI's repository, Hugging Face", (20.0,), OPENAI), ("Chen et al. 2016", (30.0,), CHEN_2016),
            ("Korthikanti et al. 2022", (30.0, 40.0), KORTHIKANTI_2022))  # fmt: skip
    return Records(
        Record("paper", "time_overhead", "%", samples, "published", {"by": by}, provenance={"source": source})
        for by, samples, source in rows
    )


def price(records: Records) -> dict[str, Estimate]:
    """Step time with each policy against without any, round by round."""
    none = records.one("step_s", policy="none").samples
    steps = records.where("step_s")
    return {r.case["policy"]: paired_ratio(r.samples, none) for r in steps if r.case["policy"] != "none"}


def forward_share(records: Records) -> Estimate:
    """Part of a step's time that is forward: what one more forward pass costs. A third of the operations."""
    return paired_ratio(records.one("forward_s").samples, records.one("step_s", policy="none").samples, "1")


def pareto(records: Records, part: str = "pareto") -> list[dict[str, Any]]:
    """One row per policy: bytes measured and predicted, FLOPs and time against none; None where there is no such."""
    found, times = [], price(records) if part == "pareto" else {}
    for peak in records.where("peak_bytes", part=part):
        case = {"part": part, "policy": peak.case["policy"]}

        def value(metric: str, case: dict = case) -> float | None:
            return next((r.value for r in records.where(metric, **case)), None)

        flops, none = value("flops"), next((r.value for r in records.where("flops", part=part, policy="none")), None)
        found.append({
            **{k: peak.case[k] for k in ("policy", "segments", "share")}, "peak_bytes": peak.value,
            "predicted_peak_bytes": value("predicted_peak_bytes"), "saved_bytes": value("saved_bytes"),
            "flops_ratio": flops / none if flops and none else None, "time_ratio": times.get(peak.case["policy"]),
        })  # fmt: skip
    return found


def fell(records: Records, policy: str) -> tuple[float, float]:
    """(by which factor what forward keeps fell, by which factor the peak did) with `policy` against none."""
    kept, peak = (
        records.one(m, part="pareto", policy="none").value / records.one(m, part="pareto", policy=policy).value
        for m in ("saved_bytes", "peak_bytes")
    )
    return kept, peak
