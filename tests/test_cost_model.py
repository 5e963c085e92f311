"""The cost model by hand: bytes, seconds at their limits, known choices; FSDP2's bytes on real tensors."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labs.common.cost_model import cards, choose, seconds, waiting
from labs.common.cost_model.choose import best, by_scheme, cost, costs, fewest_gpus, grid, plans, remedies
from labs.common.cost_model.jobs import Job, Plan, shape
from labs.common.cost_model.memory import REMEDIES, activation_bytes, sent_per_parameter, states_bytes
from labs.common.cost_model.seconds import INFINITE, Cluster, Link, Work, all_reduce_s, gather_s, step
from labs.common.data_parallel.scaling import ring_all_reduce_bytes
from labs.common.sharding.fake_ranks import fake_job
from labs.kit import hardware
from labs.kit.errors import BadInput

JOB = Job(parameters=1e9, batch=32, seq=1024, layers=20, hidden=2048, vocabulary=1000)
ONE_NODE = Cluster(2, 8, 1e14, Link(25e9), gap_s=0.0, spread=0.0, memory_bytes=80e9)
NVLINK, NETWORK = Link(200e9, 5e-6), Link(20e9, 10e-6)
CLUSTER = Cluster(64, 8, 1e14, NVLINK, NETWORK, 1e12)
WORK = Work.of(Job(1e9, 512, 1024, 20, 2048))
FREE = replace(CLUSTER, inside=INFINITE, between=INFINITE, memory_bytes_s=math.inf, gap_s=0.0, spread=0.0)
ALONE = cost(JOB, ONE_NODE, Plan())


def test_states_of_7_billion_parameters_by_hand():
    """Adam in FP32: 16 bytes and a 16-bit copy; DDP's buckets add 4. FSDP2 on 8: an eighth, and two layers at work."""
    job = Job(7e9, 64, 2048, layers=32, hidden=4096)
    assert states_bytes(job, Plan()) == 126e9
    assert states_bytes(job, Plan(data=8)) == 154e9, "18 + 4 bytes per parameter: .grad and the buckets"
    assert states_bytes(job, Plan(data=8, bucket_view=True)) == 126e9
    fsdp = states_bytes(job, Plan(data=8, sharded=True))
    assert fsdp == pytest.approx(14e9 + 7e9 / 32 * (2 * 2 + 2 + 4)) and fsdp == pytest.approx(16.1875e9)
    assert states_bytes(job, Plan(tensor=8)) == states_bytes(job, Plan(pipeline=8)) == 126e9 / 8


def test_states_of_other_formats_by_hand():
    by_name, n, layer = {s.name: s for s in REMEDIES}, JOB.parameters, JOB.parameters / JOB.layers
    half = Plan(data=2, sharded=True)
    assert states_bytes(JOB, Plan(), by_name["8-bit Adam"]) == pytest.approx(n * (8 + 2 * (1 + 4 / 256)) + 2 * n)
    offload = by_name["FSDP2 with CPU offload"]
    assert states_bytes(JOB, half, offload) == 10 * layer and offload.host_bytes * n == 16e9
    lora = by_name["LoRA of rank 16 on BF16 weights"]
    h, r, widths = JOB.hidden, 16, [(1, 1)] * 4 + [(1, 4), (4, 1)]
    adapters = JOB.layers * sum(r * h * (a + b) for a, b in widths)
    assert states_bytes(JOB, Plan(), lora) == states_bytes(JOB, Plan(data=2), lora) == 2 * n + 16 * adapters


def test_activations_by_hand():
    tokens = 32 * 1024
    assert ALONE.activation_bytes == tokens * (20 * 34 * 2048 + 10 * 1000)
    assert activation_bytes(JOB, Plan(micro_batches=4)) == ALONE.activation_bytes / 4
    assert activation_bytes(JOB, Plan(recompute=True)) < ALONE.activation_bytes / 5


def test_every_scheme_can_cut_the_batch_so_no_one_is_charged_for_all_its_logits():
    """The naive split needs no more memory than a pipeline: its one micro-batch is that of every other scheme."""
    wide = replace(JOB, vocabulary=50257)
    naive, piped = (Plan(pipeline=2, micro_batches=32, naive=n) for n in (True, False))
    logits = 1024 * 50257 * 10
    assert activation_bytes(wide, naive) == 1024 * 10 * 34 * 2048 + logits
    assert activation_bytes(wide, naive) <= activation_bytes(wide, piped)
    for scheme in ("naive split", "pipeline", "tensor", "DDP", "FSDP2"):
        smallest = max(p.micro_batches * p.data for p in plans(wide, 2) if p.scheme == scheme)
        assert smallest == wide.batch, f"{scheme} can run one sequence at a time"


