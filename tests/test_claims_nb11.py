"""Verdicts of notebook 11, each turned round by records, or by a cost model, that say the opposite."""

from __future__ import annotations

import re

import pytest

from labs.chapters.nb11 import claims as nb11
from labs.kit.claims import claims, judge_of, table
from labs.kit.record import Record, Records
from labs.parts.planning.parallel_cost import Cost, Plan
from labs.pip_indexes import CASES

HERE = {
    "then": "1.13.1+cu116",
    "now": "2.4.1",
    "swapped": "2.4.1",
    "pinned": "1.13.1+cu116",
    "one_index": "1.13.1+cu116",
    "first_build": "2.9.1",
    "second_build": "2.10.0",
    "constrained": "2.9.1",
    "other_cuda": "2.9.1+cu126",
    "other_system": "2.10.0",
    "other_python": "2.4.1",
    "no_wheel": "",
}


def made(metric, *samples, **case):
    layout = {"world_size": 1, "rank": None, "backend": "gloo", "device": "cpu"}
    return Record("pip_indexes", metric, "1", samples or (1.0,), case=case, layout=layout)


def pip_took(same_file_on=(), **changed):
    """labs.pip_indexes; each keyword is a version that pip took otherwise."""
    rows = []
    for name, version in (HERE | changed).items():
        case = CASES[name]
        system = "linux" if name in same_file_on else case.system
        file = f"torch-{version}-{system}.whl" if version else ""
        rows.append(made("wheels", float(bool(version)), asked=name, version=version, file=file, python=case.python))
    return Records(rows)


def loaded(second=2.0, ended=False, runtimes=1.0, installers=("pip",)):
    rows = [made("packages", 90.0, installer=name) for name in installers]
    rows += [
        made("openmp_runtimes", runtimes, files=["libgomp.so.1"]),
        made("openmp_threads", 3.0, 3.0, copies=1, runtimes=1, ended=False),
        made("openmp_threads", *((0.0,) if ended else (3.0, second)), copies=2, runtimes=2, ended=ended),
    ]
    return Records(rows)


FIRST_INDEX_WINS = pip_took(now="1.13.1+cu116", swapped="1.13.1+cu116")
ONE_WHEEL_FOR_ALL = pip_took({"other_system"}, other_python="2.10.0", other_cuda="2.10.0", no_wheel="2.10.0")
BOTH = ("conda", "pip")
TURNED = {
    "D30": [(pip_took(), "does not hold"), (FIRST_INDEX_WINS, "holds")],
    "D35": [(pip_took(), "does not hold"), (pip_took(second_build="2.9.1"), "holds")],
    "E01": [
        (pip_took(), "depends"),
        (pip_took(no_wheel="2.10.0"), "holds"),
        (pip_took({"other_system"}), "depends"),
        (ONE_WHEEL_FOR_ALL, "does not hold"),
    ],
    "B45": [
        (loaded(), "depends"),
        (loaded(second=3.0), "does not hold"),
        (loaded(ended=True), "depends"),
        (loaded(installers=BOTH), "depends"),
        (loaded(installers=BOTH, runtimes=2.0), "holds"),
    ],
}
PUBLISHED = {"D27", "E02"}
MODELLED = {"C01", "D34"}


@pytest.mark.parametrize("claim, records, word", [(c, *case) for c, cases in TURNED.items() for case in cases])
def test_the_word_follows_the_records(claim, records, word):
    found = table("11", records, gpus=0, strict=True).verdict(claim)
    assert (found.word, found.kind) == (word, "measured"), found
    assert len(found.because) < 330


def test_each_claim_of_the_notebook_is_turned_modelled_or_published():
    mine = {c.id for c in claims("11")}
    assert set(TURNED) | PUBLISHED | MODELLED == mine == {c.id for c in claims("11") if judge_of(c)}


def test_without_records_nothing_is_claimed_of_pip():
    found = table("11", gpus=0, strict=True)
    assert {found.verdict(c).word for c in TURNED} == {"not tried yet"}
    assert {found.verdict(c).kind for c in PUBLISHED} == {"published"}
    only_some = Records(r for r in pip_took() if r.case["asked"] in ("now", "pinned"))
    assert table("11", only_some, gpus=0, strict=True).verdict("D30").word == "not tried yet"
    unread = pip_took(now="")
    assert "cannot have read" in table("11", unread, gpus=0, strict=True).verdict("D30").because


def test_an_older_torch_is_on_the_conda_channel(monkeypatch):
    assert table("11", gpus=0).verdict("E02").word == "does not hold"
    monkeypatch.setattr(nb11.torch, "__version__", "2.4.1")
    assert table("11", gpus=0).verdict("E02").word == "depends"


def cost(plan, step_s):
    return Cost(plan, 1e9, 1e9, step_s, 0.0, 0.0)


DDP, FSDP, TENSOR = Plan(data=8), Plan(data=8, sharded=True), Plan(tensor=8)


@pytest.mark.parametrize(
    "advised, times, words",
    [
        (lambda n: DDP, {DDP: 1.0, FSDP: 1.2}, ("holds", "holds")),
        (lambda n: DDP if n < 3e9 else FSDP, {DDP: 1.5, FSDP: 1.05, TENSOR: 1.0}, ("depends", "holds")),
        (lambda n: TENSOR, {DDP: 2.0, FSDP: 2.0, TENSOR: 1.0}, ("does not hold", "does not hold")),
        (lambda n: TENSOR, {TENSOR: 1.0}, ("does not hold", "does not hold")),
    ],
)
def test_the_cost_model_turns_its_verdicts(monkeypatch, advised, times, words):
    fitting = tuple(cost(p, s) for p, s in times.items())
    monkeypatch.setattr(nb11, "plans", lambda n, cards, network: (fitting, cost(advised(n), 1.0)))
    found = table("11", gpus=0, strict=True)
    assert tuple(found.verdict(c).word for c in ("C01", "D34")) == words
    assert {found.verdict(c).kind for c in MODELLED} == {"modelled"}


def test_one_size_that_needs_more_than_data_parallelism_makes_it_depend(monkeypatch):
    def plans(n, cards, network):
        return (cost(DDP, 1.5 if n > 1e11 else 1.0), cost(TENSOR, 1.0)), cost(DDP, 1.0)

    monkeypatch.setattr(nb11, "plans", plans)
    found = table("11", gpus=0, strict=True).verdict("D34")
    assert found.word == "depends" and "in 15 of 18 cases" in found.because


def test_a_slow_network_makes_the_complex_plans_pay():
    """By the cost model itself: on a DGX's network data parallelism is near everywhere, on an eighth of it not."""
    found = table("11", gpus=0, strict=True).verdict("D34")
    fast, slow = (int(n) for n in re.findall(r"in (\d+) of 17 cases", found.because))
    assert found.word == "depends" and fast == 17 > slow > 8, found.because


def test_where_nothing_fits_nothing_is_said(monkeypatch):
    monkeypatch.setattr(nb11, "plans", lambda n, cards, network: ((), None))
    assert {table("11", gpus=0, strict=True).verdict(c).word for c in MODELLED} == {"not tried yet"}
