"""Typical mistakes in exercise 09.1: {mistake: (function, words that its feedback must hold)}."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile, record_function, schedule

CPU = [ProfilerActivity.CPU]


def plan_of(job, **changed):
    return schedule(**{"wait": job.slow - 1, "warmup": 1, "active": job.active, "repeat": 1} | changed)


def rest(job, x):
    """Everything after the batch, each in its range."""
    with record_function("forward"):
        loss = job.forward(x)
    with record_function("backward"):
        job.backward(loss)
    with record_function("exchange"):
        job.exchange().wait()
    with record_function("update"):
        job.update()


def whole(job, plan, step=True):
    """The right ranges with any schedule."""
    batches = job.batches()
    with profile(activities=CPU, schedule=plan) as prof:
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            rest(job, x)
            if step:
                prof.step()
    return prof


def _no_step(job):
    return whole(job, plan_of(job), step=False)


def _warm_up_recorded(job):
    return whole(job, plan_of(job, wait=0))


def _no_schedule(job):
    return whole(job, None)


def _longer_than_the_loop(job):
    return whole(job, plan_of(job, wait=job.steps))


def _starts_again(job):
    return whole(job, plan_of(job, repeat=0))


def _only_the_launch(job):
    batches = job.batches()
    with profile(activities=CPU, schedule=plan_of(job)) as prof:
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            with record_function("forward"):
                loss = job.forward(x)
            with record_function("backward"):
                job.backward(loss)
            with record_function("exchange"):
                work = job.exchange()
            work.wait()
            with record_function("update"):
                job.update()
            prof.step()
    return prof


def _iterator_only(job):
    with profile(activities=CPU, schedule=plan_of(job)) as prof:
        for x in job.batches():
            with record_function("data"):
                x = x.contiguous()
            rest(job, x)
            prof.step()
    return prof


def _nested(job):
    batches = job.batches()
    with profile(activities=CPU, schedule=plan_of(job)) as prof:
        for _ in range(job.steps):
            with record_function("data"):
                x = next(batches)
            with record_function("forward"):
                loss = job.forward(x)
                with record_function("backward"):
                    job.backward(loss)
            with record_function("exchange"):
                job.exchange().wait()
            with record_function("update"):
                job.update()
            prof.step()
    return prof


MUTANTS = {
    "prof.step() is missing": (_no_step, "prof.step() is never called"),
    "the slow steps are recorded": (_warm_up_recorded, "is one of the first 3, which are slow"),
    "no schedule": (_no_schedule, "without a schedule all 12 steps are in the trace"),
    "longer than the loop": (_longer_than_the_loop, "the trace is empty"),
    "the schedule starts again": (_starts_again, "starts again"),
    "a range around the launch only": (_only_the_launch, "the time is in wait()"),
    "a range beside the iterator": (_iterator_only, "the range must be around that, not around batches()"),
    "nested ranges": (_nested, "your range 'forward' also holds the work of 'backward'"),
}
