"""A bad value is told before anything is imported, built or started for it."""

import os
import resource
import subprocess

import pytest
from processes import HERE, PYTHON, new_environment

from labs.kit.errors import BadInput
from labs.kit.lab import require_findable
from labs.parts import models


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Modules that must not be imported."""
    texts = {
        "plain": "from os import path as renamed\ndef factory(): ...\nconstant = 1\n",
        "starred": "from os.path import *\n",
        "lazy": "def __getattr__(name): ...\n",
        "broken": "def factory(:\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}_for_this_test.py").write_text(f"raise SystemError('imported')\n{text}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "name", ["plain:factory", "plain:constant", "plain:renamed", "starred:join", "lazy:x", "broken:x"]
)
def test_what_may_be_there_is_left_to_the_import(modules, name):
    require_findable(name.replace(":", "_for_this_test:"), "model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain_for_this_test:nothing", "module 'plain_for_this_test' has no attribute 'nothing'"),
        ("missing_for_this_test:x", "No module named 'missing_for_this_test'"),
        ("missing_for_this_test.deep:x", "No module named 'missing_for_this_test'"),
        ("labs.nothing_of_that_name:x", "No module named 'labs.nothing_of_that_name'"),
        ("plain_for_this_test:", "must be package.module:factory"),
    ],
)
def test_what_cannot_be_there_is_told_without_an_import(modules, name, words):
    with pytest.raises(BadInput, match=words):
        models.require_known(name)


def cpu_s(*arguments: str) -> tuple[float, subprocess.CompletedProcess]:
    """Seconds of processor time, which other programs change less than the time on the wall."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*PYTHON, *arguments], env=new_environment(), cwd=HERE, text=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs resource")
@pytest.mark.parametrize("arguments", ["batch_size --model nosuch:thing", "mixed_precision --formats fp8"])
def test_a_bad_value_takes_hardly_longer_than_the_import_of_torch(arguments):
    both = []
    for _ in range(3):
        seconds, done = cpu_s("-m", *f"labs.{arguments}".split())
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stdout == ""
        both.append((seconds, cpu_s("-c", "import torch")[0]))
    bad, torch = (min(column) for column in zip(*both, strict=True))
    assert bad < 1.3 * torch
