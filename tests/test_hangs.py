"""Real ranks hang and die; the watchdog's report names rank, call and line, and nothing is left of them."""

import inspect

import psutil
import pytest

from labs import hangs as lab
from labs.kit.errors import BadInput
from labs.kit.lab import lab_module, make_config
from labs.kit.launch import launch
from labs.kit.record import Record, Records


def left_over():
    """Command lines of this test's processes that serve the programs."""
    lines = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
    return [line for line in lines if "from labs.hangs import serve" in line]


def test_reports_name_what_was_planted_and_who_raises_is_not_at_fault():
    """A rank that ends by itself, and one that is killed: the others raise."""
    run = launch("hangs", 1, device="cpu", programs=("out_of_data", "dead_peer"))
    assert lab.named(run) == ["out_of_data", "dead_peer"], [r.case["said"] for r in run.where("report_s")]
    assert len(run.where("error_s")) == 4 and not any(r.case["at_fault"] for r in run.where("error_s"))
    assert left_over() == []


@pytest.mark.drill
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_program_is_named_right(ranks):
    run = launch("hangs", 1, device="cpu", ranks=ranks, seed=ranks, timeout_s=280)
    assert lab.named(run) == list(lab.HANGS), [r.case for r in run.where("report_s")]
    assert left_over() == []


@pytest.mark.parametrize("name", lab.HANGS)
def test_a_program_marks_one_line_and_fits_a_cell(name):
    hang = lab.HANGS[name]
    assert len(hang.lines) == 1 and len(inspect.getsource(hang.program).splitlines()) <= 12


def test_the_rank_at_fault_is_drawn():
    drawn = [lab.Config(seed=s, ranks=4).wrong("dead_peer") for s in range(40)]
    assert set(drawn) == {0, 1, 2, 3} and drawn == [lab.Config(seed=s, ranks=4).wrong("dead_peer") for s in range(40)]


def test_a_report_that_misses_the_line_counts_as_missed():
    rows = [Record("hangs", "right", "1", (v,), case={"what": w, "program": "early_stop"})
            for w, v in zip(lab.WHAT, (1.0, 1.0, 0.0), strict=True)]  # fmt: skip
    rows.append(Record("hangs", "report_s", "s", (2.0,), case={"program": "early_stop"}))
    assert lab.named(Records(rows)) == [] and "Not in early_stop." in list(lab.answer(Records(rows)))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"programs": ("dead_pear",)}, "dead_peer"),
        ({"programs": ()}, "programs"),
        ({"patience_s": 6.0}, "less than wait_s"),
        ({"ranks": 1}, "ranks"),
    ],
)
def test_bad_values_name_their_option(values, said):
    with pytest.raises(BadInput, match=said):
        make_config(lab_module("hangs"), values)
