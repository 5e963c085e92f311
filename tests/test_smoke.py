"""Smoke runs from a shell: smaller than a notebook's, from a fork of the command, in little more than an import."""

import dataclasses
import importlib
import os
import subprocess
from pathlib import Path

import pytest
from processes import HERE, MARK, PYTHON, assert_no_survivors, new_environment

from labs.kit.lab import experiments, for_smoke

LABS = [importlib.import_module(f"labs.{name}") for name in experiments()]
SHORTER = [lab for lab in LABS if hasattr(lab, "SMOKE")]


def test_a_smoke_run_takes_the_shorter_values_of_the_experiment_unless_told_otherwise():
    assert len(SHORTER) > 5
    for lab in SHORTER:
        usual, short = lab.Config(), for_smoke(lab, lab.Config(smoke=True))
        assert for_smoke(lab, usual) is usual
        for name, value in lab.SMOKE.items():
            assert getattr(short, name) == value != getattr(usual, name), lab.__name__
        told = dataclasses.replace(lab.Config(smoke=True), **lab.SMOKE)
        assert for_smoke(lab, told) == told, lab.__name__


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="only Linux forks a process that has loaded torch")
def test_the_ranks_of_a_command_come_from_a_fork_of_it_which_has_none_of_its_open_files(tmp_path):
    (tmp_path / "family.py").write_text(FAMILY)
    folder = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = new_environment() | {"PYTHONPATH": os.pathsep.join([folder, str(HERE.parent)])}
    done = subprocess.run([*PYTHON, "-m", "family", "--nproc", "2"], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    said = dict(line.rpartition("] ")[2].split("=") for line in done.stdout.splitlines() if "=" in line)
    assert said == {"server": "forkserver", "command": "True", "threads": "1", "held": "False", "imported": "True"}
    assert_no_survivors(environment[MARK])


FAMILY = """
import os, sys
from dataclasses import dataclass
from pathlib import Path
import torch

HELD = open(__file__) if __name__ == "__main__" else None  # a file of the command
TORCH = torch.__file__

@dataclass(frozen=True)
class Config:
    smoke: bool = False

def run(config, rank):
    server = Path(f"/proc/{os.getppid()}")
    if rank.rank == 0:
        print("server", (server / "comm").read_text().strip(), sep="=")
        print("command", b"family" in (server / "cmdline").read_bytes(), sep="=")
        print("threads", len(list((server / "task").iterdir())), sep="=")
        print("held", any(os.readlink(f) == __file__ for f in (server / "fd").iterdir()), sep="=")
        print("imported", hasattr(sys.modules["__main__"], "TORCH"), sep="=")
    yield rank.record("done", "1", 1)

if __name__ == "__main__":
    from labs.kit import cli
    cli.main()
"""
