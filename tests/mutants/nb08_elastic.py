"""Typical mistakes in exercise 08.2: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _way(
    look="one",
    load="all",
    save="zero",
    due=True,
    skip="steps",
    order="epoch",
    part="mine",
    agree="sum",
    number="done",
    unit="all",
    end="last",
    put=True,
):
    """An entry point that is right by default, with as many mistakes as there are arguments."""

    def survive(job):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        found = [job.newest() if rank == 0 or look == "each" else None]
        if look == "one":
            dist.broadcast_object_list(found)
        step = 0
        if found[0] is not None and look != "never":
            step, state = found[0]
            if load == "all" or rank == 0:
                job.load_state(state)
        if skip == "epoch":
            step = step // job.steps_per_epoch * job.steps_per_epoch
        last = job.epochs * job.steps_per_epoch
        goal = step + last if end == "more" and step == last else last
        while step < goal:
            epoch, done = divmod(step, job.steps_per_epoch)
            first = (done + (skip == "one" and found[0] is not None)) * job.batch
            if unit == "rank":
                first = done * (job.batch // 2) * ranks  # right on two ranks only
            batch = job.order(epoch if order == "epoch" else 0)[first : first + job.batch]
            if unit == "rank":
                batch = job.order(epoch)[first : first + job.batch // 2 * ranks]
            job.train(batch[rank::ranks] if part == "mine" else batch)
            step += 1
            stop = torch.tensor(float(job.stopping()))
            if agree == "sum":
                dist.all_reduce(stop)
            elif agree == "never":
                stop.zero_()
            if (rank == 0 or save == "every") and (
                (due and step % job.save_every == 0) or (due and step == goal) or (put and stop > 0)
            ):
                job.save(step if number == "done" else step - 1, job.state())
            if stop > 0:
                return

    return survive


def _only_the_model(job):
    load = job.load_state
    job.load_state = lambda state: load({**job.state(), "weights": state["weights"]})
    _way()(job)


MUTANTS = {
    "08.2": {
        "each rank looks for itself": (_way(look="each"), "does not see the newest file yet"),
        "rank 0 alone loads": (_way(load="zero"), "other weights than each other"),
        "every rank saves": (_way(save="every"), "rank 1 saves, too"),
        "the epoch begins again": (_way(skip="epoch"), "the epoch begins again from its first batch"),
        "the order of epoch 0 in all": (_way(order="first"), "has the order of epoch 0"),
        "position in samples of a rank": (_way(unit="rank"), "split among the ranks there are now"),
        "one rank leaves": (_way(agree="alone"), "rank 0 does not know, and waits for it"),
        "stops without a save": (_way(put=False), "does not save it"),
    },
}
RARER = {
    "never looks for a checkpoint": (_way(look="never"), "begins again at its first step"),
    "the optimizer is forgotten": (_only_the_model, "load all of the state"),
    "nothing is saved": (_way(due=False, put=False), "nothing is ever saved"),
    "the whole batch on each rank": (_way(part="all"), "every rank trains on the whole batch"),
    "the number of the step before": (_way(number="before"), "nothing was saved under that number"),
    "nobody looks at the notice": (_way(agree="never"), "the job trains on to its end"),
    "a finished job trains on": (_way(end="more"), "is started again, and trains"),
}
"""More mistakes of other kinds, tried by tests/test_exercise_nb08_elastic.py."""
