"""What pip takes, by pip itself; nobody's settings change it, and no pip is a result, too."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labs import pip_indexes as lab
from labs.chapters.nb11 import figures_install
from labs.kit.check import predict
from labs.kit.claims import table
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.record import Records
from labs.parts.installing import runtimes
from labs.parts.installing.indexes import INDEXES, Wheel

TAKEN = {
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
NOW = lab.CASES["now"]


@pytest.fixture(scope="module")
def run():
    if not lab.pip_command()[0]:
        pytest.skip("no pip, and Python brings none")
    return launch("pip_indexes", nproc=2, oversubscribe=True)


def test_pip_takes_the_newest_that_fits_wherever_it_stands(run):
    assert {r.case["asked"]: r.case["version"] for r in run.where("wheels")} == TAKEN
    taken = {r.case["asked"]: r.case for r in run.where("wheels")}
    assert (taken["now"]["index"], taken["then"]["index"]) == ("main-2.9", "cu116")
    assert "macosx" in taken["other_system"]["file"] and "x86_64" in taken["second_build"]["file"]
    assert run.one("wheels", asked="no_wheel").value == 0


def test_the_rule_says_the_same():
    assert lab.predict(lab.Config()) == TAKEN
    two = {"main-2.9": (Wheel("1.0", "cp38", "linux_x86_64"),), "cu116": (Wheel("1.0+cu116", "cp38", "linux_x86_64"),)}
    assert lab.newest_that_fits(NOW, two).version == "1.0+cu116", "with equal numbers the one with a build is newer"


@pytest.fixture
def shown(monkeypatch):
    """(tables, sentences) of what is shown meanwhile."""
    tables, said = [], []
    monkeypatch.setattr(figures_install, "show_table", tables.append)
    monkeypatch.setattr(figures_install, "say", said.append)
    return tables, said


def test_the_claims_are_judged_and_told(run, shown):
    found = {c.id: v for c, v in table("11", run, gpus=0, strict=True).rows}
    assert (found["D30"].word, found["D35"].word, found["E01"].word) == ("does not hold", "does not hold", "depends")
    assert "in 12 of 12 cases" in " ".join(lab.answer(run))
    (tables, said) = shown
    figures_install.choices(run, predict(5, "lines"))
    assert tables[0].loc[figures_install.ASKED["now"], "pip takes"] == "2.4.1 from main-2.9"
    assert set(tables[0]["the rule"]) == {"the same"} and len(tables[0]) == len(TAKEN)
    assert said == [f"* {predict(5, 'lines').against(3.0)}"], "of five lines with cu116 three give it"
    figures_install.environment(run)
    assert "CUDA packages" in said[-1] and "who installed them" in said[-1]


def test_a_pip_that_prefers_the_extra_index_is_seen(run, shown):
    """What the records would be if it did: the rule no longer explains them, and the verdict turns."""
    other = {"version": "1.13.1+cu116"}
    swapped = [replace(r, case=r.case | other) if r.metric == "wheels" and r.case["asked"] == "now" else r for r in run]
    assert "in 11 of 12 cases" in " ".join(lab.answer(Records(swapped)))
    assert table("11", swapped, gpus=0, strict=True).verdict("D30").word == "holds"
    figures_install.choices(Records(swapped))
    assert shown[0][0].loc[figures_install.ASKED["now"], "the rule"] == "2.4.1"


def test_nobodys_settings_and_no_proxy_take_part(tmp_path, monkeypatch):
    """Each of these alone makes a plain pip look elsewhere, or stop."""
    home = tmp_path / "a home"
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nindex-url = http://127.0.0.1:9/simple\nno-index = true\n"
    )
    (tmp_path / "pip.py").write_text("raise SystemExit('a pip.py of the user')")
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "PIP_CONFIG_FILE": str(home / ".config" / "pip" / "pip.conf"),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": "/no/such/file",
        "PIP_PRE": "1",
        "PYTHONWARNINGS": "error",
    }.items():
        monkeypatch.setenv(name, value)
    assert lab.choose(NOW) == lab.Choice("2.4.1", "main-2.9", "torch-2.4.1-cp38-cp38-manylinux1_x86_64.whl")


@pytest.mark.long
def test_pip_from_pythons_own_wheel_takes_the_same(monkeypatch):
    version_of = importlib.metadata.version

    def version(name):
        if name == "pip":
            raise importlib.metadata.PackageNotFoundError(name)
        return version_of(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    command, number = lab.pip_command()
    if not command:
        pytest.skip("this Python brings no wheel of pip")
    assert command[1].endswith(os.path.join(".whl", "pip")) and number
    assert lab.choose(NOW).version == "2.4.1"


def test_without_pip_the_rest_is_there_and_it_is_said(shown):
    def records():
        import torch
        import torch.distributed as dist

        from labs import pip_indexes as lab
        from labs.kit.rank import Rank

        lab.pip_command = lambda: ([], "")
        rank = Rank(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"), "gloo", (), lab="pip_indexes")
        return list(lab.run(lab.Config(), rank))

    (found,) = run_on_ranks(records, 1)
    run = Records(found)
    assert len(run.where("no_answer")) == len(TAKEN) and not len(run.where("wheels"))
    assert lab.NO_PIP in " ".join(lab.answer(run)) and len(run.where("packages"))
    assert table("11", run, gpus=0, strict=True).verdict("D30").word == "not tried yet"
    figures_install.choices(run)
    assert shown == ([], [f"* No answer from pip: {lab.NO_PIP}"])


STAND_INS = {
    "a pip too old": ("import sys; sys.exit('no such option: --dry-run')", "no such option: --dry-run"),
    "a pip that hangs": ("import time; time.sleep(60)", "no answer after 1 s"),
    "a pip that says nothing": ("raise SystemExit(3)", "exit code 3"),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_a_pip_that_gives_no_answer_is_no_choice(name, tmp_path):
    program, why = STAND_INS[name]
    urls = dict.fromkeys(INDEXES, "file:///nowhere")
    found = lab.ask_pip(
        NOW, urls, [sys.executable, "-c", program], tmp_path, timeout_s=1.0 if "hangs" in name else 60.0
    )
    assert found == lab.Choice(failed=why)


@pytest.mark.long
def test_nothing_is_left_in_a_folder_of_any_name(tmp_path, monkeypatch):
    folder = tmp_path / "my #1, 100 % Übung"
    folder.mkdir()
    monkeypatch.setattr(lab.tempfile, "tempdir", str(folder))
    assert lab.choose(NOW).version == "2.4.1"
    assert list(folder.iterdir()) == []


def test_bad_input_is_one_line():
    with pytest.raises(BadInput, match="there is no 'pined': did you mean 'pinned'"):
        lab.Config(cases=("pined",))
    done = subprocess.run(
        [sys.executable, "-m", "labs.pip_indexes", "--cases", "pined"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pinned" in done.stderr


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /venv/lib/torch/lib/libgomp.so.1
7f01-7f02 rw-p 00000000 08:01 11 /venv/lib/torch/lib/libgomp.so.1
7f02-7f03 r-xp 00000000 08:01 12 /a home/sklearn.libs/libgomp-a34b3233.so.1.0.0
7f03-7f04 r-xp 00000000 08:01 13 /conda/lib/libiomp5.so
7f04-7f05 r-xp 00000000 08:01 14 /conda/lib/libomp.so (deleted)
7f05-7f06 r-xp 00000000 08:01 15 /venv/lib/libompitrace.so.40
7f06-7f07 r-xp 00000000 08:01 16 /venv/lib/numpy.libs/libscipy_openblas64_-32a4b2a6.so
7f07-7f08 rw-p 00000000 00:00 0 [heap]
7f08-7f09 rw-p 00000000 00:00 0
"""


