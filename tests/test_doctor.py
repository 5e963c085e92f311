"""The doctor's command: what a script may do, it ends with facts, and nothing is left: no process, no file."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import MARK, assert_no_survivors, family, new_environment, wait_for

from labs.doctor import __main__ as doctor
from labs.doctor import profile as doctor_profile
from labs.doctor import supervisor

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 250
TORCHS_OWN = ("torchelastic_", "torchinductor_")  # Torchrun's log folder, and the cache of torch.compile
DOCTOR = "labs_for_tests.doctor_profiles"

TRAINING = """
import os, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

def train(steps=100_000):
    for number in range(1, steps + 1):
        at(number)
        step()

def at(number): ...
"""


def state(folder: Path, writes=frozenset()) -> dict[str, tuple]:
    """Of all files in a folder, but those that the script writes: mode, time of the last change, contents."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in writes]
    return {str(p.relative_to(folder)): (p.stat().st_mode, p.stat().st_mtime_ns, p.read_bytes()) for p in files}


@contextmanager
def heard():
    """What starts here hears all three signals: it would inherit that they are ignored, as under nohup."""
    deaf = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_IGN]
    for signum in deaf:
        signal.signal(signum, signal.SIG_DFL)
    try:
        yield
    finally:
        for signum in deaf:
            signal.signal(signum, signal.SIG_IGN)


class Started:
    """A doctor at work."""

    def __init__(self, folder: Path, script: str, options=(), args=(), ranks=0, **environment) -> None:
        self.work, self.out = folder / "work", folder / "out"
        self.work.mkdir(exist_ok=True)
        self.tmp = Path(tempfile.mkdtemp())  # its path is short, as that of a socket must be
        (self.work / "train.py").write_text(textwrap.dedent(script))
        self.before, self.writes = state(self.work), {"seen.txt", "shared.pt"}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        options = ["--out", self.out, "--seconds", "0", "--steps", "8", *options]
        self.env = new_environment(TMPDIR=str(self.tmp), OMP_NUM_THREADS="1", **environment)
        command = [sys.executable, "-B", *torchrun, "-m", DOCTOR, *options, "train.py", *args]
        with heard():
            self.process = subprocess.Popen(
                [*map(str, command)],
                cwd=self.work,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def end(self) -> "Started":
        """Wait for it. Nothing may be left."""
        self.said, self.errors = self.process.communicate(timeout=LIMIT_S)
        self.code = self.process.returncode
        assert_no_survivors(self.env[MARK])
        assert state(self.work, self.writes) == self.before
        left = [p.name for p in self.tmp.iterdir() if not p.name.startswith(TORCHS_OWN)]
        assert left == []
        self.ranks = []
        if (self.out / "profiles.json").exists():
            self.ranks = [doctor_profile.from_json(row) for row in json.loads((self.out / "profiles.json").read_text())]
        return self

    @property
    def facts(self):
        (only,) = self.ranks
        return only


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*args, **kwargs):
        started.append(Started(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        for process in family(one.env[MARK]):
            process.kill()
        one.process.communicate()
        shutil.rmtree(one.tmp)


@pytest.fixture
def run(start):
    return lambda *args, **kwargs: start(*args, **kwargs).end()


# Scripts as they are


EVERYTHING = """
import sys
assert "torch" not in sys.modules  # what it sets in the environment before counts
import argparse, os, sys, threading, types
from pathlib import Path
import torch
from torch import nn
import helper  # from its own folder
assert __name__ == "__main__" and __file__ == os.path.abspath("train.py"), __file__
assert sys.path[0] == os.path.dirname(__file__), sys.path
assert sys.path.count(sys.path[0]) == 1 and not any("parts" + os.sep + "doctor" in path for path in sys.path)
assert sys.argv == ["train.py", "--steps", "7", "--out", "here", "train.py"], sys.argv
assert Path("train.py").read_text() == Path(__file__).read_text()
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int); parser.add_argument("--out", type=Path)
parser.add_argument("other")
given = parser.parse_args()

def batches():
    while True:
        yield torch.randn(4, 8)

generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
one = torch.optim.Adam(generator.parameters()); two = torch.optim.SGD(critic.parameters(), lr=0.1)
given.out.mkdir()
(given.out / "log.txt").write_text("begun\\n")
for number, x in enumerate(batches()):
    critic(generator(x)).mean().backward()
    if number % 3 == 2:  # accumulated
        one.step(); two.step(); one.zero_grad(); two.zero_grad()
        with open("here/log.txt", "a") as log:
            print(number, file=log)
        torch.save(generator.state_dict(), "here/latest.pt")
        assert torch.load("here/latest.pt").keys() == generator.state_dict().keys()
        print(len(Path("here/log.txt").read_text().splitlines()), "lines")
"""


def test_a_script_runs_as_it_would_alone(run, tmp_path):
    """Arguments that look like ours, relative paths, its own modules, a generator, two optimizers, accumulation."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "helper.py").write_text("")
    args = ["--steps", "7", "--out", "here", "train.py"]
    done = run(EVERYTHING, options=["--show-output", "--copy"], args=args)
    assert done.code == 0, done.said + done.errors
    facts = done.facts
    assert (facts.ended, facts.stage, len(facts.step_s), facts.micro_batches) == ("done", "done", 8, 3.0)
    assert facts.argv == ["train.py", *args]
    assert {"save", "print"} <= {line.kind for line in facts.lines} and facts.unseen == []
    assert f"{facts.steps - 1} lines" in done.said  # the last step was ended in


def test_a_script_writes_its_own_files_and_into_the_copy_if_one_is_asked_for(start, tmp_path):
    for options, there in (["--copy"], False), ([], True):
        one = start(TRAINING + "open('mine.txt', 'w').write('x')\ntrain()", options=options)
        one.writes = {"mine.txt"}
        assert one.end().code == 0
        assert (tmp_path / "work" / "mine.txt").exists() == there


WORKERS = (
    TRAINING
    + """
from torch.utils.data import DataLoader, TensorDataset
import multiprocessing as mp
other = mp.get_context("fork").Process(target=lambda: open("seen.txt", "w").write("child"))
other.start(); other.join()
assert open("seen.txt").read() == "child"
while True:
    for (x,) in DataLoader(TensorDataset(torch.ones(4096, 8)), batch_size=2, num_workers=2):
        optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""
)


def test_workers_and_children_write_and_end(run):
    done = run(WORKERS)
    assert done.code == 0, done.said + done.errors
    assert done.facts.ended == "done" and done.facts.loader.workers == 2


# Scripts that end otherwise

ENDS = {
    "an exception in step 3": (
        "def at(number):\n    if number == 3: print('so \\x1b[1mfar'); raise RuntimeError('no \\x1b[0mmore')\ntrain()",
        ("error", 1, 2, "RuntimeError: no more (train.py:21)"),
        ["so far", "RuntimeError: no more"],
    ),
    "an error of syntax": ("def x(:", ("error", 1, 0, "SyntaxError: invalid syntax"), ["def x(:"]),
    "it ends by itself": ("train(2)", ("script ended", 0, 2, ""), []),
    "memory is exhausted": (
        "import signal; train(2); os.kill(os.getpid(), signal.SIGKILL)",
        ("killed", -9, 2, "ended by SIGKILL: the system does so when memory is exhausted"),
        [],
    ),
}
QUICK = ("an exception in step 3",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.drill) for name in ENDS]
)
def test_a_script_that_ends_early_is_told_as_it_ended(run, name):
    body, (how, code, steps, error), words = ENDS[name]
    done = run(TRAINING + body)
    facts = done.facts
    assert done.code == 1, "no step could be looked at as it is"
    assert (facts.ended, facts.exit_code, facts.steps) == (how, code, steps)
    assert facts.error.startswith(error)
    assert all(word in done.said for word in words), done.said


