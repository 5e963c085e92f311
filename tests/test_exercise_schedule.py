"""Exercise 09.1: right answers of another style pass; rarer mistakes have their name, too."""

from __future__ import annotations

import os

import pytest
from mutants.nb09_schedule import CPU, plan_of, rest, whole
from speeds import first
from torch.profiler import ProfilerAction, profile, record_function, schedule

from labs.chapters.nb09.exercise_schedule import Job, jobs
from labs.kit.check import Mistake, examine


def told(candidate):
    outcome = examine("09.1", candidate)
    assert outcome.state == "not yet", outcome.text
    return outcome.text


def by_hand(job):
    """start() and stop(), a schedule of one's own, and step() at the beginning of a step."""

    def plan(step):
        record = job.slow < step <= job.slow + job.active
        last = step == job.slow + job.active
        return (
            ProfilerAction.RECORD_AND_SAVE
            if last
            else ProfilerAction.RECORD
            if record
            else ProfilerAction.WARMUP
            if step == job.slow
            else ProfilerAction.NONE
        )

    prof, batches = profile(activities=CPU, schedule=plan), job.batches()
    prof.start()
    for _ in range(job.steps):
        prof.step()
        with record_function("data"):
            x = next(batches)
        rest(job, x)
    prof.stop()
    return prof


def wrapped(job):
    """record_function as a decorator, skip_first, more warm-up, and a range around the whole step beside the five."""
    parts = {name: record_function(name)(getattr(job, name)) for name in ("forward", "backward", "update")}
    load = record_function("data")(next)
    exchange = record_function("exchange")(lambda: job.exchange().wait())
    plan = schedule(skip_first=1, wait=0, warmup=job.slow, active=job.active, repeat=1)
    batches = job.batches()
    with profile(activities=CPU, schedule=plan, record_shapes=True) as prof:
        for _ in range(job.steps):
            with record_function("a whole step"):
                parts["backward"](parts["forward"](load(batches)))
                exchange()
                parts["update"]()
            prof.step()
    return prof


def launch_and_wait_apart(job):
    """Two ranges of the same name for one part: where the exchange starts, and where it is waited for."""
    batches = job.batches()
    with profile(activities=CPU, schedule=plan_of(job)) as prof:
        for step in range(job.steps):
            with record_function("data"):
                x = next(batches)
            with record_function("forward"):
                loss = job.forward(x)
            with record_function("backward"):
                job.backward(loss)
            with record_function("exchange"):
                work = job.exchange()
            with record_function("exchange"):
                work.wait()
            with record_function("update"):
                job.update()
            if step < job.steps - 1:
                prof.step()
    return prof


@pytest.mark.parametrize("right", first(1, [by_hand, wrapped, launch_and_wait_apart]))
def test_answers_of_another_style_pass(right):
    outcome = examine("09.1", right)
    assert outcome.state == "passed", outcome.text


def test_rarer_mistakes_are_told():
    assert "no warm-up" in told(lambda job: whole(job, plan_of(job, wait=job.slow, warmup=0)))
    assert "not the profiler" in told(lambda job: whole(job, plan_of(job)).key_averages())
    assert "5 steps are in the trace, and 4" in told(lambda job: whole(job, plan_of(job, active=job.active + 1)))

    def twice(job):
        prof = whole(job, plan_of(job))
        prof.step_num *= 2
        return prof

    assert "24 times in 12 steps" in told(twice)


def test_a_profiler_that_was_never_stopped_is_told():
    def running(job):
        prof, batches = profile(activities=CPU, schedule=plan_of(job, active=50)), job.batches()
        prof.start()
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            rest(job, x)
            prof.step()
        return prof

    assert "still running" in told(running)


def test_another_order_of_the_loop_is_told():
    def update_too_early(job):
        batches = job.batches()
        with profile(activities=CPU, schedule=plan_of(job)) as prof:
            for _ in range(job.steps):
                loss = job.forward(next(batches))
                job.backward(loss)
                work = job.exchange()
                job.update()
                work.wait()
                prof.step()
        return prof

    assert "calls 'update' where 'wait' is due" in told(update_too_early)


def test_leaving_the_process_is_told():
    assert "passed" not in told(lambda job: os._exit(3))


def test_planted_costs_are_paid_and_slow_steps_cost_more():
    for job in jobs():
        assert set(job.ms) == {"data", "forward", "backward", "exchange", "update"}
        assert job.slow + job.active < job.steps and job.slow >= 2
        assert job._cost_ms("data") == 4 * job.ms["data"]
        job.calls += ["data", "forward", "backward", "exchange", "wait", "update"] * job.slow + ["data"]
        assert job._cost_ms("data") == job.ms["data"]


def test_a_wrong_call_is_a_mistake():
    with pytest.raises(Mistake, match="'data' is due"):
        Job(1, 0, 1, dict.fromkeys(("data", "forward", "backward", "exchange", "update"), 0.0)).exchange()
