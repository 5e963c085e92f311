"""Checker of exercise 06.1: the stages run in threads over simulated links, then once on two real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labs.chapters.nb06.exercise_pipeline_exchange import Exchange, dead_lock
from labs.chapters.nb06.exercise_pipeline_gradients import gradient_faults, loss_faults
from labs.chapters.nb06.exercise_pipeline_link import RankLink, SimulatedLink
from labs.chapters.nb06.exercise_pipeline_problem import Job, Played, players
from labs.chapters.nb06.exercise_pipeline_threads import Stopped, together
from labs.kit.answers import on_ranks
from labs.kit.check import Mistake, error_text

Function = Callable[..., Any]
Finding = tuple[str, str]
JOBS = (Job(2, (4, 4, 4), 1), Job(3, (4, 4, 4, 1), 2))
"""Equal micro-batches first: what goes wrong there has nothing to do with their rows."""
ON_RANKS = Job(2, (3, 3, 2), 3)
LIMIT_S = 4.0


def check_pipeline_step(f: Function) -> None:
    """Two stages, three stages with a short last micro-batch, and two ranks that share nothing but messages."""
    for job in JOBS:
        played = _simulate(f, job)
        for what, hint in _faults(played):
            raise Mistake(f"{job.stages} stages, micro-batches of {', '.join(map(str, job.rows))} rows: {what}", hint)
    _check_on_ranks(f)


def _simulate(f: Function, job: Job) -> list[Played]:
    """All stages after the step. Mistake for a dead-lock; what a stage raised is raised, the first of all."""
    exchange, failed = Exchange(job.stages), []
    played = players(job, lambda s: SimulatedLink(s, job.stages, exchange))

    def run(p: Played) -> None:
        try:
            p.run(f)
            exchange.leave(p.number)
        except Stopped:
            raise
        except BaseException as error:
            failed.append((p.number, error))
            exchange.stop()

    done = together([lambda p=p: run(p) for p in played], LIMIT_S, exchange.stop)
    if failed:
        raise _explained(*failed[0], job)
    if exchange.stuck:
        raise dead_lock(exchange.stuck, len(job.rows))
    if not done:
        raise Mistake(f"your code did not finish within {LIMIT_S:g} s", "look for a loop that never ends")
    return played


def _explained(stage: int, error: BaseException, job: Job) -> BaseException:
    where = f"stage {stage} of {job.stages}"
    if "does not require grad" in error_text(error):
        return Mistake(
            f"{where} calls backward() on a tensor without a history: it was detached, or computed under no_grad()",
            "send a copy, link.send_next(y.detach()), and keep y itself",
        )
    if "backward through the graph a second time" in error_text(error):
        return Mistake(
            f"{where} goes backward through the same graph twice: the activations of the other micro-batches are lost",
            "keep x and y of every micro-batch, in a list, until its gradient arrives",
        )
    return error


def _faults(played: Sequence[Played]) -> Iterator[Finding]:
    """In the order in which a step runs; numbers come last, when all else is in order."""
    for p in played:
        yield from _forward(p)
    for p in played:
        yield from _order(p)
    for p in reversed(played):
        yield from _pairing(p)
    yield from _without_gradient(played)
    for p in reversed(played):
        yield from gradient_faults(p)
    for p in played:
        yield from _memory(p)
    yield from loss_faults(played[-1])


def _forward(p: Played) -> Iterator[Finding]:
    m, ran = len(p.job.rows), p.stage.ran
    if ran == 1 and len(p.stage.inputs[0]) == sum(p.job.rows):
        yield (f"stage {p.number} computes all {sum(p.job.rows)} rows in one forward pass: this is the naive split, "
               "where one stage works and the others wait", "one forward pass for each micro-batch")  # fmt: skip
    elif ran != m:
        yield f"stage {p.number} ran forward {ran} times for {m} micro-batches", "one forward pass for each"


def _order(p: Played) -> Iterator[Finding]:
    """Does a neighbour wait although its message could have been sent?"""
    forward, backward, m = p.events("forward"), p.events("backward"), len(p.job.rows)
    sent, returned = p.events("send", 1), p.events("send", -1)
    if sent and sent[0] > forward[-1]:
        yield (f"stage {p.number} computes all {m} micro-batches before it sends the first: stage {p.number + 1} "
               "waits all that time", "send each activation as soon as it is computed")  # fmt: skip
    if p.link.first and backward and _in_flight(p) == 1:
        yield ("only one micro-batch is under way at any time: stage 0 waits for its gradient before it begins the "
               "next, so that one stage works and the others wait, as in the naive split",
               "all forwards first, then all backwards: while stage 1 computes a micro-batch, stage 0 is at the "
               "next")  # fmt: skip
    if returned and backward and returned[0] > backward[-1]:
        yield (f"stage {p.number} goes backward through all {m} micro-batches before it sends the first gradient: "
               f"stage {p.number - 1} waits all that time",
               "backward() for each micro-batch by itself, and send x.grad at once")  # fmt: skip


def _in_flight(p: Played) -> int:
    """Most micro-batches that a stage has begun and not finished."""
    now = most = 0
    for event in p.link._events:
        now += {"forward": 1, "backward": -1}.get(event.what, 0)
        most = max(most, now)
    return most


def _pairing(p: Played) -> Iterator[Finding]:
    """Whose gradient went backward through which micro-batch's graph?"""
    if p.link.last:
        return
    known = [own[p.number + 1] for own in p.job.reference.inputs]
    for event in (p.link._events[i] for i in p.events("backward")):
        other = next((j for j, g in enumerate(known) if _parallel(event.tensor, g)), event.number)
        if other != event.number:
            yield (f"on stage {p.number} the gradient of micro-batch {other + 1} went backward through the "
                   f"activations of micro-batch {event.number + 1}",
                   "gradients arrive in the order in which the next stage sends them: use what you kept in the same "
                   "order, kept.pop(0)")  # fmt: skip


