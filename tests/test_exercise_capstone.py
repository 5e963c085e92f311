"""The capstone: each illness that is left is told by its size, other results are told by what was changed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from mutants import nb12 as m
from mutants.nb12 import ILLNESSES, left
from processes import assert_no_survivors, new_environment

from labs.chapters.nb12 import exercise_capstone as capstone
from labs.chapters.nb12.exercise_capstone import LOSS, ORDINAL, PARTS, check_results, check_speed, judged, watched
from labs.chapters.nb12.solution_capstone import SLOW, edited, fast_script
from labs.doctor_trial.in_turn import Block
from labs.kit.check import Mistake, check

MS = {"data": 14, "evaluation": 40, "forward": 13, "backward": 18, "prepare": 7, "save": 4}
WELL = {"data": 0.6, "evaluation": 0.0, "forward": 4.2, "backward": 6.5, "prepare": 0.3, "save": 0.0}
KINDS = {
    "data": ["data"],
    "evaluation": ["evaluation"],
    "arithmetic": ["forward", "backward"],
    "own lines": ["prepare"],
    "saving": ["save"],
}


def blocks(ms: dict[str, float], noise: float = 0.02) -> list[Block]:
    """Nine of them, that scatter a little."""
    scale = [1 - noise, 1 + noise, 1.0] * 3
    return [Block(f * sum(ms.values()) / 1e3, {k: f * v / 1e3 for k, v in ms.items()}, 128) for f in scale]


def taken(*ill: str) -> dict[str, list[Block]]:
    """Of a script that still has these illnesses."""
    kinds = {kind for part in ill for kind in KINDS[part]}
    yours = {k: MS[k] if k in kinds else WELL[k] for k in MS}
    return {"original": blocks(MS), "yours": blocks(yours), "reference": blocks(WELL)}


def test_an_illness_that_is_left_is_told_by_its_size_and_not_by_its_place():
    sizes = {part: sum(MS[k] - WELL[k] for k in kinds) for part, kinds in KINDS.items()}
    by_size = sorted(sizes, key=lambda part: -sizes[part])
    for count in (1, 2, 4):
        for ill in itertools.combinations(KINDS, count):
            speed = judged(taken(*ill))
            assert sorted(speed.ill) == sorted(ill)
            with pytest.raises(Mistake) as found:
                check_speed(speed, "")
            worst = max(ill, key=sizes.__getitem__)
            assert f"the {ORDINAL[by_size.index(worst)]} of the five, {sizes[worst]:.1f} ms" in str(found.value)
            assert not any(part in str(found.value) for part in PARTS)
    check_speed(judged(taken()), "")


def test_noise_alone_is_no_illness_and_a_faster_script_than_the_reference_passes():
    loud = {"original": blocks(MS), "yours": blocks(WELL, 0.3), "reference": blocks(WELL)}
    check_speed(judged(loud), "")
    check_speed(judged(taken() | {"yours": blocks({k: v / 2 for k, v in WELL.items()})}), "")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
def test_the_scripts_and_their_workers_share_one_core_and_afterwards_there_are_as_many_as_before(monkeypatch):
    """On a core of its own a worker would hide an illness of the data."""
    before, seen = os.sched_getaffinity(0), []

    def take_turns(*_):
        done = subprocess.run(
            [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"], capture_output=True, text=True
        )
        seen.append(done.stdout)
        return taken()

    monkeypatch.setattr(capstone, "take_turns", take_turns)
    capstone.compared(fast_script())
    assert seen == ["1\n"] and os.sched_getaffinity(0) == before


@pytest.fixture(scope="module")
def original():
    return capstone.original_results()


@pytest.fixture(scope="module")
def found():
    """An epoch of the fast script."""
    return watched(fast_script())


def test_the_epoch_of_the_fast_script_is_that_of_the_original(original, found):
    check_results(found, original)
    assert capstone.herrings_cured(found, original) == ""
    said = capstone.herrings_cured(dataclasses.replace(found, zeroed=False, reads=0.0), original)
    assert "zeroed in place" in said and "read in each step" in said
    assert sum(found.samples) == len(found.means) == 10_000 and found.tested == 2_000
    assert LOSS[0] < original.loss < LOSS[1]


"""What no result shows: these are trained, or do not come so far."""


RESULTS = [
    (lambda r: {"samples": [512] * 19 + [272], "steps": 20, "drops": False}, "a step takes 512 images"),
    (lambda r: {"parameters": r.parameters - 1}, "parameters"),
    (lambda r: {"tested": 500}, "sees 500 of the 2000 test images"),
    (lambda r: {"files": [name for name in r.files if name != "last.pt"]}, "last.pt is missing"),
    (lambda r: {"means": [0.353 * mean + 0.286 for mean in r.means]}, "the images that the model is given"),
    (lambda r: {"samples": r.samples[:-1], "steps": 78}, "9,984 images"),
    (lambda r: {"threads": 2}, "torch computes with 2 threads"),
    (lambda r: {"drops": False}, "dropout is gone"),
    (lambda r: {"lr": [4e-3]}, "learning rate"),
    (lambda r: {"optimizer": "Adam"}, "the optimizer is Adam"),
]
"""(What is changed in the results of the fast script, words of the feedback)."""


@pytest.mark.parametrize(("changes", "words"), RESULTS)
def test_other_results_are_told(changes, words, original, found):
    with pytest.raises(Mistake) as told:
        check_results(dataclasses.replace(found, **changes(found)), original)
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("def f(:\n", "is no Python"),
        (edited(fast_script(), {'    parser.add_argument("--seed", type=int, default=0)\n': ""}), "seed"),
        ("no_such_script.py", "there is no file"),
    ],
)
def test_a_script_that_cannot_run_is_told(script, words, original):
    with pytest.raises(Mistake, match=words):
        check_results(watched(capstone.script_of(lambda: script)), original)


@pytest.mark.long
def test_the_original_does_what_was_kept_of_it_and_its_illnesses_are_left():
    kept, found = capstone.original_results(), watched(SLOW.read_text())
    assert np.abs(np.array(kept.means) - found.means).max() < 1e-9
    assert (kept.samples, kept.parameters, kept.lr, kept.tested) == (
        found.samples,
        found.parameters,
        found.lr,
        found.tested,
    )
    assert kept.loss == pytest.approx(found.loss, rel=0.05) and (kept.threads, kept.drops) == (1, True) == (
        found.threads,
        found.drops,
    )


@pytest.mark.quiet
@pytest.mark.long
def test_each_illness_alone_is_found_where_it_is():
    sizes = capstone.compared(SLOW.read_text()).size_s
    assert min(sizes.values()) > 0, sizes
    for part in ILLNESSES:
        assert capstone.compared(left(part)).ill == [part]


def of_another_style() -> str:
    """Workers prepare the images, a network in a network, inference mode, gradients dropped."""
    changes = {
        "pixels = (np.asarray(image) / 255.0 - 0.286) / 0.353": "pixels = np.asarray(image, np.float32) / 255",
        "unsqueeze(0), int(": "unsqueeze(0).sub(0.286).div(0.353), int(",
        m.cures.NETWORK[0]: "torch.nn.Sequential(Network())",
        "DataLoader(train, args.batch_size, shuffle=True)": "DataLoader(train, args.batch_size, shuffle=True, "
        "num_workers=2, persistent_workers=True)",
        "with torch.no_grad():": "with torch.inference_mode():",
        "zero_grad(set_to_none=False)": "zero_grad()",
    }
    return edited(SLOW.read_text(), m.cures.EVALUATION | m.cures.STATISTICS | m.cures.SAVING | changes)


@pytest.mark.long
def test_the_results_of_a_right_script_of_another_style_are_those_of_the_original(tmp_path, original):
    path = tmp_path / "mine.py"
    path.write_text(of_another_style())
    found = watched(capstone.script_of(lambda: path))
    check_results(found, original)
    assert found.workers == 2


@pytest.mark.quiet
@pytest.mark.long
def test_an_illness_of_the_data_is_left_whoever_prepares_the_images():
    workers = {"args.batch_size, shuffle=True)": "args.batch_size, shuffle=True, num_workers=4)"}
    assert capstone.compared(edited(left("data"), workers)).ill  # of the data, or of what the workers interrupt


@pytest.mark.quiet
def test_the_fast_script_passes_and_nothing_else_is_said_of_it(capsys):
    assert capstone.EXERCISE.reference is fast_script
    check("12.1", None, solutions=True)
    assert capsys.readouterr().out == f"12.1 passed: {capstone.EXERCISE.task}\n"


@pytest.mark.long
def test_nothing_is_left_of_a_script_that_fails():
    env = new_environment()
    code = "from labs.chapters.nb12.exercise_capstone import watched; watched('import time; time.sleep(0); 1/0')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert "ZeroDivisionError" in done.stderr
    assert_no_survivors(env["LABS_TEST_MARK"])
