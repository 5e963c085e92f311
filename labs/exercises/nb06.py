"""Exercises of notebook 06: a pipeline schedule under a memory limit, a timeline, FSDP2 from the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import mse_loss

from labs.common.pipelines import Chain, schedules
from labs.common.pipelines.engine import Pipeline
from labs.common.sharding.traffic import Traffic
from labs.kit.answers import on_ranks
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]
Order = list[tuple[str, int]]

# -- 06.1: the order of a stage under a memory limit


def order(stage: int, stages: int, micro_batches: int, limit: int) -> Order:
    """Return 1F1B keeping at most `limit` micro-batches; it starts no more forwards than the first gradient needs."""
    ahead = min(stages - stage, limit, micro_batches)
    actions = [("forward", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions.append(("backward", i))
        if ahead + i < micro_batches:
            actions.append(("forward", ahead + i))
    return actions


def _without_limit(stage: int, stages: int, micro_batches: int, limit: int) -> Order:
    return order(stage, stages, micro_batches, micro_batches)


def _one_at_a_time(stage: int, stages: int, micro_batches: int, limit: int) -> Order:
    return [(kind, i) for i in range(micro_batches) for kind in ("forward", "backward")]


def _one_too_few_ahead(stage: int, stages: int, micro_batches: int, limit: int) -> Order:
    return order(stage + 1, stages, micro_batches, limit)


def _not_drained(stage: int, stages: int, micro_batches: int, limit: int) -> Order:
    full = order(stage, stages, micro_batches, limit)
    return full[: full.index(("forward", micro_batches - 1)) + 1]


CASES = ((3, 6, 3), (4, 8, 2), (2, 5, 1), (4, 2, 4), (3, 6, 2))
"""(stages, micro-batches, limit). Three ranks train with the last case."""
FORWARD_S, BACKWARD_S = 1.0, 2.0
RIGHT = "none"  # where it is shown, a value of more than 28 characters would be cut


def observe_order(answer: Answer) -> dict[str, Any]:
    """Return whether all stages' orders are complete, within the limit and end; a step's time; a training step."""
    answers = on_ranks(_orders, 1, answer, when="in your function")[0]
    seen: dict[str, Any] = {}
    for (p, m, limit), orders in zip(CASES, answers, strict=True):
        where = f"{p} stages, {m} micro-batches, limit {limit}"
        faults = [f"stage {stage}: {fault}" for stage, found in enumerate(orders) if (fault := _fault(found, m))]
        seen[f"{where}: first fault in a stage's actions"] = faults[0] if faults else RIGHT
        if not faults:
            most = [schedules.in_flight([schedules.Action(*a) for a in found]) for found in orders]
            seen[f"{where}: stages that keep more than the limit"] = [s for s, kept in enumerate(most) if kept > limit]
            seen[f"{where}: seconds of a step, if forward takes 1 s and backward 2 s"] = _span_s(orders, m)
    p, m, _ = CASES[-1]
    if len(seen) == 3 * len(CASES) and isinstance(list(seen.values())[-1], float):
        errors = on_ranks(_train_in_order, p, answers[-1], when="in the pipeline")
        seen["three ranks get the gradients of one process"] = max(errors) < 1e-5
    return seen


def _orders(answer: Answer) -> list[list[Any]]:
    return [[_plain(answer(stage, p, m, limit)) for stage in range(p)] for p, m, limit in CASES]


def _plain(found: Any) -> Any:
    """Return a list of pairs, or any other value as text, because it travels between processes."""
    try:
        return [(str(kind), int(i)) for kind, i in found]
    except (TypeError, ValueError):
        return f"{found!r:.60}"


def _fault(found: Any, m: int) -> str:
    """Return what is wrong with a stage's actions; "" if nothing is."""
    if isinstance(found, str):
        return "no list of pairs"
    if strange := [kind for kind, _ in found if kind not in ("forward", "backward")]:
        return f"{strange[0]:.8}?"
    for wanted in ("forward", "backward"):
        numbers = [i for kind, i in found if kind == wanted]
        if missing := sorted(set(range(m)) - set(numbers)):
            return f"{wanted} {missing[0]} missing"
        if numbers != list(range(m)):
            return f"{wanted}s disordered"
    early = [i for i in range(m) if found.index(("backward", i)) < found.index(("forward", i))]
    return f"backward {early[0]} too soon" if early else ""


