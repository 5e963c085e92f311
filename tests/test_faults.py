"""Fault drills: whatever happens to a run, no process, port or file stays behind, and the cause is named."""

import glob
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager
from processes import (
    HERE,
    MARK,
    PYTHON,
    SURVIVAL_S,
    assert_no_survivors,
    family,
    is_backstage,
    leftovers,
    listening,
    new_environment,
    wait_for,
)

from labs.kit.errors import BadInput
from labs.kit.launch import RankFailed, RankTimeout, launch, run_on_ranks
from labs.kit.record import load

FAULTY = "labs_for_tests.faulty"


@pytest.fixture(autouse=True)
def nothing_stays_behind(tmp_path, monkeypatch):
    """Around every test: no process of a run, no port, no file, and the signal handlers as before."""
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    ports, files = listening(), tmp_path / "temporary"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    yield
    assert_no_survivors(os.environ[MARK], os.getpid())
    assert listening() <= ports
    assert list(files.iterdir()) == []
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.fixture
def own_tmp():
    """A folder for temporary files with a short path, as sockets need it; must be empty of ours in the end."""
    folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")
    yield folder
    wait_for(lambda: not leftovers(folder), SURVIVAL_S, f"an empty folder, not {leftovers(folder)}")
    shutil.rmtree(folder)


# Faults of a rank


@pytest.mark.drill
def test_a_rank_that_raises_is_named_with_its_traceback_first():
    with pytest.raises(RankFailed) as failure:
        launch(FAULTY, fault="raise", say="before the fault")
    lines = str(failure.value).splitlines()
    assert lines[0].startswith("Traceback") and "faulty.py" in lines[1]
    assert lines[-2:-1] == ["ValueError: this batch is broken"] and lines[-1].startswith("rank 1 on ")
    assert "labs/kit" not in str(failure.value), "the launcher's own frames tell a learner nothing"
    assert failure.value.rank == 1 and failure.value.host
    assert failure.value._render_traceback_() == lines


def test_bad_input_found_by_a_rank_stays_bad_input():
    with pytest.raises(BadInput, match=r"take a multiple of 2$"):
        launch(FAULTY, fault="bad_input")


@pytest.mark.drill
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_not_the_peers_connection_errors(rank):
    with pytest.raises(RankFailed, match=f"^rank {rank} was killed by SIGKILL") as failure:
        launch(FAULTY, fault="sigkill", on_rank=rank, workers=1)
    assert failure.value.rank == rank


@pytest.mark.drill
@pytest.mark.parametrize(("fault", "told"), [("exit", "exit code 3"), ("segfault", "SIGSEGV")])
def test_a_rank_that_vanishes_is_named(fault, told):
    with pytest.raises(RankFailed, match=f"^rank 1 .*{told}") as failure:
        launch(FAULTY, fault=fault)
    assert ("in go_wrong" in str(failure.value)) == (fault == "segfault"), "where it crashed"


def test_a_connection_error_alone_is_reported():
    def broken():
        raise ConnectionResetError("Connection reset by peer")

    with pytest.raises(RankFailed, match="Connection reset by peer"):
        run_on_ranks(broken, 1)


@pytest.mark.drill
def test_a_stopped_rank_ends_in_a_timeout_that_names_it():
    with pytest.raises(RankTimeout, match="rank 1 was stopped") as failure:
        launch(FAULTY, fault="sigstop", timeout_s=2, workers=1)
    assert failure.value.rank == 1


@pytest.mark.drill
def test_a_hang_in_a_collective_tells_where_each_rank_was():
    with pytest.raises(RankTimeout) as failure:
        launch(FAULTY, fault="sleep", timeout_s=2)
    rank_0, rank_1 = str(failure.value).split("rank 0 ")[1].split("rank 1 ")
    assert "all_reduce" in rank_0 and "go_wrong" in rank_1