def _parallel(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() > 0.9999


def _without_gradient(played: Sequence[Played]) -> Iterator[Finding]:
    empty = [p.number for p in played if p.gradient is None]
    if empty and not played[-1].events("backward"):
        yield "no stage has a gradient: backward() was never called on the loss", "loss.backward() on the last stage"
    if not empty:
        return
    sent = played[empty[-1] + 1].events("send", -1) if empty[-1] + 1 < len(played) else []
    if not sent:
        yield (f"stage {empty[-1]} has no gradient after the step and never trains, as the first half of the published "
               "split model: what arrives on the other side has no history, so the gradient has to be sent back",
               "after backward() link.send_previous(x.grad), and before: y.backward(link.receive_next())")  # fmt: skip
    yield (f"stage {empty[-1]} has no gradient after the step, although one was sent to it",
           "y.backward(link.receive_next()), with the y that the stage computed")  # fmt: skip


def _memory(p: Played) -> Iterator[Finding]:
    """Is a micro-batch's graph freed by its backward? Counted when the last backward begins."""
    m, kept = len(p.job.rows), p.stage.kept_at_backward
    if m > 1 and kept and kept[-1] > 1.5 * kept[0] / m:
        yield (f"when stage {p.number} begins its last backward, the activations of the others are still in memory: "
               f"{kept[-1]} tensors, where one micro-batch has {round(kept[0] / m)}",
               "backward() frees them by itself; leave out retain_graph=True")  # fmt: skip


def _check_on_ranks(f: Function) -> None:
    found = on_ranks(_on_rank, 2, f, when="on two real ranks")
    for what in filter(None, found):
        raise Mistake(
            f"with simulated links all is right, but on two real ranks {what}",
            "do the stages share a variable? Ranks are processes: only messages pass from one to the other",
        )


def _on_rank(f: Function) -> str:
    """What is wrong on this rank, in words; "" if nothing is."""
    torch.set_num_threads(1)
    rank, job = dist.get_rank(), ON_RANKS
    played = players(job, lambda s: RankLink(s, job.stages))[rank]
    with contextlib.redirect_stdout(None):
        played.run(f)
    if played.gradient is None:
        return f"stage {rank} has no gradient"
    return next((what for what, _ in gradient_faults(played)), "")
