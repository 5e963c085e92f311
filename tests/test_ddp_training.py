"""Each bug of the lab shows exactly the symptoms that the notebook teaches."""

import pytest

from labs import ddp_training
from labs.kit.errors import BadInput
from labs.kit.launch import launch


@pytest.fixture(scope="module")
def run():
    return launch("ddp_training", nproc=2, oversubscribe=True, smoke=True)


SYMPTOMS = {  # steps per epoch, images seen, same order in the next epoch, replicas differ
    "single": (16, 1.0, False, False),
    "ddp": (16, 1.0, False, False),
    "no_sampler": (32, 1.0, False, False),
    "no_set_epoch": (16, 1.0, True, False),
    "different_models": (16, 1.0, False, True),
}


@pytest.mark.parametrize("case", SYMPTOMS)
def test_symptoms(run, case):
    def at(metric):
        return run.one(metric, case=case).value

    found = (at("steps_per_epoch"), at("distinct_share"), bool(at("same_order_next_epoch")), at("parameter_spread") > 0)
    assert found == SYMPTOMS[case]


def test_a_sampler_seed_per_rank_repeats_images_and_misses_others(run):
    seen = run.one("distinct_share", case="sampler_seed_per_rank").value
    assert 0.5 < seen < 1
    assert run.one("repeated_share", case="sampler_seed_per_rank").value == pytest.approx(1 - seen)


def test_what_raises_says_so_in_torchs_words(run):
    assert "twice" in run.one("raised", case="setup_twice").case["error"]
    plain, cured = run.where("raised", case="unused_parameters")
    assert "finished reduction" in plain.case["error"]
    assert cured.case["error"] == "none"


@pytest.mark.drill
def test_one_writer_never_leaves_a_damaged_checkpoint(run):
    assert run.one("damaged_share", guarded=True).value == 0
    assert [r.value for r in run.where("writers")] == [2, 1]


def test_predicted_steps_are_those_of_the_samplers(run):
    expected = ddp_training.predict(ddp_training.Config(smoke=True), 2)
    assert {c: run.one("steps_per_epoch", case=c).value for c in expected} == expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples": 0}, "samples must be between"),
        ({"samples": 40}, "must be at least 64"),
        ({"cases": ("sgd",)}, "cases"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("ddp_training", nproc=2, oversubscribe=True, **values)
