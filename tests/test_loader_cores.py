"""Who needs the cores: the rule for workers, the records of a run, its sentences, and bad values."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from labs import loader_cores as lab
from labs.chapters.nb02 import figures_cores
from labs.common.loading.feed import Feed
from labs.kit.check import Prediction
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.loader_cores import augment as steps

ROUNDS = (1.0, 1.01, 0.99, 1.02, 0.98, 1.0)
NOISY = (0.5, 2.0, 1.0, 0.4, 2.5, 1.1)


@pytest.mark.parametrize(("model", "one", "workers"), [(100, 100, 1), (101, 100, 2), (800, 200, 4), (50, 100, 1)])
def test_the_rule_by_hand(model, one, workers):
    assert lab.predict(model, one) == workers


def record(metric, samples, unit="1/s", kind="measured", **case):
    return Record(
        "loader_cores",
        metric,
        unit,
        samples,
        kind,
        case,
        {},
        {"world_size": 2, "device": "cpu"},
        {"cores": 2, "utc": "2026-11-22"},
    )


def made(shares=(0.6, 0.98, 0.99), noise=ROUNDS, augment=4.0, threads=0.3):
    """A run: share of the model's rate with 1, 2, 3 workers; ms of jitter; rate with 2 threads."""
    found = [
        record("images_per_s", [500.0 * r for r in ROUNDS], way="one worker"),
        record("predicted_workers", [2], "workers", "modelled", model_rate=1.6),
        record("images_per_s", [800.0] * 6, way="model", model_rate=1.6),
    ]
    for n, share in enumerate(shares, start=1):
        samples = [800 * share * r for r in noise]
        found.append(record("images_per_s", samples, way="both", workers=n, model_rate=1.6))
    for stage in steps.STAGES:
        ms = {"decode": 2.0, "colour jitter": augment}.get(stage, 0.5)
        found.append(record("stage_s", [1e-3 * ms * r for r in ROUNDS], "s", stage=stage))
    found.append(record("batched_jitter_s", [1e-3] * 6, "s", on="cpu"))
    for n, rate in ((1, 100.0), (2, 100 * threads)):
        found.append(record("items_per_s", [rate * r for r in ROUNDS], workers=2, threads=n, cores=2))
    return Records(found)


def test_how_many_are_enough_is_shown_possible_or_neither():
    assert lab.enough(made(), 1.6) == (2, 2)
    assert lab.enough_text(made(), 1.6) == "2 workers are enough"
    assert lab.enough_text(made(shares=(0.98, 0.98, 0.98)), 1.6) == "1 worker is enough"
    assert lab.enough_text(made(shares=(0.5, 0.6, 0.6)), 1.6) == "none of those tried are enough"
    assert "these samples cannot tell" in lab.enough_text(made(noise=NOISY), 1.6)


@pytest.mark.parametrize(("times", "predicted"), [(0.8, 1), (3.0, 3), (7.0, 7)])
@pytest.mark.parametrize("cores", [16, 1])
def test_without_noise_the_rule_succeeds_if_there_are_cores_for_it(monkeypatch, times, predicted, cores):
    def rate(data, workers, batch, step):
        return min(500.1 * min(workers, cores), 1e9 if step is None else batch / step.args[0])

    monkeypatch.setattr(lab, "rate", rate)
    monkeypatch.setattr(lab, "drive", lambda batches, step, *_, **__: Feed((0.0,), (step.args[0],), 8))
    found = []

    def keep(metric, unit, samples, kind="measured", rank=0, **case):
        found.append(record(metric, samples if isinstance(samples, list) else [samples], unit, kind, **case))
        return found[-1]

    cut, rank = SimpleNamespace(paths=["a.jpg"], labels=[0]), SimpleNamespace(record=keep)
    run = Records(lab.needed(cut, lab.Config(model_rates=(times,), rounds=6), rank))
    assert run.one("predicted_workers").value == predicted and predicted in lab.fed(run, times)
    assert lab.enough(run, times)[0] == (predicted if predicted <= cores else None)


