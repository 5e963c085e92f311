"""Figures and tables of notebook 06 about splitting inside of layers, both at once, states, and what is sent."""

from __future__ import annotations

import pandas

from labs import point_to_point
from labs.kit.check import Prediction
from labs.kit.display import say, show_table
from labs.kit.measure import Estimate, estimate, paired_ratio
from labs.kit.plot import GREY, SERIES, figure, log_axes, points, show
from labs.kit.record import Records

WAYS = {"ddp": "DDP", "fsdp": "FSDP2", "fsdp, kept": "FSDP2, parameters kept"}
MODES = {"ddp": "DDP", "tensor": "tensor parallel", "pipeline": "1F1B pipeline"}


def traffic(run: Records) -> pandas.DataFrame:
    """All-reduces and bytes of tensor parallel training, counted as they pass, against the closed form."""
    rows = []
    for model, way in dict.fromkeys((r.case["model"], r.case["way"]) for r in run.where("all_reduces", split="even")):
        case = {"model": model, "way": way, "split": "even"}
        cells = {"model": model, "way": way.replace("dtensor", "DTensor")}
        for phase in ("forward", "backward"):
            count, closed = (next(r.value for r in run.where("all_reduces", phase=phase, **case) if r.kind == k)
                             for k in ("measured", "modelled"))  # fmt: skip
            cells[f"all-reduces, {phase}"] = f"{count:.0f}" + f", closed form {closed:.0f}" * (count != closed)
        sent = {
            k: sum(r.value for r in run.where("sent_bytes", **case) if r.kind == k) for k in ("measured", "modelled")
        }
        cells["sent per rank"] = f"{sent['measured']:,.0f} B"
        cells["closed form"] = "equal" if sent["measured"] == sent["modelled"] else f"{sent['modelled']:,.0f} B"
        rows.append(cells)
    return pandas.DataFrame(rows).set_index("model")


def where_it_wins(run: Records) -> None:
    """Figure: speed of three ways over one device against the rows of the batch, for the widest layers measured."""
    width = max(r.case["width"] for r in run.where("step_s"))
    rows = sorted({r.case["rows"] for r in run.where("step_s", width=width)})
    found = {m: {n: _speed(run, m, width, n) for n in rows} for m in MODES}
    few, many = (_fastest(run, width, n) for n in (rows[0], rows[-1]))
    few, many = (name if max(found[m][n].low for m in MODES) > 1 else "none shown to beat one device"
                 for name, n in ((few, rows[0]), (many, rows[-1])))  # fmt: skip
    message = f"Fastest with {rows[0]} rows: {few}; with {rows[-1]}: {many}"
    fig, ax = figure(message, xlabel="rows in the batch of both ranks", ylabel="speed, one device = 1 (x)", records=run,
                     legend_below=True)  # fmt: skip
    for k, (mode, speeds) in enumerate(found.items()):
        points(ax, rows, list(speeds.values()), label=MODES[mode], line=True, color=SERIES[k])
    ax.axhline(1, linestyle=":", color=GREY)
    log_axes(ax, rows)
    show(fig, alt=f"{message}. Width {width}. " + "; ".join(f"{MODES[m]}, {n} rows: {e}" for m, v in found.items()
                                                           for n, e in v.items()))  # fmt: skip
    sent = {m: run.one("sent_bytes_per_step", mode=m, width=width, rows=rows[0]).value for m in MODES}
    more = {m: run.one("sent_bytes_per_step", mode=m, width=width, rows=rows[-1]).value for m in MODES}
    said = "; ".join(f"{MODES[m]} {sent[m] / 1e6:.2f} MB and {more[m] / 1e6:.2f} MB" for m in MODES)
    say(f"Layers of width {width}. Sent per rank and step with {rows[0]} and with {rows[-1]} rows: {said}. What tensor "
        "parallel sends grows with the rows, what DDP sends with the parameters.")  # fmt: skip


def _fastest(run: Records, width: int, rows: int) -> str:
    """The fastest way by name; two of them where the interval of their ratio holds 1."""
    found = sorted(MODES, key=lambda m: -_speed(run, m, width, rows).value)
    samples = [next(r for r in run.where("step_s", mode=m, width=width, rows=rows) if r.kind == "measured").samples
               for m in found[:2]]  # fmt: skip
    near = paired_ratio(samples[1], samples[0]).low <= 1
    return " or ".join(MODES[m] for m in found[: 1 + near])


def _speed(run: Records, mode: str, width: int, rows: int) -> Estimate:
    single, other = (next(r for r in run.where("step_s", mode=m, width=width, rows=rows) if r.kind == "measured")
                     for m in ("single", mode))  # fmt: skip
    return paired_ratio(single.samples, other.samples)


