"""Part of the checker of exercise 06.1: gradients and loss against those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labs.chapters.nb06.exercise_pipeline_problem import Played
from labs.kit.answers import number

Finding = tuple[str, str]
WEIGH = "weigh each micro-batch's loss by its share of the rows, len(x) / rows, on the last stage and nowhere else"


def gradient_faults(p: Played) -> Iterator[Finding]:
    """With which weights are the micro-batches' gradients in that of the stage?"""
    m, rows = len(p.job.rows), torch.tensor(p.job.rows, dtype=torch.float64)
    own = torch.stack([g[p.number] for g in p.job.reference.parameters], 1).double()
    got, want = p.gradient.double(), rows / rows.sum()
    if torch.allclose(got, own @ want, rtol=1e-4, atol=1e-6):
        return
    weights = torch.linalg.lstsq(own, got[:, None]).solution[:, 0]
    name, ratio = f"the gradient of stage {p.number}", weights / want
    if not torch.allclose(own @ weights, got, rtol=1e-3, atol=1e-5):
        off = ((got - own @ want).norm() / want.norm()).item()
        yield f"{name} is {off:.2g} of its size off that of one process", WEIGH
    zero = weights.abs() < 1e-4
    lost = ", ".join(str(i + 1) for i in range(m) if zero[i])
    if lost == ", ".join(str(i + 1) for i in range(m - 1)):
        yield (f"only the last micro-batch is in {name}", "zero_grad() empties .grad: the caller does it, before the "
               "step")  # fmt: skip
    if lost:
        yield f"micro-batch {lost} is not in {name}", "every micro-batch goes forward and backward on every stage"
    if torch.allclose(weights, torch.ones(m).double(), atol=1e-3):
        yield (f"{name} is that of the sum of {m} losses, each a mean over its rows: the step is about {m} times too "
               "long", WEIGH)  # fmt: skip
    if torch.allclose(weights, torch.full((m,), 1 / m).double(), atol=1e-3):
        yield (f"in {name} every micro-batch weighs the same: the {p.job.rows[-1]} row of the last one counts as much "
               f"as {p.job.rows[0]} rows of another", WEIGH)  # fmt: skip
    if torch.allclose(ratio, ratio[0], rtol=1e-3):
        only = "" if p.link.last else f", while that of stage {p.number + 1} is right: it was scaled again on the way"
        yield f"{name} is {ratio[0]:.3g} times that of one process{only}", WEIGH
    found = ", ".join(f"{w:.3g}" for w in weights)
    yield f"in {name} the micro-batches weigh {found}, not {', '.join(f'{w:.3g}' for w in want)}", WEIGH


def loss_faults(last: Played) -> Iterator[Finding]:
    """Does the last stage return the batch's mean loss?"""
    losses, rows, m = last.job.reference.losses, last.job.rows, len(last.job.rows)
    want = sum(a * n for a, n in zip(losses, rows, strict=True)) / sum(rows)
    hint = "return the mean over all rows there: the sum of the weighted losses"
    if last.returned is None:
        yield "the last stage returns None, not the loss", hint
        return
    got = number(last.returned, "0.7")
    known = {losses[-1]: "the loss of the last micro-batch alone", sum(losses): "the sum of the micro-batches' losses",
             losses[-1] * rows[-1] / sum(rows): "the last micro-batch's share alone",
             sum(losses) / m: "the mean of the micro-batches' losses: their rows differ"}  # fmt: skip
    if abs(got - want) > 1e-4 * want:
        what = next((text for value, text in known.items() if abs(got - value) < 1e-4 * value), f"{got:.4g}")
        yield f"the last stage returns {what}, where the batch's mean loss is {want:.4g}", hint
