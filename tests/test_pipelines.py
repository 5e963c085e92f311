"""Chains and cuts, schedules and their closed forms, the pipeline written out, the cost model of a split."""

import copy
import itertools

import pytest
import torch
from torch import nn

from labs.kit.errors import BadInput
from labs.kit.launch import RankFailed, run_on_ranks
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.models import Workload
from labs.parts.pipelines import CHAINS, Chain, analysis, chain, even_cuts, partition, profiling, schedules, split
from labs.parts.pipelines.memory import counting
from labs.parts.pipelines.two_devices import NaiveSplit, TwoDevices

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


@pytest.mark.parametrize("cuts", [[0], [6], [7], [-1], [3, 3], [4, 2]])
def test_a_cut_out_of_range_is_one_line(cuts):
    with pytest.raises(BadInput) as e:
        split(small(), cuts)
    assert "\n" not in str(e.value) and ("from 1 to 5" in str(e.value) or "rise" in str(e.value))


def test_even_cuts_and_more_stages_than_layers():
    assert even_cuts(small(), 1) == [] and even_cuts(small(), 2) == [3] and even_cuts(small(), 6) == [1, 2, 3, 4, 5]
    assert all(len(split(small(), even_cuts(small(), p))) == p for p in range(1, 7))
    with pytest.raises(BadInput, match="6 layers, not enough for 7 stages: use at most 6 ranks"):
        even_cuts(small(), 7)


def sequential():
    return Workload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), small(width=4).make_batch, lambda o, t: o.mean())


def not_sequential():
    return Workload(nn.Linear(4, 2), small(width=4).make_batch, lambda o, t: o.mean())


def test_a_model_of_ones_own_must_be_a_sequential():
    assert len(chain(f"{__name__}:sequential").layers) == 2
    with pytest.raises(BadInput, match=r"is a Linear: a pipeline cuts an nn\.Sequential"):
        chain(f"{__name__}:not_sequential")
    with pytest.raises(BadInput, match="there is no chain 'resnet': take one of deep_mlp"):
        chain("resnet")


# Schedules


def test_bubble_as_published():
    published = {2: [50, 33.3, 20, 11.1, 5.9], 4: [75, 60, 42.9, 27.3, 15.8], 8: [87.5, 77.8, 63.6, 46.7, 30.4]}
    for p, shares in published.items():
        found = [100 * schedules.bubble(p, m) for m in (1, 2, 4, 8, 16)]
        assert found == pytest.approx(shares, abs=0.05)
    assert schedules.bubble(1, 1) == 0


@pytest.mark.parametrize("schedule", schedules.SCHEDULES.values())
@pytest.mark.parametrize(("stages", "m"), list(itertools.product([1, 2, 3, 4, 8], [1, 2, 3, 8])))
def test_played_through_a_schedule_idles_as_the_closed_form_says(schedule, stages, m):
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


def test_best_number_of_micro_batches_is_where_the_step_is_shortest():
    best = schedules.best_micro_batches(1.0, 0.01, 4)
    around = [schedules.step_s(1.0, 0.01, 4, best * f) for f in (0.9, 1.0, 1.1)]
    assert min(around) == around[1]


# The pipeline written out


def _gradients(cuts, schedule, m):
    from labs.parts.pipelines import parity
    from labs.parts.pipelines.bench import actions
    from labs.parts.pipelines.engine import Pipeline

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

    from labs.parts.pipelines.bench import actions
    from labs.parts.pipelines.engine import Pipeline

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
        from labs.parts.pipelines.engine import Pipeline

        Pipeline(small(), [2, 4], rank_here())

    with pytest.raises(BadInput, match="3 stages need as many ranks, not 2: give 1 cuts"):
        run_on_ranks(function, 2)


def test_both_halves_in_one_process():
    model = small()
    x, y = model.make_batch(8)
    expected = torch.autograd.grad(model.loss(model.module()(x), y), list(model.module().parameters()))
    for m in (1, 4):
        both = TwoDevices(model, 2, (CPU, CPU))
        both.halves.zero_grad()
        loss = both.step(x, y, m)
        assert loss.item() == pytest.approx(model.loss(model.module()(x), y).item(), rel=1e-6)
        for p, g in zip(both.halves.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g)


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


# Where to cut