def axes(run: Records) -> pandas.DataFrame:
    """Four ranks as a 2 x 2 mesh: what travels along each axis, counted against the closed form."""
    rows = []
    for scheme in dict.fromkeys(r.case["scheme"] for r in run.where("sent_bytes")):
        cells = {"scheme": scheme}
        for axis, name in (("rows", "between the parts of a copy"), ("columns", "between copies of a part")):
            found = {r.kind: r for r in run.where("sent_bytes", scheme=scheme, axis=axis)}
            same = found["measured"].samples == found["modelled"].samples
            word = "as closed form" if same else "NOT as closed form"
            cells[name] = f"{found['measured'].case['op']}, {max(found['measured'].samples) / 1e6:.2f} MB, {word}"
        part = max(run.one("bytes_per_rank", scheme=scheme, what="parameters").samples)
        rows.append({**cells, "parameters per rank": f"{part / 1e6:.2f} MB"})
    return pandas.DataFrame(rows).set_index("scheme")


def sharded(run: Records, model: str, guess: Prediction) -> None:
    """In a table and words: FSDP2 against DDP, bytes held and bytes sent by each rank."""
    rows = {}
    for way in WAYS:
        case = {"way": way, "model": model}
        held = {w: _both(run, "bytes_per_rank", what=w, **case) for w in ("parameters", "gradients", "optimizer")}
        ops = dict.fromkeys(r.case["op"] for r in run.where("sent_bytes", **case))
        sent = [_both(run, "sent_bytes", op=op, **case) for op in ops]
        exact = all(a == b for a, b in [*held.values(), *sent])
        rows[WAYS[way]] = {"states held": f"{sum(a for a, _ in held.values()) / 1e6:.2f} MB",
                     "parameters gathered at once": f"{_both(run, 'gathered_bytes', **case)[0] / 1e6:.2f} MB",
                     "peak of the step": f"{run.one('peak_bytes', **case).value / 1e6:.1f} MB",
                     "sent per step": f"{sum(a for a, _ in sent) / 1e6:.2f} MB",
                     "closed forms": "exact" if exact else "NOT exact"}  # fmt: skip
    show_table(pandas.DataFrame(rows).T)
    held = {w: sum(_both(run, "bytes_per_rank", what=x, way=w, model=model)[0] for x in ("parameters", "gradients",
            "optimizer")) for w in ("ddp", "fsdp")}  # fmt: skip
    ratio = estimate([100 * held["fsdp"] / held["ddp"]], "%")
    times = {w: run.one("step_s", way=w, model=model).samples for w in ("ddp", "fsdp")}
    say(f"FSDP2 holds {ratio.value:.0f} % of DDP's states. {guess.against(ratio)} A step takes "
        f"{paired_ratio(times['fsdp'], times['ddp'])} as long here.")  # fmt: skip


def _both(run: Records, metric: str, **case: object) -> tuple[float, float]:
    found = {r.kind: r.value for r in run.where(metric, **case)}
    return found["measured"], found["modelled"]


def sums(run: Records) -> pandas.DataFrame:
    """A sum over n ranks in three ways: the most that one rank sends, by closed form; at n = 2 what was counted."""
    ways = ("all_reduce", "root", "hand ring")
    rows = []
    for n in (2, 4, 8):
        size = 1_000_000  # numbers, 4 bytes each
        sent = {w: max(point_to_point.predict(w, size, r, n) for r in range(n)) for w in ways}
        rows.append({"ranks": n, **{w: f"{s / 1e6:.1f} MB" for w, s in sent.items()}})
    counted = [r for r in run.where("sent_bytes")]
    exact = all(a.samples == b.samples for a, b in zip(counted[::2], counted[1::2], strict=True))
    rows.append(
        {"ranks": "counted here", **dict.fromkeys(ways, "as the closed form" if exact else "NOT as the closed form")}
    )
    return pandas.DataFrame(rows).set_index("ranks")


def sum_times(run: Records) -> None:
    """In words: how long the three ways take here, small and large."""
    said = []
    sizes = sorted({r.case["size"] for r in run.where("seconds")})
    for size in (sizes[0], sizes[-1]):
        seconds = {r.case["way"]: r.samples for r in run.where("seconds", size=size) if r.kind == "measured"}
        ratios = [f"{w}: {paired_ratio(seconds[w], seconds['all_reduce'])}" for w in seconds if w != "all_reduce"]
        took = estimate(seconds["all_reduce"], "s")
        said.append(f"* {size / 1e6:.2g} MB: all_reduce takes {took}; in units of that, {', '.join(ratios)}")
    say("\n".join(said))
