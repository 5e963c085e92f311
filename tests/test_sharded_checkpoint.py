"""A sharded checkpoint: what each rank writes, loaded by other numbers of ranks bit for bit, and no damage unseen."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from again import holds_soon
from processes import HERE, MARK, PYTHON, SURVIVAL_S, assert_no_survivors, leftovers, new_environment, wait_for

from labs import sharded_checkpoint
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.supervise import watched_folder
from labs.sharded_checkpoint import damage


def again(ranks, folder):
    return launch("sharded_checkpoint", nproc=ranks, oversubscribe=True, smoke=True, folder=folder)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long), 3])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    yield again(request.param, folder)
    assert not list(folder.iterdir())


def ranks(run):
    return run[0].layout["world_size"]


def test_each_rank_holds_what_was_predicted_and_writes_it_to_a_file_of_its_own(run):
    held = [r.value for r in run.where("state_bytes") if r.kind == "measured"]
    assert held == sharded_checkpoint.predict(256, 2, ranks(run))
    assert held == [r.value for r in run.where("state_bytes") if r.kind == "modelled"]
    for rank, size in enumerate(held):
        assert size <= run.one("file_bytes", file=f"__{rank}_0.distcp").value < size + 50_000
    assert len(run.where("file_bytes")) == ranks(run) + 1 and run.one("file_bytes", file=".metadata").value > 0


def test_predict_by_hand():
    assert sharded_checkpoint.predict(10, 1, 1) == [12 * (10 * 10 + 10) + 8]
    assert sharded_checkpoint.predict(10, 3, 4) == [3 * (12 * 11 * rows + 8) for rows in (3, 3, 3, 1)]
    assert sharded_checkpoint.predict(2, 1, 4) == [12 * 3 + 8, 12 * 3 + 8, 8, 8]


def goes_on(run):
    """Whether training takes steps during an async_save: a rank that gets no core may find it done already."""
    stall, total, steps = (run.one(m, mode="async_save").value for m in ("stall_s", "total_s", "steps_during"))
    return stall < total and steps >= 1


def test_training_goes_on_during_async_save_and_what_is_saved_is_the_moment_of_the_call(run, tmp_path):
    for mode in sharded_checkpoint.MODES:
        stall, total = run.one("stall_s", mode=mode), run.one("total_s", mode=mode)
        assert len(stall.samples) == 2
        steps = run.one("steps_during", mode=mode)
        if mode == "async_save":
            assert holds_soon(goes_on, run, lambda: again(ranks(run), tmp_path))
        else:
            assert stall.samples == total.samples and steps.value == 0
    found = run.one("is_snapshot")
    assert found.value == 1 and found.case["steps"] >= 1


def test_any_number_of_ranks_loads_what_another_has_saved(run):
    n = ranks(run)
    pairs = {(r.case["saved_by"], r.case["loaded_by"]) for r in run.where("equal")}
    assert pairs == {1: {(1, 1)}, 2: {(1, 2), (2, 1)}}.get(n, {(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b})
    assert all(r.value == 1 for r in run.where("equal"))
    tensors = {(r.case["part"], r.case["tensors"]) for r in run.where("equal")}
    assert tensors == {("model", 4), ("optimizer", 12)}  # of AdamW: two moments and a step count for each parameter


@pytest.mark.parametrize("kind", damage.DAMAGES)
def test_damage(run, kind):
    alone, checked = (run.one("noticed", damage=kind, checksums=c) for c in (False, True))
    assert checked.value == 1 and checked.case["named"] and checked.case["error"].startswith("Damaged: .../")
    assert alone.value == (kind not in ("flipped", "stale")), "DCP has no checksums, or has them now?"
    assert run.one("right_values", damage=kind, checksums=False).value == 0
    if kind == "truncated":
        assert not alone.case["named"], "torch now names the file: say so in the notebook"


def interrupted(folder: str) -> list[bool]:
    """A save that breaks off before its end, then one that does not: what is there after each."""
    from unittest import mock

    import torch.distributed as dist

    from labs.sharded_checkpoint import shards

    state, there = {"model": {"x": __import__("torch").ones(3)}}, []
    with mock.patch.object(shards, "seal", side_effect=KeyError("killed here")):
        try:
            shards.save(state, Path(folder) / "a")
        except KeyError:
            there.append((Path(folder) / "a").exists())
    dist.barrier()
    shards.save(state, Path(folder) / "a")
    state["model"]["x"].zero_()
    shards.load(state, Path(folder) / "a")
    return [*there, bool(state["model"]["x"].all()), len(os.listdir(folder)) == 1]


def test_a_save_is_there_as_a_whole_or_not_at_all(tmp_path):
    assert run_on_ranks(interrupted, 2, str(tmp_path)) == [[False, True, True]] * 2


def sums_damaged(folder: str) -> list[str]:
    """What a load says after each damage to the list of checksums; then of a second save to the same folder."""
    import torch
    import torch.distributed as dist

    from labs.sharded_checkpoint import shards

    state, place = {"model": {"x": torch.ones(3)}}, Path(folder) / "a"
    shards.save(state, place)
    written, said = (place / shards.SUMS).read_bytes(), []
    lines = written.splitlines(keepends=True)
    for damaged in (b"", lines[0], b"".join(lines)[:-5], b"\xff\x00" + written, b"no list\n"):
        dist.barrier()
        if dist.get_rank() == 0:
            (place / shards.SUMS).write_bytes(damaged)
        dist.barrier()
        try:
            shards.load(state, place)
            said.append("loaded")
        except shards.Damaged as e:
            said.append(str(e).replace(str(place), "..."))
    try:
        shards.save(state, place)
    except OSError as e:
        said.append(str(e))
    return said


def test_a_damaged_list_of_checksums_lets_nothing_pass_and_no_rank_waits_for_one_that_failed(tmp_path):
    first, second = run_on_ranks(sums_damaged, 2, str(tmp_path))
    assert first == second and len(first) == 6
    assert all(said.startswith(".../") and "\n" not in said for said in first[:5]), first
    assert "SHA256SUMS does not name __" in first[1] and "never written twice" in first[5]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"width": 0}, "width must be"),
        ({"layers": 0}, "layers must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"folder": Path("/nowhere")}, "cannot write to /nowhere"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("sharded_checkpoint", nproc=1, **values)


def test_its_folder_goes_away(tmp_path):
    with pytest.raises(ZeroDivisionError), watched_folder(tmp_path) as folder:
        (folder / "file").touch()
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.drill
def test_its_folder_goes_away_even_if_everything_is_killed(tmp_path):
    environment = new_environment(TMPDIR=str(tmp_path))
    command = [*PYTHON, "-m", "labs.sharded_checkpoint", "--rounds", "50", "--nproc", "1", "--width", "512"]
    launcher = subprocess.Popen(command, env=environment, cwd=HERE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: list(tmp_path.glob("labs-*/*/*.distcp")), 60, "a file of a rank")
        time.sleep(0.2)
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert_no_survivors(environment[MARK])
    wait_for(lambda: not leftovers(tmp_path), SURVIVAL_S, "an empty folder")