@pytest.mark.long
def test_a_module_is_run_as_python_m_runs_it(run):
    alike = "assert (__name__, __spec__.name, sys.path[0]) == ('__main__', 'train', os.getcwd())\n"
    body = TRAINING + alike + "assert sys.argv[1:] == ['train.py', '-m', 'x']\ntrain()"
    done = run(body, ["-m", "train"], ["-m", "x"], 2)
    assert done.code == 0 and [(f.ended, len(f.step_s)) for f in done.ranks] == [("done", 8)] * 2, done.said


SILENT = """
import signal, subprocess
for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
for session in (True, False):
    subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(1000)"],
                     start_new_session=session)
time.sleep(1000)
"""


@pytest.mark.drill
def test_a_script_that_takes_no_step_is_ended_with_all_that_it_has_started(run):
    done = run(TRAINING + SILENT, options=["--timeout", "25"])
    assert done.code == 1 and (done.facts.ended, done.facts.steps) == ("silent", 0)
    assert done.facts.error.startswith("no step in 25 s")


THREADS = """
import threading
def forever():
    while True:
        time.sleep(0.1)
for daemon in (True, False):
    threading.Thread(target=forever, daemon=daemon).start()
try:
    train()
finally:
    print("finally", flush=True)
"""


@pytest.mark.long
def test_threads_that_never_end_and_ten_megabytes_of_output(run):
    done = run(TRAINING + "for _ in range(100): print('x' * 100_000)\n" + THREADS, options=["--show-output"])
    assert done.code == 0 and done.facts.ended == "done"
    assert len(done.said) > 10_000_000 and "finally" in done.said


@pytest.mark.drill
def test_a_script_that_catches_everything_is_ended_all_the_same(run):
    done = run(TRAINING + "while True:\n    try:\n        train()\n    except BaseException:\n        pass")
    assert done.code == 0 and done.facts.ended == "done"


# Whoever ends it


def at_work(one: Started) -> bool:
    """Whether steps have been taken."""
    return any(int(p.read_bytes() or 0) > 5 for p in one.tmp.glob("labs-*/progress-*"))


