"""The experiments of notebook 03: what they count, and what they make of a record."""

import math

import pytest

from labs import comm_overlap, data_parallel, ddp_bugs, speedup_map
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records


@pytest.fixture(scope="module")
def smoke():
    return {
        "data_parallel": launch("data_parallel", 2, model="cnn", batch_size=4, smoke=True, oversubscribe=True),
        "comm_overlap": launch("comm_overlap", 2, width=1024, layers=3, batch_size=4, smoke=True, oversubscribe=True),
        "speedup_map": launch("speedup_map", 2, widths=(16, 32), batch_sizes=(2,), smoke=True, oversubscribe=True),
        "ddp_bugs": launch("ddp_bugs", 2, images=128, oversubscribe=True),
    }


@pytest.mark.parametrize("lab", [data_parallel, comm_overlap, speedup_map, ddp_bugs], ids=lambda lab: lab.__name__)
def test_an_answer_follows_from_a_smoke_run(smoke, lab):
    run = smoke[lab.__name__.removeprefix("labs.")]
    assert all(sentence.endswith(".") for sentence in lab.answer(run))
    if hasattr(lab, "category"):
        assert lab.category(run) in ("faster", "slower", "inconclusive", "right", "wrong")


def test_rates_of_copies_add_up_and_the_speedup_is_paired():
    rates = {"single": (100.0, 200.0), "copies": (180.0, 360.0), "ddp": (150.0, 300.0)}
    records = Records(Record("x", "samples_per_s", "1/s", r, case={"way": way}) for way, r in rates.items())
    assert data_parallel.speedup(records).value == pytest.approx(1.5)
    assert data_parallel.speedup(records, "ddp", "copies").value == pytest.approx(150 / 180)
    assert data_parallel.category(records) == "faster"


def test_default_buckets_are_torchs_and_all_gradients_travel(smoke):
    run = smoke["comm_overlap"]
    layer = 4 * 1024 * 1025
    sent = {way: [] for way in (comm_overlap.ONE, comm_overlap.MANY)}
    for r in run.where("span_s", part="exchange"):
        if r.layout["rank"] == 0:
            sent[r.case["way"]].append(r.case["bytes"])
    assert sent[comm_overlap.ONE] == [3 * layer] and run.one("gradient_bytes").value == 3 * layer
    assert sent[comm_overlap.MANY] == [layer, 2 * layer], "the first bucket closes above 1 MiB, the second below 25"


def test_a_bucket_waits_until_every_rank_has_filled_it(smoke):
    run = smoke["comm_overlap"]
    for way in (comm_overlap.ONE, comm_overlap.MANY):
        for part in ("wait", "exchange"):
            assert all(begin <= end for begin, end in (r.samples for r in run.where("span_s", way=way, part=part)))
        starts = {}
        for r in run.where("span_s", way=way, part="exchange"):
            starts.setdefault(r.case["number"], set()).add(round(r.samples[0], 9))
        assert all(len(both) == 1 for both in starts.values()), "both ranks exchange from the same moment on"


def cell(width, batch_size, single, ddp, gradient_mb):
    case = {"width": width, "batch_size": batch_size, "gradient_mb": gradient_mb}
    layout = {"world_size": 2}
    return [
        Record("m", "step_s", "s", [s * k for k in (0.99, 1.0, 1.01)], case={"way": way} | case, layout=layout)
        for way, s in (("single", single), ("ddp", ddp))
    ]


def test_the_map_is_predicted_from_its_smallest_batches():
    added = {64: 0.002, 128: 0.003}  # 1 ms + 1 ms per MB
    records = Records(
        r
        for width, mb in ((64, 1.0), (128, 2.0))
        for batch_size, single in ((8, 0.001), (512, 0.02))
        for r in cell(width, batch_size, single, single + added[width], mb)
    )
    rows = speedup_map.speedups(records)
    for row, guess in zip(rows, speedup_map.predicted(rows, 2), strict=True):
        assert math.isclose(guess, row["speedup"].value, rel_tol=1e-6)
    assert speedup_map.category(records) == "right"
    wrong = Records(r for r in records if r.case["batch_size"] == 8) + cell(64, 512, 0.02, 0.05, 1.0)
    assert speedup_map.category(wrong) == "wrong"


def test_each_bug_has_one_sign_that_gives_it_away(smoke):
    count = {(r.case["case"], r.case["sign"]): r.value for r in smoke["ddp_bugs"].where("count")}
    cases = {case for case, _ in count}
    odd = {
        case: {sign for (c, sign), value in count.items() if c == case and value != count["right", sign]}
        for case in cases - {"right"}
    }
    assert odd.pop("bypassed") == {"ranks' weights agree", "gradients exchanged per step"}
    assert odd == {
        "no sampler": {"steps per epoch"},
        "no set_epoch": {"next epoch has the same order"},
        "seed per rank": {"different images per epoch"},
        "forward outside no_sync": {"gradients exchanged per step"},
    }


@pytest.mark.parametrize(
    ("lab", "values", "words"),
    [
        ("data_parallel", {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ("data_parallel", {"block_s": 0.0}, "block_s must be more than 0, not 0.0"),
        ("data_parallel", {"model": "resnet"}, "there is no model 'resnet'"),
        ("comm_overlap", {"rounds": 1}, "rounds must be at least 2"),
        ("speedup_map", {"widths": ()}, "widths must hold positive numbers"),
        ("ddp_bugs", {"images": 100}, "images must be a multiple of 64"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(lab, values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch(lab, nproc=2, oversubscribe=True, **values)
    assert "\n" not in str(e.value)
