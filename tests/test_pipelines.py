"""Chains and cuts, schedules and their closed forms, the pipeline written out."""

import itertools

import pytest
import torch
from torch import nn

from labs.common.pipelines import CHAINS, Chain, chain, schedules, split
from labs.kit.errors import BadInput
from labs.kit.launch import RankFailed, run_on_ranks
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.pipeline_parallel import analysis
from labs.pipeline_parallel.memory import counting

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


@pytest.mark.parametrize("name", list(CHAINS))
def test_every_chain_trains_on_real_rows(name):
    model = chain(name)
    x, y = model.make_batch(3)
    assert len(x) == len(y) == 3
    loss = model.loss(model.module()(x), y)
    loss.backward()
    assert loss.isfinite() and all(p.grad is not None for p in model.module().parameters())
    again = chain(name).module().state_dict()
    assert all(torch.equal(again[k], v) for k, v in model.module().state_dict().items())


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
    from labs.pipeline_parallel import parity
    from labs.pipeline_parallel.bench import actions

    rank, model = rank_here(), small()
    x, y = model.make_batch(2 * m)
    loss, expected = parity.reference(model, x, y)
    pipeline = Pipeline(model, cuts, rank)
    pipeline.events = []
    found = pipeline.step(actions(schedule, m, rank), x.chunk(m), y.chunk(m))
    error = parity.gradient_error({rank.rank: pipeline.module}, cuts, expected, rank)
    sent = pipeline.activations.bytes_sent, pipeline.gradients.bytes_sent
    return error, found, loss, sent, [(e.kind, e.micro_batch) for e in pipeline.events]


@pytest.mark.parametrize(("cuts", "schedule", "m"), [([3], "gpipe", 4), ([1], "1f1b", 3), ([1, 2, 5], "1f1b", 6)])
def test_gradient_loss_and_bytes_of_a_pipeline(cuts, schedule, m):
    stages = len(cuts) + 1
    results = run_on_ranks(_gradients, stages, cuts, schedule, m)
    for stage, (error, found, loss, sent, events) in enumerate(results):
        assert error <= 1e-6
        assert found == (pytest.approx(loss, rel=1e-6) if stage == stages - 1 else None)
        size = 2 * m * 8 * 4  # all rows, 8 numbers each, 4 bytes
        assert sent == (size if stage < stages - 1 else 0, size if stage else 0)
        done = [e for e in events if e[0] in ("forward", "backward")]
        assert done == [tuple(a) for a in schedules.SCHEDULES[schedule](stage, stages, m)]


def _failing(where, wait_s, m=4):
    import time

    from labs.common.pipelines.engine import Pipeline
    from labs.pipeline_parallel.bench import actions

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
    pipeline.step(actions("gpipe", m, rank), x.chunk(m), y.chunk(m))


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


def test_what_backward_keeps_is_counted_until_it_is_freed():
    layer = nn.Linear(16, 16)
    with counting(layer.parameters()) as kept:
        first = layer(torch.ones(4, 16))
        one = kept.now
        second = layer(torch.ones(4, 16)).relu()
        assert one == 4 * 16 * 4 and kept.now == 3 * one  # an input; another input and a ReLU's output
        first.sum().backward()
        assert kept.now == 2 * one
        second.sum().backward()
        assert kept.now == 0 and kept.peak == 3 * one


# What records say


def step(schedule, m, *seconds, by="hand"):
    case = {"chain": "small", "schedule": schedule, "by": by, "micro_batches": m, "rows": 8}
    return Record("pipeline_parallel", "step_s", "s", seconds, case=case, layout={"world_size": 2})


def test_speedups_and_the_share_of_the_ceiling_by_hand():
    records = Records(
        [
            step("single", 1, 1.0, 2.0),
            step("copies", 1, 1.2, 2.4),
            step("naive", 1, 1.1, 2.2),
            step("1f1b", 4, 0.75, 1.5),
        ]
    )
    assert analysis.speedups(records, "small")["1f1b", "hand", 4].value == pytest.approx(1.1 / 0.75)
    assert analysis.speedups(records, "small", "single")["naive", "hand", 1].value == pytest.approx(1 / 1.1)
    assert analysis.shares_of_ceiling(records, "small")["1f1b", "hand", 4].value == pytest.approx(0.6 / 0.8 / 0.75)
    assert analysis.best(records, "small") == ("1f1b", "hand", 4)
