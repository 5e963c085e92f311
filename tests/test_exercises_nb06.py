"""Checkers of notebook 06: right answers of other kinds pass, hangs are ended, references agree with the labs."""

from __future__ import annotations

import random
import sys
import time
from itertools import combinations, pairwise

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from labs.chapters.nb06 import exercise_pipeline as pipeline_checks
from labs.chapters.nb06 import exercises as cuts_checks
from labs.chapters.nb06 import exercises as nb06
from labs.chapters.nb06 import solutions as solution
from labs.chapters.nb06.exercise_pipeline import JOBS, STAGES, Wait, deadlock, play_jobs
from labs.chapters.nb06.exercise_tensor import problem, run, unsplit, watched
from labs.kit.check import TODO, examine, get_exercise
from labs.kit.launch import run_on_ranks
from labs.parts.pipelines import partition, schedules


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


# -- 06.1


def last_in_first_out(stage, micro_batches, loss_fn, link):
    """Backward from the last micro-batch to the first, as in GPipe's paper, on every stage."""
    rows, kept = sum(len(y) for _, y in micro_batches), []
    for x, y in micro_batches:
        x = x if link.first else link.receive_previous().detach().requires_grad_(True)
        kept.append((x, stage.forward(x), y))
        if not link.last:
            link.send_next(kept[-1][1])
    loss = torch.zeros(())
    for x, output, y in reversed(kept):
        if link.last:
            mean = loss_fn(output, y)
            mean.backward(torch.tensor(len(y) / rows))
            loss += mean.detach() * len(y) / rows
        else:
            torch.autograd.backward([output], [link.receive_next()])
        if not link.first:
            link.send_previous(x.grad)
    return loss if link.last else 0.0


