"""Chains and cuts, schedules and their closed forms, the pipeline written out."""

import itertools

import pytest
import torch
from torch import nn

from labs.common.pipelines import Chain, chain, even_cuts, schedules, split
from labs.kit.errors import BadInput
from labs.kit.launch import RankFailed, run_on_ranks
from labs.kit.rank import Rank

CPU = torch.device("cpu")


def rank_here():
    import torch.distributed as dist

    r, n = dist.get_rank(), dist.get_world_size()
    return Rank(r, n, r, n, CPU, "gloo", ())


def small(layers=6, width=8):
    """A chain of equal layers on random rows, the same on every rank."""
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return Chain("small", body, lambda rows: (torch.randn(rows, width), torch.randn(rows, width)), nn.MSELoss())


# Chains


def test_the_notebooks_chain_trains_on_real_rows_and_is_the_same_on_every_rank():
    name = "labs.common.sharding.blocks:row_transformer"
    model = chain(name)
    x, y = model.make_batch(3)
    loss = model.loss(model.module()(x), y)
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.module().parameters())
    again = chain(name).module().state_dict()
    assert all(torch.equal(again[k], v) for k, v in model.module().state_dict().items())
    halves = split(model, even_cuts(model, 2))
    sizes = [sum(p.numel() for m in half if not isinstance(m, nn.Linear) for p in m.parameters()) for half in halves]
    assert sizes[0] == sizes[1]


def test_stages_share_the_layers_and_cover_them_once():
    model = small()
    for cuts in ([], [1], [5], [2, 3], [1, 2, 3, 4, 5]):
        stages = split(model, cuts)
        assert len(stages) == len(cuts) + 1
        assert [layer for stage in stages for layer in stage] == model.layers


# Schedules


def test_bubble_as_published():
    published = {2: [50, 33.3, 20, 11.1, 5.9], 4: [75, 60, 42.9, 27.3, 15.8], 8: [87.5, 77.8, 63.6, 46.7, 30.4]}
    for p, shares in published.items():
        found = [100 * schedules.bubble(p, m) for m in (1, 2, 4, 8, 16)]
        assert found == pytest.approx(shares, abs=0.05)
    assert schedules.bubble(1, 1) == 0


@pytest.mark.parametrize("schedule", schedules.SCHEDULES.values())
def test_played_through_a_schedule_idles_as_the_closed_form_says(schedule):
    for stages, m in itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 8]):
        events = schedules.simulate(schedule, m, [1.0] * stages, [2.0] * stages)
        assert len(events) == 2 * m * stages
        assert schedules.span_s(events) == pytest.approx(3.0 * (m + stages - 1))
        assert schedules.idle_share(events, stages) == pytest.approx(schedules.bubble(stages, m))


def test_micro_batches_kept_by_gpipe_and_1f1b():
    for stages, m in itertools.product([1, 2, 4, 8], [1, 2, 4, 16]):
        for stage in range(stages):
            assert schedules.in_flight(schedules.gpipe(stage, stages, m)) == m
            assert schedules.in_flight(schedules.one_f_one_b(stage, stages, m)) == min(stages - stage, m)


def test_a_message_takes_its_sender_and_its_receiver_time():
    events = schedules.simulate(schedules.gpipe, 1, [1.0, 1.0], [1.0, 1.0], [0.25])
    assert schedules.span_s(events) == pytest.approx(4 + 4 * 0.25)
    assert [e.kind for e in events if e.stage == 1] == ["receive", "forward", "backward", "send"]


def test_a_schedule_that_waits_for_itself_is_found():
    def backward_first(stage, stages, m):
        return schedules.gpipe(stage, stages, m)[::-1]

    with pytest.raises(ValueError, match="can never finish"):
        schedules.simulate(backward_first, 2, [1.0, 1.0], [1.0, 1.0])


