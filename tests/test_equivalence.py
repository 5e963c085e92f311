"""Parallel equals single process, forward and backward: the heart of the course."""

import pytest
import torch

from labs.common import models
from labs.kit.launch import launch, run_on_ranks


@pytest.fixture(scope="module")
def parity():
    return launch("ddp_parity", nproc=2, oversubscribe=True)


def error(parity, model, dtype, synced=False):
    return parity.one("gradient_relative_error", model=model, dtype=dtype, sync_batchnorm=synced).value


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_ddp_gradient_is_that_of_the_whole_batch(parity, model):
    assert error(parity, model, "float32") <= 1e-6
    assert error(parity, model, "float64") <= 1e-13


def test_batchnorm_is_the_exception_and_syncbatchnorm_the_repair(parity):
    assert error(parity, "cnn_batchnorm", "float64") > 1e-3
    assert error(parity, "cnn_batchnorm", "float64", synced=True) <= 1e-13


def _statistics(width):
    """Output and running statistics of the synchronised layer on this rank's shard, and of torch's on everything."""
    import torch.distributed as dist

    from labs.common.data_parallel.sync_batchnorm import SyncBatchNorm2d

    torch.manual_seed(0)
    x = torch.randn(6, width, 3, 3, dtype=torch.float64)
    ours, whole = (cls(width).double() for cls in (SyncBatchNorm2d, torch.nn.BatchNorm2d))
    shard = slice(dist.get_rank() * 3, dist.get_rank() * 3 + 3)
    difference = (ours(x[shard]) - whole(x)[shard]).abs().max().item()
    running = max(
        (ours.running_mean - whole.running_mean).abs().max(), (ours.running_var - whole.running_var).abs().max()
    )
    return difference, running.item()


def test_synchronised_batchnorm_equals_batchnorm_of_everything():
    for difference, running in run_on_ranks(_statistics, 2, 5):
        assert difference < 1e-12
        assert running < 1e-12


def test_every_model_of_the_course_builds_the_same_twice():
    for name in models.MODELS:
        first, second = (models.build(name, seed=3).module.state_dict() for _ in range(2))
        assert all(torch.equal(first[k], second[k]) for k in first)
