"""A deprecation that our own code causes is an error wherever tests run that code; one of others is not."""

import re
import subprocess
import sys

import nbformat
import pytest
from labs_for_tests import outdated
from nbformat.v4 import new_code_cell, new_notebook, new_output
from processes import new_environment

from labs.kit.course import execute
from labs.kit.launch import RankFailed, launch, run_on_ranks

LAB, ERROR = "labs_for_tests.outdated", "DeprecationWarning: old() is deprecated"
NOT_AS_WANTED = "from labs_for_tests import outdated\noutdated.not_as_wanted()"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def start(*command):
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.Popen(command, env=new_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_in_this_process():
    assert outdated.not_as_wanted() == []


def test_in_ranks_of_a_launch():
    assert run_on_ranks(outdated.not_as_wanted) == [[], []]
    with pytest.raises(RankFailed, match=re.escape(ERROR)):
        launch(LAB, 1)


@pytest.mark.long
def test_in_a_shell_under_torchrun_and_in_their_ranks():
    torchrun = ("torch.distributed.run", "--nproc-per-node", "1", "-m")
    both = [start(LAB, "--nproc", "1"), start(*torchrun, LAB)]  # at the same time: they mostly import torch
    try:
        for process in both:
            out, err = process.communicate(timeout=250)
            assert "not as wanted: []" in out and ERROR in err and process.returncode == 1, process.args
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.fixture
def notebook(tmp_path):
    """Its first cell's output is an empty list if all is well, and its second must fail."""
    wanted = [new_output("execute_result", {"text/plain": "[]"}, execution_count=1)]
    first = new_code_cell(NOT_AS_WANTED, outputs=wanted, execution_count=1)
    nbformat.write(new_notebook(cells=[first, new_code_cell("outdated.old()")], metadata=KERNEL), tmp_path / "a.ipynb")
    return tmp_path / "a.ipynb"


def test_in_cells_under_nbval(notebook):
    options = (
        "--disable-plugin-autoload -p nbval.plugin --nbval --nbval-current-env -p no:cacheprovider -rA -c /dev/null"
    )
    with start("pytest", *options.split(), f"--rootdir={notebook.parent}", notebook) as process:
        out = re.sub(r"\x1b\[[0-9;]*m", "", process.communicate(timeout=250)[0])
    assert "1 failed, 1 passed" in out and re.search(r"PASSED \S*a.ipynb::Cell 0", out) and ERROR in out


def test_in_cells_under_papermill(notebook, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", new_environment()["PYTHONPATH"])
    error = execute(notebook, notebook.with_name("ran.ipynb"), {})
    assert error.startswith("Cell [2]") and error.endswith(ERROR)
    (output,) = nbformat.read(notebook.with_name("ran.ipynb"), as_version=4).cells[1].outputs
    assert output.data["text/plain"] == "[]"
