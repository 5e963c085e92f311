"""The article's split model: which parameters get a gradient, and what the article's loss does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from labs import broken_split
from labs.broken_split import Config, as_probabilities, predict, untrained
from labs.kit.errors import BadInput
from labs.kit.launch import launch


@pytest.fixture(scope="module")
def records():
    return launch("broken_split", nproc=2, steps=60, seeds=1)


@pytest.mark.parametrize("way", broken_split.Way.__args__)
def test_the_halves_that_get_a_gradient_are_those_predicted(records, way):
    found = [records.one("trained_parameters", way=way, loss="logits", half=h).value for h in ("first", "second")]
    assert tuple(found) == predict(way)


def test_a_half_without_a_gradient_stays_where_it_was_and_training_goes_on(records):
    for way in ("own input", "received"):
        moved = [records.one("moved", way=way, loss="logits", half=h).value for h in ("first", "second")]
        assert moved[0] == 0 < moved[1]
        # Ten classes: the accuracy alone does not give the fault away.
        assert records.one("test_accuracy", way=way, loss="logits").value > 0.3


def test_both_halves_move_if_the_gradient_comes_back(records):
    for half in ("first", "second"):
        assert records.one("moved", way="gradient sent back", loss="logits", half=half).value > 0


def test_the_article_s_loss_starts_higher_and_learns_less(records):
    right, wrong = (
        {m: records.one(m, way="gradient sent back", loss=name).value for m in ("test_accuracy", "first_loss")}
        for name in ("logits", "as probabilities")
    )
    assert right["first_loss"] == pytest.approx(math.log(10), abs=0.3)
    assert wrong["first_loss"] > right["first_loss"] + 1
    assert wrong["test_accuracy"] < right["test_accuracy"]


def test_the_split_model_takes_the_same_step_as_the_whole_one():
    """Gradients sent back by hand are those of one process: one step of both, compared on rank 0 and 1 by moves."""
    split = launch("broken_split", nproc=2, steps=1, seeds=1)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(784, 512), nn.Linear(512, 10))
    start = [p.detach().clone() for p in whole.parameters()]
    x, y, _, _ = broken_split._images(torch.device("cpu"))
    rows = torch.randint(len(x), (64,), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(whole.parameters())
    loss = nn.functional.cross_entropy(whole(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    moves = [float((p - s).detach().norm()) for p, s in zip(whole.parameters(), start, strict=True)]
    norms = [float(s.norm()) for s in start]
    for half, layers in (("first", slice(0, 2)), ("second", slice(2, 4))):
        moved = split.one("moved", way="gradient sent back", loss="logits", half=half).value
        assert moved == pytest.approx(sum(moves[layers]) / sum(norms[layers]), rel=1e-4)
    assert split.one("first_loss", way="gradient sent back", loss="logits").value == pytest.approx(loss.item())


def test_untrained_names_parameters_without_a_gradient_and_with_zeros():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert untrained(module) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module(torch.ones(4, 2)).sum().backward()
    assert untrained(module) == []
    module[0].weight.grad.zero_()
    assert untrained(module) == ["0.weight"]


def test_logits_taken_for_probabilities_get_no_gradient_outside_of_0_and_1():
    logits = torch.tensor([[-2.0, 0.5, 3.0]], requires_grad=True)
    as_probabilities(logits, torch.tensor([0])).backward()
    assert logits.grad[0, 0] == 0 and logits.grad[0, 2] == 0 and logits.grad[0, 1] != 0
    p = torch.tensor([[0.2, 0.3, 0.5]])  # real probabilities: plain cross entropy
    assert as_probabilities(p, torch.tensor([1])).item() == pytest.approx(-math.log(0.3), rel=1e-5)


@pytest.mark.parametrize("values", [{"steps": 0}, {"batch": 0}, {"seeds": 0}])
def test_bad_values_are_one_line(values):
    with pytest.raises(BadInput, match=f"{next(iter(values))} must be at least 1"):
        Config(**values)


@pytest.mark.parametrize("nproc", [1, 3])
def test_a_model_of_two_halves_needs_two_ranks(nproc):
    with pytest.raises(BadInput, match="take 2 ranks"):
        launch("broken_split", nproc=nproc, oversubscribe=True)
