"""The experiments of notebook 02: what they count, and what they make of a record."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from labs import dataloader, dataset_formats, loader_memory, loader_workers, tune_dataloader
from labs.common.data.tiles import tiles
from labs.common.loading.paths import TensorOfPaths, path
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

LABS = {lab.__name__.removeprefix("labs."): lab for lab in (
    dataloader, dataset_formats, loader_memory, loader_workers, tune_dataloader)}  # fmt: skip


@pytest.mark.parametrize("name", LABS)
def test_an_answer_and_a_category_follow_from_a_smoke_run(name):
    run = launch(name, 1, smoke=True)
    assert all(sentence.endswith(".") for sentence in LABS[name].answer(run))
    assert LABS[name].category(run)


def rates(way, workers, step, value):
    case = {"way": way, "workers": workers, "step": step}
    return Record("dataloader", "images_per_s", "1/s", [value * k for k in (0.99, 1.0, 1.01)], case=case)


def test_the_slower_side_decides_and_without_workers_they_take_turns():
    records = Records([
        rates("model", 0, "computes", 600.0), rates("loader", 0, "none", 300.0), rates("loader", 2, "none", 500.0),
        rates("both", 0, "computes", 200.0), rates("both", 2, "sleeps", 490.0), rates("both", 2, "computes", 350.0),
    ])  # fmt: skip
    found = {case: ratio.value for case, ratio in dataloader.over_expected(records).items()}
    assert found == pytest.approx({(0, "computes"): 1.0, (2, "sleeps"): 0.98, (2, "computes"): 0.7})
    said = dataloader.category(records)
    assert said == "0 workers, step computes: holds; 2 workers, step sleeps: holds; 2 workers, step computes: fails"


def test_the_fewest_workers_that_feed_the_model():
    shares = {"wait": (0.4, 0.8, 0.97, 0.98), "compute": (0.4, 0.7, 0.72, 0.71)}
    records = Records(
        Record("loader_workers", "model_share", "1", [share] * 3, case={"items": items, "workers": n})
        for items, by in shares.items()
        for n, share in enumerate(by, start=1)
    )
    assert loader_workers.category(records) == "wait: 3, compute: never"
    assert loader_workers.workers_needed(2.5, 1) == 3 and loader_workers.workers_needed(2.0, 1) == 2


def test_three_processes_hold_three_copies_under_forkserver_and_one_of_a_tensor():
    run = launch("loader_memory", 1, paths=200_000, methods=("fork", "forkserver"))
    by = loader_memory.total_mb(run)
    assert by["np.array of str"]["forkserver"] > 1.1 * by["list"]["forkserver"]
    assert by["np.array of bytes"]["fork"] < by["np.array of str"]["fork"] < by["list"]["fork"]
    assert by["tensor and offsets"]["forkserver"] < by["np.array of bytes"]["forkserver"]


def test_a_path_comes_back_from_the_tensor():
    held = TensorOfPaths(map(path, range(50)))
    assert len(held) == 50 and held[0].decode() == path(0) and held[49].decode() == path(49)


def test_all_formats_hold_the_same_images(tmp_path):
    paths = list(tiles().paths[:4])
    dataset_formats.write_all(paths, tmp_path)
    sources = dataset_formats.readers(paths, tmp_path)
    images = {name: sorted(image.tobytes() for image in source()) for name, source in sources.items()}
    assert images["JPEG, short side 256; resize"] == images["tar shards; resize"] == images["memory map; none"]
    assert {np.array(image).nbytes for image in sources["JPEG; resize"]()} == {224 * 224 * 3}


@pytest.mark.parametrize(
    ("model", "loader", "enough", "compared"),
    [
        (650, {0: 150, 1: 150, 2: 300}, False, [2]),
        (650, {0: 150, 1: 150, 2: 300, 4: 480, 8: 500}, True, [2, 4, 8]),  # more bring nothing
        (100, {0: 150, 1: 150, 2: 300}, True, [0, 1, 2]),  # three times as fast as the model
        (1e6, {0: 1e5, 1: 2e4, 2: 2.1e4}, True, [0]),  # items so small that a worker costs more than it brings
    ],
)
def test_which_numbers_of_workers_are_compared(model, loader, enough, compared):
    assert tune_dataloader.is_enough(model, loader) is enough
    assert tune_dataloader.finalists(model, loader) == compared


def test_the_fewest_workers_close_to_the_best_win():
    assert tune_dataloader.ladder(6) == [0, 1, 2, 4, 6] and tune_dataloader.ladder(0) == [0]
    assert tune_dataloader.cheapest({2: 300, 4: 375, 8: 400}) == 4
    tuning = tune_dataloader.Tuning([650], {2: 300, 4: 480, 8: 500}, {2: [290], 4: [390], 8: [380]})
    assert tuning.settings == {"num_workers": 4, "persistent_workers": True} and "share cores" in str(tuning)


def test_a_dataset_and_a_step_are_tuned():
    seen = []
    tuning = tune_dataloader.tune_dataloader(
        TensorDataset(torch.arange(64.0)), lambda batch: seen.append(len(batch[0])), batch_size=8, max_workers=1,
        budget_s=0.1, device="cpu",
    )  # fmt: skip
    assert set(seen) == {8} and set(tuning.both) <= {0, 1} and tuning.table.shape[1] == 3


@pytest.mark.parametrize(
    ("lab", "values", "words"),
    [
        ("dataloader", {"workers": 0}, "workers must be at least 1, not 0"),
        ("dataloader", {"dataset": "labs.nothing:photos"}, "cannot be imported"),
        ("loader_workers", {"model_rate": 0.0}, "model_rate must be more than 0"),
        ("loader_memory", {"paths": 10}, "paths must be at least 1000"),
        ("dataset_formats", {"images": 1}, "images must be at least 64"),
        ("tune_dataloader", {"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(lab, values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch(lab, nproc=1, **values)
    assert "\n" not in str(e.value)


def test_the_tuner_says_what_it_cannot_tune():
    data = TensorDataset(torch.arange(4.0))
    for wrong, words in (({"batch_size": 5}, "batch_size must be 1 to 4"), ({"shuffle": True}, "leave out shuffle")):
        with pytest.raises(BadInput, match=words):
            tune_dataloader.tune_dataloader(data, print, **{"batch_size": 2} | wrong)
