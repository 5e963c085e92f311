"""Tensor parallelism: one process's gradient, as many bytes as the closed form says, and what cannot be cut."""

import pytest
import torch

from labs import tensor_parallel
from labs.common.sharding import blocks
from labs.common.sharding.blocks import Attention, Mlp
from labs.common.sharding.tensor import CopyToRanks, by_hand, gradient_error, share
from labs.common.sharding.traffic import HEADER_BYTES, sent_bytes
from labs.common.timing.collectives import LatencyBandwidth
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.long), 4])
def run(request):
    return launch("tensor_parallel", nproc=request.param, oversubscribe=True, smoke=True)


def test_closed_forms_by_hand():
    assert tensor_parallel.predict(half_blocks=2, vectors=3, width=5, ranks=2) == {"all_reduces": 2, "sent_bytes": 120}
    assert tensor_parallel.predict(2, 3, 5, ranks=1)["sent_bytes"] == 0
    assert tensor_parallel.predict_activations(vectors=3, width=5, hidden=10) == 4 * 3 * 25
    link = LatencyBandwidth(latency_s=1.0, b_s=10.0)
    assert tensor_parallel.predict_step_s(8.0, half_blocks=2, message=20, ranks=2, link=link) == 4 + 4 * 3
    assert tensor_parallel.predict_step_s(8.0, 2, 20, ranks=1, link=link) == 8


def test_more_ranks_send_more_not_less():
    sent = [tensor_parallel.predict(2, 64, 32, n)["sent_bytes"] for n in (2, 4, 8)]
    assert sent == sorted(sent)


