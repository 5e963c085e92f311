"""Exercises of notebook 06: right answers of another style pass, and wrong ones that no known mistake covers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.functional import mse_loss

from labs.exercises import nb06
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def fails(exercise_id, answer, *words):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "not yet" and all(word in outcome.text for word in words), outcome.text


def by_counters(stage, stages, micro_batches, limit):
    """Goes backward whenever it has as many ahead as it may; yields lists."""
    forwards = backwards = 0
    while backwards < micro_batches:
        if forwards < micro_batches and forwards - backwards < min(limit, stages - stage):
            yield ["forward", forwards]
            forwards += 1
        else:
            yield ["backward", backwards]
            backwards += 1


def by_slots(stage, stages, micro_batches, limit):
    """A slot for each forward, and one for the backward that comes some forwards later; sorted."""
    ahead = min(limit, stages - stage)
    forwards = [(2 * i, "forward", i) for i in range(micro_batches)]
    backwards = [(2 * (i + ahead) - 1, "backward", i) for i in range(micro_batches)]
    return tuple((kind, i) for _, kind, i in sorted(forwards + backwards))


def test_orders():
    passes("06.1", by_counters)
    passes("06.1", by_slots)
    fails("06.1", lambda stage, stages, m, limit: nb06.order(0, stages, m, limit), "expected 24, got 42")
    fails("06.1", lambda stage, stages, m, limit: "1f1b", "stage 0: no list of pairs")
    reverse = {"forward": 1, "backward": 0}
    fails(
        "06.1", lambda *a: sorted(nb06.order(*a), key=lambda action: reverse[action[0]]), "stage 0: backward 0 too soon"
    )


def per_stage(events, stages):
    """One stage after the other; the rest of the step is waiting."""
    first, last = min(e[4] for e in events), max(e[5] for e in events)

    def seconds(stage):
        work = sum(e[5] - e[4] for e in events if e[0] == stage and e[1] in ("forward", "backward"))
        messages = sum(e[5] - e[4] for e in events if e[0] == stage and e[1] == "send")
        for _, what, peer, i, start, end in [e for e in events if e[0] == stage]:
            if what == "receive":
                [begin] = [e[4] for e in events if e[:4] == (peer, "send", stage, i)]
                messages += end - start if begin < start else end - begin
        return {"waiting": last - first - work - messages, "work": work, "messages": messages}

    return list(map(seconds, range(stages)))


def test_timelines():
    passes("06.2", per_stage)
    fails("06.2", lambda events, stages: per_stage(events, stages)[:1], "dicts in the list")

    def milliseconds(events, stages):
        return [{k: 1e3 * v for k, v in each.items()} for each in per_stage(events, stages)]

    fails("06.2", milliseconds, "work of each stage")


def test_the_timelines_can_tell_each_mistake():
    for _, events, stages in nb06.TIMELINES:
        found = nb06.spend(events, stages)
        step = max(e[5] for e in events) - min(e[4] for e in events)
        assert all(abs(sum(each.values()) - step) < 1e-9 and min(each.values()) > 0 for each in found)


def by_distribute_tensor(build, weights, micro_batches, max_norm):
    """Gives each parameter its shard, clips by hand, and adds up the losses' gradients divided at the end."""
    with torch.device("meta"):
        model = build()
    [fully_shard(block) for block in model.blocks]
    fully_shard(model).to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(distribute_tensor(weights[name], p.device_mesh, p.placements))
    for x, y in micro_batches:
        model.set_requires_gradient_sync(x is micro_batches[-1][0])
        mse_loss(model(x), y).backward()
    squares = torch.zeros(1)
    for p in model.parameters():
        p.grad /= len(micro_batches)
        squares += p.grad.to_local().square().sum()
    dist.all_reduce(squares)
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad * min(1.0, max_norm / squares.sqrt().item())
    return model


def never_clipped(build, weights, micro_batches, max_norm):
    return nb06.sharded_step(build, weights, micro_batches, 1e9)


def not_meta(build, weights, micro_batches, max_norm):
    model = build()
    model.load_state_dict(weights)
    return nb06.sharded_step(lambda: model.to("meta"), weights, micro_batches, max_norm)


def clipped_alone(build, weights, micro_batches, max_norm):
    """Each rank clips its own shards by their own norm."""
    real = nn.utils.clip_grad_norm_
    nn.utils.clip_grad_norm_ = lambda parameters, norm: [
        p.grad.mul_(min(1.0, norm / sum(q.grad.to_local().norm() ** 2 for q in ps).sqrt().item()))
        for ps in [list(parameters)]
        for p in ps
    ]
    try:
        return nb06.sharded_step(build, weights, micro_batches, max_norm)
    finally:
        nn.utils.clip_grad_norm_ = real


def test_sharded_steps():
    passes("06.3", by_distribute_tensor)
    fails("06.3", never_clipped, "max_norm 0.05", "length of the step")
    fails("06.3", not_meta, "devices on which build() is called")
    fails("06.3", clipped_alone, "max_norm 0.05")
    fails("06.3", lambda *args: None, "what you return", "NoneType")
