"""Sums over ranks by hand: right for every size and number of ranks, with the bytes that the closed forms say."""

import pytest

from labs import point_to_point
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.parts.timing.collectives import LatencyBandwidth


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
def run(request):
    return launch("point_to_point", nproc=request.param, oversubscribe=True, smoke=True, sizes=(4100, 1_200_000))


def test_every_way_gives_the_sum(run):
    assert len(run.where("max_error")) == 6
    assert all(r.value == 0 for r in run.where("max_error"))


def test_counted_bytes_are_the_closed_form(run):
    for way in point_to_point.WAYS:
        for size in (4100, 1_200_000):
            measured, modelled = run.where("sent_bytes", way=way, size=size)
            assert measured.samples == pytest.approx(modelled.samples, abs=1e-6)
            assert len(measured.samples) == run[0].layout["world_size"]


def test_tcp_carried_no_less_and_little_more(run):
    for r in run.where("tcp_sent_bytes", size=1_200_000):
        counted = run.where("sent_bytes", **r.case)[0].samples
        assert all(0 < tcp - sent < 0.01 * sent + 2000 for tcp, sent in zip(r.samples, counted, strict=True))


def test_times_and_fits_are_there(run):
    assert all(r.value > 0 for r in run.where("seconds"))
    assert {r.case["of"] for r in run.where("bandwidth_b_s")} == {"message", "all_reduce"}
    assert all(r.value >= 0 for r in run.where("latency_s"))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("numbers", [1, 10, 1024])
def test_a_ring_and_a_root_send_as_much_together(ranks, numbers):
    """The root does not send more in total: it sends it from one place."""
    ways = {way: [point_to_point.predict(way, numbers, r, ranks) for r in range(ranks)] for way in point_to_point.WAYS}
    total = {way: sum(sent) for way, sent in ways.items()}
    assert total["hand ring"] == total["root"] == pytest.approx(total["all_reduce"])
    assert ways["root"][0] == 4 * numbers * (ranks - 1)


def test_seconds_by_hand():
    message = LatencyBandwidth(latency_s=1.0, b_s=10.0)
    assert point_to_point.predict_s("root", 40, 4, message) == 6 * 5
    assert point_to_point.predict_s("hand ring", 40, 4, message) == 6 * 2


@pytest.mark.parametrize("values", [{"sizes": (4096,)}, {"sizes": (4096, 4097)}, {"sizes": (0, 4)}, {"rounds": 0}])
def test_bad_values(values):
    with pytest.raises(BadInput):
        point_to_point.Config(**values)


def test_one_rank_is_one_line():
    with pytest.raises(BadInput, match="use nproc=2"):
        launch("point_to_point", nproc=1, smoke=True)