def test_bytes_of_collectives():
    assert [sent_bytes(k, 80, 4) for k in ("all_reduce", "all_gather", "reduce_scatter", "send", "recv")] == [
        120,
        60,
        60,
        80,
        0,
    ]
    assert sent_bytes("reduce_scatter", 80, 4, gloo=True) == 120


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_shares_cover_every_unit_once(ranks):
    for half, size in ((Attention(12, head_size=4, heads=5), 20), (Mlp(8, 33), 33)):
        shares = [share(half, r, ranks) for r in range(ranks)]
        assert [i for s in shares for i in range(size)[s]] == list(range(size))
        lengths = [(s.stop - s.start) // half.unit for s in shares]
        assert max(lengths) - min(lengths) <= 1
        assert all(s.start % half.unit == 0 for s in shares)


def test_more_ranks_than_heads_is_one_line():
    with pytest.raises(BadInput, match=r"^4 heads cannot be shared by 8 ranks: use at most 4$"):
        tensor_parallel.check_layout(tensor_parallel.Config(), 8)


@pytest.mark.parametrize(
    "values",
    [
        {"widths": ()},
        {"rows": (0,)},
    ],
)
def test_bad_values(values):
    with pytest.raises(BadInput):
        tensor_parallel.Config(**values)


def test_rows_that_ddp_and_the_pipeline_cannot_share():
    with pytest.raises(BadInput, match=r"rows 6 cannot be split .* take multiples of 4"):
        tensor_parallel.check_layout(tensor_parallel.Config(rows=(6,)), 2)


def test_block_made_of_halves_computes_the_same():
    from labs.common import models

    torch.manual_seed(0)
    ours, theirs = blocks.char_gpt(seed=3), models.make("char_gpt", 3)
    x, _ = theirs.make_batch(2)
    assert torch.allclose(ours.module(x), theirs.module(x), atol=1e-6)
    numbers = [sum(p.numel() for p in w.module.parameters()) for w in (ours, theirs)]
    assert numbers[0] == numbers[1] == 159_296


def test_gradients_are_those_of_one_process(run):
    errors = run.where("gradient_relative_error")
    assert {(r.case["model"], r.case["split"]) for r in errors} == {
        ("mlp", "even"),
        ("transformer", "even"),
        ("char_gpt", "even"),
        ("mlp", "uneven"),
        ("transformer", "uneven"),
    }
    assert max(r.value for r in errors) <= 1e-6


def test_uneven_sizes_work_by_hand_and_are_refused_by_dtensor(run):
    for model, words in (("mlp", "same reduction dim"), ("transformer", "unflatten")):
        assert run.one("refused", model=model, way="by hand", split="uneven").value == 0
        refused = run.one("refused", model=model, way="dtensor", split="uneven")
        assert refused.value == 1
        assert words in refused.case["error"]


@pytest.mark.parametrize("metric", ["all_reduces", "sent_bytes"])
def test_counted_is_the_closed_form(run, metric):
    found = [r for r in run.where(metric) if r.kind == "measured" and r.case["way"] in ("by hand", "dtensor")]
    assert len(found) == 2 * (2 * 3 + 2)  # phases x (ways x models, and the two uneven ones)
    for r in found:
        modelled = [m for m in run.where(metric, **r.case) if m.kind == "modelled"]
        assert [m.value for m in modelled] == [r.value]


def test_an_input_that_is_not_prepared_costs_two_more_sums_per_attention(run):
    calls = {
        phase: [
            r.value
            for r in run.where("all_reduces", model="transformer", phase=phase, way="dtensor, no prepared input")
        ]
        for phase in ("forward", "backward")
    }
    assert calls == {"forward": [2, 2], "backward": [4, 2]}  # measured, modelled


def test_tcp_carried_these_bytes_and_headers(run):
    for r in run.where("tcp_sent_bytes"):
        counted = sum(m.value for m in run.where("sent_bytes", **r.case) if m.kind == "measured")
        assert 0 < r.value - counted < 0.05 * counted
        assert (r.value - counted) % HEADER_BYTES == 0


def test_memory_of_a_rank(run):
    ranks = run[0].layout["world_size"]
    for model in ("mlp", "transformer"):
        measured = [r for r in run.where("bytes_per_rank", model=model) if r.kind == "measured"]
        whole, part = (
            {r.case["what"]: r.value for r in measured if r.case["mode"] == mode} for mode in ("single", "tensor")
        )
        assert part["gradients"] == part["parameters"]
        assert whole["parameters"] / ranks < part["parameters"] < 1.05 * whole["parameters"] / ranks
        assert part["activations"] > whole["activations"] / ranks  # a half's input is whole on every rank
    for mode in ("single", "tensor"):
        measured, modelled = run.where("bytes_per_rank", model="mlp", mode=mode, what="activations")
        assert measured.value == modelled.value


def test_every_way_is_timed(run):
    assert {r.case["mode"] for r in run.where("step_s")} == {"single", "tensor", "ddp", "pipeline"}
    assert all(r.value > 0 for r in run.where("step_s"))


def _error_without(function):
    """Relative gradient error of a block when the backward of f, or the forward of g, leaves out its sum."""
    import torch.distributed as dist

    from labs.common.sharding.tensor import SumOverRanks

    if function == "f":
        CopyToRanks.backward = staticmethod(lambda ctx, gradient: (gradient, None))
    elif function == "g":
        SumOverRanks.forward = staticmethod(lambda ctx, part, group: part.clone())
    whole, ours = (blocks.workload("transformer", extra=1) for _ in range(2))
    x, y = whole.make_batch(2)
    dist.broadcast(x.data, 0), dist.broadcast(y, 0)
    whole.loss(whole.module(x), y).backward()
    module = by_hand(ours.module, dist.group.WORLD)
    whole.loss(module(x), y).backward()
    return gradient_error(module, whole.module, dist.group.WORLD)


@pytest.mark.parametrize(("without", "least", "most"), [("", 0, 1e-6), ("f", 1e-3, 10), ("g", 1e-3, 10)])
def test_the_check_sees_a_sum_that_is_left_out(without, least, most):
    for error in run_on_ranks(_error_without, 2, without):
        assert least <= error <= most
