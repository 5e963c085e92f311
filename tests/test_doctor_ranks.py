"""The doctor's hooks and counterfactuals on two ranks over gloo: ranks stay in step, and what is planted is found."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_training import environment
from processes import free_port

from labs.doctor.profile import AS_IS, load
from labs.doctor.script_process import Settings

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).parent / "doctor_scripts" / "two_ranks.py")
RECIPES = Path(__file__).parents[1] / "labs" / "recipes"


def run(tmp_path, *argv, seconds=20, ranks=2):
    """Profile of all ranks."""
    port, started, paths = str(free_port()), [], []
    for rank in range(ranks):
        settings = Settings(list(argv), str(tmp_path), rank, ranks, ranks, steps=6, seconds=seconds)
        mine = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        env = (
            environment() | {k: str(v) for k, v in mine.items()} | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        )
        command = [sys.executable, "-m", "labs.doctor.script_process", str(settings.save())]
        started.append(
            subprocess.Popen(
                command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
        paths.append(settings.path("profile"))
    try:
        said = [process.communicate(timeout=250)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(p.returncode for p in started), said
    facts = [load(path) for path in paths]
    assert {f.ended for f in facts} == {"done"} and not any(f.unseen for f in facts), [f.unseen for f in facts]
    return facts


def ms(facts, mode):
    """Median of a mode's turns."""
    return 1e3 * statistics.median(turn[0] for turn in facts.interleaved_s[mode] if turn)


def test_a_straggler_is_seen_where_ranks_are_alone(tmp_path, straggler=1):
    facts = run(tmp_path, SCRIPT, "--straggler", str(straggler), "--late", "0.1")
    late, other = facts[straggler], facts[1 - straggler]
    assert ms(late, "no exchange") > 100
    assert ms(other, "no exchange") < ms(late, "no exchange") / 2
    assert ms(other, AS_IS) > 100  # it waits in the exchange


def test_exposed_exchange_is_gone_and_comes_back(tmp_path):
    """Also where the script itself calls no_sync(), which puts back what it reads."""
    facts = run(tmp_path, SCRIPT, "--exchange", "0.1", "--accumulate", "3")
    for f in facts:
        gained = [a[0] - b[0] for a, b in zip(f.interleaved_s[AS_IS], f.interleaved_s["no exchange"], strict=True)]
        assert statistics.median(gained) > 0.08
        assert min(turn[0] for turn in f.interleaved_s[AS_IS]) > 0.1  # after no exchange there is one


@pytest.mark.parametrize("recipe", sorted(p.stem for p in RECIPES.glob("train_*.py")))
def test_recipes_run_with_all_counterfactuals(tmp_path, recipe):
    few = ("--cpu", "--steps", "100000", "--batch-size", "32")
    facts = run(tmp_path, str(RECIPES / f"{recipe}.py"), *few, seconds=30, ranks=1 if recipe == "train_single" else 2)
    assert all(f.interleaved_s[AS_IS] and "same batch again" in f.interleaved_s for f in facts), facts[0].not_tried
    assert facts[0].interleaved_s.keys() == facts[-1].interleaved_s.keys()


OWN_RANK = f"""
import os, runpy, subprocess, sys
if "RANK" not in os.environ:
    os.environ.update(RANK="0", WORLD_SIZE="2")
    subprocess.Popen([sys.executable, __file__], env=os.environ | {{"RANK": "1"}})
sys.argv[1:] = ["--exchange", "0.05"]
runpy.run_path({SCRIPT!r}, run_name="__main__")
"""


def test_a_script_that_starts_its_other_rank_itself_is_looked_at_as_it_is(tmp_path):
    """As Lightning does without torchrun: that rank is not looked at, and would not take part in counterfactuals."""
    (tmp_path / "train.py").write_text(OWN_RANK)
    env = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    doctor = [sys.executable, "-m", "labs.doctor", "--all", "--steps", "6", "--seconds", "6", "train.py"]
    said = subprocess.run(doctor, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True, timeout=250).stdout
    told = " ".join(said.split())
    assert told.startswith("No verdict: torch.distributed joins 2 ranks")
    assert "WHERE A STEP GOES" in told and "the doctor is not in the ranks that the script has started itself" in told
