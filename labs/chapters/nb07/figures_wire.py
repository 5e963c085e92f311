"""Figures and sentences of notebook 07 on the wire: its formula, what a model makes of it, and compressed gradients."""

from __future__ import annotations

from pathlib import Path

import pandas

from labs import gradient_compression, slow_link
from labs.common.communication import wire
from labs.common.communication.wire import NO_PACE
from labs.gradient_compression.compression import WAYS
from labs.kit.check import Prediction
from labs.kit.display import say
from labs.kit.measure import Estimate, estimate
from labs.kit.plot import SERIES, bars, curve, figure, log_axes, points, prediction, show
from labs.kit.record import Records, load, provenance_line

GUESSED = "powersgd_4"
"""The way whose gain on the slowest wire the learner guesses."""
RECORDED = Path(__file__).parents[3] / "records" / "cpu-2-cores-2026-11"
"""Runs of `python -m labs.gradient_compression` with more rounds than a notebook has time for, on a quiet machine."""


def ring_table(*runs: Records) -> pandas.DataFrame:
    """The ring's formula against the paced wire, for the gradients of every run, and how many are near in words."""
    rows = [
        {
            "model": run[0].config["model"],
            "MB": f"{p.size / 1e6:.2f}",
            "MB/s": f"{p.mb_s:g}",
            "formula": f"{1e3 * p.formula_s:.1f} ms",
            "measured / formula": f"{p.error}{'' if p.in_reach else ' *'}",
        }
        for run in runs
        for p in slow_link.ring_points(run)
    ]
    for run in runs:
        print(f"{run[0].config['model']}: {slow_link.ring_text(run)}")
    if any("*" in row["measured / formula"] for row in rows):
        print("* more than half of what the wire reaches as it is")
    return pandas.DataFrame(rows).set_index(["model", "MB", "MB/s"])


def bounds(run: Records, mb_s: float) -> tuple[float, float]:
    """(speed-up if nothing overlapped, if everything that can did) from one rank's step and the ring's formula."""
    ranks, size = run[0].layout["world_size"], run.one("gradient_bytes").value
    alone = run.one("step_s", way="single", mb_s=mb_s).value  # of the same rounds: a slow spell hits both
    exchange = slow_link.predict_s(size, ranks, mb_s)
    return ranks * alone / (alone + exchange), ranks * alone / max(alone, exchange)


def dial(runs: dict[str, Records], guess: Prediction) -> None:
    """Speed-up against bandwidth for two models, with the bounds that one rank's step and the ring give."""
    message = "; ".join(f"{name}: {slow_link.pays_text(run)}" for name, run in runs.items())
    ranks = next(iter(runs.values()))[0].layout["world_size"]
    every = sum(runs.values(), Records())
    fig, ax = figure(
        message,
        xlabel=f"bandwidth of the {wire.named(every)}, each direction (MB/s)",
        ylabel="samples/s, one rank = 1 (x)",
        records=every,
        legend_below=True,
    )
    for color, (name, run) in zip(SERIES, runs.items(), strict=False):
        found = {mb_s: e for mb_s, e in slow_link.speedups(run).items() if mb_s != NO_PACE}
        points(ax, list(found), found.values(), label=f"{name}, DDP on {ranks} ranks", color=color)
        xs = sorted(found)
        for k in (0, 1):
            curve(ax, xs, [bounds(run, x)[k] for x in xs], label="_" if k else f"{name}, bounds", color=color)
    ax.axhline(1, linestyle=":", color="black", label="one rank")
    prediction(ax, float(guess), 1.0)
    log_axes(ax, sorted({m for run in runs.values() for m in slow_link.speedups(run) if m != NO_PACE}))
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. Points are measured, dashed lines are the two bounds.")
    lines = [_guess_text(next(iter(runs.values())), guess), *_dial_text(runs), *wire.label(every)]
    say("\n".join(f"* {line}" for line in lines))


def _guess_text(run: Records, guess: Prediction) -> str:
    """The guess against the two wires between which DDP begins to pay, or what one of them alone says of it."""
    slower, faster = slow_link.pays_from(run)
    if slower and faster != float("inf"):
        rounds = len(run.one("step_s", way="ddp", mb_s=slower).samples)
        return guess.against(Estimate((slower * faster) ** 0.5, slower, faster, rounds, "MB/s"))
    if guess <= slower:
        return f"You predicted {float(guess):g} MB/s; at {slower:g} MB/s DDP is still slower than one rank."
    if guess > faster:
        return f"You predicted {float(guess):g} MB/s; at {faster:g} MB/s DDP is faster than one rank already."
    return "Whether your prediction is right, the wires of known bandwidth cannot tell."


def _dial_text(runs: dict[str, Records]) -> list[str]:
    lines = []
    for name, run in runs.items():
        found = slow_link.speedups(run)
        near = sum(bounds(run, m)[0] <= e.high and e.low <= bounds(run, m)[1] for m, e in found.items() if m)
        unpaced = f"; over the wire as it is {found[NO_PACE]}" if NO_PACE in found else ""
        lines.append(
            f"{name}: {near} of {len(found) - (NO_PACE in found)} intervals reach between the two bounds{unpaced}."
        )
    return lines


# -- compression


def sent_table(run: Records) -> pandas.DataFrame:
    """Bytes of a step by way to send gradients: by closed form, and counted by the kernel, relative to FP32."""
    rows = {}
    whole = next(r for r in run.where("sent_bytes", way="fp32") if r.kind == "modelled").value
    for record in run.where("sent_bytes"):
        way = record.case["way"]
        row = rows.setdefault(way, {"what is sent": WAYS[way].about})
        if record.kind == "modelled":
            row["closed form"] = f"{100 * record.value / whole:.1f}%"
        else:
            row["counted"] = f"{100 * max(record.samples) / whole:.1f}%"
    table = pandas.DataFrame(rows).T
    table.columns.name = "of FP32"
    return table