@pytest.mark.parametrize("step", [None, print])
def test_what_was_loaded_before_the_clock_starts_is_taken_by_the_step_and_not_counted(monkeypatch, step):
    called = []
    monkeypatch.setattr(
        lab,
        "drive",
        lambda batches, step, timed, device, *, skip, **_: (called.append((step, skip)), Feed((0.01,), (0.0,), 8))[1],
    )
    lab.rate(list(range(64)), 2, 8, step)
    assert called == [(step, 2 * 2 + 1)]  # all that can be in the queue after a pause, and one more


def test_the_share_of_augmentation_by_hand():
    share = lab.augmentation_share(made(augment=4.0))
    assert share.value == pytest.approx((0.5 + 0.5 + 4.0) / (2.0 + 0.5 + 0.5 + 4.0 + 0.5))


@pytest.fixture
def shown(monkeypatch):
    found = []
    monkeypatch.setattr(figures_cores, "show", lambda fig, alt: found.append(alt))
    monkeypatch.setattr(figures_cores, "say", found.append)
    return found


def test_augmentation_changes_what_it_should_and_draws_from_torch_alone():
    image = Image.effect_noise((512, 384), 60).convert("RGB")
    crop = steps.random_crop(image)
    assert crop.size == (224, 224)
    flips = {steps.random_flip(crop).tobytes() for _ in range(20)}
    assert flips == {crop.tobytes(), crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()}
    torch.manual_seed(0)
    first = steps.colour_jitter(steps.random_crop(image)).tobytes()
    second = steps.colour_jitter(steps.random_crop(image)).tobytes()
    torch.manual_seed(0)
    assert steps.colour_jitter(steps.random_crop(image)).tobytes() == first != second
    assert steps.to_tensor(crop).shape == (3, 224, 224)


def test_a_batch_is_changed_image_by_image_and_stays_in_range():
    images = torch.full((6, 3, 8, 8), 128, dtype=torch.uint8)
    out = steps.jitter_batch(images)
    assert out.shape == images.shape and out.dtype == torch.float32
    assert out.min() >= 0 and out.max() <= 1 and len(out.mean((1, 2, 3)).unique()) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": ()}, "must each hold something"),
        ({"model_rates": (0.0,)}, "model_rates must be from 0.1 to 16 times the rate of one worker, not 0"),
        ({"rounds": 1}, "rounds must be at least 2, not 1: one sample has no interval"),
    ],
)
def test_a_bad_value_is_one_line(change, message):
    with pytest.raises(BadInput, match=message) as error:
        lab.Config(**change)
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_a_smoke_run_has_every_part_and_an_answer():
    run = launch("loader_cores", nproc=2, smoke=True, oversubscribe=True)
    assert {r.case["way"] for r in run.where("images_per_s")} == {"one worker", "model", "both"}
    assert [r.case["stage"] for r in run.where("stage_s")] == list(steps.STAGES)
    assert run.one("predicted_workers").value == 2 and len(list(lab.answer(run))) == 3
    assert all(s > 0 for r in run for s in r.samples)


def test_the_figures_say_what_the_records_hold(shown):
    figures_cores.needed(made(), Prediction(100, "share", "%"))
    assert "Measured: 2 workers are enough" in shown[0] and "not enough" not in shown[1]
    figures_cores.needed(made(shares=(0.625, 0.7, 0.7)), Prediction(100, "share", "%"))  # the second worker has no core
    assert "Here 2 workers are not enough" in shown[3] and "gave less than before" not in shown[3]
    assert "2 workers over 1 worker: 1.12 x" in shown[3] and "the rule expects 1.6 x" in shown[3]
    assert "3 workers over 2 workers: no difference" in shown[3]
    figures_cores.needed(made(shares=(0.4, 0.64, 0.8)), Prediction(100, "share", "%"))  # all slower than when alone
    assert "40.0 % [39.2, 40.8] in place of 62%" in shown[5] and "the rule expects" not in shown[5]
    assert "3 workers over 2 workers: 1.25 x" in shown[5]