class Live(TorchDispatchMode):
    """The most bytes of storages that were alive at any operation: what FSDP2 frees shrinks to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs, out)):
            if isinstance(t, torch.Tensor) and not hasattr(t, "full_tensor"):
                storage = t.untyped_storage()
                self.seen[storage._cdata] = weakref.ref(storage)
        alive = [s for s in (r() for r in self.seen.values()) if s is not None]
        self.most = max(self.most, sum(s.nbytes() for s in alive))
        return out


def test_torch_s_fsdp2_holds_the_copies_and_gradients_that_are_counted():
    """One of 64 fake ranks: 8 layers of 256 x 256, whose activations are next to nothing."""
    width, layers, ranks = 256, 8, 64
    with fake_job(ranks):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (ranks,))
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        for unit in (*module, module):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        for _ in range(2):
            with Live() as live:
                module(torch.ones(1, width)).sum().backward()
    n = layers * width**2
    counted = states_bytes(Job(n, ranks, 1, layers, width, 1), Plan(data=ranks, sharded=True))
    assert live.most == pytest.approx(counted - 8 * n / ranks, rel=0.06), "no optimizer has made moments yet"


def test_bytes_sent_by_hand():
    assert sent_per_parameter(8, False) == 7 / 8 * 8 and sent_per_parameter(8, True) == 7 / 8 * (2 + 2 + 4)
    assert sent_per_parameter(8, True, weight=4) / sent_per_parameter(8, False) == 1.5


# -- seconds


def test_one_gpu_is_its_arithmetic_its_gaps_and_its_update():
    alone = step(WORK, CLUSTER, Plan())
    assert alone.arithmetic_s == pytest.approx(512 * 1024 * (6e9 + 12 * 20 * 2048 * 1024) / 1e14)
    assert alone.overhead_s == pytest.approx(45 * 20 * CLUSTER.gap_s + 30 * 1e9 / 1e12)
    assert alone.bubble_s == alone.exposed_s == alone.waiting_s == 0


@pytest.mark.parametrize("sharded", [False, True])
def test_links_and_ranks_that_cost_nothing_scale_perfectly(sharded):
    one = step(WORK, FREE, Plan()).step_s
    for n in (2, 8, 64, 4096):
        plan = Plan(data=n, sharded=sharded)
        assert step(WORK, replace(FREE, gpus=n), plan).step_s == pytest.approx(one / n)
        assert seconds.efficiency(WORK, replace(FREE, gpus=n), plan) == pytest.approx(1)


def test_the_ring_by_hand():
    """8 GPUs, 1 GB, 10 GB/s: each sends 2 x 7/8 GB, so 175 ms."""
    ring = all_reduce_s(1e9, 8, 8, Link(1e10), NETWORK)
    assert ring == pytest.approx(0.175) == ring_all_reduce_bytes(1e9, 8) / 1e10
    assert gather_s(1e9, 8, 8, Link(1e10), NETWORK) == pytest.approx(0.0875)
    assert all_reduce_s(1e9, 1, 8, NVLINK, NETWORK) == gather_s(1e9, 1, 8, NVLINK, NETWORK) == 0


def test_between_nodes_an_all_reduce_sends_each_node_s_sum_once():
    """Four nodes of 8 B200, 4 GiB: 36.5 GB/s per GPU between nodes, as ml-engineering works out from its 377 GB/s."""
    size, n = 4 * 2**30, 32
    assert all_reduce_s(size, n, 8, INFINITE, Link(36.52e9)) == pytest.approx(
        2 * (n - 1) / n * size / 377.34e9, rel=0.01
    )


def test_the_faster_of_two_ways_is_taken():
    """Two nodes: two levels send half of a flat ring's bytes between them, but they also pass the links inside."""
    slow_inside = all_reduce_s(1e9, 16, 8, Link(10e9), Link(10e9))
    assert slow_inside == pytest.approx(2 * 15 / 16 * 1e9 / 10e9), "flat: at the pace of the links inside"
    slow_network = all_reduce_s(1e9, 16, 8, INFINITE, Link(1e8))
    assert slow_network == pytest.approx(1e9 / 8 / 1e8), "two levels: 2 (N-1)/N of an eighth"


@pytest.mark.parametrize(("stages", "micro", "idle"), [(2, 1, 1 / 2), (4, 8, 3 / 11), (4, 32, 3 / 35)])
def test_the_bubble_by_hand(stages, micro, idle):
    """(p-1) / (m+p-1) of a stage's time; a naive split waits for p-1 of p, whatever m is."""
    c = step(Work.of(JOB), ONE_NODE, Plan(pipeline=stages, micro_batches=micro))
    assert c.bubble_s / (c.bubble_s + c.arithmetic_s) == pytest.approx(idle)
    naive = step(Work.of(JOB), ONE_NODE, Plan(pipeline=stages, micro_batches=micro, naive=True))
    assert naive.arithmetic_s + naive.bubble_s == pytest.approx(ALONE.step_s) and naive.step_s > ALONE.step_s


