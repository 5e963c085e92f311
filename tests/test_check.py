"""Predictions, and checks that explain instead of raising."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.exercises import nb00
from labs.kit import answers
from labs.kit.check import TODO, Exercise, Mistake, check, examine, predict
from labs.kit.errors import BadInput
from labs.kit.launch import run_on_ranks


def mean(values):
    """Mean of a list of numbers."""
    return sum(values) / len(values)


def judge_mean(f):
    got = f([1.0, 2.0, 6.0])
    if got == 9.0:
        raise Mistake("you summed without dividing", "divide by the number of values")
    if not isinstance(got, float):
        raise Mistake(f"a float is needed, you returned {type(got).__name__}")
    if got != 3.0:
        raise Mistake(f"the mean of 1, 2 and 6 is 3, not {got}")


@pytest.fixture(autouse=True)
def exercise(monkeypatch):
    """One extra exercise "00.9", with half a second to solve it."""
    extra = {**nb00.EXERCISES, "00.9": Exercise("compute a mean", judge_mean, mean, timeout_s=1.5)}
    monkeypatch.setattr(nb00, "EXERCISES", extra)


def printed(capsys, candidate, **kwargs) -> str:
    check("00.9", candidate, **kwargs)
    return capsys.readouterr().out


def test_the_three_outcomes_and_nothing_else(capsys):
    assert printed(capsys, mean) == "00.9 passed: compute a mean\n"
    assert printed(capsys, lambda values: TODO) == "00.9 to do: compute a mean\n"
    said = printed(capsys, lambda values: sum(values))
    assert said == "00.9 not yet: you summed without dividing\n    Hint: divide by the number of values\n"


def stub(values):
    return TODO


def half_done(values):
    total = sum(values)
    return TODO if total else total


class StubMethod:
    def done(self):
        return 1

    def half_done(self):
        TODO  # noqa: B018


@pytest.mark.parametrize("candidate", [TODO, half_done, StubMethod])
def test_a_stub_is_to_do_without_being_run(candidate, monkeypatch):
    def never(f):
        raise AssertionError("the checker was run")

    monkeypatch.setitem(nb00.EXERCISES, "00.9", Exercise("compute a mean", never, mean))
    assert examine("00.9", candidate).state == "to do"


def test_a_stub_that_hides_its_todo_is_to_do_when_it_runs():
    hidden = {"x": TODO}
    assert examine("00.9", lambda values: hidden["x"]).state == "to do"


def test_an_error_shows_the_learners_own_line_and_a_hint(capsys):
    def divides_by_zero(values):
        total = sum(values)
        return total / (len(values) - 3)

    said = printed(capsys, divides_by_zero)
    assert said.startswith("00.9 not yet: your code raised ZeroDivisionError")
    assert "in divides_by_zero:  return total / (len(values) - 3)" in said
    assert "judge_mean" in said or "line" in said
    assert "check.py" not in said and said.count("in divides_by_zero") == 1


def test_an_error_on_a_rank_shows_the_learners_own_line(capsys, monkeypatch):
    def on_ranks(f):
        run_on_ranks(f, 2, [1.0, 2.0], timeout_s=20)

    def fails_on_ranks(values):
        return undefined_name / len(values)  # noqa: F821

    monkeypatch.setitem(nb00.EXERCISES, "00.9", Exercise("compute a mean", on_ranks, mean))
    said = printed(capsys, fails_on_ranks)
    assert "NameError" in said and "return undefined_name / len(values)" in said
    assert "spelled right" in said
    assert len(said.splitlines()) <= 4
    assert examine("00.9", cloudpickle.loads(cloudpickle.dumps(lambda values: values))).state == "passed"


def test_a_hidden_stub_on_ranks_is_to_do(monkeypatch):
    hidden = {"x": TODO}
    monkeypatch.setitem(
        nb00.EXERCISES, "00.9", Exercise("compute a mean", lambda f: run_on_ranks(f, 1, [1.0], timeout_s=20), mean)
    )
    assert examine("00.9", lambda values: hidden["x"]).state == "to do"


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (3.0, "the function itself, not float"),
        (lambda: 3.0, "must take the arguments (values)"),
        (lambda values: "3.0", "you returned str"),
    ],
)
def test_wrong_shapes_of_answer_are_named(candidate, words):
    outcome = examine("00.9", candidate)
    assert outcome.state == "not yet" and words in outcome.text


@pytest.mark.drill
@pytest.mark.timeout(250)
def test_a_loop_that_swallows_every_error_is_stopped():
    def endless(values):
        while True:
            try:
                time.sleep(0.01)
            except:  # noqa: E722
                continue

    outcome = examine("00.9", endless)
    assert outcome.state == "not yet" and "did not finish within 1.5 s" in outcome.text


@pytest.mark.parametrize(
    ("leaving", "words"),
    [
        (lambda values: sys.exit(), "(exit() or SystemExit)"),
        (lambda values: os._exit(3), "(os._exit(3))"),
    ],
    ids=["sys.exit", "os._exit"],
)
def test_leaving_the_process_is_told_and_ends_no_kernel(leaving, words):
    real = os._exit
    outcome = examine("00.9", leaving)
    assert outcome.state == "not yet" and words in outcome.text, outcome
    assert os._exit is real


def together(late):
    """A sum over two ranks, of which the second one comes when `late` returns."""
    if dist.get_rank() == 1:
        late()
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def work_for_2_s():
    until = time.monotonic() + 2
    while time.monotonic() < until:
        pass


def test_a_rank_that_is_late_because_it_works_is_waited_for(monkeypatch):
    """As on a machine where others compute; that rank 0 waits for too short a time is seen in the first run."""
    monkeypatch.setattr(answers, "WAIT_S", 1.0)
    monkeypatch.setattr(answers, "MORE", 20)
    assert answers.on_ranks(together, 2, work_for_2_s, when="here") == [2.0, 2.0]

    monkeypatch.setattr(answers._Work, "went_on", lambda work: False)
    with pytest.raises(Mistake, match="the ranks wait for each other forever here"):
        answers.on_ranks(together, 2, work_for_2_s, when="here")


@pytest.mark.drill
def test_a_real_interrupt_is_not_taken_for_a_timeout():
    def slow(values):
        time.sleep(60)

    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        examine("00.9", slow)
    timer.join()


def test_checks_work_outside_of_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(examine("00.9", mean)))
    thread.start()
    thread.join(5)
    assert found[0].state == "passed"


def test_solutions_judges_the_reference_and_raises_if_it_fails(capsys, monkeypatch):
    assert printed(capsys, stub, solutions=True) == "00.9 passed: compute a mean\n"
    monkeypatch.setitem(nb00.EXERCISES, "00.9", Exercise("compute a mean", judge_mean, lambda values: 4.0))
    with pytest.raises(AssertionError, match="reference solution fails"):
        check("00.9", stub, solutions=True)


def test_an_unknown_exercise_names_those_there_are():
    for unknown in ("00.77", "98.1", "x"):
        with pytest.raises(BadInput, match=r"00\.1.*00\.9"):
            check(unknown, mean)


def test_a_prediction_is_a_number_that_knows_what_it_is_of():
    guess = predict(1.5, "speed-up", "x")
    assert guess == 1.5 and guess * 2 == 3.0 and guess.unit == "x"
    assert repr(guess) == "your prediction: 1.5 x (speed-up)"
    again = pickle.loads(pickle.dumps(guess))
    assert again == guess and again.what == "speed-up"


@pytest.mark.parametrize("wrong", ["two", True, [1.0], float("inf")])
def test_a_prediction_that_is_no_number_is_one_clear_line(wrong):
    with pytest.raises(BadInput, match="speed-up"):
        predict(wrong, "speed-up")
