"""A training in a library's own loop: the doctor knows whose it is, and names its options."""

import pytest
import torch
from doctor_training import classifier, forever, look_at
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset


def within(module, function):
    """`function`, called by a module of this name."""
    return eval("lambda: function()", {"__name__": module, "function": function})


def training(loader):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in forever(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def rows(**batches):
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.ones(64).long()), **batches)


@pytest.mark.parametrize(
    ("modules", "trainer"),
    [
        ([], ""),
        (["transformers.optimization"], ""),
        (["transformers.trainer", "accelerate.optimizer"], "transformers"),
        (["lightning.pytorch.loops.optimization.automatic"], "Lightning"),
    ],
    ids=",".join,
)
def test_whose_loop_it_is_is_seen_at_a_step(modules, trainer):
    run = lambda: training(rows(batch_size=8))  # noqa: E731
    for module in reversed(modules):
        run = within(module, run)
    assert look_at(run, {}, steps=1).training["trainer"] == trainer


def test_a_batch_samplers_size_is_the_batch_and_a_list_of_batches_has_none():
    sampler = BatchSampler(SequentialSampler(range(64)), 8, drop_last=False)
    assert look_at(lambda: training(rows(batch_sampler=sampler)), {}, steps=1).loader.batch_size == 8
    listed = [[0, 1, 2], [3, 4]]
    assert look_at(lambda: training(rows(batch_sampler=listed)), {}, steps=1).loader.batch_size is None