def test_runtimes_are_counted_by_file_not_by_mapping():
    assert [Path(f).name for f in runtimes.openmp_files(MAPS)] == [
        "libgomp-a34b3233.so.1.0.0",
        "libiomp5.so",
        "libomp.so (deleted)",
        "libgomp.so.1",
    ]


@pytest.mark.skipif(not runtimes.openmp_runtimes(), reason="no OpenMP runtime, or no Linux to tell")
def test_a_second_copy_is_seen_and_keeps_its_own_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    library = runtimes.openmp_runtimes()[0]
    once, twice = runtimes.with_a_copy(library, tmp_path)
    assert once == runtimes.Together(1, (runtimes.ASKED, runtimes.ASKED))
    assert twice in (runtimes.Together(2, (runtimes.ASKED, runtimes.DEFAULT)), runtimes.Together(2, ()))
    (tmp_path / "broken.so").write_text("no library")
    assert runtimes.together(library, str(tmp_path / "broken.so")) is None
    monkeypatch.setattr(runtimes, "TWO", "import os; os.abort()")
    assert runtimes.together(library, library) == runtimes.Together(2, ())


def test_settings_of_the_user_do_not_reach_the_two_copies(monkeypatch):
    """KMP_DUPLICATE_LIB_OK, which many set for ever, hides what is looked for."""
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
    told = "import os; print(*sorted(len(k) for k in os.environ if k[:4] in ('OMP_', 'KMP_', 'GOMP')))"
    monkeypatch.setattr(runtimes, "TWO", told)
    assert runtimes.together("a", "b") == runtimes.Together(0, (len("OMP_NUM_THREADS"),))