def test_gradients_hide_behind_backward_until_the_link_is_too_slow():
    quick, slow = (cost(JOB, replace(ONE_NODE, inside=Link(x)), Plan(data=2)).step for x in (25e9, 1e9))
    assert quick.exposed_s == pytest.approx(25 * 2**20 / 25e9), "the last bucket"
    assert slow.exposed_s == pytest.approx(4e9 / 1e9 - 2 / 3 * ALONE.step_s / 2)
    after = step(replace(WORK, overlap=False), CLUSTER, Plan(data=64))
    assert after.exposed_s == pytest.approx(all_reduce_s(4e9, 64, 8, NVLINK, NETWORK))
    fsdp = cost(JOB, replace(ONE_NODE, inside=Link(1e8)), Plan(data=2, sharded=True)).step
    assert fsdp.exposed_s == pytest.approx(0.5 * (2 + 2 + 4) * 1e9 / 1e8 - fsdp.arithmetic_s)


def test_tensor_parallel_sends_four_all_reduces_of_the_activations_per_layer():
    c, again = (cost(JOB, ONE_NODE, Plan(tensor=2, recompute=r)).step for r in (False, True))
    assert c.exposed_s == pytest.approx(4 * 20 * (2 * 2048 * 32 * 1024) / 25e9)
    assert again.exposed_s == pytest.approx(1.5 * c.exposed_s)


def test_the_expected_maximum_is_that_of_random_numbers():
    numbers = np.random.default_rng(0).normal(size=(20_000, 128))
    for n in (2, 8, 128):
        assert waiting.of_normal(n) == pytest.approx(numbers[:, :n].max(axis=1).mean(), abs=0.03)


PLANS = st.sampled_from(
    [Plan(64), Plan(64, sharded=True), Plan(8, tensor=8), Plan(8, 2, 4, True, 4), Plan(16, 4, micro_batches=8)]
)


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, level=st.sampled_from(["inside", "between"]), factor=st.floats(1.1, 1000))
def test_a_faster_link_never_costs_time_and_a_slower_one_never_saves_it(plan, level, factor):
    link = getattr(CLUSTER, level)
    faster = replace(CLUSTER, **{level: replace(link, bytes_s=link.bytes_s * factor)})
    later = replace(CLUSTER, **{level: replace(link, latency_s=link.latency_s * factor)})
    now = step(WORK, CLUSTER, plan).step_s
    assert step(WORK, faster, plan).step_s <= now <= step(WORK, later, plan).step_s


@pytest.mark.parametrize("sharded", [False, True])
def test_more_gpus_never_do_more_each(sharded):
    """Weak scaling: the batch grows with the GPUs."""
    some = [Plan(data=2**k, sharded=sharded and k > 0) for k in range(13)]
    done = [seconds.efficiency(replace(WORK, batch=8 * p.data), replace(CLUSTER, gpus=p.data), p) for p in some]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(done)) and 0 < done[-1] < done[0] <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(plan=PLANS, measured=st.floats(0.3, 100))
def test_a_calibrated_model_gives_back_what_was_measured(plan, measured):
    found = seconds.calibrated(WORK, CLUSTER, plan, measured)
    assert step(WORK, found, plan).step_s == pytest.approx(measured, rel=1e-6)


def test_a_step_that_no_arithmetic_explains_is_refused():
    with pytest.raises(BadInput, match="is too short"):
        seconds.calibrated(WORK, replace(CLUSTER, between=Link(1e7)), Plan(data=64), 0.1)


# -- cards


@pytest.mark.parametrize(
    ("card", "gpus", "gb_s", "pcie"),
    [
        ("A100 80GB PCIe", 2, 300, False),
        ("A100 80GB PCIe", 8, 32, True),
        ("H100 SXM", 8, 450, False),
        ("L4", 8, 32, True),
    ],
)
def test_a_card_s_links_are_its_own_and_a_bridge_joins_two(card, gpus, gb_s, pcie):
    found = cards.cluster(cards.require_card(card), gpus, 8, 25, 1e14)
    assert found.inside.bytes_s == pytest.approx(0.8 * gb_s * 1e9) and found.pcie == pcie
    assert found.inside.latency_s == (5.7e-6 if pcie else 3.4e-6)
    assert cards.cluster(cards.require_card(card), gpus, 8, 25, 1e14, link_gb_s=9.0).inside.bytes_s == 9e9