def by_autograd_grad(stage, micro_batches, loss_fn, link):
    """No .grad of what was received, and no backward()."""
    xs, outputs, total = {}, {}, 0.0
    rows, parameters = sum(len(x) for x, _ in micro_batches), list(stage.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for i, (x, y) in enumerate(micro_batches):
        xs[i] = (x.clone() if link.first else link.receive_previous()).requires_grad_()
        outputs[i] = stage(xs[i])
        if link.last:
            outputs[i] = loss_fn(outputs[i], y) * len(x) / rows
            total += float(outputs[i].detach())
        else:
            link.send_next(outputs[i])
    for i in range(len(micro_batches)):
        given = None if link.last else link.receive_next()
        found = torch.autograd.grad(outputs.pop(i), [*parameters, xs.pop(i)], given)
        for p, g in zip(parameters, found, strict=False):
            p.grad += g
        if not link.first:
            link.send_previous(found[-1])
    return total


def one_forward_one_backward(stage, micro_batches, loss_fn, link):
    """1F1B: after a few forwards each backward as soon as its gradient is there, so that little is in memory."""
    rows, kept, total = sum(len(x) for x, _ in micro_batches), [], 0.0
    warm_up = dist.get_world_size() - 1 - dist.get_rank()

    def backward(gradient):
        x, output = kept.pop(0)
        output.backward(gradient)
        if not link.first:
            link.send_previous(x.grad)

    for i, (x, y) in enumerate(micro_batches):
        x = x if link.first else link.receive_previous().requires_grad_()
        output = stage(x)
        if link.last:
            output = loss_fn(output, y) * len(x) / rows
            total += output.item()
        kept.append((x, output))
        gradient = link.receive_next() if i >= warm_up and not link.last else None
        if not link.last:
            link.send_next(output.detach())  # after the receive: else both sides would send
        if i >= warm_up:
            backward(gradient)
    while kept:
        backward(None if link.last else link.receive_next())
    return total if link.last else None


@pytest.mark.parametrize("right", [last_in_first_out, by_autograd_grad, one_forward_one_backward])
def test_other_steps_pass(right):
    passes("06.1", right)


def test_the_reference_has_the_gradients_of_one_process():
    ranks = run_on_ranks(play_jobs, STAGES, solution.pipeline_step, JOBS)
    for job, *played in zip(JOBS, *ranks, strict=True):
        modules = job.modules()
        x, y = (torch.cat(part) for part in zip(*job.micro_batches, strict=True))
        loss = functional.mse_loss(torch.nn.Sequential(*modules)(x), y)
        loss.backward()
        for p, module in zip(played, modules, strict=True):
            whole = torch.cat([q.grad.flatten() for q in module.parameters()])
            assert torch.allclose(p.gradient, whole, rtol=1e-4, atol=1e-7)
        assert played[-1].returned == pytest.approx(loss.item(), rel=1e-5)
        assert [pipeline_checks.most_in_flight(p) for p in played] == [len(job.rows)] * STAGES
        for p in played:
            kept = [p.events[i].kept for i in p.at("backward")]
            assert kept == sorted(kept, reverse=True) and 0 < kept[-1] <= kept[0] / len(job.rows)


@pytest.mark.drill
def test_a_loop_without_end_and_what_it_started_is_ended(monkeypatch):
    monkeypatch.setattr("labs.kit.answers.RUN_S", 6.0)

    def pipeline_step(stage, micro_batches, loss_fn, link):
        while True:
            try:
                time.sleep(0.001)
            except Exception:
                continue

    assert "did not finish within 6 s" in examine("06.1", pipeline_step).text


def test_an_error_on_one_stage_is_told_although_the_others_wait():
    def pipeline_step(stage, micro_batches, loss_fn, link):
        if link.last:
            return {}["no such key"]
        link.receive_next()

    text = examine("06.1", pipeline_step).text
    assert "KeyError: 'no such key'" in text and 'return {}["no such key"]' in text


def test_leaving_the_process_is_told_and_the_check_goes_on_living():
    text = examine("06.1", lambda stage, micro_batches, loss_fn, link: sys.exit("enough")).text
    assert "SystemExit: enough" in text


def test_a_step_that_does_nothing_is_told():
    text = examine("06.1", lambda stage, micro_batches, loss_fn, link: None).text
    assert "stage 0 ran forward 0 times for 3 micro-batches" in text


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_emptied_at_the_end_are_called_that(to_none):
    def pipeline_step(stage, micro_batches, loss_fn, link):
        total = solution.pipeline_step(stage, micro_batches, loss_fn, link)
        stage.zero_grad(set_to_none=to_none)
        return total

    text = examine("06.1", pipeline_step).text
    assert "zero_grad() comes" in text if to_none else "zero_grad() came after the last backward()" in text


def test_backward_through_the_last_output_is_not_blamed_on_requires_grad():
    def pipeline_step(stage, micro_batches, loss_fn, link):
        xs = []
        for x, y in micro_batches:
            xs.append(x if link.first else link.receive_previous().requires_grad_())
            output = stage(xs[-1])
            output = loss_fn(output, y) if link.last else output
            if not link.last:
                link.send_next(output.detach())
        for x in xs:
            output.backward(None if link.last else link.receive_next(), retain_graph=True)
            if not link.first:
                link.send_previous(x.grad)

    text = examine("06.1", pipeline_step).text
    assert "went through the activations of another micro-batch" in text


def test_a_todo_inside_of_the_function_is_found():
    def pipeline_step(stage, micro_batches, loss_fn, link):
        TODO  # noqa: B018
        stage(micro_batches[0][0])

    assert examine("06.1", pipeline_step).state == "to do"


def test_a_deadlock_of_three_names_the_two_that_block_each_other():
    waits = {
        0: Wait(0, 1, "sends activation 2"),
        1: Wait(1, 2, "sends activation 2"),
        2: Wait(2, 1, "sends gradient 1"),
    }
    assert "stage 1 sends activation 2, while stage 2 sends gradient 1" in str(deadlock(waits))
    ended = deadlock({0: Wait(0, 1, "waits for gradient 1")})
    assert "stage 0 waits for gradient 1 for ever: stage 1 has ended" in str(ended)


@pytest.mark.parametrize(
    ("late", "words"),
    [
        ("gradient first", "stage 0 waits for gradient 1, while stage 1 waits for activation 1"),
        ("nothing back", "stage 1 waits for gradient 1, while stage 2 waits for activation 2; neither sends"),
    ],
)
def test_a_deadlock_ends_in_seconds_with_the_reason(late, words):
    def pipeline_step(stage, micro_batches, loss_fn, link):
        for x, y in micro_batches:
            x = x if link.first else link.receive_previous().requires_grad_()
            output = loss_fn(stage(x), y) if link.last else stage(x)
            if late == "nothing back" and not link.last:
                link.send_next(output.detach())
            output.backward(None if link.last else link.receive_next())
            if late == "gradient first" and not link.last:
                link.send_next(output.detach())

    assert words in examine("06.1", pipeline_step).text


# -- 06.2


def test_no_slip_is_another_one_or_the_right_answer():
    right = [solution.best_pipeline(*case) for case in nb06.STEPS]
    for k, slips in enumerate((nb06.MICRO_BATCHES, nb06.STEP, nb06.IDLE_SHARE)):
        seen = {tuple(float(r[k]) for r in right): "right"}
        for wrong, what, _ in slips:
            made = tuple(float(wrong(case)) for case in nb06.STEPS)
            assert made not in seen or seen[made] == what, f"{what!r} is {seen[made]!r}"
            seen[made] = what


def test_the_best_number_is_that_of_a_search_and_of_the_labs_model():
    draw = random.Random(0)
    for _ in range(200):
        work_s, p, rows = draw.uniform(0.01, 5), draw.randint(1, 8), draw.randint(1, 80)
        overhead_s = work_s / p / draw.uniform(0.5, 3000)
        m, step_s, idle = solution.best_pipeline(work_s, p, overhead_s, rows)
        assert step_s == pytest.approx(min(nb06._step((work_s, p, overhead_s, rows), n) for n in range(1, rows + 1)))
        assert step_s == pytest.approx(schedules.step_s(work_s / p, overhead_s, p, m))
        assert idle == schedules.bubble(p, m)


def test_tensors_and_a_list_are_as_good():
    def best_pipeline(work_s, stages, overhead_s, rows):
        m = torch.arange(1, rows + 1, dtype=torch.float64)
        step_s = (m + stages - 1) * (work_s / stages / m + overhead_s)
        best = step_s.argmin()
        return [m[best], step_s[best], (stages - 1) / (m[best] + stages - 1)]

    passes("06.2", best_pipeline)


# -- 06.3


def by_bisection(layer_s, stages):
    """Try limits: fill stages up to the limit, and count them; cut more where a layer each is missing."""

    def fill(limit):
        cut, now = [], 0.0
        for k, seconds in enumerate(layer_s):
            must = len(layer_s) - k == stages - 1 - len(cut)
            if k and (now + seconds > limit + 1e-9 or must):
                cut.append(k)
                now = 0.0
            now += seconds
        return cut

    low, high = max(layer_s), sum(layer_s)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(fill(middle)) < stages else (middle, high)
    return fill(high)


def by_tables(layer_s, stages):
    n, inf = len(layer_s), float("inf")
    cost = [[inf] * (n + 1) for _ in range(stages + 1)]
    begin = [[0] * (n + 1) for _ in range(stages + 1)]
    cost[0][0] = 0.0
    for p in range(1, stages + 1):
        for end in range(p, n + 1):
            cost[p][end], begin[p][end] = min(
                (max(cost[p - 1][k], sum(layer_s[k:end])), k) for k in range(p - 1, end)
            )  # fmt: skip
    cut, end = [], n
    for p in range(stages, 1, -1):
        end = begin[p][end]
        cut.append(end)
    return torch.tensor(cut[::-1])


@pytest.mark.parametrize("right", [by_bisection, by_tables])
def test_other_ways_to_cut_pass(right):
    passes("06.3", right)


def test_the_reference_cuts_as_well_as_any_way_and_as_the_lab():
    draw = random.Random(0)
    for _ in range(60):
        layer_s = [draw.choice([draw.uniform(0, 1), draw.randint(1, 9)]) for _ in range(draw.randint(1, 9))]
        stages = draw.randint(1, len(layer_s))
        ways = combinations(range(1, len(layer_s)), stages - 1)
        best, mine = (max(sum(layer_s[a:b]) for a, b in pairwise([0, *cut, len(layer_s)]))
                      for cut in (min(ways, key=lambda c: max(cuts_checks._sums(layer_s, c))),
                                  solution.cuts(layer_s, stages)))  # fmt: skip
        assert mine == pytest.approx(best)
        none = tuple(0.0 for _ in layer_s)
        lab = partition.choose(partition.Costs(tuple(layer_s), none, none), stages)
        assert max(cuts_checks._sums(layer_s, lab)) == pytest.approx(best)


def test_each_way_of_slipping_is_wrong_somewhere():
    for slip, what, _ in cuts_checks.SLIPS:
        assert any(cuts_checks._wrong(c, slip(list(c[0]), c[1])) for c in cuts_checks.CASES), what


@pytest.mark.parametrize("junk", [None, "abc", 3.0, {}, [None], [[1]], ["a"], [-1], [99], [2, 2], [3, 1]])
def test_junk_for_cuts_is_told(junk):
    said = examine("06.3", lambda layer_s, stages: junk)
    assert said.state == "not yet" and "your code raised" not in said.text


def test_a_loop_inside_of_c_is_ended():
    """It holds Python's lock: in the notebook's own process nothing could interrupt it."""
    text = examine("06.3", lambda layer_s, stages: [sum(range(10**12))]).text
    assert "did not finish within 1 s" in text


def test_ending_the_process_is_told():
    assert "os._exit()" in examine("06.3", lambda layer_s, stages: __import__("os")._exit(1)).text


# -- 06.4


def by_hooks_and_every_nth(x, up, down):
    """No autograd.Function: a hook on a copy of x, a sum in place, hidden features dealt out like cards."""
    entered = x * 1.0
    if entered.requires_grad:
        entered.register_hook(summed)
    mine = torch.arange(dist.get_rank(), up.out_features, dist.get_world_size())
    part = functional.linear((entered @ up.weight[mine].T + up.bias[mine]).clamp(min=0), down.weight[:, mine])
    dist.all_reduce(part.data)
    return part + down.bias


def summed(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total


def by_adding_the_difference(x, up, down):
    """Gradients by algebra: what is not to be followed is detached."""
    size = up.out_features // dist.get_world_size()
    weights = [p.split(size)[dist.get_rank()] for p in (up.weight, up.bias, down.weight.T)]
    entered = x.view_as(x)
    entered.register_hook(summed)
    part = functional.relu(entered @ weights[0].T + weights[1]) @ weights[2]
    return part + (summed(part.detach()) - part.detach()) + down.bias


@pytest.mark.parametrize("right", [by_hooks_and_every_nth, by_adding_the_difference])
def test_other_tensor_parallelism_passes(right):
    passes("06.4", right)


def test_every_hidden_feature_is_used():
    gradient = run(unsplit, False).gradients["up.weight"]
    assert (gradient.abs().sum(1) > 0).all(), "a feature that is never positive has no gradient and no owner"


def _counted():
    calls, t, n = [], torch.ones(4), dist.get_world_size()
    before = dist.ProcessGroup.allreduce
    with watched(calls):
        dist.all_reduce(t)
        dist.all_gather([torch.empty(4) for _ in range(n)], t)
        dist.broadcast(t, 0)
    dist.all_reduce(t)
    return [(c.kind, c.bytes) for c in calls], before is dist.ProcessGroup.allreduce


def test_collectives_are_counted_with_their_bytes():
    for calls, restored in run_on_ranks(_counted, 2):
        assert calls == [("all_reduce", 16), ("all_gather", 32), ("broadcast", 16)] and restored


def _reference_traffic():
    seen = run(solution.parallel_mlp, True)
    return [(c.kind, c.bytes) for c in seen.forward], [(c.kind, c.bytes) for c in seen.backward]


def test_the_reference_needs_one_all_reduce_each_way():
    x = problem()[0]
    assert run_on_ranks(_reference_traffic, 2) == [([("all_reduce", x.nbytes)], [("all_reduce", x.nbytes)])] * 2


@pytest.mark.parametrize("junk", [lambda *_: None, lambda x, up, down: x[0], lambda x, up, down: 1 / 0])
def test_junk_for_an_output_is_told(junk):
    assert examine("06.4", junk).state == "not yet"


def test_an_error_on_a_rank_shows_the_learners_line():
    def parallel_mlp(x, up, down):
        return up(down(x[:, :3]))

    text = examine("06.4", parallel_mlp).text
    assert "shapes cannot be multiplied" in text and "return up(down(x[:, :3]))" in text


@pytest.mark.parametrize("exercise_id", ["06.1", "06.2", "06.3", "06.4"])
@pytest.mark.parametrize("junk", [None, 3, "text", object(), lambda: 1])
def test_what_is_no_such_function_is_told(exercise_id, junk):
    assert examine(exercise_id, junk).state == "not yet" and get_exercise(exercise_id).title
