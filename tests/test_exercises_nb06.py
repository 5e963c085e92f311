"""Checkers of notebook 06: right answers of other kinds pass, hangs are ended."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from mutants import nb06 as mutants
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb06 import exercise_fsdp, exercise_pipeline
from labs.chapters.nb06 import exercises as nb06
from labs.chapters.nb06 import solutions as solution
from labs.common.pipelines import schedules
from labs.common.pipelines.schedules import Action
from labs.kit.check import TODO, examine
from labs.kit.launch import run_on_ranks


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


# -- 06.1


def by_room(stage, stages, micro_batches, most):
    """Forward while there is room and work ahead, else backward: a generator of tensors' numbers."""
    forward = backward = 0
    room = min(most, stages - stage)
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < room:
            yield "forward", torch.tensor(forward)
            forward += 1
        else:
            yield "backward", torch.tensor(backward)
            backward += 1


def three_parts(stage, stages, micro_batches, most):
    """Fill, steady state, drain."""
    ahead = min(stages - stage - 1, most - 1, micro_batches)
    fill = [["forward", i] for i in range(ahead)]
    steady = [a for i in range(ahead, micro_batches) for a in (["forward", i], ["backward", i - ahead])]
    return (*fill, *steady, *(["backward", i] for i in range(micro_batches - ahead, micro_batches)))


@pytest.mark.parametrize("right", [by_room, three_parts])
def test_other_orders_pass(right):
    passes("06.1", right)


def test_without_a_limit_the_reference_is_1f1b_and_no_other_order_is_shorter():
    for p, m in ((1, 4), (3, 6), (4, 2)):
        for s in range(p):
            assert solution.order(s, p, m, most=m + p) == [tuple(a) for a in schedules.one_f_one_b(s, p, m)]
    draw = random.Random(0)
    for p, m, most in exercise_pipeline.CASES:
        best = [[Action(*a) for a in solution.order(s, p, m, most)] for s in range(p)]
        assert all(schedules.in_flight(o) <= most for o in best)
        for _ in range(40):
            other = [_random_order(draw, m, most) for _ in range(p)]
            try:
                assert exercise_pipeline._span_s(best, m) <= exercise_pipeline._span_s(other, m) + 1e-9
            except ValueError:  # these orders wait for each other
                continue


def _random_order(draw, micro_batches, most):
    forward = backward = 0
    found = []
    while backward < micro_batches:
        may = [
            k
            for k, can in (
                ("forward", forward < micro_batches and forward - backward < most),
                ("backward", backward < forward),
            )
            if can
        ]
        kind = draw.choice(may)
        found.append(Action(kind, forward if kind == "forward" else backward))
        forward, backward = forward + (kind == "forward"), backward + (kind == "backward")
    return found


def test_ranks_that_train_in_this_order_have_the_gradients_of_one_process():
    p, m, most = exercise_pipeline.TRAINED
    orders = [solution.order(s, p, m, most) for s in range(p)]
    assert max(run_on_ranks(exercise_pipeline._train, p, orders)) < 1e-6


@pytest.mark.parametrize(
    "junk",
    [
        lambda *a: None,
        lambda *a: [1, 2],
        lambda *a: [("forwards", 0)],
    ],
)
def test_junk_for_an_order_is_told(junk):
    said = examine("06.1", junk)
    assert said.state == "not yet" and "your code raised" not in said.text


def test_a_todo_inside_of_the_function_is_found():
    def order(stage, stages, micro_batches, most):
        TODO  # noqa: B018
        return [("forward", 0)]

    assert examine("06.1", order).state == "to do"


# -- 06.2


def test_the_parts_and_the_mean_work_are_the_step():
    """Held against the schedule's own closed form: equal stages and free messages leave the bubble alone."""
    events, p = nb06.TIMELINES[0]
    found = solution.lost_time(events, p)
    step = max(e[4] for e in events) - min(e[3] for e in events)
    assert found["waiting"] + found["messages"] == pytest.approx(step - 0.4)
    free = nb06._timeline((0.4, 0.4, 0.4), 6, 0.0, 5.0)
    found = solution.lost_time(*free)
    assert found["waiting"] / (0.4 + found["waiting"]) == pytest.approx(schedules.bubble(3, 6))
    assert found["cut"] == pytest.approx(0) and found["messages"] == 0


