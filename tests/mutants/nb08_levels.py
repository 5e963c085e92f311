"""Typical mistakes in exercise 08.1: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labs.chapters.nb08 import solution_levels as solution


def _flat(x, inside, across, i, a):
    dist.all_reduce(x)
    return 0.0


def _whole_across(x, inside, across, i, a):
    dist.all_reduce(x, group=inside)
    dist.all_reduce(x, group=across)
    return 0.0


def _leader(x, inside, across, i, a):
    node = dist.get_process_group_ranks(inside)
    dist.reduce(x, node[0], group=inside)
    if dist.get_rank() == node[0]:
        dist.all_reduce(x, group=across)
    dist.broadcast(x, node[0], group=inside)
    return 0.0


def _not_in_place(x, *about):
    return solution.two_levels(x.clone(), *about)


def _only_inside(x, inside, across, i, a):
    dist.all_reduce(x, group=inside)
    return 0.0


def _only_across(x, inside, across, i, a):
    dist.all_reduce(x, group=across)
    return 0.0


def _mean(x, *about):
    seconds = solution.two_levels(x, *about)
    x /= dist.get_world_size()
    return seconds


def _not_put_together(x, inside, across, i, a):
    own = torch.empty_like(x[: len(x) // inside.size()])
    dist.reduce_scatter(own, list(x.clone().chunk(inside.size())), group=inside)
    dist.all_reduce(own, group=across)
    x.chunk(inside.size())[inside.rank()].copy_(own)
    return 0.0


def _wrong_group(x, inside, across, i, a):
    return solution.two_levels(x, across, inside, i, a)


def _seconds(wrong):
    def two_levels(x, inside, across, i, a):
        solution.two_levels(x, inside, across, i, a)
        return wrong(x.nbytes, inside.size(), across.size(), i, a)

    return two_levels


def _in(s, k, i):
    return 2 * (k - 1) / k * s / i


def _out(s, m, a):
    return 2 * (m - 1) / m * s / a


MUTANTS = {
    "08.1": {
        "flat": (_flat, "one flat ring over all ranks"),
        "whole vector across": (_whole_across, "every rank sends a whole vector across"),
        "one leader for each node": (_leader, "one rank of each node does it for all"),
        "not in place": (_not_in_place, "nothing was written into it"),
        "a card for each rank": (_seconds(lambda s, k, m, i, a: _in(s, k, i) + _out(s, m, a) / k), "share one network"),
        "the longer of two": (_seconds(lambda s, k, m, i, a: max(_in(s, k, i), _out(s, m, a))), "longer of the two"),
        "inside is free": (_seconds(lambda s, k, m, i, a: _out(s, m, a)), "it is fast, not free"),
        "not put together": (_not_put_together, "were not put together again"),
    },
}

# Rarer ones, of kinds that the eight above are near to
MORE = {
    "08.1": {
        "inside only": (_only_inside, "the other nodes' numbers are missing"),
        "across only": (_only_across, "the ranks of its own node are missing"),
        "mean": (_mean, "the sum is asked"),
        "half": (_seconds(lambda s, k, m, i, a: (_in(s, k, i) + _out(s, m, a)) / 2), "half of it"),
        "numbers for bytes": (_seconds(lambda s, k, m, i, a: (_in(s, k, i) + _out(s, m, a)) / 4), "number has four"),
        "bits": (_seconds(lambda s, k, m, i, a: 8 * (_in(s, k, i) + _out(s, m, a))), "byte/s for bit/s"),
        "the flat ring's time": (_seconds(lambda s, k, m, i, a: _out(s, m * k, min(i, a))), "of one flat ring"),
        "no number": (_seconds(lambda s, k, m, i, a: None), "not a number of seconds"),
    },
}
