"""Meshes of ranks: one process's gradient on every mesh, bytes along each axis as the closed forms say."""

import pytest

from labs import hybrid_parallel
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.parts.sharding import hybrid

MESHES = [(4, 2), (3, 1), *(pytest.param(m, marks=pytest.mark.long) for m in ((4, 1), (2, 2)))]
"""(ranks, dp): 2 x 2, 1 x 3 (uneven stages and heads), 1 x 4, 2 x 1."""


@pytest.fixture(scope="module", params=MESHES, ids=lambda m: f"{m[1]}x{m[0] // m[1]}")
def run(request):
    ranks, dp = request.param
    return launch("hybrid_parallel", nproc=ranks, oversubscribe=True, dp=dp, micro_batches=2, batch_size=8, smoke=True)


def test_gradients_are_those_of_one_process(run):
    errors = run.where("gradient_relative_error")
    assert {r.case["scheme"] for r in errors} == {"data x pipeline", "data x pipeline, torch", "data x tensor"}
    assert max(r.value for r in errors) <= 1e-6


def test_counted_bytes_are_the_closed_form(run, count=6):
    measured = [r for r in run.where("sent_bytes") if r.kind == "measured"]
    assert len(measured) == count
    for r in measured:
        (modelled,) = (m for m in run.where("sent_bytes", **r.case) if m.kind == "modelled")
        assert r.samples == pytest.approx(modelled.samples, rel=1e-12)


def test_tcp_carried_these_bytes(run):
    for r in run.where("tcp_sent_bytes"):
        parts = [m.samples for m in run.where("sent_bytes", **r.case) if m.kind == "measured"]
        for tcp, sent in zip(r.samples, map(sum, zip(*parts, strict=True)), strict=True):
            assert 0 < tcp - sent < 0.01 * sent + 10_000


def test_ranks_that_share_a_core_are_not_timed():
    run = launch("hybrid_parallel", nproc=4, device="cpu", oversubscribe=True, smoke=True, model="convnet", dp=1)
    places = launch_places()
    assert bool(run.where("step_s")) == places
    assert {r.case["scheme"] for r in run.where("gradient_relative_error")} == {
        "data x pipeline",
        "data x pipeline, torch",
    }  # a model without attention has no heads to share
    test_counted_bytes_are_the_closed_form(run, count=4)  # though each cut has messages of another size


def launch_places() -> bool:
    """Whether this machine has a core for each of four ranks."""
    from labs.kit.hardware import usable_affinity

    return len(usable_affinity()) >= 4


def test_closed_form_by_hand():
    """A stage in the middle sends to both neighbours; on 2 copies a ring sends each gradient once."""
    middle = hybrid.predict(on=10, back=20, micro_batches=4, gradients=100, dp=2)
    assert middle == {("rows", "send"): 120, ("columns", "all_reduce"): 100}
    assert hybrid.predict(10, 0, 4, 100, dp=1) == {("rows", "send"): 40, ("columns", "all_reduce"): 0}


def test_micro_batches_that_do_not_divide_the_batch_are_one_line():
    with pytest.raises(BadInput, match=r"batch_size 16 cannot be split into 2 x 3 micro-batches: take a multiple of 6"):
        hybrid_parallel.Config(micro_batches=3)


@pytest.mark.parametrize("values", [{"dp": 0}, {"micro_batches": 0}, {"rounds": 0}, {"batch_size": 0}])
def test_bad_values(values):
    with pytest.raises(BadInput):
        hybrid_parallel.Config(**values)


@pytest.mark.parametrize(
    ("ranks", "values", "words"),
    [
        (3, {}, "nproc=3 cannot hold 2 copies"),
        (40, {}, "layers, not enough for 20 stages"),
        (10, {}, "4 heads cannot be shared by 5"),
    ],
)
def test_a_mesh_that_cannot_be_is_one_line(ranks, values, words):
    with pytest.raises(BadInput, match=words):
        hybrid_parallel.check_layout(hybrid_parallel.Config(**values), ranks)
