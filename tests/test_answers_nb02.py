"""Sentences of notebook 02's figures and command lines, each with records that choose it and records that do not."""

import pytest

from labs import dataloader, dataset_formats, tune_dataloader
from labs.chapters.nb02 import figures, figures_data
from labs.kit.check import Prediction
from labs.kit.record import Record, Records

NEAR, FAR = (0.99, 1.0, 1.01, 1.0, 1.0), (0.5, 1.5, 0.7, 1.3, 1.0)
GUESS = Prediction(4, "workers")


def make(lab, metric, samples, unit="1/s", device="cpu", kind="measured", config=None, **case):
    origin = {"cores": 2, "utc": "2026-11-22T00:00:00Z", "gpus": ["GPU"] if device == "cuda" else []}
    return Record(
        lab, metric, unit, list(samples), kind, case, config or {}, {"world_size": 1, "device": device}, origin
    )


def rate(value, noise=NEAR, **case):
    return make("dataloader", "images_per_s", [value * k for k in noise], batch=case.pop("batch", 16), **case)


@pytest.fixture
def shown(monkeypatch):
    found = []
    for module in (figures, figures_data):
        monkeypatch.setattr(module, "show", lambda fig, alt: found.append(alt))
        monkeypatch.setattr(module, "say", found.append)
    return found


def sweep(*rates, noise=NEAR):
    return Records(rate(r, noise, way="sweep", workers=n) for n, r in zip((0, 1, 2, 4), rates, strict=True))


def test_no_cell_is_crowned_that_cannot_be_told_from_others(shown):
    figures.sweep_map(sweep(500, 500, 1000, 600), GUESS)
    assert shown[0].startswith("Fastest here: 2 workers, batches of 16") and "cannot tell" not in shown[1]
    assert "4 workers, more than cores, over 2 workers, in batches of 16: 0.600 x" in shown[1]
    figures.sweep_map(sweep(500, 500, 1000, 1005, noise=FAR), GUESS)
    assert "cells may be the fastest" in shown[2] and "cannot tell it from cells with" in shown[3]
    assert "no difference that this run can show" in shown[3]


def test_single_samples_show_nothing():
    run = Records([rate(500, (1.0,), way="sweep", workers=0), rate(900, (1.0,), way="sweep", workers=2)])
    best, tied = dataloader.as_fast(run, way="sweep")
    assert best.case["workers"] == 2 and len(tied) == 2
    assert any("0 cannot be told from it" in said for said in dataloader.answer(run))


def pinned(gain, device="cuda", kind="measured"):
    rates = {(p, n): 1000 * (gain if p and n else 1) for p in (False, True) for n in (False, True)}
    return Records(
        make(
            "dataloader",
            "images_per_s",
            [rate * k for k in NEAR],
            device=device,
            kind=kind,
            way="both",
            model="even",
            workers=4,
            batch=16,
            pin_memory=p,
            non_blocking=n,
        )
        for (p, n), rate in rates.items()
    )


def models(together, noise=NEAR):
    return Records([rate(1000, way="model", model="even"), rate(together, noise, way="both", model="even", workers=2)])


def formats(map_, worker, cold=None):
    rates = {"JPEG folder": 500, "tar shards": 500, "memory map": map_, "RAM cache": 900, "memory copy": 2000}
    found = [
        make("dataset_formats", "images_per_s", [r * k for k in NEAR], format=f, cache="warm") for f, r in rates.items()
    ]
    for f, r in (("JPEG folder", 500), ("memory map", worker)):
        found.append(make("dataset_formats", "worker_images_per_s", [r * k for k in NEAR], format=f))
    found.append(make("dataset_formats", "disk_bytes", [1e6], "B", format="memory map"))
    if cold:
        found.append(make("dataset_formats", "disk_bytes_per_s", [6e7], "B/s"))
        for f, r in (("JPEG folder", 100), ("memory map", cold)):
            found.append(make("dataset_formats", "images_per_s", [r * k for k in NEAR], format=f, cache="cold"))
    return Records(found)


def test_a_tuning_of_ones_own_has_told_its_answer_already():
    assert list(tune_dataloader.answer(Records([make("tune_dataloader", "rate_per_s", NEAR, way="model alone")]))) == []


def test_the_loaders_answer_turns_round():
    assert "the model limits" in " ".join(dataloader.answer(models(990)))
    assert "the loader, or cores that both share, limit" in " ".join(dataloader.answer(models(500)))
    assert "may be what limits" in " ".join(dataloader.answer(models(900, FAR)))
    assert "single samples" in " ".join(dataloader.answer(models(900, (1.0,))))
    assert "pin_memory with non_blocking over neither: 1.50 x" in " ".join(dataloader.answer(pinned(1.5)))


def test_a_format_is_judged_through_a_worker_and_from_this_disk_as_well(shown):
    figures_data.formats(formats(50_000, 10_000, cold=50), Prediction(3, "map"))
    assert "100 x in one process, 20 x through a worker" in shown[0]
    assert "60 MB/s front to back, over the JPEG folder: memory map 0.50" in shown[1]
    figures_data.formats(formats(400, 400), Prediction(3, "map"))
    assert "0.8 x in one process" in shown[2] and "not measured" in shown[3]
    assert "the RAM cache gives" in " ".join(dataset_formats.answer(formats(400, 400)))
    assert "the memory map gives 100 x" in " ".join(dataset_formats.answer(formats(50_000, 10_000)))