def _span_s(orders: Sequence[Order], micro_batches: int) -> float | str:
    p = len(orders)

    def schedule(stage: int, *_: int) -> list[schedules.Action]:
        return [schedules.Action(*a) for a in orders[stage]]

    try:
        return schedules.span_s(schedules.simulate(schedule, micro_batches, [FORWARD_S] * p, [BACKWARD_S] * p))
    except ValueError:
        return "never ends: each stage waits for another"


def _train_in_order(orders: list[Iterable[tuple[str, int]]]) -> float:
    """Return ||g - G|| / ||G|| of this rank's stage after one step in this order; G is from one process."""
    torch.manual_seed(0)
    p, m, _ = CASES[-1]
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p)]
    model = Chain("tanh", layers, lambda rows: torch.randn(2, rows, 6).unbind(), mse_loss)
    x, y = model.make_batch(4 * m)
    mse_loss(model.module()(x), y).backward()
    rank = dist.get_rank()
    expected = torch.cat([q.grad.flatten() for q in layers[rank].parameters()])
    model.module().zero_grad()
    place = SimpleNamespace(rank=rank, world_size=p, device=torch.device("cpu"))
    pipeline = Pipeline(model, list(range(1, p)), place, wait_s=4.0)
    pipeline.step([schedules.Action(*a) for a in orders[rank]], x.chunk(m), y.chunk(m))
    found = torch.cat([q.grad.flatten() for q in pipeline.module.parameters()])
    return float((found - expected).norm() / expected.norm())


# -- 06.2: separate waiting from receiving

Event = tuple[int, str, "int | None", int, float, float]
"""(stage, what, peer, micro-batch, start in s, end in s)"""


def spend(events: Sequence[Event], stages: int) -> list[dict[str, float]]:
    """Return each stage's seconds of work, messages and waiting. A receive waits until its sender starts to send."""
    sent = {(stage, peer, i): start for stage, what, peer, i, start, _ in events if what == "send"}
    step = max(e[5] for e in events) - min(e[4] for e in events)
    found = [{"work": 0.0, "messages": 0.0} for _ in range(stages)]
    for stage, what, peer, i, start, end in events:
        if what == "receive":
            start = max(start, sent[peer, stage, i])
        found[stage]["work" if what in ("forward", "backward") else "messages"] += end - start
    return [each | {"waiting": step - each["work"] - each["messages"]} for each in found]


def _receives_whole(events: Sequence[Event], stages: int) -> list[dict[str, float]]:
    return spend([(s, "send" if what == "receive" else what, None, 0, a, b) for s, what, _, _, a, b in events], stages)


def _begun_before_asked(events: Sequence[Event], stages: int) -> list[dict[str, float]]:
    sent = {(stage, peer, i): start for stage, what, peer, i, start, _ in events if what == "send"}
    moved = [(s, w, p, i, sent[p, s, i] if w == "receive" else a, b) for s, w, p, i, a, b in events]
    return spend(moved, stages)


def _until_its_own_end(events: Sequence[Event], stages: int) -> list[dict[str, float]]:
    found = spend(events, stages)
    for stage, each in enumerate(found):
        own = [e for e in events if e[0] == stage]
        step = max(e[5] for e in own) - min(e[4] for e in own)
        each["waiting"] = step - each["work"] - each["messages"]
    return found


def _from_zero(events: Sequence[Event], stages: int) -> list[dict[str, float]]:
    begin = min(e[4] for e in events)
    return [each | {"waiting": each["waiting"] + begin} for each in spend(events, stages)]


