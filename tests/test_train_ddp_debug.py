"""train_ddp_debug.py trains what train_ddp.py trains, and each planted fault leaves files that say where and who."""

import functools
import json
import re
import signal

import pytest
import torch
from processes import family, wait_for
from test_recipes import EXACT, FEW, assert_trains_the_same, changed, forks, home, single, start  # noqa: F401
from test_recipes import run as run_recipe  # noqa: F401

from labs.kit.code import diff_shown

pytestmark = pytest.mark.timeout(300)
LONG = ("--cpu", "--steps", 12, "--log-every", 6, "--batch-size", 32, "--check-every", 5)


@pytest.fixture
def run(run_recipe):  # noqa: F811
    """By fresh interpreters: what stands in the way of signals and of the end of a process is not that of a fork."""
    return functools.partial(run_recipe, fresh=True)


@pytest.fixture
def faulty(home):  # noqa: F811
    """Make a copy of the recipe with lines put in before its backward, where `step` is one less than its number."""

    def faulty(lines: str) -> str:
        before = "            loss.backward()\n"
        return changed(home, "train_ddp_debug", "faulty", (before, f"            {lines}\n{before}"))

    return faulty


def ends(folder) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.end.json").read_text()) for rank in (0, 1)]


def collectives(folder, rank: int) -> int:
    """How many this rank has begun."""
    return len(json.loads((folder / f"rank{rank}.recorder.json").read_text())["entries"])


def test_it_trains_what_one_process_trains_and_ends_well(run, single, tmp_path):  # noqa: F811
    """In a folder with files of an earlier run on six ranks, which are no alarm and do not stay."""
    (tmp_path / "debug").mkdir()
    for rank in range(6):
        (tmp_path / "debug" / f"rank{rank}.end.json").write_text("{}")
    result = run("train_ddp_debug", *EXACT, "--check-every", 2, "--save", "w.pt", ranks=2)
    assert_trains_the_same(result, torch.load(tmp_path / "w.pt", weights_only=True), single)
    assert [(end["exit_code"], end["error"], end["step"]) for end in ends(tmp_path / "debug")] == [(0, "", 4)] * 2
    assert collectives(tmp_path / "debug", 0) == collectives(tmp_path / "debug", 1) > 4
    assert {path.name[:6] for path in (tmp_path / "debug").glob("rank*.*")} == {"rank0.", "rank1."}
    memory = (tmp_path / "debug" / "rank1.memory.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in memory] == list("1234") and all(int(m.split(",")[1]) > 50 for m in memory)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 3])
def test_it_trains_on_any_number_of_ranks(run, ranks):
    options = ("--cpu", "--steps", 4, "--log-every", 1, "--batch-size", 24)
    plain, debug = (run(recipe, *options, ranks=ranks) for recipe in ("train_ddp", "train_ddp_debug"))
    assert len(plain.losses) == 4 and (plain.losses, plain.tested) == (debug.losses, debug.tested)


@pytest.mark.drill
def test_a_hang_is_ended_and_each_rank_says_where_it_was(run, faulty, tmp_path):
    recipe = faulty("if rank == 1 and step == 3: time.sleep(1000)")
    result = run(recipe, *LONG, "--patience", 15, code=1, ranks=2)
    folder = tmp_path / "debug"
    assert "no step in 15.0 s" in result.err
    assert [(end["exit_code"], end["error"], end["step"]) for end in ends(folder)] == [(None, "", 3)] * 2, ends(folder)
    waiting, sleeping = ((folder / f"rank{rank}.stacks.txt").read_text() for rank in (0, 1))
    assert re.search(r"_engine_run_backward|autograd", waiting) and "autograd" not in sleeping
    assert re.search(r'faulty\.py", line \d+ in main', sleeping)
    assert collectives(folder, 0) > collectives(folder, 1), "rank 0 has begun what rank 1 never came to"


@pytest.mark.drill
def test_an_error_on_one_rank_is_told_with_what_the_others_did(run, faulty, tmp_path):
    recipe = faulty("if rank == 1 and step == 3: raise OSError('disk on fire')")
    result = run(recipe, *LONG, code=1, ranks=2)
    other, failed = ends(tmp_path / "debug")
    assert "OSError: disk on fire" in result.err
    assert (failed["exit_code"], failed["error"], failed["step"]) == (1, "OSError: disk on fire", 3)
    assert "disk on fire" in failed["traceback"] and other["step"] == 3
    assert "disk on fire" not in other["error"]
    assert collectives(tmp_path / "debug", 0) > collectives(tmp_path / "debug", 1)


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_all_ranks_and_names_the_first(run, faulty, tmp_path):
    """Step 5 on rank 1, told at step 6. Then the weights of both are NaN, and so is every loss."""
    result = run(faulty("loss = loss * float('nan') if rank == 1 and step == 4 else loss"), *LONG, code=1, ranks=2)
    told = "FloatingPointError: the loss was first not finite in step 5 on rank(s) [1]"
    assert [end["error"] for end in ends(tmp_path / "debug")] == [told] * 2 and told in result.err
    assert "step 12/" not in result.out and "test loss" not in result.out


@pytest.mark.drill
@pytest.mark.parametrize("odd", [0, 1])
def test_a_replica_that_drifts_is_found(run, faulty, tmp_path, odd):
    """The last bit of one weight of thousands, in step 2; replicas are compared at step 5."""
    recipe = faulty(f"if rank == {odd} and step == 1: model.module[2].up.weight.data.view(torch.int32)[3, 7] ^= 1")
    run(recipe, *LONG, "--lr", 1e-30, code=1, ranks=2)
    for end in ends(tmp_path / "debug"):
        assert end["error"].startswith("RuntimeError: replicas differ: 2.up.weight is not on rank(s) [1]")
        assert end["step"] == 5


@pytest.mark.drill
def test_signals_write_stacks(start, tmp_path):  # noqa: F811
    process = start("train_ddp_debug", *FEW[:1], "--steps", 100_000, "--log-every", 1, "--batch-size", 32)
    wait_for(lambda: process.stdout.readline().startswith("step 2/"), what="step 2")
    [rank] = [p for p in family(process.mark) if p.pid == process.pid]
    stacks = tmp_path / "debug" / "rank0.stacks.txt"
    rank.send_signal(signal.SIGUSR1)
    wait_for(lambda: "in main" in stacks.read_text(), what="the stacks")
    at = stacks.stat().st_size
    assert process.poll() is None, "it trains on"
    rank.send_signal(signal.SIGTERM)
    process.communicate(timeout=250)
    assert process.returncode == -signal.SIGTERM and stacks.stat().st_size > at


def test_the_difference_can_be_read():
    """What stays of train_ddp.py stays as it is: beside its docstring, a single call has other arguments."""
    lines = diff_shown("train_ddp", "train_ddp_debug")["text/plain"].splitlines()
    removed = [line for line in lines if line.startswith("-")]
    assert len([line for line in removed if "dist." in line or "=" in line]) == 1 and len(removed) <= 6