def test_a_card_without_a_source_is_refused_in_one_line():
    assert {"H100 SXM", "A100 80GB SXM", "L4", "T4", "B200 SXM"} <= set(cards.known())
    for name, words in (("V100 SXM2", "no memory"), ("RTX 3090", "no link"), ("H1000", "did you mean")):
        with pytest.raises(BadInput, match=words) as e:
            cards.require_card(name)
        assert "\n" not in str(e.value)
    assert cards.memory_bytes(hardware.spec("L4")) == 23034 * 2**20, "what nvidia-smi prints"


# -- choices


def test_every_plan_uses_all_gpus_and_divides_the_batch():
    found = list(plans(JOB, 4))
    assert {p.ranks for p in found} == {4}
    assert all(JOB.batch % (p.data * p.micro_batches) == 0 for p in found)
    expected = {"DDP", "FSDP2", "pipeline", "naive split", "tensor", "DDP x pipeline", "DDP x tensor"}
    assert expected <= {p.scheme for p in found}
    assert all(p.data == 1 for p in plans(replace(JOB, batch=3), 2))
    assert {p.tensor for p in plans(replace(JOB, hidden=1000), 4)} == {1}, "no whole heads"
    assert len(list(plans(replace(JOB, batch=10**9), 1))) == 200, "divisors are not searched one by one"


def test_the_choice_where_it_is_known():
    choose_for = lambda cluster: best(costs(JOB, cluster), choose.limit_bytes(cluster))  # noqa: E731
    assert choose_for(ONE_NODE).plan.scheme == "DDP", "fits, and the link is fast"
    small = replace(ONE_NODE, memory_bytes=20e9)
    assert choose_for(small).plan.sharded, "states do not fit one GPU"
    assert choose_for(replace(small, inside=Link(2e8))).plan.pipeline == 2, "a pipeline sends least"
    assert choose_for(replace(ONE_NODE, memory_bytes=1e9)) is None


def test_no_choice_uses_the_headroom():
    """A DDP step of 22 bytes per parameter at 95 % of the memory is too large; the bucket view brings it below 90 %."""
    tiny = replace(JOB, batch=2, seq=16)
    exact = cost(tiny, ONE_NODE, Plan(data=2)).memory_bytes
    for share, view in ((0.95, True), (0.89, False)):
        cluster = replace(ONE_NODE, memory_bytes=exact / share)
        ddp = [c for c in costs(tiny, cluster) if c.plan.scheme == "DDP"]
        found = best(ddp, choose.limit_bytes(cluster))
        assert found.plan.bucket_view == view and found.memory_bytes <= 0.9 * cluster.memory_bytes


def test_what_would_help_where_nothing_fits():
    small = replace(ONE_NODE, memory_bytes=6e9)
    assert best(costs(JOB, small), choose.limit_bytes(small)) is None
    assert {s.name.split()[0] for s, _, size in remedies(JOB, small) if size <= 5.4e9} == {"FSDP2", "LoRA"}
    n = fewest_gpus(JOB, small)
    fits = lambda gpus: best(costs(JOB, replace(small, gpus=gpus)), 5.4e9) is not None  # noqa: E731
    assert fits(n) and not fits(n // 2)
    assert fewest_gpus(JOB, replace(small, memory_bytes=1e6), most=64) is None


def test_the_table_has_one_row_per_scheme_those_that_fit_first():
    cluster = replace(ONE_NODE, gpus=4, memory_bytes=12e9)
    table = by_scheme(costs(JOB, cluster), cluster)
    assert table["scheme"].is_unique and set(table["fits"]) == {True, False}
    assert table["fits"].is_monotonic_decreasing and table[table["fits"]]["step_s"].is_monotonic_increasing
    total = table["states_gb"] + table["activations_gb"]
    assert ((total <= 10.8) == table["fits"]).all()
    parts = [c for c in table if c.endswith("_s") and c != "step_s"]
    assert np.allclose(table[parts].sum(axis=1), table["step_s"])


def test_the_grid_asks_for_real_cards_and_agrees_with_the_choice():
    found = grid([1e8, 7e9, 3e10], ["L4", "H100 SXM"], gpus=2, batches=(8, 64))
    assert len(found) == 3 * 2 * 2 and set(found["link"]) == {"PCIe", "NVLink 4"}
    assert (found["gb_per_gpu"].dropna() <= found["limit_gb"][found["gb_per_gpu"].notna()]).all()
    large = found[(found["parameters"] == 3e10) & (found["card"] == "L4")]
    assert set(large["scheme"]) == {"nothing fits"} and all("CPU offload" in r for r in large["remedies"])
    with pytest.raises(BadInput, match="no link"):
        grid([1e8], ["RTX 3090"])


@pytest.mark.parametrize("parameters", [1e6, 7e9, 1.75e11])
def test_the_assumed_shape_has_about_these_parameters(parameters):
    layers, hidden = shape(parameters)
    assert 12 * layers * hidden**2 == pytest.approx(parameters, rel=0.25) and hidden % 64 == 0