def _timeline(work: Sequence[float], micro_batches: int, message_s: float, begin_s: float) -> list[Event]:
    """Return a 1F1B step as ranks report it: an idle stage is already in its next receive."""
    p, m = len(work), micro_batches
    seconds = [w / m / 3 for w in work]
    links = [message_s] * (p - 1)
    found = schedules.simulate(schedules.one_f_one_b, m, seconds, [2 * s for s in seconds], links)
    events: list[Event] = []
    for stage in range(p):
        free = 0.0
        for e in sorted((e for e in found if e.stage == stage), key=lambda e: e.start_s):
            forth = (e.message == "activation") == (e.kind == "send")
            peer = None if not e.message else stage + 1 if forth else stage - 1
            start = free if e.kind == "receive" else e.start_s
            events.append((stage, e.kind, peer, e.micro_batch, begin_s + start, begin_s + e.end_s))
            free = e.end_s
    return events


TIMELINES = (
    ("an even cut", _timeline((0.3, 0.3), 4, 0.004, 7.0), 2),
    ("three stages, the second slow", _timeline((0.2, 0.5, 0.2), 8, 0.001, 100.0), 3),
    ("slow messages", _timeline((0.28, 0.3, 0.29, 0.27), 16, 0.015, 3.0), 4),
)


def observe_spend(answer: Answer) -> dict[str, Any]:
    """Return each stage's seconds for three timelines."""
    seen: dict[str, Any] = {}
    for name, events, stages in TIMELINES:
        found = answer(list(events), stages)
        seen[f"{name}: dicts in the list"] = len(found)
        for what in ("work", "messages", "waiting"):
            seen[f"{name}: {what} of each stage, s"] = [float(each[what]) for each in found]
    return seen


# -- 06.3: FSDP2 from the meta device


