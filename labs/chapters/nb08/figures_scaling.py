"""Figures, tables and sentences of notebook 08 about the scaling model and its blind test."""

from __future__ import annotations

import html
import math

import pandas

from labs import scaling_model
from labs.common.planning import blind_test
from labs.common.planning.blind_test import HARD, Predicted
from labs.common.sources import published
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.plot import GREY, SERIES, curve, figure, log_axes, points, show
from labs.kit.record import Record, Records

NAMES = {
    "one_bit_adam": "BERT, slow networks",
    "pytorch_ddp": "CNNs, V100, DDP",
    "llm_foundry": "GPTs, A100, FSDP",
    "torchtitan": "Llama 8B, H100, FSDP2",
    "nvidia_resnet": "ResNet-50, one node",
    "megatron": "GPT-2, V100, tensor",
    "mlperf_gpt3": "GPT-3, H100",
    "rtx_3090": "CNNs, RTX 3090, PCIe",
}
NEAR = (1 / 1.2, 1 / 0.8)
"""Published over modelled seconds of a prediction that errs by 20 %."""


def _records(names: tuple[str, ...] = blind_test.STEPS) -> Records:
    """For the line under a figure: one entry, not one per source."""
    return Records(
        [
            Record(
                "published",
                "step_s",
                "s",
                (1.0,),
                "published",
                provenance={"source": f"{len(names)} tables of records/published"},
            )
        ]
    )


def ratio(p: Predicted) -> float:
    """Published over modelled seconds."""
    return p.row.published_s / p.modelled_s


def errors(guess: Prediction | None = None) -> None:
    """Figure: published over modelled seconds of every predicted row, by table; held-out rows marked."""
    band = blind_test.band()
    held = blind_test.judged(held_out=True)
    also = sum(abs(p.error) <= 0.2 for p in held)
    perfect = blind_test.perfect_band().within_20
    message = (
        f"Within 20%: {band.within_20:.0%} of {band.rows} predictions, {perfect:.0%} of perfect scaling's; "
        f"{also} of the {len(held)} held out"
    )
    fig, ax = figure(
        message,
        xlabel="published over modelled time (x)",
        ylabel="table",
        records=_records(),
        size=(7.2, 4.8),
        legend_below=True,
    )
    ax.axvspan(*NEAR, color="#E8EEF4", zorder=0)
    for row, name in enumerate(NAMES):
        its = [p for p in _of(name) if not p.row.held_out]
        label = "over the model (published)" if row == 0 else "_"
        points(ax, [ratio(p) for p in its], [row - 0.17] * len(its), kind="published", label=label, color=SERIES[0])
        ideal = [p.row.published_s / p.perfect_s for p in its]
        points(
            ax,
            ideal,
            [row + 0.17] * len(its),
            kind="published",
            color=GREY,
            label="over perfect scaling (published)" if row == 0 else "_",
        )
    rows = list(NAMES)
    points(
        ax,
        [ratio(p) for p in held],
        [rows.index(p.row.table) - 0.17 for p in held],
        kind="published",
        label="held out (published)",
        color=SERIES[1],
    )
    curve(ax, [1, 1], [-0.6, len(NAMES) - 0.4], label="the model")
    log_axes(ax, (0.75, 1, 1.5, 2, 3, 4, 6))
    ax.set_yticks(range(len(NAMES)), NAMES.values())
    ax.set_ylim(-0.6, len(NAMES) - 0.4)
    ax.invert_yaxis()
    told = "; ".join(f"{NAMES[t]} {r['median error']}" for t, r in blind_test.by_table().iterrows())
    show(fig, alt=f"{message}. Median errors: {told}. The shaded band is 20 % to both sides of the model.")
    if guess is not None and not math.isnan(float(guess)):
        say(
            f"Your guess: {float(guess):.3g} % within 20 %; it is {band.within_20:.0%}, and {perfect:.0%} for perfect "
            "scaling, which knows no link."
        )


