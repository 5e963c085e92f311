"""The doctor's trial: how pages are judged, and that a case is a run of the doctor's own command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labs.doctor.bottlenecks import RISK, SLOW, WRONG
from labs.doctor.findings import Finding
from labs.doctor.profile import Profile
from labs.doctor.report import Report
from labs.doctor_trial import Case, command, counts, judge, read_cases
from labs.kit.errors import BadInput

ROOT = Path(__file__).parents[1]
HEAD = "file\tranks\targs\tkind\tfamily\texpected\tline\tobject\tunseen\n"
CLIP = Case("wrong/a.py", 1, "", "wrong", "2", "clips to 0", "40,72", "clip_grad", True)


def page(*findings):
    profile = Profile("a.py", ["a.py"], step_s=[0.1] * 30)
    return Report([profile], [Finding(n, "t", None, where, "f", "", "b", kind) for n, where, kind in findings], [], [])


@pytest.mark.parametrize(
    ("findings", "named"),
    [
        ([("effect", "a.py:74  step()", WRONG)], True),
        ([("effect", "a.py:80  clip_grad_norm_(p, 0)", WRONG)], True),
        ([("effect", "a.py:80  step()", WRONG)], False),
        ([("effect", "b.py:72  step()", WRONG)], False),
        ([("data", "a.py:72  step()", WRONG)], False),
        ([("data", "a.py:9  x", WRONG), ("effect", "a.py:72  step()", WRONG)], False),
        ([("effect", "a.py:72  step()", RISK)], False),
        ([], False),
    ],
)
def test_a_fault_is_named_by_kind_and_line_or_object(findings, named):
    assert judge(CLIP, page(*findings))["named"] is named


def test_right_results_are_accused_by_any_wrong_result():
    healthy = Case("healthy/a.py", 1, "", "healthy", "", "", "", "", True)
    slow = Case("slow/a.py", 1, "", "slow", "", "a late loader", "5", "", True)
    both = page(("effect", "a.py:3  x", WRONG), ("slow_loader", "a.py:5  x", SLOW))
    assert judge(healthy, both)["accused"] and not judge(healthy, page(("slow_loader", "a.py:5  x", SLOW)))["accused"]
    assert judge(slow, both) | {"first_line": ""} == {"first_line": "", "named": False, "accused": True}
    assert judge(slow, page(("slow_loader", "a.py:5  x", SLOW)))["named"]
    assert judge(healthy, None)["accused"] is None
    rows = [{"kind": "healthy", "unseen": True, "named": None, "accused": True}]
    assert counts(rows) == "unseen, healthy: 1 of 1 accused"


def test_cases_are_read_and_a_bad_line_is_named(tmp_path):
    (tmp_path / "cases.tsv").write_text(HEAD + "a.py\t2\t--lr '0.1 2'\twrong\t1\tno DDP\t9\t\tyes\n")
    (case,) = read_cases(tmp_path)
    assert (case.ranks, case.line, case.unseen) == (2, "9", True)
    assert command(case, Path("a.py"), Path("out"))[-2:] == ["--lr", "0.1 2"] and "2" in command(case, Path(), Path())
    (tmp_path / "cases.tsv").write_text(HEAD + "a.py\t2\t\tstrange\t\t\t\t\tyes\n")
    with pytest.raises(BadInput, match="line 2"):
        read_cases(tmp_path)


def test_the_committed_cases_can_be_read():
    cases = read_cases(ROOT / "records" / "doctor_trial")
    assert len(cases) > 30 and all(c.line or c.kind == "healthy" for c in cases)


@pytest.mark.long
def test_a_case_is_a_run_of_the_doctor(tmp_path):
    (tmp_path / "cases.tsv").write_text(HEAD + "a.py\t1\t\thealthy\t\t\t\t\tno\ngone.py\t1\t\thealthy\t\t\t\t\tno\n")
    text = "import torch\np = torch.nn.Parameter(torch.ones(9))\no = torch.optim.SGD([p], lr=0.1)\n"
    (tmp_path / "a.py").write_text(
        f"{text}for _ in range(90):\n    (p**2).sum().backward()\n    o.step()\n    o.zero_grad()\n"
    )
    argv = [
        sys.executable,
        "-m",
        "labs.doctor_trial",
        str(tmp_path),
        "--out",
        str(tmp_path / "t.json"),
        "--seconds",
        "0",
    ]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (row,) = json.loads((tmp_path / "t.json").read_text())
    assert row["accused"] is False and row["torch"] and "skipped" in out and "gone.py" in out