def compression(run: Records, guess: Prediction) -> None:
    """Gain of every way against the bandwidth of the wire."""
    found = gradient_compression.gains(run)
    every = [(w, m) for w, by in found.items() for m in by]
    shown = [(w, m) for w, m in every if found[w][m].low > 1]
    best_way, best_wire = max(shown or every, key=lambda k: found[k[0]][k[1]].value)
    best = found[best_way][best_wire]
    where = f"at {best_wire:g} MB/s" if best_wire != NO_PACE else "on the wire as it is"
    message = f"{best_way} makes a step {best.value:.1f} times as fast {where}"
    if rivals := [w for w, by in found.items() if w != best_way and best_wire in by and by[best_wire].high >= best.low]:
        message += f"; {' or '.join(rivals)} may do as much"
    if not shown:
        message = "No way makes a step faster that this run can show"
    fig, ax = figure(
        message,
        xlabel=f"bandwidth of the {wire.named(run)}, each direction (MB/s)",
        ylabel="speed of a step, FP32 = 1 (x)",
        records=run,
        legend_below=True,
    )
    for color, (way, by) in zip(SERIES, found.items(), strict=False):
        wires = sorted(m for m in by if m != NO_PACE)
        points(ax, wires, [by[m] for m in wires], label=way, color=color, line=True)
    ax.axhline(1, linestyle=":", color="black")
    log_axes(ax, wires)
    ax.set_ylim(bottom=0)
    show(fig, alt=f"{message}. " + " ".join(_gain_text(way, by) for way, by in found.items()))
    guessed = found.get(GUESSED, {})  # a smoke run times fewer ways
    lines = [guess.against(guessed[min(m for m in guessed if m != NO_PACE)])] if guessed else []
    lines += [*(_gain_text(way, by) for way, by in found.items()), *wire.label(run)]
    say("\n".join(f"* {line}" for line in lines))


def _gain_text(way: str, by: dict[float, Estimate]) -> str:
    gain = [m for m, e in by.items() if m and e.low > 1]
    loss = [m for m, e in by.items() if m and e.high < 1]
    text = f"{way}: "
    text += f"surely faster at {', '.join(f'{m:g}' for m in sorted(gain))} MB/s" if gain else "surely faster nowhere"
    return text + (f", surely slower at {', '.join(f'{m:g}' for m in sorted(loss))} MB/s." if loss else ".")


def recorded_break_even(*names: str) -> None:
    """Break-even bandwidths, predicted and tried, of recorded runs: their models, rounds and where they come from."""
    for run in (load(RECORDED / f"compression_break_even_{name}.jsonl") for name in names):
        for way, tried in gradient_compression.crossings(run).items():
            [predicted] = run.where("break_even_mb_s", way=way)
            rounds = len(run.where("tried_step_s", beside=way)[0].samples)
            model = predicted.config["model"].rpartition(":")[2]
            print(f"{way} ({model}, {rounds} rounds): {gradient_compression.tried_text(tried)}")
        print(f"    {provenance_line(run.where('step_s'))}")


def recorded_training() -> None:
    """Time and accuracy of the same trainings over a paced wire, from a recorded run."""
    run = load(RECORDED / "compression_training.jsonl")
    print(gradient_compression.trained_text(run))
    print(f"    {provenance_line(run.where('train_s'))}")


def choice(run: Records) -> pandas.DataFrame | None:
    """What to take on a wire of 100 MB/s: speed against DDP as it is, accuracy against FP32, and which is best."""
    mb_s = gradient_compression.CHOICE_MB_S
    lost = gradient_compression.losses(run)
    rows = {
        way: {"speed, FP32 = 1": str(by[mb_s]), "accuracy, FP32 = 0": str(lost[way])}
        for way, by in gradient_compression.gains(run).items()
        if mb_s in by
    }
    print(gradient_compression.choice_text(run, mb_s) if rows else f"This run had no wire of {mb_s:g} MB/s.")
    return pandas.DataFrame(rows).T if rows else None


def accuracy(run: Records) -> None:
    """Accuracy against FP32, seed by seed."""
    plain = run.one("accuracy", way=gradient_compression.PLAIN)
    found = gradient_compression.losses(run)
    lost = [way for way, e in found.items() if e.high < 0]
    message = f"Less is learned with {' and '.join(lost)}" if lost else "No way learns less that this run can show"
    fig, ax = figure(
        message,
        xlabel="accuracy, FP32 = 0 (percentage points)",
        ylabel="what is sent",
        records=run,
        size=(7.0, 3.4),
        legend_below=True,
    )
    bars(ax, list(found), found.values())
    ax.axvline(0, linestyle=":", color="black")
    n = len(plain.samples)
    show(fig, alt=f"{message}, over {n} seeds. " + ", ".join(f"{way}: {e}" for way, e in found.items()) + ".")
    say(f"FP32 reaches {estimate([100 * a for a in plain.samples], '%')} over {n} seeds. {_training_text(run)}")


def _training_text(run: Records) -> str:
    """How short the trainings are, and that no way had a learning rate of its own."""
    config = run[0].config
    rows = config["batch_size"] * run[0].layout["world_size"]
    steps = config["epochs"] * (gradient_compression.TRAINED_ROWS // rows)
    return (
        f"Each training has {steps} steps, all with the learning rate {config['lr']:g}: what a longer one, or "
        "a rate for each way, would reach is not told."
    )