def by_table(events, stages):
    import pandas

    table = pandas.DataFrame(events, columns=["stage", "what", "i", "start", "end"])
    table["s"] = table.end - table.start
    kind = table.what.isin(["forward", "backward"])
    work, sent = (table[rows].groupby("stage").s.sum().reindex(range(stages), fill_value=0) for rows in (kind, ~kind))
    cut, messages = work.max() - work.mean(), sent.max()
    return {"waiting": table.end.max() - table.start.min() - work.max() - messages, "messages": messages, "cut": cut}


def by_tensors(events, stages):
    work, sent = torch.zeros(stages, dtype=torch.float64), torch.zeros(stages, dtype=torch.float64)
    for stage, what, _, start, end in sorted(events, key=lambda e: e[3]):
        (sent if what in ("send", "receive") else work)[stage] += end - start
    begin, end = min(e[3] for e in events), max(e[4] for e in events)
    return dict(cut=work.max() - work.mean(), messages=sent.max(), waiting=end - begin - work.max() - sent.max())


@pytest.mark.parametrize("right", [by_table, by_tensors])
def test_other_ways_to_read_a_timeline_pass(right):
    passes("06.2", right)


# -- 06.4


class Gather(torch.autograd.Function):
    """Whole from shards; backward: mean of the ranks' gradients, own rows. By reduce and slices of a list."""

    @staticmethod
    def forward(ctx, shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        n = dist.get_world_size()
        mine = torch.empty_like(gradient[: len(gradient) // n])
        dist.reduce_scatter(mine, [g.contiguous() / n for g in gradient.split(len(gradient) // n)])
        return mine


def by_checkpoint(x, shard):
    """The gather is run again in backward by torch's own recomputation."""
    return checkpoint(lambda x, s: torch.nn.functional.linear(x, Gather.apply(s)), x, shard, use_reentrant=False)


def by_objects(x, shard):
    """Gathers Python objects, and keeps nothing but x and the shard."""

    def whole(s):
        found = [torch.empty_like(s) for _ in range(dist.get_world_size())]
        dist.all_gather(found, s.detach().clone())
        return torch.vstack(found)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, s):
            ctx.x, ctx.s = x.detach(), s.detach()
            return torch.einsum("ri,oi->ro", x, whole(s))

        @staticmethod
        def backward(ctx, g):
            n, out = dist.get_world_size(), torch.empty_like(ctx.s)
            dist.reduce_scatter(out, list(torch.einsum("ro,ri->oi", g / n, ctx.x).chunk(n)))
            return g @ whole(ctx.s), out

    return Layer.apply(x, shard)


@pytest.mark.parametrize("right", [by_checkpoint, by_objects])
def test_other_layers_pass(right):
    passes("06.4", right)


def test_the_reference_gathers_twice_and_scatters_once_for_each_layer():
    for seen in run_on_ranks(exercise_fsdp.run, 2, solution.sharded_linear):
        assert seen.forward == ["all_gather"] * 2
        assert sorted(seen.backward) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def summed_in_forward(x, shard):
    dist.all_reduce(torch.ones(1))
    return solution.sharded_linear(x, shard)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (mutants.layer(order=-1), "the output of rank 0"),
        (mutants.layer(reduce="none"), "is not this rank's rows of the mean"),
        (mutants.layer(x_gradient=lambda g, w: g @ w / 2), "the gradient of x on rank 0"),
        (summed_in_forward, "call all_reduce"),
    ],
)
def test_other_wrong_layers_are_refused(wrong, words):
    said = examine("06.4", wrong)
    assert said.state == "not yet" and words in said.text, said.text


@pytest.mark.parametrize(
    "junk",
    [
        lambda *_: None,
        lambda x, shard: 1 / 0,
    ],
)
def test_junk_for_an_output_is_told(junk):
    assert examine("06.4", junk).state == "not yet"


@pytest.mark.parametrize("exercise_id", ["06.1", "06.2", "06.4"])
def test_what_is_no_such_function_is_told(exercise_id):
    for junk in (None, lambda: 1):
        assert examine(exercise_id, junk).state == "not yet"
