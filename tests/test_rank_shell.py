"""The same lab under launch(), `python -m` and torchrun gives the same set of records."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from processes import HERE, MARK, PYTHON, assert_no_survivors, new_environment

from labs.kit import cli
from labs.kit.launch import launch
from labs.kit.record import Record, Records, load

EMPTY = "labs_for_tests.empty"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def shape(records):
    """What must not depend on how the lab was started."""
    return sorted((r.lab, r.metric, r.unit, str(r.case), str(r.layout), str(r.config)) for r in records)


@pytest.mark.parametrize(
    "start",
    [pytest.param([*PYTHON, "-m"], marks=pytest.mark.long, id="python -m"), pytest.param(TORCHRUN, id="torchrun")],
)
def test_the_same_records_however_it_is_started(start, tmp_path):
    environment, out = new_environment(), tmp_path / "run.jsonl"
    done = subprocess.run(
        [*start, EMPTY, "--out", out], env=environment, cwd=HERE, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"saved to {out}" and "own_rank" in done.stdout
    assert done.stdout.count("median [95 %]") == 1, "rank 0 alone prints"
    assert shape(load(out)) == shape(launch(EMPTY, 2))
    assert_no_survivors(environment[MARK])


@pytest.mark.long
def test_bad_input_under_torchrun_names_the_fix_once_per_rank(tmp_path):
    """At most: torchrun ends the others 0.1 s after the first rank has failed, and a busy machine is slower."""
    command, environment = [*TORCHRUN, EMPTY, "--smoky"], new_environment()
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    assert 1 <= done.stderr.count("there is no option --smoky: did you mean '--smoke'? --help lists them all") <= 2


A_LAB = SimpleNamespace(answer=lambda run: iter([f"A step takes {run.one('step_s').value * 1e3:.0f} ms."]))


def test_the_answer_comes_first_and_the_records_are_saved(tmp_path, capsys):
    run = Records([Record("a_lab", "step_s", "s", [0.010, 0.012, 0.011], case={"mode": "ddp"})])
    assert cli.report(A_LAB, run, None, cli.Output(tmp_path / "run.jsonl")) == 0
    answer, rest = capsys.readouterr().out.split("\n\n")
    assert answer == "A step takes 11 ms." and "11.0 ms [10.0, 12.0]" in rest and "ddp" in rest
    assert len(load(tmp_path / "run.jsonl")) == 1
    assert cli.report(A_LAB, Records(), None, cli.Output()) == 0 and capsys.readouterr().out == "no records\n"


def test_many_records_are_shown_when_asked_for(capsys):
    run = Records(Record("a_lab", "all_reduce_s", "s", [0.01], case={"size": k}) for k in range(cli.ROWS))
    run += [Record("a_lab", "step_s", "s", [0.011])]
    for output, rows in ((cli.Output(), 0), (cli.Output(table=True), cli.ROWS)):
        cli.report(A_LAB, run, None, output)
        assert capsys.readouterr().out.count("all_reduce_s") == rows
