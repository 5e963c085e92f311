"""Exercise 06.1: the order in which a stage works, under a memory limit; tried in a simulation and on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from labs.chapters.nb06 import solutions as solution
from labs.common.pipelines import Chain, schedules
from labs.common.pipelines.engine import Pipeline
from labs.common.pipelines.schedules import Action
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake

Function = Callable[..., Any]
Case = tuple[int, int, int]
CASES: list[Case] = [(3, 6, 3), (4, 8, 2), (4, 8, 8), (2, 5, 1), (4, 2, 4), (3, 6, 2), (1, 3, 2)]
"""(stages, micro_batches, most). In turn: room for 1F1B; half of it; more than it needs; one at a time; few
micro-batches; what the ranks train with; a single stage."""
FORWARD_S, BACKWARD_S = 1.0, 2.0
TRAINED = CASES[5]
ROWS, WIDTH = 4, 6


def check_order(f: Function) -> None:
    """Each case: is it an order, does it keep to the limit, does it end, how long does it take; then the training."""
    answers = on_ranks(_ask, 1, f, when="in your function")[0]
    for case, orders in zip(CASES, answers, strict=True):
        _check(case, [_actions(case, stage, order) for stage, order in enumerate(orders)])
    errors = on_ranks(_train, TRAINED[0], answers[CASES.index(TRAINED)], when="in the pipeline")
    if max(errors) > 1e-5:
        raise Mistake("three ranks that work in your order do not get the gradient of one process")


def _ask(f: Function) -> list[list[Any]]:
    return [[_plain(f(stage, p, m, most)) for stage in range(p)] for p, m, most in CASES]


def _plain(order: Any) -> Any:
    """A list of pairs, or what was returned, as text: it travels between processes."""
    try:
        return [(str(kind), _whole(i)) for kind, i in order]
    except (TypeError, ValueError):
        return f"{order!r:.60}"


def _whole(i: Any) -> int:
    if int(i) != i:
        raise ValueError
    return int(i)


def _said(case: Case, stage: int) -> str:
    p, m, most = case
    return f"stage {stage} of {p} with {m} micro-batches, of which {most} may be kept"


MISSING = {
    ("forward", True): "after each backward one forward, as long as there are any",
    ("forward", False): "the first forwards come before the first backward: they are part of the order",
    ("backward", True): "after the last forward the pipeline has to be emptied: all backwards are done",
    ("backward", False): "every micro-batch that went forward goes backward, from 0 on",
}
"""By (kind, whether those up to it are there)."""


def _actions(case: Case, stage: int, order: Any) -> list[Action]:
    """The order of one stage; Mistake unless each micro-batch goes forward and then backward, once, in turn."""
    if isinstance(order, str):
        raise Mistake(f"you return {order}", 'a list of pairs: [("forward", 0), ("backward", 0), ...]')
    if not order:
        raise Mistake(f"{_said(case, stage)}: your list is empty", 'of pairs: [("forward", 0), ("backward", 0), ...]')
    m = case[1]
    for kind, other in (("forward", "backward"), ("backward", "forward")):
        found = [i for k, i in order if k == kind]
        if strange := [k for k, _ in order if k not in (kind, other)]:
            raise Mistake(f"{strange[0]!r} is no action", '"forward" or "backward"')
        if outside := [i for i in found if i not in range(m)]:
            raise Mistake(
                f"{_said(case, stage)}: there is a {kind} of micro-batch {max(outside)}",
                "micro-batches are counted from 0: min(..., micro_batches)",
            )
        if missing := sorted(set(range(m)) - set(found)):
            raise Mistake(
                f"{_said(case, stage)}: the {kind} of micro-batch {missing[0]} is missing",
                MISSING[kind, max(found, default=-1) < missing[0]],
            )
        if found != list(range(m)):
            raise Mistake(
                f"{_said(case, stage)}: the {kind}s come in the order {found}",
                "each once, and in turn: activations and gradients arrive as they were sent",
            )
    for i in range(m):
        if order.index(("backward", i)) < order.index(("forward", i)):
            raise Mistake(
                f"{_said(case, stage)}: micro-batch {i} goes backward before it went forward",
                "the last stage, too, begins with a forward",
            )
    return [Action(*action) for action in order]


def _check(case: Case, orders: list[list[Action]]) -> None:
    p, m, most = case
    for stage, order in enumerate(orders):
        if (kept := schedules.in_flight(order)) > most:
            raise Mistake(
                f"{_said(case, stage)}: you keep the activations of {kept} at once",
                "a backward frees those of its micro-batch: no forward while `most` are kept",
            )
    try:
        yours = _span_s(orders, m)
    except ValueError:
        raise Mistake(
            f"{p} stages, {m} micro-batches, {most} kept: deadlock, every stage waits for another",
            "a stage cannot go backward before the stages after it went forward",
        ) from None
    best = _span_s([[Action(*a) for a in solution.order(s, p, m, most)] for s in range(p)], m)
    if yours > best + 1e-9:
        alone = p > 1 and most > 1 and schedules.in_flight(orders[0]) == 1
        naive = "; stage 0 waits for each gradient before it goes on, as in the naive split"
        what = naive if alone else _first_forwards(case, orders)
        raise Mistake(
            f"right, but slow: {p} stages, {m} micro-batches, {most} kept: the step takes {yours:g} s, and "
            f"{best:g} s is possible (forward {FORWARD_S:g} s, backward {BACKWARD_S:g} s){what}",
            "as many forwards as the limit allows until the first gradient can be back, then one backward, "
            "one forward; the last stage can go backward at once",
        )


def _first_forwards(case: Case, orders: list[list[Action]]) -> str:
    """The first stage that begins with too few or too many forwards, in words; "" if none does."""
    p, m, most = case
    for stage, order in enumerate(orders):
        first = [a.kind for a in order].index("backward")
        if first != (best := min(p - stage, most, m)):
            return f"; stage {stage} begins with {first} forward{'s' * (first != 1)}, where {best} would be right"
    return ""


def _span_s(orders: list[list[Action]], micro_batches: int) -> float:
    p = len(orders)
    events = schedules.simulate(lambda s, *_: list(orders[s]), micro_batches, [FORWARD_S] * p, [BACKWARD_S] * p)
    return schedules.span_s(events)


def _train(orders: list[Iterable[tuple[str, int]]]) -> float:
    """||g - G|| / ||G|| of this rank's stage after one step in this order, against one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    p, m, _ = TRAINED
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(p)]
    model = Chain("tanh", layers, lambda rows: torch.randn(2, rows, WIDTH).unbind(), mse_loss)
    x, y = model.make_batch(m * ROWS)
    mse_loss(model.module()(x), y).backward()
    rank = dist.get_rank()
    wanted = torch.cat([q.grad.flatten() for q in layers[rank].parameters()])
    model.module().zero_grad()
    place = SimpleNamespace(rank=rank, world_size=p, device=torch.device("cpu"))
    pipeline = Pipeline(model, list(range(1, p)), place, wait_s=4.0)
    pipeline.step([Action(*a) for a in orders[rank]], x.chunk(m), y.chunk(m))
    found = torch.cat([q.grad.flatten() for q in pipeline.module.parameters()])
    return float((found - wanted).norm() / wanted.norm())
