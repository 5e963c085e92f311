"""What is hidden, exposed and slowed, from made-up timelines; the lab's records."""

from __future__ import annotations

import pytest

from labs import ddp_overlap
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

NOISE = (0.998, 1.0, 1.0015, 0.999, 1.001, 1.0005, 0.9995, 1.002)


def make(metric, samples, config=None, lab="data_parallel", world=2, rank=None, device="cpu", unit="s", **case):
    samples = tuple(samples) if isinstance(samples, list | tuple) else (samples,)
    layout = {"world_size": world, "rank": rank, "device": device, "backend": "gloo"}
    return Record(lab, metric, unit, samples, "measured", case, config or {}, layout)


def times(seconds, shape=NOISE):
    return [seconds * k for k in shape]


def overlapped(exposed=0.002, under_way=0.010, slowed=0.003, cost=0.005, step=0.050, world=2):
    def record(metric, samples, **case):
        return make(metric, samples, lab="ddp_overlap", world=world, **case)

    spans = [
        make("timeline_s", s, lab="ddp_overlap", rank=rank, **case)
        for rank in range(world)
        for s, case in (
            ((0.0, 0.01), {"part": "forward"}),
            ((0.01, 0.05), {"part": "backward"}),
            ((0.05, 0.06), {"part": "optimizer"}),
            ((0.02, 0.03), {"part": "all-reduce", "bucket": 0}),
            ((0.04, 0.05), {"part": "all-reduce", "bucket": 1}),
        )
    ]
    return Records(
        [
            record("step_s", times(step + cost), mode="ddp"),
            record("step_s", times(step), mode="no_sync"),
            record("gradients_s", times(0.03 + slowed), mode="ddp"),
            record("gradients_s", times(0.03), mode="no_sync"),
            record("exposed_s", times(exposed)),
            record("under_way_s", times(under_way)),
            *spans,
        ]
    )


def test_parts_of_a_made_up_step():
    found = ddp_overlap.overlap(overlapped())
    assert found.hidden.value == pytest.approx(80)
    assert found.slowed.value == pytest.approx(0.003, rel=0.01)
    assert found.expected.value == pytest.approx(0.005, rel=0.01) == found.cost.value
    assert "as far as this run can show" in ddp_overlap.accounts(found)
    assert "are not what DDP costs" in ddp_overlap.accounts(ddp_overlap.overlap(overlapped(cost=0.02)))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (overlapped(), "what is hidden is not free"),
        (overlapped(slowed=0.0), "That hiding slows the gradients down, this run cannot show"),
        (overlapped(world=1), "needs two"),
    ],
)
def test_the_answer_follows_the_records(records, words):
    assert words in " ".join(ddp_overlap.answer(records))


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_lab_measures_every_part(nproc):
    run = launch("ddp_overlap", nproc=nproc, smoke=True, oversubscribe=True, width=32, layers=3, bucket_cap_mb=0.001)
    spans = run.where("timeline_s", part="all-reduce", bucket=0)
    assert len(spans) == nproc and all(0 < start <= end for start, end in (r.samples for r in spans))
    buckets = {r.case["bucket"]: r.case["bytes"] for r in run.where("timeline_s", part="all-reduce")}
    assert sum(buckets.values()) == 4 * 3 * (32 * 32 + 32) and len(buckets) > 1
    found = ddp_overlap.overlap(run)
    assert found.exposed.value >= 0 and found.under_way.value > 0
    assert list(ddp_overlap.answer(run))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 0}, "width must be at least 1"),
        ({"bucket_cap_mb": 0.0}, "must be positive"),
        ({"model": "resnet"}, "there is no model 'resnet'"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        launch("ddp_overlap", nproc=2, oversubscribe=True, **values)


def test_one_rank_has_no_wire_to_pace():
    with pytest.raises(BadInput, match="no wire to pace: use nproc=2"):
        launch("ddp_overlap", nproc=1, mb_s=100.0)
