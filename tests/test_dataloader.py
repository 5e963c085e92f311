"""The loader lab: its model, its timeline's source, its formulas, the records of a run, and bad values."""

import math
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from labs import dataloader as lab
from labs.common.loading.tile_training import WIDTHS, TileNet, Trainer, Watched
from labs.common.models import gradient_bytes
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


def test_predictions_by_hand():
    found = lab.predict(model=100, loader=200, one=100, workers=2, cores=2)
    assert found == {"the slower one": 100, "shared cores": pytest.approx(100)}
    found = lab.predict(model=100, loader=80, one=40, workers=4, cores=2)
    assert found == {"the slower one": 80, "shared cores": pytest.approx(2 / (0.01 + 0.025))}
    alone = lab.predict(model=100, loader=100, one=100, workers=0, cores=2)
    assert alone["the slower one"] == pytest.approx(50), "without workers they take turns"


def test_the_model_takes_bytes_and_numbers_alike_and_grows_with_its_width():
    net = TileNet(8)
    images = torch.randint(256, (2, 3, 224, 224), dtype=torch.uint8)
    assert net(images).shape == (2, 9)
    torch.testing.assert_close(net(images), net(images.float()))
    sizes = [gradient_bytes(TileNet(w)) for w in WIDTHS.values()]
    assert sizes == sorted(sizes) and sizes[-1] > 10 * sizes[0]


def test_a_step_trains_and_does_not_touch_the_batch():
    images, labels = torch.randint(256, (4, 3, 224, 224), dtype=torch.uint8), torch.tensor([0, 1, 2, 3])
    trainer = Trainer(8, CPU, seed=0)
    before = [p.clone() for p in trainer.module.parameters()]
    kept = images.clone()
    trainer((images, labels))
    assert all(not a.equal(b) for a, b in zip(before, trainer.module.parameters(), strict=True))
    assert images.equal(kept) and images.dtype == torch.uint8


def test_watched_items_say_who_loaded_them_and_when():
    data = Watched(TensorDataset(torch.arange(8)))
    start = time.perf_counter()
    value, worker, seconds = data[3]
    assert value == 3 and worker == -1 and len(data) == 8
    assert start <= seconds[0] <= seconds[1] <= time.perf_counter()
    found = {int(w) for _, workers, _ in DataLoader(data, 2, num_workers=2) for w in workers}
    assert found == {0, 1}


def test_seconds_of_a_long_uptime_survive_collating():
    """As Python numbers they would be collated to float32, which knows 1/32 s after a week."""
    (_, _, seconds) = next(iter(DataLoader(Watched(TensorDataset(torch.arange(4))), 4)))
    assert seconds.dtype == torch.float64 and seconds.shape == (4, 2)


def rate(way, samples, **case):
    return Record("dataloader", "images_per_s", "1/s", samples, case={"way": way, "batch": 16, **case})


def test_comparisons_put_both_predictions_beside_what_was_measured():
    records = Records(
        [
            rate("loader", [50], workers=0),
            rate("loader", [90], workers=2),
            rate("model", [100], model="even"),
            rate("both", [34], model="even", workers=0),
            rate("both", [60, 62, 64], model="even", workers=2),
            rate("both", [70], model="even", workers=2, prefetch_factor=4),
            rate("sweep", [90], workers=2),
        ]
    )
    rows = lab.comparisons(records, cores=2)
    assert [(r["model"], r["workers"], r["measured"].value) for r in rows] == [("even", 0, 34), ("even", 2, 62)]
    assert rows[0]["the slower one"] == pytest.approx(100 / 3) and rows[1]["the slower one"] == 90
    assert rows[1]["shared cores"] == pytest.approx(2 / (0.01 + 0.02))
    assert (rows[1]["alone"], rows[1]["loader"]) == (100, 90)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ()}, "must each hold something"),
        ({"workers": (2, -1)}, "workers must not be negative: -1"),
        ({"batches": (16, 0)}, "batch_size and batches must be at least 1"),
        ({"images": 64, "batches": (4, 128)}, "a batch of 128 needs as many images"),
    ],
)
def test_a_bad_value_is_one_line(change, message):
    with pytest.raises(BadInput, match=message) as error:
        lab.Config(**change)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def run():
    return launch("dataloader", nproc=1, smoke=True)


@pytest.mark.long
def test_a_smoke_run_has_every_part(run):
    ways = {r.case["way"] for r in run.where("images_per_s")}
    assert ways == {"model", "loader", "both", "sweep"}
    assert {r.case["workers"] for r in run.where("images_per_s", way="loader")} == {0, 1}
    assert all(0 <= s <= 1 for r in run.where("wait_share") for s in r.samples)
    assert all(math.isfinite(s) and s > 0 for r in run.where("images_per_s") for s in r.samples)
    rows = lab.comparisons(run, cores=2)
    assert [(r["model"], r["workers"]) for r in rows] == [("light", 0), ("light", 1)]


@pytest.mark.long
def test_the_timeline_has_a_start_and_an_end_for_every_batch(run):
    who = {"worker 0", "worker 1", "waits", "trains"}
    for model in ("light", "heavy"):
        assert {r.case["who"] for r in run.where("start_s", model=model)} == who
        for name in who:
            starts, ends = (run.one(edge, who=name, model=model).samples for edge in ("start_s", "end_s"))
            assert all(0 <= a <= b for a, b in zip(starts, ends, strict=True)) and list(starts) == sorted(starts)
        waited, trained = (run.one("end_s", who="waits", model=model), run.one("start_s", who="trains", model=model))
        assert waited.samples == trained.samples, "training begins when the batch is there"
        loaded = min(min(run.one("end_s", who=f"worker {w}", model=model).samples) for w in (0, 1))
        assert loaded <= waited.samples[0], "no batch is trained on before a worker has loaded one"


@pytest.mark.long
def test_without_a_gpu_nothing_is_said_of_transfers(run):
    transfers = [r for r in run if "pin_memory" in r.case]
    assert bool(transfers) is torch.cuda.is_available()


def test_other_ranks_only_wait():
    run = launch("dataloader", nproc=2, smoke=True, parts=("sweep",), oversubscribe=True)
    assert {r.layout["rank"] for r in run} == {0} and {r.metric for r in run} == {"images_per_s"}
