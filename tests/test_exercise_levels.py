"""Exercise 08.1: right answers of another style pass, and each typical mistake has its name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mutants.nb08_levels import MORE, MUTANTS
from speeds import first

from labs.common.communication import wire
from labs.kit import check
from labs.two_levels.two_levels import hierarchical_all_reduce

pytestmark = pytest.mark.skipif(not wire.can_pace(), reason="this system does not count what a connection sends")


def examine(candidate):
    return check.examine("08.1", candidate)


def with_tensors(x, inside, across, inside_b_s, across_b_s):
    """With the collectives that take whole tensors, and the seconds as a tensor."""
    hierarchical_all_reduce(x, inside, across)
    k, m = inside.size(), across.size()
    inner, outer = (k - 1) / k / inside_b_s, (m - 1) / m / across_b_s
    return torch.tensor(2 * x.numel() * x.element_size() * (inner + outer), dtype=torch.float64)


def from_messages(x, inside, across, inside_b_s, across_b_s):
    """Every part to the rank that sums it, by messages; across by gathering from the partner ranks in two steps."""
    node, k, me = dist.get_process_group_ranks(inside), inside.size(), inside.rank()
    parts = x.chunk(k)
    arrived = [torch.empty_like(parts[me]) for _ in node]
    works = [dist.isend(parts[r].clone(), node[r]) for r in range(k) if r != me]
    works += [dist.irecv(arrived[r], node[r]) for r in range(k) if r != me]
    for work in works:
        work.wait()
    for r in range(k):
        if r != me:
            parts[me].add_(arrived[r])
    dist.all_reduce(parts[me], group=across)
    whole = [torch.empty_like(parts[me]) for _ in node]
    dist.all_gather(whole, parts[me].contiguous(), group=inside)
    x.copy_(torch.cat(whole))
    size, m = x.nbytes, across.size()
    return 2 * size * ((1 - 1 / k) / inside_b_s + (1 - 1 / m) / across_b_s)


@pytest.mark.parametrize("right", first(1, [with_tensors, from_messages]))
def test_right_answers_pass(right):
    outcome = examine(right)
    assert outcome.state == "passed", outcome.text


@pytest.mark.long
@pytest.mark.parametrize("name", MORE["08.1"])
def test_rarer_mistakes_have_their_name(name):
    candidate, words = MORE["08.1"][name]
    outcome = examine(candidate)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


def test_a_mistake_in_the_seconds_has_its_name_in_every_run():
    candidate, words = MUTANTS["08.1"]["a card for each rank"]
    assert words in examine(candidate).text
