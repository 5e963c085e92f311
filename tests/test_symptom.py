"""labs.symptom: real texts find their row, the most specific line decides, and no row is better than a wrong one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from labs.symptom import RATE, answer, catalog

ROOT = Path(__file__).parents[1]
ROWS = {row.name: row for row in catalog.rows()}
TEXTS = [json.loads(line) for line in (ROOT / "tests" / "error_texts.jsonl").read_text("utf-8").splitlines()]
"""Posted in public threads, shortened. "held out": no row was written for it; `row` is the one that was right when it
was tried, "none" where no row, a general one or a wrong one came first."""


def first(text: str) -> str:
    return next((match.row.name for match in catalog.search(text)), "none")


def test_rows_are_complete_and_their_phrases_find_them():
    for row in ROWS.values():
        assert row.why and row.fix and row.follows in range(4), row.name
        lost = [p for p in row.see if row.name not in [m.row.name for m in catalog.search(p.replace(" && ", "\n"), 5)]]
        assert len(lost) <= 0.4 * len(row.see), (row.name, lost)


def test_texts_that_the_catalog_was_built_with_find_their_row():
    built = [t for t in TEXTS if t["use"] == "built with"]
    assert len(built) >= 15 and [t for t in built if first(t["text"]) != t["row"]] == []


def test_the_rate_on_texts_that_were_held_out_is_as_the_documents_say():
    held = [t for t in TEXTS if t["use"] == "held out"]
    right = sum(t["row"] != "none" and first(t["text"]) == t["row"] for t in held)
    assert f"{right} of {len(held)} texts" in RATE and RATE in (ROOT / "docs" / "WATCH.md").read_text().replace(
        "\n", " "
    )


GONE = "[rank0]: RuntimeError: [pair.cc:553] Read error [10.0.0.2]:4713: Connection reset by peer\n"
TIMED_OUT = (
    "[rank0]:[E1126 10:11:12.1 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600042 milliseconds\n"
)
UNEQUAL = (
    "[rank2]: RuntimeError: stack expects each tensor to be equal size, but got [3, 224] at entry 0 and [3, 225]\n"
)
FULL = "OSError: [Errno 28] No space left on device"
HEAP = '  File "/usr/lib/python3.11/multiprocessing/heap.py", line 83, in __init__\n    os.ftruncate(self.fd, size)\n'


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (UNEQUAL + TIMED_OUT, "samples of different shapes"),
        (TIMED_OUT + UNEQUAL + GONE, "samples of different shapes"),
        (GONE + "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "GPU out of memory"),
        (
            "Some tasks have been OOM Killed. slurmstepd: error: Detected 2 oom_kill events\n" + GONE,
            "killed by the kernel",
        ),
        (
            "ncclInvalidUsage: invalid usage of NCCL library.\nDuplicate GPU detected : rank 0 and 1",
            "one GPU for two ranks",
        ),
        (HEAP + FULL, "shared memory full"),
        (f"{FULL}: '/dev/shm/nccl-WU88OE'", "shared memory full"),
        (f"{FULL}: 'checkpoints/step_100.pt'", "disk full while saving"),
        ("DataLoader worker (pid 7) exited unexpectedly\n" + HEAP + FULL, "shared memory full"),
        ("[rank0]: \x1b[1;35mKeyError\x1b[0m: \x1b[35m'LOCAL_RANK'\x1b[0m", "no address"),
    ],
)
def test_the_most_specific_line_decides_and_a_healthy_rank_is_no_cause(text, row):
    assert first(text) == row


def test_an_unknown_first_error_comes_before_what_follows_from_it():
    text = GONE + "[rank1]: FrobnicationError: the flux capacitor is empty\n"
    lines = list(answer(catalog.search(text), catalog.unknown_error(text)))
    assert "no row for the first error" in lines[0] and "FrobnicationError" in lines[1]
    assert "follows from another error" in lines[-1]
    assert catalog.unknown_error(GONE + UNEQUAL) == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
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


def command(*arguments, text=None):
    words = [sys.executable, "-m", "labs.symptom", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, input=text, timeout=250)


def test_the_command_answers(tmp_path):
    assert command("trying to initialize the default process group twice!").stdout.startswith(
        "process group made twice\n"
    )
    log = tmp_path / "train.log"
    log.write_bytes(b"\xff step 1\n" * 10 + b"EOFError: Ran out of input\n")
    assert command("--file", log).stdout.startswith("damaged file\n")
    nothing = command("--file", "-", text="the cat sat on the mat")
    assert nothing.returncode == 1 and "no row" in nothing.stdout
    for arguments, words in (
        ([], "give the text"),
        (["x", "--list"], "give the text"),
        (["--file", "no.log"], "no.log"),
    ):
        done = command(*arguments)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