@pytest.mark.drill
def test_a_rank_that_left_early_is_told_from_those_that_wait_for_it():
    def early():
        import torch.distributed as dist

        if dist.get_rank() == 0:
            dist.barrier()

    with pytest.raises(RankTimeout, match="rank 1 had finished") as failure:
        run_on_ranks(early, timeout_s=2)
    assert "barrier" in str(failure.value)


@pytest.mark.drill
def test_a_killed_fork_server_ends_the_run_and_the_next_one_works():
    def kill_parent():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"^the process that starts ranks was killed.* Run the cell again"):
        run_on_ranks(kill_parent)
    assert run_on_ranks(lambda: 1) == [1, 1]


@pytest.mark.drill
def test_a_killed_watcher_is_replaced():
    run_on_ranks(lambda: 1)
    watchers = [p for p in psutil.Process().children() if "supervise.py" in " ".join(p.cmdline())]
    assert len(watchers) == 1
    watchers[0].kill()
    watchers[0].wait()
    assert run_on_ranks(lambda: 1) == [1, 1]


# Faults of the launching process: a notebook's kernel


class Kernel:
    """A real IPython kernel whose processes can be found again."""

    def __init__(self, tmp: str) -> None:
        self.environment = new_environment(TMPDIR=tmp, PYTHONDONTWRITEBYTECODE="1")
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=self.environment, cwd=tmp)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=250)
        self.pid = self.manager.provisioner.pid
        self.mark = self.environment[MARK]

    def execute(self, code: str) -> tuple[str, list[str]]:
        """What the code printed, and the traceback it ended with."""
        printed, traceback = [], []

        def hook(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                traceback.extend(content["traceback"])

        # After an error the kernel drops what arrives in the next moment.
        wait_for(lambda: self._run(code, hook) != "aborted")
        return "".join(printed), traceback

    def _run(self, code: str, hook) -> str:
        return self.client.execute_interactive(code, output_hook=hook, timeout=250)["content"]["status"]

    def start(self, code: str, processes: int = 6) -> str:
        """Send code and return, when its ranks and their workers are there, the id of the request."""
        request = self.client.execute(code)
        wait_for(lambda: len(self.ranks()) >= processes, what="ranks")
        return request

    def interrupt(self, request: str) -> list[str]:
        """Interrupt, and wait for the end of the request, since the kernel drops what is sent before; its traceback."""
        self.manager.interrupt_kernel()
        while (reply := self.client.get_shell_msg(timeout=250))["parent_header"]["msg_id"] != request:
            pass
        return reply["content"].get("traceback", [])

    def ranks(self) -> list[psutil.Process]:
        """All processes of the family other than the kernel and what stays behind it."""
        return [p for p in family(self.mark) if p.pid != self.pid and not is_backstage(p, self.pid)]

    def close(self) -> None:
        """End the kernel if it is still there."""
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel(own_tmp):
    """A kernel in which `launch` is imported; whatever a test did to it, nothing of it survives its end."""
    kernel = Kernel(own_tmp)
    try:
        kernel.execute("from labs.kit.launch import launch, run_on_ranks")
        yield kernel
    finally:
        kernel.close()
    assert_no_survivors(kernel.mark)


SLEEP = f"launch({FAULTY!r}, fault='sleep', workers=2, timeout_s=100)"


@pytest.mark.drill
def test_interrupting_the_cell_stops_the_run_and_the_kernel_goes_on(kernel):
    assert kernel.interrupt(kernel.start(SLEEP)) == ["KeyboardInterrupt: all ranks have been stopped"]
    assert_no_survivors(kernel.mark, kernel.pid)
    printed, traceback = kernel.execute("print(run_on_ranks(lambda: 7))")
    assert (printed, traceback) == ("[7, 7]\n", [])
    kernel.execute("def learner():\n    print('here')\n    raise ValueError('mine')")
    printed, traceback = kernel.execute("run_on_ranks(learner, 1)")
    assert printed == "[rank 0] here\n"
    assert traceback[0].startswith("Traceback") and "    raise ValueError('mine')" in traceback
    assert traceback[-2] == "ValueError: mine" and "rank 0" in traceback[-1]


@pytest.mark.drill
def test_an_interrupt_while_torch_is_still_loading_keeps_the_fork_server(own_tmp):
    kernel = Kernel(own_tmp)
    try:
        # The kernel itself does not import torch here: an interrupted import of it is beyond repair.
        request = kernel.client.execute("import time, labs.kit.fork_server\ntime.sleep(60)")
        server = wait_for(lambda: [p for p in family(kernel.mark) if "forkserver" in " ".join(p.cmdline())])[0]
        kernel.interrupt(request)
        printed, traceback = kernel.execute("from labs.kit.launch import run_on_ranks; print(run_on_ranks(lambda: 7))")
        assert (printed[-7:], traceback) == ("[7, 7]\n", []) and server.is_running()
    finally:
        kernel.close()
    assert_no_survivors(kernel.mark)


@pytest.mark.drill
def test_killing_the_kernel_kills_ranks_and_workers(kernel):
    kernel.start(SLEEP)
    os.kill(kernel.pid, signal.SIGKILL)
    assert_no_survivors(kernel.mark)


@pytest.mark.drill
@pytest.mark.skipif(sys.platform != "linux", reason="a signal at a parent's death is Linux's")
def test_killing_kernel_and_watcher_at_once_kills_fork_server_ranks_and_workers(kernel, own_tmp):
    kernel.start(SLEEP)
    (watcher,) = (p for p in family(kernel.mark) if "supervise.py" in " ".join(p.cmdline()))
    watcher.suspend()  # so that it does nothing between the two
    os.kill(kernel.pid, signal.SIGKILL)
    watcher.kill()
    assert_no_survivors(kernel.mark)
    for folder in Path(own_tmp).glob("labs-*"):  # with nobody left to remove it
        shutil.rmtree(folder)


@pytest.mark.long
def test_ranks_still_start_when_the_thread_that_made_the_first_launch_has_ended(own_tmp):
    code = (
        "import threading\nfrom labs.kit.launch import run_on_ranks\n"
        "first = threading.Thread(target=run_on_ranks, args=(int, 1))\nfirst.start()\nfirst.join()\n"
        "from multiprocessing import forkserver\nserver = forkserver._forkserver._forkserver_pid\n"
        "print(run_on_ranks(int, 1), server == forkserver._forkserver._forkserver_pid)"
    )
    environment = new_environment(TMPDIR=own_tmp)
    done = subprocess.run([*PYTHON, "-c", code], env=environment, cwd=HERE, text=True, capture_output=True, timeout=250)
    assert done.stdout == "[0] True\n", done.stderr


@pytest.mark.drill
def test_restarting_the_kernel_kills_ranks_and_workers(kernel):
    kernel.start(SLEEP)
    before = {p.pid for p in family(kernel.mark)}
    kernel.manager.restart_kernel(now=True)
    wait_for(lambda: not before & {p.pid for p in family(kernel.mark)}, SURVIVAL_S, "the old processes to be gone")


# Faults of the launching process: a shell


def command(*arguments: str, tmp: str, lab: str = FAULTY) -> tuple[subprocess.Popen, str]:
    """`python -m lab ...` in the background, and the mark of its processes."""
    environment = new_environment(TMPDIR=tmp)
    process = subprocess.Popen(
        [*PYTHON, "-m", lab, *arguments],
        env=environment,
        cwd=HERE,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    return process, environment[MARK]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("number", "group", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, -signal.SIGTERM),
        (signal.SIGKILL, False, -signal.SIGKILL),
        (signal.SIGKILL, True, -signal.SIGKILL),
    ],
)
def test_ending_a_lab_in_the_shell_ends_its_ranks(number, group, code, own_tmp):
    process, mark = command("--fault", "sleep", "--workers", "1", tmp=own_tmp)
    wait_for(lambda: len(family(mark)) >= 8, what="launcher, 3 helpers, 2 ranks, 2 workers")
    (root,) = Path(own_tmp).glob("labs-*")
    semaphores = f"/dev/shm/sem.{root.name}-*"
    assert glob.glob(semaphores) or not Path("/dev/shm").exists()
    os.killpg(process.pid, number) if group else process.send_signal(number)
    _, complaint = process.communicate(timeout=250)
    assert process.returncode == code
    assert_no_survivors(mark)
    wait_for(lambda: not glob.glob(semaphores), what="no semaphore to be left")
    if number == signal.SIGINT:
        assert complaint == "interrupted: all ranks stopped, nothing was recorded\n"