def saved(one: Started) -> list[dict]:
    """What it has of each rank so far."""
    return [json.loads(p.read_text()) for p in one.tmp.glob("labs-*/profile-?")]


ENDLESS = TRAINING + "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('begun')\ntrain()"
ENDLESS = ENDLESS.replace("def at(number): ...", "def at(number): time.sleep(0.05)")  # 10 000 steps: eight minutes


LOADED = """
from torch.utils.data import DataLoader, TensorDataset
while True:
    for (x,) in DataLoader(TensorDataset(torch.ones(4096, 8)), 4):
        time.sleep(0.5); print("step"); optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
"""


@pytest.mark.drill
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_what_is_known_is_told(start, signum):
    one = start(TRAINING + LOADED, options=["--seconds", "1000"])
    wait_for(lambda: any(f["interleaved_s"] for f in saved(one)), LIMIT_S, "a round")
    one.process.send_signal(signum)
    done = one.end()
    assert (done.facts.ended, done.facts.error) == ("stopped", signum.name)
    assert done.code == 0 and "step" in done.said
    assert len(done.facts.step_s) == 8 and done.facts.interleaved_s


@pytest.mark.drill
def test_nothing_survives_the_doctor_s_own_death(start):
    one = start(
        ENDLESS.replace(
            "train()",
            """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
train()""",
        ),
        options=["--steps", "10000"],
    )
    wait_for(lambda: at_work(one), LIMIT_S, "steps")
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not family(one.env[MARK]), 60, "the end of all processes")
    assert one.end().ranks == []


# Ranks

RANKS = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0:
    torch.save(model.state_dict(), "shared.pt")
dist.barrier()
torch.load("shared.pt")
train()
"""


@pytest.mark.drill
def test_two_ranks_are_told_together(run):
    done = run(TRAINING + RANKS, ranks=2)
    assert [(f.rank, f.ranks, f.ended, len(f.step_s)) for f in done.ranks] == [(0, 2, "done", 8), (1, 2, "done", 8)]


@pytest.mark.drill
@pytest.mark.parametrize("end", ["raise RuntimeError('mine')", "os.kill(os.getpid(), 9)"])
def test_a_rank_that_fails_is_told_with_the_other(run, end):
    body = RANKS.replace("train()\n", f"def at(number):\n    if (rank, number) == (1, 3): {end}\ntrain()")
    done = run(TRAINING + body, ranks=2)
    assert done.code == 1
    one, two = done.ranks
    how = ("killed", "ended by SIGKILL") if "kill" in end else ("error", "RuntimeError: mine")
    assert two.ended == how[0] and two.error.startswith(how[1]) and two.steps == 2
    assert one.ended in ("error", "killed") and one.steps <= 3  # gloo says so, or it waits and is ended


# Bad input


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nothing.py", "there is no script nothing.py"),
        ("--steps 0 train.py", "--steps must be from 1 to 10000, not 0"),
        ("--seconds -1 train.py", "--seconds must be a number from 0 on"),
        ("--compare none.json train.py", "--compare: none.json cannot be read (No such file or directory)"),
        ("--out train.py train.py", "--out: cannot write to a folder"),
        ("-m pkg.train --lr 1", "-m: there is no module pkg in this folder, nor among the installed ones"),
        ("hidden/train.py", "{here}/hidden/labs.py has the same name as this command's package: rename it"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden").mkdir()
    for name in ("train.py", "hidden/train.py", "hidden/labs.py"):
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(supervisor, "examine", lambda *args: pytest.fail("it starts"))
    monkeypatch.setattr(sys, "argv", ["labs.doctor", *arguments.split()])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert err.startswith(f"python -m labs.doctor: {told.format(here=tmp_path)}") and err.count("\n") == 1


def test_options_after_the_script_are_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    wanted = doctor.options(["--steps", "3", "train.py", "--steps", "x", "--help", "--", "-v"])
    assert wanted.argv == ["train.py", "--steps", "x", "--help", "--", "-v"] and wanted.steps == 3
    assert wanted.timeout is None
    assert doctor.options(["--timeout", "5", "train.py"]).timeout == 5


# The whole command


def test_the_page_is_printed_and_the_report_is_written(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING + "train()")
    env = new_environment(OMP_NUM_THREADS="1", TMPDIR=str(tmp_path))
    command = [sys.executable, "-B", "-m", "labs.doctor", "--steps", "10", "--seconds", "1", "train.py"]
    for more in ([], ["--compare", "doctor-report/report.json", "--out", "after"]):
        done = subprocess.run(
            [*command[:-1], *more, "train.py"], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=LIMIT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert_no_survivors(env[MARK])
        assert "A step takes" in done.stdout
    assert json.loads((tmp_path / "after" / "report.json").read_text())["profiles"][0]["ended"] == "done"
    left = sorted(name for name in os.listdir(tmp_path) if not name.startswith(TORCHS_OWN))
    assert left == ["after", "doctor-report", "train.py"]
