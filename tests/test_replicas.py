"""DataParallel's algorithm with threads: the gradients of one process, and the bytes of its closed form."""

import copy
import os
import threading
from collections import Counter

import pytest
import torch

from labs.common import models
from labs.common.data_parallel import scaling
from labs.common.data_parallel.replicas import ThreadedDataParallel, nbytes


def flat(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def cores(n):
    """`n` cores to pin threads to, one of them more than once if there are too few."""
    have = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    return [have[i % len(have)] for i in range(n)]


@pytest.fixture(params=[("mlp", 2), ("cnn", 3), ("mlp", 1)], ids=str)
def step(request):
    """One step on n threads: the workload, its module before the step, and what was moved."""
    name, n = request.param
    torch.manual_seed(0)
    workload = models.build(name)
    module, whole, moved = workload.module.double(), copy.deepcopy(workload.module.double()), Counter()
    x, y = workload.make_batch(6 * n)
    threaded = ThreadedDataParallel(module, cores(n), moved)
    try:
        loss = threaded.step(x.double(), y, workload.loss)
    finally:
        threaded.close()
    expected = workload.loss(whole(x.double()), y)
    expected.backward()
    return n, module, whole, moved, x.double(), (loss.item(), expected.item())


def test_loss_and_gradients_equal_those_of_one_process(step):
    _, module, whole, _, _, (loss, expected) = step
    assert loss == pytest.approx(expected, rel=1e-12)
    assert (flat(module) - flat(whole)).norm() <= 1e-12 * flat(whole).norm()


def test_bytes_counted_equal_the_closed_form(step):
    n, module, whole, moved, x, _ = step
    parameters, buffers = nbytes(*module.parameters()), nbytes(*module.buffers())
    form = scaling.data_parallel_bytes(parameters, buffers, nbytes(x), nbytes(whole(x)), n)
    assert {phase: moved[f"dp {phase}"] for phase in form} == form
    assert set(moved) <= {f"dp {phase}" for phase in form}


def test_gradients_add_up_as_those_of_any_module():
    workload = models.build("mlp")
    x, y = workload.make_batch(8)
    threaded = ThreadedDataParallel(workload.module, cores(2), Counter())
    threaded.step(x, y, workload.loss)
    once = flat(workload.module).clone()
    threaded.step(x, y, workload.loss)
    threaded.close()
    assert torch.allclose(flat(workload.module), 2 * once, rtol=1e-4, atol=1e-7)


def test_close_ends_the_threads():
    before = threading.active_count()
    workload = models.build("mlp")
    threaded = ThreadedDataParallel(workload.module, cores(2), Counter())
    threaded.step(*workload.make_batch(4), workload.loss)
    assert threading.active_count() > before
    threaded.close()
    assert threading.active_count() == before