def test_the_time_before_a_neighbour_sends_is_idle_and_what_follows_is_receiving():
    events = [
        schedules.Event(0, "forward", 0, 10.0, 12.0),
        schedules.Event(0, "send", 0, 12.0, 12.5, "activation"),
        schedules.Event(1, "receive", 0, 10.5, 13.0, "activation"),
        schedules.Event(1, "forward", 0, 13.0, 14.0),
    ]
    found = [(e.stage, e.kind, e.start_s, e.end_s) for e in schedules.with_idle(events, 2)]
    assert found == [
        (0, "forward", 10.0, 12.0),
        (0, "send", 12.0, 12.5),
        (0, "idle", 12.5, 14.0),
        (1, "idle", 10.0, 12.0),
        (1, "receive", 12.0, 13.0),
        (1, "forward", 13.0, 14.0),
    ]
    assert schedules.idle_share(schedules.with_idle(events, 2), 2) == pytest.approx(3.5 / 8)


# The pipeline written out


def _gradients(cuts, schedule, m):
    from labs.common.pipelines.engine import Pipeline

    rank, model = rank_here(), small()
    x, y = model.make_batch(2 * m)
    whole = model.module()
    loss = model.loss(whole(x), y)
    loss.backward()
    begin, end = ([0, *cuts, len(model.layers)][i] for i in (rank.rank, rank.rank + 1))
    expected = [p.grad.clone() for p in whole[begin:end].parameters()]
    whole.zero_grad()
    pipeline = Pipeline(model, cuts, rank)
    pipeline.events = []
    actions = schedules.SCHEDULES[schedule](rank.rank, rank.world_size, m)
    found = pipeline.step(actions, x.chunk(m), y.chunk(m))
    error = max(
        float((p.grad - g).norm() / g.norm()) for p, g in zip(pipeline.module.parameters(), expected, strict=True)
    )
    sent = pipeline.activations.bytes_sent, pipeline.gradients.bytes_sent
    return error, found, loss.item(), sent, [(e.kind, e.micro_batch) for e in pipeline.events]


@pytest.mark.parametrize(("cuts", "schedule", "m"), [([3], "gpipe", 4), ([1], "1f1b", 3), ([1, 2, 5], "1f1b", 6)])
def test_gradient_loss_and_bytes_of_a_pipeline(cuts, schedule, m):
    stages = len(cuts) + 1
    results = run_on_ranks(_gradients, stages, cuts, schedule, m)
    for stage, (error, found, loss, sent, events) in enumerate(results):
        assert error <= 1e-5
        assert found == (pytest.approx(loss, rel=1e-6) if stage == stages - 1 else None)
        size = 2 * m * 8 * 4  # all rows, 8 numbers each, 4 bytes
        assert sent == (size if stage < stages - 1 else 0, size if stage else 0)
        done = [e for e in events if e[0] in ("forward", "backward")]
        assert done == [tuple(a) for a in schedules.SCHEDULES[schedule](stage, stages, m)]


def _failing(where, wait_s, m=4):
    import time

    from labs.common.pipelines.engine import Pipeline

    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 3:
                if where == "hangs":
                    time.sleep(60)
                raise FloatingPointError("the third\nmicro-batch")
            return x

    rank, model = rank_here(), small()
    model.layers.append(Fails())
    pipeline = Pipeline(model, [3], rank, wait_s)
    x, y = model.make_batch(2 * m)
    pipeline.step(schedules.gpipe(rank.rank, rank.world_size, m), x.chunk(m), y.chunk(m))


def test_a_stage_that_raises_is_named_with_its_micro_batch():
    with pytest.raises(RankFailed) as e:
        run_on_ranks(_failing, 2, "raises", 30.0)
    line = "stage 1 of 2 failed in the forward of micro-batch 2: FloatingPointError: the third micro-batch"
    assert any(text.endswith(line) for text in str(e.value).splitlines())
    assert e.value.rank == 1


@pytest.mark.drill
def test_a_stage_that_hangs_is_named_by_the_one_that_waits():
    with pytest.raises(RankFailed) as e:
        run_on_ranks(_failing, 2, "hangs", 0.5)
    line = r"stage 0 waited 0\.\d s for the gradient of micro-batch 0 from stage 1: that stage hangs, or needs longer"
    assert e.match(line)


def test_a_pipeline_needs_a_rank_per_stage():
    def function():
        from labs.common.pipelines.engine import Pipeline

        Pipeline(small(), [2, 4], rank_here())

    with pytest.raises(BadInput, match="3 stages need as many ranks, not 2: give 1 cuts"):
        run_on_ranks(function, 2)
