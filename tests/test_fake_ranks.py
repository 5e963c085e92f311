"""Fake ranks: the calls of real ones, and bytes by level against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labs.common.sharding.fake_ranks import by_call, crossing_share, fake_job
from labs.common.sharding.traffic import Traffic
from labs.kit.errors import BadInput
from labs.kit.launch import run_on_ranks

WIDTH, LAYERS = 32, 3


def step(mesh) -> list[tuple[str, int, int]]:
    """Calls of one step of a small FSDP2 or HSDP model."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    with Traffic() as traffic:
        model(torch.ones(2, WIDTH)).sum().backward()
    return [(c.kind, c.bytes, c.ranks) for c in traffic.calls if c.ranks > 1]


SHAPES = {"fsdp": ((4,), ("all",)), "hsdp": ((2, 2), ("across", "inside"))}


def real_step(way: str) -> list:
    shape, names = SHAPES[way]
    return step(init_device_mesh("cpu", shape, mesh_dim_names=names))


@pytest.mark.parametrize("way", SHAPES)
def test_four_real_ranks_make_the_calls_of_a_fake_one(way):
    shape, names = SHAPES[way]
    with fake_job(4):
        calls = step(init_device_mesh("cpu", shape, mesh_dim_names=names))
    assert run_on_ranks(real_step, 4, way) == [calls] * 4 and calls


@pytest.mark.parametrize(
    ("members", "per_node", "share"),
    [(range(8), 8, 0), (range(16), 8, 2 / 16), ([3], 1, 0), ([0, 8, 1, 9], 8, 1), ([0, 8, 16, 24], 8, 1)],
)
def test_the_share_of_links_that_cross(members, per_node, share):
    assert crossing_share(list(members), per_node) == share


def test_bytes_out_of_a_node_by_hand():
    """16 ranks on 2 nodes. FSDP2 in FP32: 3 gathers forward, 2 more backward, and 3 reduce-scatters, 15/16 each."""
    layer_gb = 4 * WIDTH**2 / 1e9
    with fake_job(16) as fake:
        mesh = init_device_mesh("cpu", (16,))
        with fake, Traffic() as traffic:
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
            for layer in (*model, model):
                fully_shard(layer, mesh=mesh)
            model(torch.ones(2, WIDTH)).sum().backward()
        table = by_call(traffic, 8).set_index("call")
    gathers = table["calls"]["all_gather"]
    assert gathers in (LAYERS + LAYERS - 1, 2 * LAYERS) and table["calls"]["reduce_scatter"] == LAYERS
    for call, count in (("all_gather", gathers), ("reduce_scatter", LAYERS)):
        assert table["out_gb"][call] == pytest.approx(count * 15 / 16 * layer_gb), "one of a node's 8 links leaves it"
        assert table["inside_gb"][call] == pytest.approx(7 * count * 15 / 16 * layer_gb)


def test_a_fake_job_is_left_whatever_happens_and_is_refused_within_another():
    with pytest.raises(ArithmeticError), fake_job(100, 7):
        assert (dist.get_rank(), dist.get_world_size()) == (7, 100)
        dist.all_reduce(torch.ones(1))  # nobody is there, and nobody waits
        with pytest.raises(BadInput, match="a rank of a job already"), fake_job(2):
            pass
        raise ArithmeticError
    assert not dist.is_initialized()
    with pytest.raises(BadInput, match="no rank 3 among 3"), fake_job(3, 3):
        pass
