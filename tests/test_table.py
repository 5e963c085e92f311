"""`python -m labs` lists what can be run, `python -m labs NAME` runs it, `python -m labs.models` tries a model."""

import subprocess
import sys

import pytest

from labs import __main__ as command
from labs import models


def test_every_file_that_can_be_run_is_listed_with_its_question():
    found = {row.name: row for row in command.rows()}
    assert {"data_parallel", "doctor", "watch", "symptom", "models"} <= set(found)
    assert all(row.question for row in found.values())
    assert found["data_parallel"].notebooks.startswith("03") and int(found["data_parallel"].seconds) > 0
    lines = list(command.table(list(found.values())))
    assert len(lines) == 1 + len(found) and lines[0].split() == ["notebook", "experiment", "seconds", "question"]


def test_a_notebook_that_launches_a_lab_is_found(tmp_path):
    (tmp_path / "one.py").write_text('"""Is it fast?\n\nAbout 7 s on 2 CPU cores.\n"""\n')
    (tmp_path / "two.py").write_text('"""Is it right?"""\n')
    (tmp_path / "04_x.ipynb").write_text('{"cells": [{"source": ["launch(\\n", "    \\"one\\", nproc=2)"]}]}')
    rows = command.rows(tmp_path, tmp_path)
    assert rows == [command.Row("04", "one", "Is it fast?", "7"), command.Row("", "two", "Is it right?", "")]


def test_a_name_runs_that_experiment_and_a_wrong_one_is_told(monkeypatch, capsys):
    done = subprocess.run([sys.executable, "-m", "labs", "strategy", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--params" in done.stdout and "python -m labs.strategy" in done.stdout
    monkeypatch.setattr(sys, "argv", ["labs", "data_paralel"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "there is no experiment 'data_paralel': did you mean 'data_parallel'?" in capsys.readouterr().err


def test_models_says_whether_a_factory_can_be_trained(capsys):
    models.main(["labs_for_tests.workloads:model"])
    assert "is trainable" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        models.main(["labs_for_tests.workloads:nothing"])
    assert "cannot be imported" in capsys.readouterr().err
