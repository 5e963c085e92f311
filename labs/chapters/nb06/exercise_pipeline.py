"""Exercise 06.1: one stage of a pipeline by hand, tried as three stages on three real ranks.

Each rank notes what its stage does: forward and backward passes, messages, what autograd keeps. The notes of all ranks
are then held against what one process computes, in the order in which a step runs.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from labs.kit.answers import number, on_ranks
from labs.kit.check import Mistake
from labs.kit.failure import RankFailed

Function = Callable[..., Any]
Finding = tuple[str, str]
"""What was done, and a hint."""
STAGES, WIDTHS = 3, (6, 5, 4, 2)
STUCK_S = 4.0
"""A stage that waits longer than this for a neighbour waits for ever: all else takes milliseconds."""
CARRIES = {1: "activation", -1: "gradient"}
"""What goes to the next stage, and what comes back."""

# -- the task: a model of three stages, and a batch


@dataclass(frozen=True)
class Job:
    """A batch whose micro-batches have these rows, and new stages for it."""

    rows: tuple[int, ...]
    seed: int

    @cached_property
    def micro_batches(self) -> list[tuple[Tensor, Tensor]]:
        """(x, y) of each; the same on every rank."""
        draw = torch.Generator().manual_seed(self.seed)
        return [(torch.randn(n, WIDTHS[0], generator=draw), torch.randn(n, WIDTHS[-1], generator=draw))
                for n in self.rows]  # fmt: skip

    def modules(self) -> list[nn.Module]:
        """New stages with the same parameters on every call: linear and tanh, the last one linear."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            layers = [nn.Linear(WIDTHS[s], WIDTHS[s + 1]) for s in range(STAGES)]
        return [nn.Sequential(layer, nn.Tanh()) for layer in layers[:-1]] + layers[-1:]

    @cached_property
    def reference(self) -> Reference:
        """What one process computes, micro-batch by micro-batch."""
        modules, parameters, passed, losses = self.modules(), [], [], []
        for x, y in self.micro_batches:
            between = [x]
            for module in modules:
                between.append(module(between[-1]))
            loss = mse_loss(between[-1], y)
            own = [torch.autograd.grad(loss, list(m.parameters()), retain_graph=True) for m in modules]
            parameters.append([flat(gradients) for gradients in own])
            passed.append([None, *torch.autograd.grad(loss, between[1:-1])])
            losses.append(loss.item())
        return Reference(parameters, passed, losses)


@dataclass(frozen=True)
class Reference:
    """Of the mean loss of each micro-batch alone; first index: micro-batch, second: stage."""

    parameters: list[list[Tensor]]
    """Gradient of all parameters of the stage, flat."""
    inputs: list[list[Tensor | None]]
    """Gradient of what the stage receives; None for the first."""
    losses: list[float]