@pytest.mark.drill
def test_a_failing_rank_in_the_shell_is_exit_code_1(own_tmp):
    process, mark = command("--fault", "raise", tmp=own_tmp)
    out, complaint = process.communicate(timeout=250)
    assert process.returncode == 1 and complaint.startswith("Traceback") and not out
    assert_no_survivors(mark)


@pytest.mark.drill
def test_interrupts_at_any_moment(own_tmp):
    code = (
        "import sys\nfrom labs.kit.launch import launch\n"
        "for delay in sys.stdin:\n"
        "    try:\n"
        "        print('go', flush=True)\n"
        f"        launch({FAULTY!r}, fault='sleep', workers=1, timeout_s=60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted', flush=True)\n"
    )
    environment = new_environment(TMPDIR=own_tmp)
    with subprocess.Popen(
        [*PYTHON, "-c", code],
        env=environment,
        cwd=HERE,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        for delay_s in (0.5, 0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.3):  # the first one while torch is loading
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "go\n"
            time.sleep(delay_s)
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert_no_survivors(environment[MARK], process.pid)
            assert not listening(process.pid)
        process.stdin.close()
        assert process.wait(30) == 0
    assert_no_survivors(environment[MARK])


# Two at once


def test_two_launches_of_one_process_take_turns():
    results, seconds = {}, {}

    def work(name: str) -> None:
        run = launch("labs_for_tests.empty")
        results[name], seconds[name] = run.one("ranks").value, run.seconds

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {"a": 2.0, "b": 2.0}


@pytest.mark.drill
def test_two_processes_at_once_do_not_disturb_each_other(own_tmp, tmp_path):
    process, mark = command("--out", str(tmp_path / "theirs.jsonl"), tmp=own_tmp, lab="labs_for_tests.empty")
    while process.poll() is None:
        assert len(launch("labs_for_tests.empty")) == 3
    assert process.returncode == 0, process.communicate()
    assert len(load(tmp_path / "theirs.jsonl")) == 3
    assert_no_survivors(mark)


# Recording


@pytest.mark.drill
@pytest.mark.parametrize("place", ["/dev/full", "limit", "gone"])
def test_records_that_cannot_be_saved_are_printed(place, own_tmp, tmp_path):
    out = "/dev/full" if place == "/dev/full" else str(tmp_path / "folder" / "run.jsonl")
    code = (
        "import sys, resource, shutil, runpy\n"
        "from labs.kit import record\n"
        "save = record.Records.save\n"
        "def full(self, path):\n"
        + {
            "/dev/full": "    return save(self, path)\n",
            "limit": "    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n    return save(self, path)\n",
            "gone": "    path.parent.write_text('a file now')\n    return save(self, path)\n",  # since it was checked
        }[place]
        + "record.Records.save = full\n"
        f"sys.argv = ['x', '--out', {out!r}]\n"
        "runpy.run_module('labs_for_tests.empty', run_name='__main__', alter_sys=True)\n"
    )
    environment = new_environment(TMPDIR=own_tmp)
    done = subprocess.run([*PYTHON, "-c", code], env=environment, cwd=HERE, text=True, capture_output=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith(f"could not save to {out} (") and done.stderr.count("\n") == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (tmp_path / "rescued.jsonl").write_text("\n".join(lines))
    assert {r.metric for r in load(tmp_path / "rescued.jsonl")} == {"ranks", "own_rank"}
    assert not list(tmp_path.rglob("*run.jsonl*")), "half a file"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode), "a device must not be replaced by a file"
    assert_no_survivors(environment[MARK])
