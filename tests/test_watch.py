"""labs.watch: the script runs as if alone; slow work is never called a hang; a hang is, with who and where."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from processes import MARK, assert_no_survivors, family, new_environment, wait_for

from labs.kit.place import Place
from labs.watch import __main__ as watch
from labs.watch import activity_probe, evidence
from labs.watch.activity_probe import ActivityProbe, Counted, Counts
from labs.watch.watchdog import Board, Watchdog

pytestmark = pytest.mark.timeout(300)
PATIENCE_S = 3

TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

def work(seconds):
    "A core is busy for so long."
    x = torch.ones(64, 64)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        x = (x @ x).sigmoid()

class Data(Dataset):
    def __init__(self, item=lambda: None): self.item = item
    def __len__(self): return 8
    def __getitem__(self, i): self.item(); return torch.ones(4)

def train(rank, at=lambda rank, step: None, loader=None, steps=6):
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(loader or DataLoader(Data()))
    for step in range(steps):
        at(rank, step)
        x = next(batches, None)
        model(torch.ones(2, 4) if x is None else x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    long = float(sys.argv[1]) if len(sys.argv) > 1 else 0
    {body}
    dist.barrier()
    sys.stdout.write(f"rank {rank} has ended" + os.linesep)  # print would write the end of the line by itself
    sys.stdout.flush()
    dist.destroy_process_group()
"""

HEALTHY = {
    "a long save": """
    def save(rank, step):
        if rank == 0 and step == 3:
            with open("saved", "wb", buffering=0) as file:  # a slow disk
                until = time.monotonic() + long
                while time.monotonic() < until:
                    file.write(bytes(100_000)); time.sleep(0.3)
    train(rank, save)""",
    "a long validation on one rank": """
    train(rank, lambda rank, step: work(long) if rank == 0 and step == 3 else None)""",
    "a loader that computes": """
    train(rank, loader=DataLoader(Data(lambda: work(long / 4)), batch_size=4, num_workers=1), steps=2)""",
    "a loader that waits for a disk or network far away": """
    train(rank, loader=DataLoader(Data(lambda: time.sleep(long / 4)), batch_size=1, num_workers=1), steps=8)""",
    "a compiler in a process of its own": """
    import subprocess
    train(rank, lambda rank, step: subprocess.run([sys.executable, "-c",
          f"import time; e = time.monotonic() + {long}\\nwhile time.monotonic() < e: pass"]) if step == 3 else None)""",
}
HANGS = {
    "a rank sleeps": ("train(rank, lambda rank, step: time.sleep(1000) if (rank, step) == (1, 3) else None)", 1),
    "a rank waits for a file in a loop": (
        """
    def wait(rank, step):
        while rank == 0 and step == 3 and not os.path.exists("never"):
            time.sleep(0.01)
    train(rank, wait)""",
        0,
    ),
}


