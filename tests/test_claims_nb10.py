"""The verdicts of notebook 10 follow their records, also when they turn round."""

from __future__ import annotations

import pytest

from labs.chapters.nb10 import claims as judged
from labs.chapters.nb10 import installed
from labs.chapters.nb10.installed import CONTROLS, LAB, MESSAGES, OF_GPU
from labs.kit.claim_registry import claims, judge
from labs.kit.record import Record, Records

BY_ID = {c.id: c for c in claims("10")}


def word(claim, *rows):
    return judge(BY_ID[claim], Records(rows), gpus=0, strict=True)


def found(message, files):
    return Record(LAB, "files_with", "files", (files,), case={"message": message, "of": 2000})


def searched(message=0, control=1, of_gpu=1):
    return [found(MESSAGES[0], message), *(found(c, control) for c in CONTROLS), found(OF_GPU, of_gpu)]


def ending(last, codes=(0, 0, 0), lines=0, left=0):
    return [
        Record(LAB, "exit_code", "", codes, case={"last": last}),
        Record(LAB, "lines_at_exit", "lines", (0, lines, 0), case={"last": last, "first": "Warning: leak"}),
        Record(LAB, "left", "files", (left,), case={"last": last}),
    ]


def test_a_message_that_torch_does_not_hold():
    assert word("B27", *searched()).word == "does not hold"
    assert word("B27", *searched(message=1)).word == "depends"
    assert (
        "this message is there" not in word("B27", *searched(control=0)).because
    )  # a search that finds nothing at all
    assert word("B27", *searched(control=0)).word == "not tried yet"


def test_a_search_where_there_is_no_code_for_gpus_decides_nothing_about_it():
    said = word("B27", *searched(of_gpu=0))
    assert said.word == "needs 1 GPU" and "no GPU code in this build" in said.because
    assert "is there" in word("B27", *searched(message=1, of_gpu=0)).because


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ({}, "depends"),
        ({"lines": 3}, "depends"),
        ({"codes": (-6, -6, -6)}, "does not hold"),
        ({"left": 1}, "does not hold"),
    ],
)
def test_ranks_that_just_end(last, verdict):
    said = word("A10", *ending("destroy"), *ending("just end", **last))
    assert said.word == verdict and ("leak" in said.because) == (verdict == "depends")


def test_one_pair_that_fails_may_do_so_by_chance():
    said = word("A10", *ending("destroy"), *ending("just end", (0, 0, -6)))
    assert said.word == "depends" and said.because.startswith("inconclusive in this run: so few pairs may differ so")


def test_pairs_that_end_well_say_how_few_they_are():
    assert "only that fewer than 63% fail" in word("A10", *ending("destroy"), *ending("just end")).because
    assert "fewer than 5% fail" in word("A10", *ending("destroy"), *ending("just end", (0,) * 60)).because


def test_ranks_that_fail_with_the_call_as_often_do_not_need_it():
    said = word("A10", *ending("destroy", (0, -6, -6)), *ending("just end", (-6, 0, -6)))
    assert said.word == "depends" and "of 3 pairs of gloo ranks that just end, 1 ended" in said.because


def test_what_a_variable_switches():
    header = (
        "\n// %s of NCCL.\nstatic X TORCH_NCCL_ASYNC_ERROR_HANDLING = {\nenum ErrorHandlingMode { No = 0, Tear = 1 }"
    )
    assert word("B42", *installed.error_handling(header % "Handles errors")).word == "does not hold"
    assert word("B42", *installed.error_handling(header % "Lowers the latency")).word == "depends"
    assert word("B42").word == "not tried yet"
    assert not list(installed.error_handling("another header"))


def test_the_network_is_one_cause_of_several():
    said = word("D26")
    assert said.word == "depends" and '"NCCL meets a CUDA error"' in said.because
    assert said.kind == "" and "counted in the chart" in said.because  # nobody has published it


def test_the_network_as_the_only_cause(monkeypatch):
    monkeypatch.setattr(judged, "NETWORK", judged.re.compile(""))
    assert word("D26").word == "holds"


def test_what_a_gpu_would_decide():
    assert (word("A07").word, word("B31").word) == ("needs 2 GPUs", "needs 1 GPU")
    for at, verdict in ((0, "depends"), (1, "holds")):
        assert word("A07", Record(LAB, "current_device", "", (at,), case={"tensor_on": 1})).word == verdict
    for lines, timed, verdict in ((0, 0, "does not hold"), (40, 0, "depends"), (40, 2, "holds")):
        case = {"set": "in the program", "timed": timed}
        assert word("B31", Record(LAB, "nccl_lines", "lines", (lines,), case=case)).word == verdict


def printed(**lines):
    """Lines of NCCL that name a time, by when the variable was set."""
    sets = {"early": "in the program", "late": "after the first all-reduce", "outside": "before it"}
    return [Record(LAB, "nccl_lines", "lines", (n,), case={"set": sets[k], "timed": n}) for k, n in lines.items()]


def test_a_log_level_counts_only_before_nccl_has_read_it():
    assert word("B31", *printed(early=9, late=9, outside=9)).word == "holds"
    late = word("B31", *printed(early=9, late=0, outside=9))
    assert late.word == "depends" and "after the first all-reduce it prints nothing" in late.because
    assert word("B31", *printed(early=0, late=0, outside=9)).word == "does not hold"
    elsewhere = word("B31", *printed(early=0, late=0, outside=0))
    assert elsewhere.word == "depends" and "inconclusive in this run" in elsewhere.because


@pytest.mark.long
def test_what_is_found_here():
    records = installed.facts()
    assert all(len(r.samples) == installed.PAIRS for r in records.where("exit_code"))
    verdicts = {c: judge(BY_ID[c], records, strict=True).word for c in ("A10", "B27", "B42")}
    gpu_code = records.one("files_with", message=OF_GPU).value > 0
    assert verdicts["B27"] == ("does not hold" if gpu_code else "needs 1 GPU"), verdicts
    assert verdicts["A10"] in ("depends", "does not hold"), verdicts