JOBS = (Job((4, 4, 4), 1), Job((4, 4, 4, 1), 2))
"""Equal micro-batches first: what goes wrong there has nothing to do with their rows."""


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of the tensors in a row."""
    return torch.cat([t.detach().flatten() for t in tensors])


# -- what the learner's function is given: a link, a stage and a loss, which note what is done with them


@dataclass(frozen=True)
class Event:
    """What a stage did: "forward" and "backward", or "send" and "receive" with a direction."""

    what: str
    to: int = 0
    """1: towards the next stage, -1: towards the one before."""
    tensor: Tensor | None = None
    number: int = -1
    """Of a forward or backward: the micro-batch, in the order in which they come."""
    kept: int = 0
    """Tensors that autograd keeps for backward at this moment."""
    follows: bool = False
    """Of a forward: whether its x requires a gradient."""


class Wait(NamedTuple):
    """A stage that waits for a neighbour."""

    stage: int
    neighbour: int
    doing: str
    """For example "sends activation 2"."""


class Stuck(BaseException):
    """A message that nobody takes, or gives. Not an Exception, so that `except Exception` cannot swallow it."""


class Link:
    """A stage's connection to its neighbours. Each call blocks: a send ends when the neighbour receives."""

    def __init__(self, stage: int, events: list[Event], group: dist.ProcessGroup | None = None) -> None:
        self.first, self.last = stage == 0, stage == STAGES - 1
        self._stage, self._events, self._group = stage, events, group

    def send_next(self, tensor: Tensor) -> None:
        """Send an activation to the next stage."""
        self._send(tensor, 1)

    def receive_previous(self) -> Tensor:
        """The next activation from the stage before: numbers without a history."""
        return self._receive(1)

    def send_previous(self, tensor: Tensor) -> None:
        """Send the gradient of an activation to the stage that it came from."""
        self._send(tensor, -1)

    def receive_next(self) -> Tensor:
        """The gradient of an activation that was sent to the next stage."""
        return self._receive(-1)

    def _send(self, tensor: Any, to: int) -> None:
        self._check_neighbour(self._stage + to, f"sends its {CARRIES[to]}")
        self._check_message(tensor, to)
        self._events.append(Event("send", to, tensor := tensor.detach().clone()))
        try:
            dist.send_object_list([tensor], self._stage + to, group=self._group)
        except RuntimeError:
            raise Stuck(self._wait("send", to)) from None

    def _receive(self, to: int) -> Tensor:
        self._check_neighbour(self._stage - to, f"waits for an {CARRIES[to]}" if to > 0 else "waits for a gradient")
        self._events.append(Event("receive", to))
        try:
            dist.recv_object_list(parcel := [None], self._stage - to, group=self._group)
        except RuntimeError:
            raise Stuck(self._wait("receive", to)) from None
        self._events[-1] = Event("receive", to, parcel[0].clone())
        return parcel[0]

    def _wait(self, what: str, to: int) -> Wait:
        nth = sum((e.what, e.to) == (what, to) for e in self._events)
        sends = what == "send"
        return Wait(self._stage, self._stage + (to if sends else -to),
                    f"{'sends' if sends else 'waits for'} {CARRIES[to]} {nth}")  # fmt: skip

    def _check_neighbour(self, neighbour: int, what: str) -> None:
        if not 0 <= neighbour < STAGES:
            side, has = ("before", "first") if neighbour < 0 else ("after", "last")
            hints = {
                "first": "the first stage takes x from micro_batches, and its own gradient goes nowhere",
                "last": "the last stage computes the loss, and backward() starts there without a gradient",
            }
            raise Mistake(
                f"stage {self._stage} of {STAGES} {what}, but it is the {has}: no stage is {side} it",
                f"ask link.{has}: {hints[has]}",
            )

    def _check_message(self, tensor: Any, to: int) -> None:
        if tensor is None and to < 0 and any(e.follows for e in self._events):
            raise Mistake(
                f"stage {self._stage} sends back None in place of a gradient: backward() went through the activations "
                "of another micro-batch than this x",
                "keep x and y of every micro-batch, in a list, until its gradient arrives",
            )
        if tensor is None and to < 0:
            raise Mistake(
                f"stage {self._stage} sends back None in place of a gradient: what it received does not require "
                "one, so autograd made none, and the stages before cannot train",
                "what arrives has no history: x = link.receive_previous().requires_grad_() makes x.grad appear",
            )
        if not isinstance(tensor, Tensor):
            raise Mistake(f"stage {self._stage} sends {tensor!r:.60} as its {CARRIES[to]}", "send a tensor")
        shapes = [tuple(e.tensor.shape) for e in self._events if e.what == "receive" and e.to > 0]
        if to < 0 and shapes and tuple(tensor.shape) not in shapes:
            raise Mistake(
                f"stage {self._stage} sends back a gradient of shape {tuple(tensor.shape)} for activations of shape "
                f"{shapes[0]}",
                "the stage before needs the gradient of what it sent: x.grad of the x that was received",
            )