@pytest.fixture
def start(tmp_path):
    """Start a script under labs.watch; what is left of it at the end is killed."""
    started = []

    def start(
        body: str, *args, ranks: int = 2, patience: float = PATIENCE_S, watched: bool = True, plain: bool = False
    ):
        (tmp_path / "train.py").write_text(textwrap.dedent(body) if plain else TRAINING.replace("{body}", body.strip()))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        how = ["-m", "labs.watch", "--patience", str(patience)] if watched else []
        env = new_environment(OMP_NUM_THREADS="1")
        process = subprocess.Popen(
            [sys.executable, "-B", *torchrun, *how, "train.py", *map(str, args)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        process.mark = env[MARK]
        started.append(process)
        return process

    yield start
    for process in started:
        for p in family(process.mark):
            p.kill()
        process.communicate()


@pytest.fixture
def run(start):
    def run(*args, **how) -> tuple[int, str, str]:
        process = start(*args, **how)
        out, err = process.communicate(timeout=250)
        assert_no_survivors(process.mark)
        return process.returncode, out, err

    return run


def read_until(process, words: str) -> list[str]:
    """Lines of stderr up to one that holds `words`; a thread reads stdout, so that no pipe is full."""
    threading.Thread(target=process.stdout.read, daemon=True).start()
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"no {words!r} in {''.join(lines)}")


# The script is as it would be alone

ALIKE = {
    "names": """
        import sys, os, inspect
        import helper
        print(__name__, sys.argv, os.path.basename(__file__), sys.path[0] == os.path.dirname(__file__), __spec__)
        print(sys.modules["__main__"].__dict__ is globals(), inspect.getsource(inspect.currentframe())[:11], helper.x)
    """,
    "an error": """
        def inner(): raise KeyError("gone")
        try:
            1 / 0
        except ZeroDivisionError:
            inner()
    """,
    "exit with a number": "import sys; print('here'); sys.exit(5)",
    "exit at once": "import os; print('here', flush=True); os._exit(4)",
    "a hook of its own": """
        import sys, traceback
        sys.excepthook = lambda k, e, t: print("mine:", k.__name__, len(traceback.extract_tb(t)), e.__traceback__ is t)
        raise OSError("full")
    """,
    "what runs at the end": """
        import atexit, threading, time
        atexit.register(lambda: print("last", __name__))
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    """,
    "a child by fork": """
        import multiprocessing as mp, os, sys
        def child(): sys.exit(3)
        if __name__ == "__main__":
            for how in ("fork", "spawn"):
                p = mp.get_context(how).Process(target=child); p.start(); p.join(); print(p.exitcode)
            if not (pid := os.fork()): raise SystemExit(6)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """,
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
}


@pytest.mark.parametrize(
    "what", [*list(ALIKE)[:2], *(pytest.param(w, marks=pytest.mark.long) for w in list(ALIKE)[2:])]
)
def test_the_script_does_what_it_does_alone(run, tmp_path, what):
    (tmp_path / "helper.py").write_text("x = 'from its own folder'")
    found = [run(ALIKE[what], "--lr", "0.1", "--patience", "x", ranks=0, watched=w, plain=True) for w in (False, True)]
    (code, out, err), (code_w, out_w, err_w) = found
    told = [line for line in err_w.splitlines() if line.startswith(watch.PROG)]
    without = [line for line in err_w.splitlines() if line not in told]
    assert (code, out, err.splitlines()) == (code_w, out_w, without)
    assert bool(told) == ("Error" in err or code == -signal.SIGINT or "mine" in out) == (tmp_path / "debug").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--patience", "0", "x.py"], "--patience must be"),
        (["--patience", "soon", "x.py"], "invalid float"),
        (["absent.py"], "there is no script absent.py"),
        (["--folder", "x.py", "x.py"], "not a folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, args, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    with pytest.raises(SystemExit) as end:
        watch.options(args)
    told = capsys.readouterr().err
    assert end.value.code == 2 and words in told and told.count("\n") == 1, told


# Ranks


def test_a_run_that_ends_well_leaves_nothing(run, tmp_path):
    """Though its last moment meets a call of the store in the watching thread, which here never does anything else."""
    code, out, err = run("sys.modules['labs.watch.watchdog'].LOOKS = 1e9\n    train(rank)")
    assert code == 0 and sorted(out.splitlines()) == ["rank 0 has ended", "rank 1 has ended"], err
    assert watch.PROG not in err and not (tmp_path / "debug").exists()


@pytest.mark.parametrize(
    "what", ["a rank sleeps", *(pytest.param(w, marks=pytest.mark.drill) for w in list(HANGS)[1:])]
)
def test_a_hang_is_reported_with_where_each_rank_is(start, tmp_path, what):
    body, blamed = HANGS[what]
    process = start(body)
    lines = read_until(process, f"{watch.PROG}: no rank has moved for {PATIENCE_S} s")
    wait_for(lambda: len(list((tmp_path / "debug").glob("*.end.json"))) == 2, what="evidence of both ranks")
    for rank in (0, 1):
        end = json.loads((tmp_path / "debug" / f"rank{rank}.end.json").read_text())
        assert end["exit_code"] is None and end["error"] == ""
    stacks = (tmp_path / "debug" / f"rank{blamed}.stacks.txt").read_text()
    assert re.search(r'train\.py", line \d+ in', stacks)
    assert process.poll() is None, "it is reported, not ended"
    assert sum(f"{watch.PROG}: no rank" in line for line in lines) == 1


@pytest.mark.drill
def test_a_hang_that_ends_continues(run, tmp_path):
    sleeps = f"time.sleep({3 * PATIENCE_S}) if (rank, step) == (1, 3) else work(1)"
    code, out, err = run(f"train(rank, lambda rank, step: {sleeps})")
    assert code == 0 and out.count("has ended") == 2
    assert err.count("no rank has moved") == 1 and "continues after" in err
    assert len(list((tmp_path / "debug").glob("rank*.stacks.txt"))) == 2, "the evidence is kept"


@pytest.mark.drill
@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_a_rank_that_leaves_alone_is_reported(run, tmp_path, how):
    code, _, err = run(f"train(rank, lambda rank, step: {how}(3) if (rank, step) == (1, 3) else None)")
    end = json.loads((tmp_path / "debug" / "rank1.end.json").read_text())
    assert code == 1 and end["exit_code"] == 3 and "rank 1 has ended with exit code 3" in err
    assert (tmp_path / "debug" / "rank0.stacks.txt").exists()


@pytest.mark.drill
def test_an_error_has_the_evidence_of_all_ranks(run, tmp_path):
    code, _, err = run("train(rank, lambda rank, step: 1 / 0 if (rank, step) == (1, 3) else None)")
    ends = [json.loads((tmp_path / "debug" / f"rank{rank}.end.json").read_text()) for rank in (0, 1)]
    assert code == 1 and ends[1]["error"] == "ZeroDivisionError: division by zero" and ends[1]["exit_code"] == 1
    assert "labs/watch/__main__.py" not in ends[1]["traceback"] and "train.py" in ends[1]["traceback"]
    assert "ZeroDivision" not in ends[0]["error"], "rank 0 says where it was, or that its peer is gone"
    assert err.count("rank 1 has failed (ZeroDivisionError: division by zero)") == 1 and "no rank has moved" not in err


@pytest.mark.long
@pytest.mark.parametrize("what", HEALTHY)
def test_what_is_slow_is_not_called_a_hang(run, tmp_path, what):
    """Four times the patience, as four minutes are to one."""
    code, out, err = run(HEALTHY[what], 4 * PATIENCE_S)
    assert code == 0 and out.count("has ended") == 2, err
    assert watch.PROG not in err and not (tmp_path / "debug").exists()


# Parts


def test_a_loop_that_waits_is_soon_known_and_a_step_makes_all_places_new():
    looked = ActivityProbe()
    looked.counts.now = lambda: (1,)
    looks = [looked._counts_changed() or looked._stack_is_new() for _ in range(4)]
    assert looks == [True, True, False, False], "the first count, the first stack"
    looked.counts.now = lambda: (2,)
    looks = [looked._counts_changed() or looked._stack_is_new() for _ in range(3)]
    assert looks == [True, True, False]


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, "2000"),
        ({evidence.BUFFER: "10"}, "10"),
        ({evidence.OLDER_BUFFER: "50000"}, None),
    ],
)
def test_the_users_settings_of_the_recorder_stay(tmp_path, monkeypatch, given, then):
    for name in (evidence.BUFFER, evidence.OLDER_BUFFER, evidence.DUMP_ON_TIMEOUT, evidence.DUMP_FILE):
        monkeypatch.setenv(name, "")  # is set back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    Watchdog(tmp_path, 1.0, lambda folder: (), "watch").start()
    assert os.environ.get(evidence.BUFFER) == then and os.environ[evidence.DUMP_ON_TIMEOUT] == "1"