def _of(name: str) -> list[Predicted]:
    return [p for p in blind_test.predictions() if p.row.table == name and not p.calibrates]


def every_row() -> None:
    """Every row, predicted and published, folded: as text, which takes a fifth of a table's bytes."""
    from IPython.display import display

    lines, series = [f"{'':24}{'published':>12}{'modelled':>12}{'error':>18}  most of the step"], None
    for p in blind_test.predictions():
        if (p.row.table, p.row.series) != series:
            series = p.row.table, p.row.series
            lines.append(f"{NAMES[p.row.table]}: {p.row.series}")
        error = "calibrates" if p.calibrates else f"{p.error:+.1%}" + " held out" * p.row.held_out
        seconds = f"{p.row.published_s:>10.4g} s{p.modelled_s:>10.4g} s"
        lines.append(f"  {p.row.config:22}{seconds}{error:>18}  {p.step.limit()}")
    told = html.escape("\n".join(lines))
    display(
        {
            "text/html": f"<details><summary>Every row, predicted and published</summary><pre>{told}</pre></details>",
            "text/plain": "[Every row: python -m labs.scaling_model --blind]",
        },
        raw=True,
    )


def by_table() -> pandas.DataFrame:
    """Median errors, the model's and perfect scaling's."""
    return blind_test.by_table().rename(index=NAMES)


def sources() -> None:
    """Every table of records/published: where it was read, how surely, and why some are not predicted."""
    names = (*blind_test.STEPS, *blind_test.COLLECTIVES, *blind_test.NOT_JUDGED)
    lines = []
    for name in names:
        p = published.table(name).provenance
        why = f" Not predicted: {blind_test.NOT_JUDGED[name]}." if name in blind_test.NOT_JUDGED else ""
        lines.append(f"* `{name}`, {p['verified']}: {p['source']}.{why}")
    say("\n".join(lines), folded="Where every table was read, how surely, and why five of them are not predicted")


def own(run: Records) -> None:
    """In words: a step of DDP on your wire, predicted from one rank's step and the wire's bandwidth, then measured."""
    found = scaling_model.on_your_wire(run)
    misses = {mb_s: modelled / measured.value - 1 for mb_s, (measured, modelled) in found.items()}
    inside = sum(abs(m) <= 0.2 for m in misses.values())
    rows = [
        f"{x:g} MB/s: modelled {1e3 * modelled:.3g} ms, measured {measured}"
        for x in sorted(found)
        for measured, modelled in [found[x]]
    ]
    worst = max(misses, key=lambda x: abs(misses[x]))
    say(
        f"A step of DDP. {'; '.join(rows)}. Within 20 %: {inside} of {len(found)}; furthest off at {worst:g} MB/s, "
        f"{misses[worst]:+.0%}. The model knew one rank's step, one all-reduce, and the wire's bandwidth, which no "
        "datasheet of a published run tells."
    )


def hard_text() -> None:
    """The boxed finding, in words."""
    hard, ideal = blind_test.hard_bands()
    two, one = blind_test.two_bands()
    perfect = blind_test.perfect_band().within_20
    helps = "help" if hard.median_error < 0.8 * ideal.median_error else "hardly help"
    say(
        f"> *Perfect scaling* comes within 20 % of {perfect:.0%} of the published rows. Ask a model about the others: "
        f"{hard.rows} that perfect scaling misses by more than {HARD:.0%}. There the model's median error is "
        f"{hard.median_error:.0%}, perfect scaling's {ideal.median_error:.0%}: links by their datasheets {helps}. "
        f"One more measured row, on the next number of GPUs, brings {two.within_20:.0%} of "
        f"the {two.rows} hard rows that are left within 20 %, where one row brings {one.within_20:.0%}. **Time two "
        "sizes, the second across the slow link, before you trust a number for 64.**"
    )