def sharded_step(
    build: Callable[[], nn.Module],
    weights: dict[str, Tensor],
    micro_batches: list[tuple[Tensor, Tensor]],
    max_norm: float,
) -> nn.Module:
    """Take one SGD step of a model that no rank holds whole, with gradients averaged over micro-batches and ranks."""
    with torch.device("meta"):
        model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(i == len(micro_batches))
        (mse_loss(model(x), y) / len(micro_batches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return model


def _answer_with(
    divided: bool = True, synced: bool = False, blocks: bool = True, optimizer_first: bool = False
) -> Callable[..., nn.Module]:
    """Return the reference with one thing changed."""

    def train(build: Any, weights: Any, micro_batches: Any, max_norm: float) -> nn.Module:
        with torch.device("meta"):
            model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks if blocks else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        if not optimizer_first:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i, (x, y) in enumerate(micro_batches, start=1):
            model.set_requires_gradient_sync(synced or i == len(micro_batches))
            (mse_loss(model(x), y) / (len(micro_batches) if divided else 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        return model

    return train


class _Residual(nn.Module):
    """Three blocks with a residual. `made_on` lists the devices on which instances were made."""

    made_on: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3))
        self.head = nn.Linear(8, 2)
        self.made_on.append(self.head.weight.device.type)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, 8) to (rows, 2)."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


MICRO_BATCHES, ROWS, NORMS = 3, 4, (100.0, 0.05)


def observe_sharded(answer: Answer) -> dict[str, Any]:
    """Return what a step does on two ranks, without and with clipping, and whether it equals one process's step."""
    return on_ranks(_sharded_on_rank, 2, answer, when="in sharded_step")[0]


def _sharded_on_rank(answer: Answer) -> dict[str, Any]:
    rank, seen = dist.get_rank(), {}
    torch.manual_seed(0)
    weights = _Residual().state_dict()
    x, y = torch.randn(2, MICRO_BATCHES, ROWS, 8), torch.randn(2, MICRO_BATCHES, ROWS, 2)
    batches = list(zip(x[rank], y[rank], strict=True))
    for max_norm in NORMS:
        _Residual.made_on.clear()
        with Traffic() as traffic:
            model = answer(_Residual, {name: t.clone() for name, t in weights.items()}, batches, max_norm)
        where = f"max_norm {max_norm:g}"
        seen |= {
            f"{where}: what you return": "the model" if isinstance(model, nn.Module) else type(model).__name__,
            f"{where}: devices on which build() is called": list(_Residual.made_on),
            f"{where}: modules that fully_shard wrapped": _wrapped(model),
            f"{where}: times that gradients are reduced": traffic.count()["reduce_scatter"],
        }
        if not isinstance(model, FSDPModule):
            break
        found = torch.cat([p.detach().full_tensor().flatten() for p in model.parameters()])
        one = _one_process(weights, x.flatten(0, 2), y.flatten(0, 2), max_norm)
        moved = torch.cat([weights[name].flatten() for name, _ in model.named_parameters()])
        seen[f"{where}: length of the step in all weights, as a multiple of one process's"] = round(
            float((found - moved).norm() / (one - moved).norm()), 3
        )
        seen[f"{where}: weights are those of one process"] = bool(torch.allclose(found, one, atol=1e-5))
    return seen


def _wrapped(model: Any) -> list[str]:
    if not isinstance(model, nn.Module):
        return []
    return [name or "the model" for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def _one_process(weights: dict[str, Tensor], x: Tensor, y: Tensor, max_norm: float) -> Tensor:
    """Return all parameters after the same step with all rows in plain PyTorch."""
    model = _Residual()
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


EXERCISES = {
    "06.1": Exercise(
        "06.1",
        30,
        "the order of a pipeline's stage under a memory limit",
        observe_order,
        order,
        (
            KnownMistake(
                "a stage keeps more micro-batches than `limit` allows",
                "a forward adds one, its backward frees it: start with at most `limit` forwards",
                _without_limit,
            ),
            KnownMistake(
                "each stage waits for a micro-batch's gradient before it starts the next one, as in the naive split",
                "start with as many forwards as the first gradient needs to come back, if the limit allows them",
                _one_at_a_time,
            ),
            KnownMistake(
                "the last stage goes backward before it went forward: you start with one forward too few",
                "stage `stages - 1` needs one forward first",
                _one_too_few_ahead,
            ),
            KnownMistake(
                "the order ends with the last forward", "afterwards, all remaining backwards are due", _not_drained
            ),
        ),
    ),
    "06.2": Exercise(
        "06.2",
        25,
        "tell waiting and receiving apart",
        observe_spend,
        spend,
        (
            KnownMistake(
                "you count whole receives as messages; most of that time the stage waits for its neighbour",
                "a receive counts as a message only from the moment its sender begins to send",
                _receives_whole,
            ),
            KnownMistake(
                "you count time before the receive began, when the stage was still computing",
                "a message counts from the later of two moments: the sender begins, the receiver asks",
                _begun_before_asked,
            ),
            KnownMistake(
                "your step of a stage lasts from its own first to its own last event",
                "the step lasts from the first event of all stages to the last: a stage that is done early waits, too",
                _until_its_own_end,
            ),
            KnownMistake(
                "your step begins at 0 on the clock", "it begins with the first event of all stages", _from_zero
            ),
        ),
    ),
    "06.3": Exercise(
        "06.3",
        35,
        "shard a model that fits no rank",
        observe_sharded,
        sharded_step,
        (
            KnownMistake(
                "gradients are reduced after every micro-batch",
                "model.set_requires_gradient_sync(False) for all but the last one",
                _answer_with(synced=True),
            ),
            KnownMistake(
                "only the whole model is wrapped, so all its parameters are gathered at once",
                "call fully_shard for each of model.blocks first, and then for the model",
                _answer_with(blocks=False),
            ),
            KnownMistake(
                "the gradients are sums over the micro-batches, not means",
                "divide each loss by the number of micro-batches",
                _answer_with(divided=False),
            ),
            KnownMistake(
                "the optimizer was made before sharding, so it updates parameters that the model no longer has",
                "make it after fully_shard and to_empty",
                _answer_with(optimizer_first=True),
            ),
        ),
    ),
}
