"""What is hidden, exposed and slowed, from made-up timelines; the lab's records; the sentences of notebook 03 turn."""

from __future__ import annotations

import pytest

from labs import data_parallel, ddp_overlap
from labs.chapters.nb03 import figures, figures_overlap, figures_scaling
from labs.common.data_parallel import step_timeline
from labs.kit.check import predict
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


def test_the_timeline_cuts_backward_at_the_last_gradient(monkeypatch):
    drawn = {}
    monkeypatch.setattr(step_timeline, "spans", lambda ax, row, mine, label, color: drawn.setdefault(label, mine))
    monkeypatch.setattr(figures_overlap, "show", lambda fig, alt: drawn.setdefault("alt", alt))
    monkeypatch.setattr(figures_overlap, "say", lambda text: drawn.setdefault("text", text))
    figures_overlap.timeline(overlapped(), predict(50, "share hidden", unit="%"))
    assert drawn["backward waits"] == [pytest.approx((40, 50))]
    assert drawn["gradients"] == [pytest.approx((10, 40))]
    assert drawn["alt"].startswith("80% of the time") and "You predicted 50 %" in drawn["text"]


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


# -- sentences on one launch of data_parallel, and on two


def ways(
    single=0.05,
    copies=0.054,
    ddp=0.056,
    dp=0.07,
    reduce=0.004,
    split="weak",
    shape=NOISE,
    sent=(1001.0, 1001.0),
):
    rows = {"weak": 128, "strong": 64}[split]
    config, shapes = {"model": "mlp", "split": split}, {"single": NOISE}
    found = [
        make("step_s", times(t, shapes.get(mode, shape)), config, mode=mode, ranks=n, batch_per_rank=b)
        for mode, n, t, b in (
            ("single", 1, single, 128),
            ("copies", 2, copies, rows),
            ("ddp", 2, ddp, rows),
            ("dp", 2, dp, rows),
        )
    ]
    found.append(make("all_reduce_s", times(reduce), config))
    return Records(found + ([make("wire_bytes_per_step", sent, config, unit="B")] if sent else []))


@pytest.mark.parametrize(
    ("ddp", "words"), [(0.06, "the price of DDP"), (0.054, "cannot show that DDP costs"), (0.05, "does not say why")]
)
def test_the_price_of_ddp(ddp, words):
    assert words in figures._price_text(figures.share_of_ceiling(ways(ddp=ddp)).scaled(100, "%"))


def test_the_wire_is_held_against_the_ring(monkeypatch):
    monkeypatch.setattr(data_parallel, "predict", lambda config, n: {"ddp sent": 1000.0})
    monkeypatch.setattr(figures, "_config", lambda run: {})
    assert "what the formula says" in figures.wire_text(ways())
    assert "another algorithm" in figures.wire_text(ways(sent=(1500.0, 1500.0)))
    assert "stays untested" in figures.wire_text(ways(sent=()))


@pytest.mark.parametrize(
    ("strong", "words"),
    [
        ({"ddp": 0.025, "copies": 0.025}, "it is not DDP's doing alone"),
        ({"ddp": 0.035}, "Strong lies below weak"),
        ({"ddp": 0.028}, "cannot show"),
    ],
)
def test_strong_beside_weak(strong, words):
    run = ways(split="strong", **({"copies": 0.027} | strong))
    assert words in figures_scaling.strong_beside_weak(run, ways())


# -- the answers of the other labs turn with their records
