"""The chart of symptoms: every drill makes its message and its cure ends it; real texts find their row."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from labs.kit.lab import experiments
from labs.symptom import catalog, drills

ROWS = {row.name: row for row in catalog.rows()}
DRILLS = {row.drill: row for row in catalog.rows() if row.drill}
SLOW = set(
    """no_main_guard lambda_in_dataset hidden_gpus few_files no_such_launcher no_such_version no_compiler compiled_again
    not_compilable long_dash file_too_large start_method_twice daemon_with_children unknown_host slow_worker
    another_depth_per_rank lacks_import nobody_listens""".split()
)
"""They start a Python that imports torch, two times each, or wait for something to fail."""
CPU_BUILD = {"no_nccl", "no_cuda"}
LINUX = {"many_workers", "few_files", "file_too_large", "read_only_cache"}  # limits and folders that others lack
TEXTS = Path(__file__).parent / "public_error_texts.toml"


def test_commands_name_labs_that_are_there():
    for row in catalog.rows():
        for lab in re.findall(r"labs\.(\w+)", f"{row.command} {row.ask} {row.cure}"):
            assert lab in experiments(), (row.name, lab)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in DRILLS]
)
def test_a_drill_shows_its_message_and_the_cure_ends_it(name):
    import torch

    if name in CPU_BUILD and torch.version.cuda:
        pytest.skip("this torch is built with CUDA")
    if name in LINUX and sys.platform != "linux":
        pytest.skip("needs Linux")
    row = DRILLS[name]
    found = catalog.search(drills.seen(name, cured=False))
    assert found and found[0].row.name == row.name, found
    cured = catalog.search(drills.seen(name, cured=True))
    assert row.name not in [f.row.name for f in cured], cured


def test_words_of_the_chart_find_their_row():
    for row in catalog.rows():
        for phrase in row.see:
            assert catalog.search(phrase)[0].row.name == row.name, phrase


TIMED_OUT = (
    "[rank0]:[E1126 10:11:12.1 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600042 milliseconds "
    "before timing out.\n"
)
GONE = (
    "[rank0]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was "
    "a network error, NCCL version 2.27.5\n[rank0]: ncclRemoteError: A call failed possibly due to a network error or "
    "a remote process exiting prematurely.\n"
)
UNEQUAL = (
    "[rank2]: RuntimeError: stack expects each tensor to be equal size, but got [3, 224] at entry 0 and [3, 225]\n"
)
ILLEGAL = (
    "[rank3]:[E ProcessGroupNCCL.cpp:1414] [PG 2 Rank 3] Process group watchdog thread terminated with exception: "
    "CUDA error: an illegal memory access was encountered\n"
)
KILLED = "slurmstepd: error: Detected 2 oom_kill events in StepId=77.0. Some of the step tasks have been OOM Killed.\n"
NO_ANSWER = (
    "[rank2]: torch.distributed.DistBackendError: [2] is setting up NCCL communicator and retrieving ncclUniqueId from "
    "[0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /0\n"
)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (UNEQUAL + TIMED_OUT, "samples of different shapes"),
        (TIMED_OUT + UNEQUAL, "samples of different shapes"),
        (ILLEGAL + TIMED_OUT, "illegal memory access"),
        (KILLED + GONE, "killed by the kernel"),
        (NO_ANSWER, "first rank did not answer"),  # two rows in one line: neither is the other's cause
        (
            TIMED_OUT + "exitcode : -6 (pid: 9)\ntraceback : Signal 6 (SIGABRT) received by PID 9\n",
            "collective timed out (NCCL)",
        ),
    ],
)
def test_a_cause_comes_first_however_long_the_message_of_what_follows(text, row):
    assert catalog.search(text)[0].row.name == row


@pytest.mark.parametrize("escape", ["\x1b", ""])
@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("[rank0]: <[1;35m>KeyError<[0m>: <[35m>'LOCAL_RANK'<[0m>", "no address"),
        (
            "[rank0]: <[1;35m>AttributeError<[0m>: <[35m>'DataParallel' object has no attribute 'x'<[0m>",
            "attribute behind the wrapper",
        ),
    ],
)
def test_colours_of_a_terminal_hide_no_error(text, row, escape):
    """Python 3.13 puts them around the kind of an exception; a page or an editor may drop the escape alone."""
    found = catalog.search(text.replace("<", escape).replace(">", ""))
    assert found[0].row.name == row and "[0m" not in found[0].line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "everything went well",
        "Epoch 3: loss 0.31, 1250 images/s",
        "ModuleNotFoundError: No module named 'pandas'",
        "NameError: name 'model' is not defined",
        "IndexError: list index out of range",
        "ImportError: cannot import name 'foo' from 'bar.baz'",
        "TypeError: 'NoneType' object is not subscriptable",
    ],
)
def test_no_row_is_better_than_a_wrong_one(text):
    assert catalog.search(text) == []


def told(*arguments, text=None):
    return subprocess.run(
        [sys.executable, "-m", "labs.symptom", *arguments], capture_output=True, text=True, input=text, timeout=250
    )


def test_the_command_answers(tmp_path):
    done = told("trying to initialize the default process group twice!")
    assert done.returncode == 0 and done.stdout.startswith("process group made twice\n")
    assert "--try group_twice" in done.stdout
    assert told("--file", "-", text="RuntimeError: CUDA error: invalid device ordinal").stdout.startswith("device that")
    log = tmp_path / "train.log"
    log.write_bytes(b"\xff step 1\n" * 10 + b"EOFError: Ran out of input\n")
    assert told("--file", str(log)).stdout.startswith("damaged file\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the text"),
        (["x", "--list"], "give the text"),
        (["--table", "--list"], "give the text"),
        (["--file", "no.log"], "--file no.log"),
        (["--try", "group_twise"], "group_twice"),
    ],
)
def test_bad_input_is_one_line(arguments, says):
    done = told(*arguments)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_what_no_row_knows_ends_with_1():
    done = told("the cat sat on the mat")
    assert done.returncode == 1 and "no row" in done.stdout


def test_a_search_needs_no_torch():
    code = "import sys, labs.symptom; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_messages_that_people_posted_find_their_row():
    """How well it did before it knew these texts stands in the file."""
    texts = tomllib.loads(TEXTS.read_text("utf-8"))["text"]
    assert {t["row"] for t in texts} <= {*ROWS, "none"}
    first = [(t["row"], next((f.row.name for f in catalog.search(t["shown"])), "none"), t["url"]) for t in texts]
    known = [said for said in first if said[0] != "none"]
    missed = [said for said in known if said[0] != said[1]]
    assert len(known) >= 200 and len(missed) <= 0.08 * len(known), missed
    blind = [said for text, said in zip(texts, first, strict=True) if text["round"] == 4 and said[0] != "none"]
    assert len(blind) >= 40 and sum(said[0] == said[1] for said in blind) >= 0.9 * len(blind), blind
    unknown = [said for said in first if said[0] == "none"]
    assert sum(said[1] != "none" for said in unknown) <= 0.15 * len(unknown), unknown
