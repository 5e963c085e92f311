"""Sentences of notebook 02's figures and command lines, each with records that choose it and records that do not."""

import pytest

from labs import dataloader, dataset_formats, loader_traps, tune_dataloader
from labs.chapters.nb02 import figures, figures_data
from labs.kit.check import Prediction
from labs.kit.measure import paired_ratio
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


@pytest.mark.parametrize(
    ("waited", "busy", "words"),
    [
        (0.4, 0.95, "the loader limits"),
        (0.02, 0.3, "the model limits"),
        (0.2, 0.5, "do not tell"),
        (0.02, 0.9, "do not"),
    ],
)
def test_who_limits_is_read_from_the_timeline(waited, busy, words):
    assert words in figures._who_waits("light model", waited, busy)


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


def test_the_loaders_answer_turns_round():
    assert "the model limits" in " ".join(dataloader.answer(models(990)))
    assert "the loader, or cores that both share, limit" in " ".join(dataloader.answer(models(500)))
    assert "may be what limits" in " ".join(dataloader.answer(models(900, FAR)))
    assert "single samples" in " ".join(dataloader.answer(models(900, (1.0,))))
    assert "pin_memory with non_blocking over neither: 1.50 x" in " ".join(dataloader.answer(pinned(1.5)))


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


def test_a_format_is_judged_through_a_worker_and_from_this_disk_as_well(shown):
    figures_data.formats(formats(50_000, 10_000, cold=50), Prediction(3, "map"))
    assert "100 x in one process, 20 x through a worker" in shown[0]
    assert "60 MB/s front to back, over the JPEG folder: memory map 0.50" in shown[1]
    figures_data.formats(formats(400, 400), Prediction(3, "map"))
    assert "0.8 x in one process" in shown[2] and "not measured" in shown[3]
    assert "the RAM cache gives" in " ".join(dataset_formats.answer(formats(400, 400)))
    assert "the memory map gives 100 x" in " ".join(dataset_formats.answer(formats(50_000, 10_000)))


def scaled(wait, compute, noise=NEAR):
    return Records(
        make("loader_traps", "items_per_s", [300 * g * k for k in noise], source=s, workers=n)
        for s, gain in (("sleep", wait), ("compute", compute))
        for n, g in ((0, 1), (8, gain))
    )


def test_whether_waiting_gains_more_is_told_by_the_records():
    def text(run):
        rows = {s: run.where("items_per_s", source=s) for s in ("sleep", "compute")}
        gain = {s: paired_ratio(found[-1].samples, found[0].samples) for s, found in rows.items()}
        return figures_data._scaling_text(run, gain, GUESS)

    assert "Items that wait gain more" in text(scaled(8, 2))
    assert "cannot be told" in text(scaled(2, 2)) and "cannot be told" in text(scaled(1, 3))


def test_the_answer_on_traps_names_only_those_that_were_met():
    said = " ".join(loader_traps.answer(scaled(8, 1)))
    assert "items that sleep: 8" in said and "items that compute: no difference" in said and "Random" not in said
    draws = [
        make("loader_traps", "duplicate_share", [v], "1", way=w, across="workers") for w, v in (("a", 0), ("b", 0.75))
    ]
    assert "drawn twice by: b." in " ".join(loader_traps.answer(Records(draws)))
    assert "none of the ways tried" in " ".join(loader_traps.answer(Records(draws[:1])))
    left = make("loader_traps", "processes_left", [3], "processes", trap="shm")
    assert "3 worker processes are left behind" in " ".join(loader_traps.answer(Records([left])))


def test_a_tuning_of_ones_own_has_told_its_answer_already():
    assert list(tune_dataloader.answer(Records([make("tune_dataloader", "rate_per_s", NEAR, way="model alone")]))) == []


def test_a_hanging_worker_is_shown_with_the_timeout_that_was_set(monkeypatch):
    tables = []
    monkeypatch.setattr(figures_data, "show_table", tables.append)
    figures_data.failures_table(
        Records(
            make(
                "loader_traps",
                "seconds_until_error",
                [0.5],
                "s",
                config={"loader_timeout_s": 0.4},
                trap="failures",
                failure="hangs",
                named=named,
                words="DataLoader timed out",
                names_item=False,
            )
            for named in (False, True)
        )
    )
    (name,) = tables[0].index
    assert "timeout=0.4 s" in name and "waits for ever" in name


@pytest.mark.parametrize(
    ("loader", "waits", "words"),
    [
        (400.0, 0.02, "In 1 of 1 cases with workers, the loader alone is shown to be the faster one; in 1 of these"),
        (400.0, 0.2, "in 0 of these, the model is shown to wait for less than 5 %"),
        (50.0, 0.6, "In 0 of 1 cases with workers, the loader alone is shown to be the faster one."),
    ],
)
def test_a_model_slower_than_its_loader_waits_or_not_as_the_records_say(loader, waits, words):
    shares = Records([make("dataloader", "wait_share", [waits * k for k in NEAR], model="heavy", workers=2)])
    rates = {"loader": (loader, {"workers": 2}), "model": (100.0, {"model": "heavy"})}
    found = [
        make("dataloader", "images_per_s", [rate * k for k in NEAR], way=way, **case)
        for way, (rate, case) in rates.items()
    ]
    assert words in figures._fed_text(Records([*shares, *found]), list(shares))


@pytest.mark.parametrize(
    ("on_shared_cores", "words"),
    [
        (1000, "this run's noise"),
        (960, "explain the smaller part of it; in CPU seconds, -17% remain"),
        (840, "model and workers share the cores: that can explain it; in CPU seconds, -5% remain"),
    ],
)
def test_shared_cores_are_named_as_the_cause_only_where_they_explain_most(on_shared_cores, words):
    row = {
        "model": "light",
        "workers": 4,
        "measured": rate(800),
        "the slower one": 1000,
        "shared cores": on_shared_cores,
    }
    text = figures._together_text([row], GUESS, row)
    assert "-20% from the formula" in text and words in text