class Stage(nn.Module):
    """A stage that notes its forward and backward passes."""

    def __init__(self, module: nn.Module, number: int, job: Job, events: list[Event]) -> None:
        super().__init__()
        self.module = module
        self._number, self._job, self._events = number, job, events
        self._inputs: list[Tensor] = []
        self.kept = 0
        """Tensors that autograd keeps for backward at this moment."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width of the stage before) -> (rows, own width)."""
        s = self._number
        if s > 0 and any(x is own or torch.equal(x, own) for own, _ in self._job.micro_batches):
            raise Mistake(
                f"stage {s} of {STAGES} computes with x of micro_batches, not with what stage {s - 1} sends",
                "x = link.receive_previous() on every stage but the first",
            )
        if not torch.is_grad_enabled():
            raise Mistake(f"stage {s} of {STAGES} runs forward without gradients", "leave out torch.no_grad()")
        if (i := position(x, self._inputs)) is None:
            i = len(self._inputs)
            self._inputs.append(x.detach())
        y = self.module(x)
        self._events.append(Event("forward", 0, y.detach(), i, self.kept, x.requires_grad))
        if y.requires_grad:
            y.register_hook(lambda g: self._events.append(Event("backward", 0, g.detach().clone(), i, self.kept)))
        return y

    def count_kept(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Within, what autograd saves for backward is counted, for as long as it lives."""
        return torch.autograd.graph.saved_tensors_hooks(lambda t: _Kept(t, self), lambda kept: kept.tensor)


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor, stage: Stage) -> None:
        self.tensor, self.stage = tensor, stage
        stage.kept += 1

    def __del__(self) -> None:
        self.stage.kept -= 1


def noting_loss(stage: int, job: Job, events: list[Event]) -> Callable[[Tensor, Tensor], Tensor]:
    """mse_loss, for the last stage, with the target that belongs to each output."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if stage < STAGES - 1:
            raise Mistake(
                f"stage {stage} of {STAGES} computes a loss: only the last one has the model's output",
                "a stage in the middle receives, computes and sends; ask link.last, not whether link.first is False",
            )
        forwards = [e for e in events if e.what == "forward"]
        i = next((e.number for e in forwards if position(output, [e.tensor]) == 0), None)
        j = position(target, [y for _, y in job.micro_batches])
        if None not in (i, j) and i != j:
            raise Mistake(
                f"the output of micro-batch {i + 1} is compared with the targets of micro-batch {j + 1}",
                "micro-batches arrive in the order in which they were sent",
            )
        return mse_loss(output, target)

    return loss_fn


def position(tensor: Any, among: Sequence[Tensor]) -> int | None:
    """Index of the tensor in `among` with the same numbers."""
    return next((i for i, t in enumerate(among) if isinstance(tensor, Tensor) and torch.equal(tensor, t)), None)


# -- the run: on every rank


@dataclass
class Played:
    """One stage after the learner's function has run on it."""

    stage: int
    events: list[Event] = field(default_factory=list)
    gradient: Tensor | None = None
    """All .grad of the stage, flat; None unless every parameter has one."""
    returned: Any = None
    stuck: Wait | None = None

    def at(self, what: str, to: int = 0) -> list[int]:
        """Positions of these events among all of the stage."""
        return [i for i, e in enumerate(self.events) if (e.what, e.to) == (what, to)]


def play_jobs(f: Function, jobs: Sequence[Job]) -> list[Played]:
    """This rank's stage of one job after the other, until it is stuck."""
    torch.set_num_threads(1)
    # A group of its own: after a timeout gloo closes its connections, and those of the default group are still needed.
    group = dist.new_group(timeout=datetime.timedelta(seconds=STUCK_S))
    played = []
    for job in jobs:
        played.append(_play(f, job, group))
        try:
            dist.barrier(group)  # no stage begins a job that its neighbours will not reach
        except RuntimeError:
            break
    return played


def _play(f: Function, job: Job, group: dist.ProcessGroup) -> Played:
    rank = dist.get_rank()
    played = Played(rank)
    stage = Stage(job.modules()[rank], rank, job, played.events)
    loss_fn, link = noting_loss(rank, job, played.events), Link(rank, played.events, group)
    try:
        with stage.count_kept():
            returned = f(stage, job.micro_batches, loss_fn, link)
        played.returned = returned.item() if isinstance(returned, Tensor) and returned.numel() == 1 else returned
    except Stuck as stuck:
        played.stuck = stuck.args[0]
    gradients = [p.grad for p in stage.parameters()]
    played.gradient = None if any(g is None for g in gradients) else flat(gradients)
    return played


# -- the checks, in the order in which a step runs


def check_pipeline_step(f: Function, jobs: Sequence[Job] = JOBS) -> None:
    """Mistake for what is found first; the numbers come last, when all else is in order."""
    try:
        ranks = on_ranks(play_jobs, STAGES, f, jobs, when="outside of link")
    except RankFailed as e:
        if len(jobs) > 1:  # an error with unequal micro-batches may follow from what is wrong with equal ones
            check_pipeline_step(f, jobs[:1])
        raise _explained(e) from e
    for job, *played in zip(jobs, *ranks, strict=False):
        if waits := {p.stage: p.stuck for p in played if p.stuck}:
            raise deadlock(waits)
        for what, hint in _faults(job, played):
            raise Mistake(f"micro-batches of {', '.join(map(str, job.rows))} rows: {what}", hint)


def _explained(error: RankFailed) -> Exception:
    """The Mistake that a rank raised, or one for what torch says of a lost history; else the error itself."""
    where = f"stage {error.rank} of {STAGES}"
    if found := re.search(r"Mistake: (.*?)\n    Hint: (.*?)\nrank \d+ on", str(error), re.DOTALL):
        return Mistake(*found.groups())
    if "does not require grad" in str(error):
        return Mistake(
            f"{where} calls backward() on a tensor without a history: it was detached, or computed under no_grad()",
            "send a copy, link.send_next(y.detach()), and keep y itself",
        )
    if "backward through the graph a second time" in str(error):
        return Mistake(
            f"{where} goes backward through the same graph twice: the activations of the other micro-batches are lost",
            "keep x and y of every micro-batch, in a list, until its gradient arrives",
        )
    return error


def deadlock(waits: dict[int, Wait]) -> Mistake:
    """Two neighbours that wait for each other, or one that waits for a stage that has ended, in words."""
    for _, (stage, neighbour, doing) in sorted(waits.items()):
        if neighbour not in waits:
            return Mistake(
                f"stage {stage} {doing} for ever: stage {neighbour} has ended",
                "for each micro-batch: every stage but the last link.send_next(y.detach()), every stage but the first "
                "link.send_previous(x.grad); and as many receives on the other side",
            )
        if waits[neighbour].neighbour == stage:  # else it waits for a third: that one's case is the cause
            both = f"deadlock: stage {stage} {doing}, while stage {neighbour} {waits[neighbour].doing}"
            if "waits" in doing:
                return Mistake(f"{both}; neither sends", "send what the neighbour needs before you wait for its answer")
            return Mistake(
                f"{both}; a send ends when the other side receives, and neither does",
                "where one of two neighbours sends, the other must receive: all forwards on every stage, then all "
                "backwards",
            )
    return Mistake("deadlock: all stages wait for each other")


def _faults(job: Job, played: Sequence[Played]) -> Iterator[Finding]:
    for p in played:
        yield from _forward(job, p)
    for p in played:
        yield from _order(job, p)
    for p in reversed(played[:-1]):
        yield from _pairing(job, p)
    yield from _without_gradient(played)
    for p in reversed(played):
        yield from _gradient(job, p)
    for p in played:
        yield from _memory(p)
    yield from _loss(job, played[-1])


def _forward(job: Job, p: Played) -> Iterator[Finding]:
    m, ran = len(job.rows), p.at("forward")
    if len(ran) == 1 and len(p.events[ran[0]].tensor) == sum(job.rows):
        yield (f"stage {p.stage} computes all {sum(job.rows)} rows in one forward pass: this is the naive split, "
               "where one stage works and the others wait", "one forward pass for each micro-batch")  # fmt: skip
    elif len(ran) != m:
        yield f"stage {p.stage} ran forward {len(ran)} times for {m} micro-batches", "one forward pass for each"


def _order(job: Job, p: Played) -> Iterator[Finding]:
    """Does a neighbour wait although its message could have been sent?"""
    m, forward, backward, sent, returned = (
        len(job.rows), p.at("forward"), p.at("backward"), p.at("send", 1), p.at("send", -1)
    )  # fmt: skip
    if sent and sent[0] > forward[-1]:
        yield (f"stage {p.stage} computes all {m} micro-batches before it sends the first: stage {p.stage + 1} "
               "waits all that time", "send each activation as soon as it is computed")  # fmt: skip
    if p.stage == 0 and backward and most_in_flight(p) == 1:
        yield ("only one micro-batch is under way at any time: stage 0 waits for its gradient before it begins the "
               "next, so that one stage works and the others wait, as in the naive split",
               "all forwards first, then all backwards: while stage 1 computes a micro-batch, stage 0 is at the "
               "next")  # fmt: skip
    if returned and backward and returned[0] > backward[-1]:
        yield (f"stage {p.stage} goes backward through all {m} micro-batches before it sends the first gradient: "
               f"stage {p.stage - 1} waits all that time",
               "backward() for each micro-batch by itself, and send x.grad at once")  # fmt: skip


def most_in_flight(p: Played) -> int:
    """Most micro-batches that a stage has begun and not finished."""
    now = most = 0
    for event in p.events:
        now += {"forward": 1, "backward": -1}.get(event.what, 0)
        most = max(most, now)
    return most


def _pairing(job: Job, p: Played) -> Iterator[Finding]:
    """Whose gradient went backward through which micro-batch's graph?"""
    known = [own[p.stage + 1] for own in job.reference.inputs]
    for event in (p.events[i] for i in p.at("backward")):
        other = next((j for j, g in enumerate(known) if _parallel(event.tensor, g)), event.number)
        if other != event.number:
            yield (f"on stage {p.stage} the gradient of micro-batch {other + 1} went backward through the "
                   f"activations of micro-batch {event.number + 1}",
                   "gradients arrive in the order in which the next stage sends them: use what you kept in the same "
                   "order, kept.pop(0)")  # fmt: skip


def _parallel(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() > 0.9999


def _without_gradient(played: Sequence[Played]) -> Iterator[Finding]:
    empty = [p.stage for p in played if p.gradient is None]
    if not empty:
        return
    if not played[-1].at("backward"):
        yield "no stage has a gradient: backward() was never called on the loss", "loss.backward() on the last stage"
    if any(p.at("backward") for p in played if p.stage in empty):
        yield (f"stage {empty[-1]} went backward, and its .grad is empty after the step: there the optimizer looks",
               "zero_grad() comes before the step, and the caller does it; torch.autograd.grad() fills no .grad: add "
               "what it returns")  # fmt: skip
    if empty[-1] + 1 < len(played) and not played[empty[-1] + 1].at("send", -1):
        yield (f"stage {empty[-1]} has no gradient after the step and never trains, as the first half of the published "
               "split model: what arrives on the other side has no history, so the gradient has to be sent back",
               "after backward() link.send_previous(x.grad), and before: y.backward(link.receive_next())")  # fmt: skip
    yield (f"stage {empty[-1]} has no gradient after the step, although one was sent to it",
           "y.backward(link.receive_next()), with the y that the stage computed")  # fmt: skip


WEIGH = "weigh each micro-batch's loss by its share of the rows, len(x) / rows, on the last stage and nowhere else"


def _gradient(job: Job, p: Played) -> Iterator[Finding]:
    """With which weights are the micro-batches' gradients in that of the stage?"""
    m, rows = len(job.rows), torch.tensor(job.rows, dtype=torch.float64)
    own = torch.stack([g[p.stage] for g in job.reference.parameters], 1).double()
    got, want = p.gradient.double(), rows / rows.sum()
    if torch.allclose(got, own @ want, rtol=1e-4, atol=1e-6):
        return
    weights = torch.linalg.lstsq(own, got[:, None]).solution[:, 0]
    name, ratio = f"the gradient of stage {p.stage}", weights / want
    if not torch.allclose(own @ weights, got, rtol=1e-3, atol=1e-5):
        off = ((got - own @ want).norm() / want.norm()).item()
        yield f"{name} is {off:.2g} of its size off that of one process", WEIGH
    lost = [i + 1 for i in range(m) if weights[i].abs() < 1e-4]
    if len(lost) == m:
        yield (f"{name} is zero: zero_grad() came after the last backward()", "the caller does it, before the step")
    if lost == list(range(1, m)):
        yield (f"only the last micro-batch is in {name}", "zero_grad() empties .grad: the caller does it, before the "
               "step")  # fmt: skip
    if lost:
        yield (f"micro-batch {', '.join(map(str, lost))} is not in {name}",
               "every micro-batch goes forward and backward on every stage")  # fmt: skip
    if torch.allclose(weights, torch.ones(m).double(), atol=1e-3):
        yield (f"{name} is that of the sum of {m} losses, each a mean over its rows: the step is about {m} times too "
               "long", WEIGH)  # fmt: skip
    if torch.allclose(weights, torch.full((m,), 1 / m).double(), atol=1e-3):
        yield (f"in {name} every micro-batch weighs the same: the {job.rows[-1]} row of the last one counts as much "
               f"as {job.rows[0]} rows of another", WEIGH)  # fmt: skip
    if torch.allclose(ratio, ratio[0], rtol=1e-3):
        last = p.stage == STAGES - 1
        only = "" if last else f", while that of stage {p.stage + 1} is right: it was scaled again on the way"
        yield f"{name} is {ratio[0]:.3g} times that of one process{only}", WEIGH
    found = ", ".join(f"{w:.3g}" for w in weights)
    yield f"in {name} the micro-batches weigh {found}, not {', '.join(f'{w:.3g}' for w in want)}", WEIGH


def _memory(p: Played) -> Iterator[Finding]:
    """Is a micro-batch's graph freed by its backward? Counted when the last backward begins."""
    one, last = p.events[p.at("forward")[0]].kept, p.events[p.at("backward")[-1]].kept
    if len(p.at("forward")) > 1 and last > 1.5 * one:
        yield (f"when stage {p.stage} begins its last backward, the activations of the others are still in memory: "
               f"{last} tensors, where one micro-batch has {one}",
               "backward() frees them by itself; leave out retain_graph=True")  # fmt: skip


def _loss(job: Job, last: Played) -> Iterator[Finding]:
    """Does the last stage return the batch's mean loss?"""
    losses, rows, m = job.reference.losses, job.rows, len(job.rows)
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