def costs(forward, messages=None):
    n = len(forward)
    return partition.Costs(tuple(forward), tuple(2 * f for f in forward), tuple(messages or [0.0] * n))


def slowest(found, cuts):
    return max(found.stage_s(a, b) for a, b in itertools.pairwise([0, *cuts, len(found.forward_s)]))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_chosen_cuts_are_the_best_of_all(stages):
    torch.manual_seed(0)
    for _ in range(20):
        forward, messages = torch.rand(7).tolist(), torch.rand(7).tolist()
        found = costs(forward, messages)
        every = [slowest(found, cuts) for cuts in itertools.combinations(range(1, 7), stages - 1)]
        assert slowest(found, partition.choose(found, stages)) == pytest.approx(min(every))


def test_an_expensive_message_moves_the_cut():
    assert partition.choose(costs([1, 1, 1, 1]), 2) == [2]
    assert partition.choose(costs([1, 1, 1, 1], [0, 0, 9, 0]), 2) in ([1], [3])


def test_more_stages_than_layers_cannot_be_chosen():
    with pytest.raises(BadInput, match="4 layers are not enough for 5 stages"):
        partition.choose(costs([1, 1, 1, 1]), 5)


def test_predicted_step_of_equal_stages_is_the_closed_form():
    found = partition.predict_step_s(costs([0.5] * 4), [2], 8, schedules.one_f_one_b)
    assert found == pytest.approx(schedules.step_s(8 * 3.0, 0.0, 2, 8))


def test_candidates_are_all_cuts_or_the_neighbours_of_the_chosen():
    assert partition.candidates(5, 2, [2]) == [[1], [2], [3], [4]]
    assert partition.candidates(10, 4, [3, 4, 8]) == [[3, 4, 8], [2, 4, 8], [3, 5, 8], [3, 4, 7], [3, 4, 9]]
    assert partition.candidates(3, 1, []) == [[]]


def test_a_link_is_fitted_and_never_negative():
    assert profiling.link({s: [1e-4 + s / 1e9] for s in profiling.MESSAGES}) == pytest.approx((1e-4, 1e-9))
    assert min(profiling.link({s: [1e-4 + 1 / s] for s in profiling.MESSAGES})) >= 0
    assert profiling.link({s: [0.0] for s in profiling.MESSAGES}) == (0, 0)


def test_a_profile_finds_the_heavy_layer():
    layers = [nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 1)]
    model = Chain("heavy", layers, lambda rows: (torch.randn(rows, 64), torch.randn(rows, 1)), nn.MSELoss())
    found = profiling.profile(model, *model.make_batch(64), 5, CPU)
    spent = [min(la.forward_s) + min(la.backward_s) for la in found]
    assert len(found) == 4 and spent.index(max(spent)) == 1
    assert [la.output_bytes for la in found] == [64 * 64 * 4, 64 * 2048 * 4, 64 * 4, 4]
    assert all(p.grad is None for p in model.module().parameters())


# What records say


def step(schedule, m, *seconds, by="hand"):
    case = {"chain": "small", "schedule": schedule, "by": by, "micro_batches": m, "rows": 8}
    return Record("pipeline_parallel", "step_s", "s", seconds, case=case, layout={"world_size": 2})


def test_the_fit_recovers_stage_and_cost_of_a_micro_batch():
    fit = analysis.fit_steps({m: schedules.step_s(0.4, 0.003, 4, m) for m in (1, 2, 8, 32)}, 4)
    assert (fit.stage_s, fit.per_micro_batch_s) == (pytest.approx(0.4), pytest.approx(0.003))
    assert fit.cost_share(4) == pytest.approx(0.03) and fit.best_micro_batches == pytest.approx(20)
    assert analysis.fit_steps({1: 2.0, 2: 1.4}, 2).per_micro_batch_s == 0
    with pytest.raises(ValueError, match="at least two"):
        analysis.fit_steps({1: 1.0}, 2)


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


def test_the_naive_split_computes_what_one_device_does():
    torch.manual_seed(0)
    first, second, x = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2), torch.randn(3, 4)
    whole = torch.nn.Sequential(copy.deepcopy(first), copy.deepcopy(second))
    split = NaiveSplit(first, second, devices=("cpu", "cpu"))
    for module in (whole, split):
        module(x).square().sum().backward()
    for p, q in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