@pytest.mark.parametrize(("status", "spins"), [(("7", "6"), True), (("7", "7"), False)])
def test_spinning_for_nccl_is_no_work(monkeypatch, status, spins):
    """No GPU: what torch's recorder of NCCL says is made."""
    enqueued, completed = status
    dumped = {"pg_status": {"0": {"last_enqueued_collective": enqueued, "last_completed_collective": completed}}}
    monkeypatch.setattr(Counts, "_dumps", lambda self: [lambda **_: b"{}", lambda **_: json.dumps(dumped).encode()])
    looked = ActivityProbe()
    monkeypatch.setattr(looked, "_rate", lambda name, value: 1.0)
    assert looked._computes() != spins


def test_a_counted_method_is_not_in_the_traceback():
    class Iterator:
        def __iter__(self):
            return self

        def __next__(self):
            raise OSError

    counts = Counts()
    Iterator.__next__ = Counted(Iterator.__next__, counts)
    with pytest.raises(OSError) as e:
        next(iter(Iterator()))
    assert [frame.name for frame in e.traceback] == ["test_a_counted_method_is_not_in_the_traceback", "__next__"]
    assert counts.batches == 1


def test_ranks_whose_launcher_names_no_store_know_nothing_of_each_other(monkeypatch):
    """As of srun, and a script that gives torch the address itself (tcp://...)."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    distributed = SimpleNamespace(TCPStore=None, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    assert Board(Place(0, 2, 0, 2)).add("moves", 1) is None


class Lost:
    """A store whose other end has gone."""

    def add(self, name, by):
        raise RuntimeError("Broken pipe")


def test_ranks_that_know_nothing_of_each_other_raise_no_alarm(tmp_path, monkeypatch):
    """Each of them might wait for one that works on another machine."""
    board = Board(Place(0, 2, 0, 1))
    board.store = Lost()
    assert board.add("moves", 1) is None
    guard = Watchdog(tmp_path / "debug", 0.2, lambda folder: [], "watch")
    monkeypatch.setattr(guard, "board", board)
    monkeypatch.setattr(board, "_connect", lambda: None)
    threading.Thread(target=guard._watch, daemon=True).start()
    time.sleep(1)
    assert not guard.still and not (tmp_path / "debug").exists()


def test_alone_it_alarms_by_itself(tmp_path, monkeypatch, capsys):
    guard = Watchdog(tmp_path / "debug", 0.2, lambda folder: ["here"], "watch")
    monkeypatch.setattr(guard.probe, "look", lambda: "")
    threading.Thread(target=guard._watch, daemon=True).start()
    wait_for(lambda: guard.still and (tmp_path / "debug" / "rank0.end.json").exists(), what="the alarm")
    wait_for(lambda: "watch: here" in capsys.readouterr().err, what="the diagnosis")
    assert os.path.getsize(tmp_path / "debug" / "rank0.stacks.txt") > 0
    guard.probe.look = lambda: "steps"


def test_bytes_of_a_connection_are_counted():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        before = activity_probe.tcp_bytes()
        one.sendall(bytes(5000))
        wait_for(lambda: activity_probe.tcp_bytes() - before >= 10_000, what="5000 that went and 5000 that came")
        other.close()
