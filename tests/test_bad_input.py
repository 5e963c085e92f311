"""A bad value is told before anything is imported, built or started for it."""

import subprocess

import pytest
from processes import HERE, PYTHON, new_environment

from labs import cost, slow_link, strategy
from labs.common import models
from labs.kit.errors import BadInput
from labs.kit.lab import require_findable


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


@pytest.mark.parametrize("name", ["plain:factory", "starred:join", "lazy:x", "broken:x"])
def test_what_may_be_there_is_left_to_the_import(modules, name):
    require_findable(name.replace(":", "_for_this_test:"), "model")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plain_for_this_test:nothing", "module 'plain_for_this_test' has no attribute 'nothing'"),
        ("missing_for_this_test:x", "No module named 'missing_for_this_test'"),
        ("plain_for_this_test:", "must be package.module:factory"),
    ],
)
def test_what_cannot_be_there_is_told_without_an_import(modules, name, words):
    with pytest.raises(BadInput, match=words):
        models.require_known(name)


@pytest.mark.parametrize(
    ("lab", "option", "value"),
    [
        (slow_link, "mb_s", (0.0,)),
        (strategy, "gpu", "H10"),
        (cost, "offers", ("H10:8",)),
    ],
)
def test_what_shared_code_refuses_is_told_under_the_lab_s_own_name_once(lab, option, value):
    with pytest.raises(BadInput) as error:
        lab.Config(**{option: value})
    assert str(error.value).startswith(f"{option}: ") and str(error.value).count(f"{option}: ") == 1


AS_A_PROGRAM = """
import runpy, sys, torch
torchs = len(sys.modules)
def build(self, *args, **kwargs):
    raise SystemError("a model is built")
torch.nn.Module.__init__ = build
name = sys.argv.pop(1)
try:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
finally:
    print(len(sys.modules) - torchs, torchs)
"""


@pytest.mark.parametrize(
    "arguments",
    ["batch_size --model nosuch:thing", pytest.param("pipeline_parallel --micro-batches 7", marks=pytest.mark.long)],
)
def test_a_bad_value_is_told_before_a_model_is_built_or_much_is_imported(arguments):
    command = [*PYTHON, "-c", AS_A_PROGRAM, *f"labs.{arguments}".split()]
    done = subprocess.run(command, env=new_environment(), cwd=HERE, text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    own, torchs = map(int, done.stdout.split())
    # Counted, not timed: what ranks need (launcher, FSDP2, pipelining, pandas) would be hundreds of modules more.
    assert own < 0.2 * torchs
