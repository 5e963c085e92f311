"""The verdicts of notebook 10 follow their records, also when they turn round."""

from __future__ import annotations

import pytest

from labs.chapters.nb10 import claims as judged
from labs.kit.claims import claims, judge
from labs.kit.record import Record, Records
from labs.parts.faults import installed
from labs.parts.faults.installed import CONTROLS, LAB, MESSAGES

BY_ID = {c.id: c for c in claims("10")}


def word(claim, *rows):
    return judge(BY_ID[claim], Records(rows), gpus=0, strict=True)


def found(message, files):
    return Record(LAB, "files_with", "files", (files,), case={"message": message, "of": 2000})


def searched(message=0, control=1):
    return [found(MESSAGES[0], message), *(found(c, control) for c in CONTROLS),
            Record(LAB, "spread_of_unequal_ranks", "", (0.0,))]  # fmt: skip


def ending(last, code=0, lines=0, left=0):
    return [Record(LAB, "exit_code", "", (code,), case={"last": last}),
            Record(LAB, "lines_at_exit", "lines", (lines,), case={"last": last, "first": "Warning: leak"}),
            Record(LAB, "left", "files", (left,), case={"last": last})]  # fmt: skip


def test_a_message_that_torch_does_not_hold():
    assert word("B27", *searched()).word == "does not hold"
    assert word("B27", *searched(message=1)).word == "depends"
    assert (
        "this message is there" not in word("B27", *searched(control=0)).because
    )  # a search that finds nothing at all
    assert word("B27", *searched(control=0)).word == "not tried yet"


@pytest.mark.parametrize(
    ("last", "verdict"),
    [({}, "depends"), ({"lines": 3}, "depends"), ({"code": -15}, "does not hold"), ({"left": 1}, "does not hold")],
)
def test_ranks_that_just_end(last, verdict):
    said = word("A10", *ending("destroy"), *ending("just end", **last))
    assert said.word == verdict and ("leak" in said.because) == (verdict == "depends")


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


def test_the_network_as_the_only_cause(monkeypatch):
    monkeypatch.setattr(judged, "NETWORK", judged.re.compile(""))
    assert word("D26").word == "holds"


def test_what_a_gpu_would_decide():
    assert word("A07").word == word("B31").word == "needs 1 GPU"
    for at, verdict in ((0, "depends"), (1, "holds")):
        assert word("A07", Record(LAB, "current_device", "", (at,), case={"tensor_on": 1})).word == verdict
    for lines, timed, verdict in ((0, 0, "does not hold"), (40, 0, "depends"), (40, 2, "holds")):
        case = {"set": "in the program", "timed": timed}
        assert word("B31", Record(LAB, "nccl_lines", "lines", (lines,), case=case)).word == verdict


@pytest.mark.long
def test_what_is_found_here():
    records = installed.facts()
    verdicts = {c: judge(BY_ID[c], records, strict=True).word for c in ("A10", "B27", "B42")}
    assert verdicts["B27"] == "does not hold" and verdicts["A10"] in ("depends", "does not hold"), verdicts
