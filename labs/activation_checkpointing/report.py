"""Records of labs.activation_checkpointing in the shapes that figures and claims need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.record import Record, Records

CHEN_2016 = "T. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174 (2016), abstract"
KORTHIKANTI_2022 = (
    "V. Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198 (2022)"
)
OPENAI = "README of github.com/cybertronai/gradient-checkpointing; huggingface.co/docs/transformers, grad_checkpointing"


def published_prices() -> Records:
    """What others say that checkpointing adds to a step's time, in %; a range has two samples."""
    rows = (
        ("OpenAI's repository, Hugging Face", (20.0,), OPENAI),
        ("Chen et al. 2016", (30.0,), CHEN_2016),
        ("Korthikanti et al. 2022", (30.0, 40.0), KORTHIKANTI_2022),
    )
    return Records(
        Record("paper", "time_overhead", "%", samples, "published", {"by": by}, provenance={"source": source})
        for by, samples, source in rows
    )


def price(records: Records) -> dict[str, Estimate]:
    """Step time with each policy against without any, round by round."""
    none = records.one("step_s", part="pareto", policy="none").samples
    steps = records.where("step_s", part="pareto")
    return {r.case["policy"]: paired_ratio(r.samples, none) for r in steps if r.case["policy"] != "none"}


def forward_share(records: Records) -> Estimate:
    """Part of a step's time that is forward: what one more forward pass costs. A third of the operations."""
    return paired_ratio(
        records.one("forward_s").samples, records.one("step_s", part="pareto", policy="none").samples, "1"
    )


def same_gradients(records: Records) -> str:
    """Are all policies' gradients those without, bit for bit? Where two runs without differ, bits cannot tell."""
    equal = {r.case["policy"]: bool(r.value) for r in records.where("gradients_equal", part="pareto")}
    if all(equal.values()):
        return "equal, bit for bit"
    off = {r.case["policy"]: r.value for r in records.where("gradient_difference", part="pareto")}
    most = max(value for policy, value in off.items() if policy != "none")
    if equal["none"]:
        other = list(equal.values()).count(False)
        return f"NOT equal under {other} of {len(equal) - 1} policies, by up to {most:.0e} of the largest gradient"
    return (
        f"bits cannot tell, for two runs of one step differ on this device by {off['none']:.0e} of the largest "
        f"gradient; the policies differ by up to {most:.0e}"
    )


def pareto(records: Records, part: str = "pareto") -> list[dict[str, Any]]:
    """One row per policy: bytes measured and predicted, FLOPs and time against none; None where there is no such."""
    found, times = [], price(records) if part == "pareto" else {}
    for peak in records.where("peak_bytes", part=part):
        case = {"part": part, "policy": peak.case["policy"]}

        def value(metric: str, case: dict = case) -> float | None:
            return next((r.value for r in records.where(metric, **case)), None)

        flops, none = value("flops"), next((r.value for r in records.where("flops", part=part, policy="none")), None)
        found.append(
            {
                **{k: peak.case[k] for k in ("policy", "segments", "share")},
                "peak_bytes": peak.value,
                "predicted_peak_bytes": value("predicted_peak_bytes"),
                "saved_bytes": value("saved_bytes"),
                "flops_ratio": flops / none if flops and none else None,
                "time_ratio": times.get(peak.case["policy"]),
            }
        )
    return found


def fell(records: Records, policy: str) -> tuple[float, float]:
    """(by which factor what forward keeps fell, by which factor the peak did) with `policy` against none."""
    kept, peak = (
        records.one(m, part="pareto", policy="none").value / records.one(m, part="pareto", policy=policy).value
        for m in ("saved_bytes", "peak_bytes")
    )
    return kept, peak


NAMES = {"block": "Each block recomputed", "selective": "Selective"}


def added(records: Records) -> dict[tuple[str, int], Estimate]:
    """Seconds that a policy adds to a step of so many rows, round by round: `{(policy, rows): Estimate}`."""
    none = {r.case["rows"]: r.samples for r in records.where("step_s", part="sizes", policy="none")}
    return {
        (r.case["policy"], r.case["rows"]): estimate(
            [a - b for a, b in zip(r.samples, none[r.case["rows"]], strict=True)], "s"
        )
        for r in records.where("step_s", part="sizes")
        if r.case["policy"] != "none"
    }


def fixed_price(records: Records) -> Iterator[str]:
    """Which part of what a policy adds is there with the fewest rows, too, in sentences; none without the part sizes.

    A step of one row has almost no arithmetic and no activations to move. What a policy adds there is calls, and the
    weights that the second run reads again; the two are not told apart.
    """
    found = added(records)
    few, many = (pick((rows for _, rows in found), default=0) for pick in (min, max))
    for policy in dict.fromkeys(p for p, _ in found):
        fixed, whole, name = found[policy, few], found[policy, many], NAMES.get(policy, policy)
        said = f"{name} adds {fixed} to a step of {few} row{'s' * (few > 1)}"
        if fixed.low <= 0:
            said = f"{name}: a fixed price cannot be told in this run; with {few} row{'s' * (few > 1)} it adds {fixed}"
        elif many > few:
            said += (
                f", which has 1/{many // few} of the operations of one of {many}: that part does not come from the rows"
            )
        if many > few:
            grows = whole.low > fixed.high
            said += f". With {many} rows it adds {whole}: " + (
                "the rest grows with the rows" if grows else "no more that this run can show"
            )
        yield f"{said}."
