"""Launches of one machine take turns: order, exclusion, death, stops, interrupts, several users, what is shown."""

import contextlib
import errno
import fcntl
import io
import json
import os
import random
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from fakes import FakeNvml, card
from processes import HERE, PYTHON, new_environment, wait_for

from labs.kit import display, launch_queue, nvml
from labs.kit.errors import BadInput
from labs.kit.hardware import Device
from labs.kit.launch import launch, run_on_ranks
from labs.kit.launch_queue import MACHINE, Turn
from labs.kit.measure import estimate
from labs.kit.record import load

EMPTY = "labs_for_tests.empty"
CPU = Device("cpu", 0, "cpu", (0,))
# A process that takes a turn, keeps it until its standard input ends, and says what happens.
TAKE = """
import sys, time
from pathlib import Path
from labs.kit import launch_queue
folder, claims, head_start_s = Path(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3])
launch_queue.SILENT_S = float(sys.argv[4])
last = []
def look(text):
    if text != last: print(text, flush=True)
    last[:] = [text]
with launch_queue.Turn(folder, "lab", "2 cores", claims, head_start_s).taken(look):
    print("in", time.monotonic(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder():
    """A queue as an instructor makes it. Not pytest's own folder, which other users may not enter."""
    made = Path(tempfile.mkdtemp(prefix="queue-", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def take(folder):
    """Start a process that takes a turn; returns when its ticket is there. All are ended after the test."""
    started = []

    def start(name: str, claims: str = MACHINE, head_start_s: float = 0.0, silent_s: float = 60.0) -> subprocess.Popen:
        known = names(folder)
        child = subprocess.Popen(
            [*PYTHON, "-c", TAKE, str(folder), claims, str(head_start_s), str(silent_s)],
            env=new_environment(COURSE_NAME=name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        started.append(child)
        wait_for(lambda: names(folder) - known, what=f"{name}'s ticket")
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def leave(child: subprocess.Popen) -> None:
    """Let its turn end."""
    child.stdin.close()
    child.stdin = None


def names(folder: Path) -> set[tuple[str, str]]:
    """(process id, place) of every ticket: a ticket changes its name when it starts to run."""
    return {tuple(p.stem.split("-")[2:]) for p in folder.glob("*ing-*.json")}


def entered(child: subprocess.Popen, seconds: float = 60.0) -> list[str]:
    """What `child` said until its turn came; the last line is "in <time>"."""
    lines, deadline = [], time.monotonic() + seconds
    while not (lines and lines[-1].startswith("in ")):
        assert select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], f"no turn: {lines}"
        lines.append(child.stdout.readline().decode().strip())
    return lines


def is_in(child: subprocess.Popen) -> bool:
    """Whether it says that its turn has come, within two looks into the folder."""
    with contextlib.suppress(AssertionError):
        return bool(entered(child, 1.0))
    return False


class Waits(Exception):
    """Raised by a look: there was something to wait for."""


def impatient(text: str) -> None:
    raise Waits(text)


def free(folder: Path, *claims: str) -> bool:
    """Whether a launch with these claims could start now."""
    with contextlib.suppress(Waits), Turn(folder, "lab", "1 core", claims or (MACHINE,), 0).taken(impatient):
        return True
    return False


# Order and exclusion


@pytest.mark.drill
def test_first_come_first_served_and_nothing_stays_behind(folder, take):
    first = take("anna")
    entered(first)
    others = [take(f"learner {i}") for i in range(4)]
    leave(first)
    said = []
    for child in others:
        said.append(entered(child))
        leave(child)
        child.wait(10)
    times = [float(lines[-1].split()[1]) for lines in said]
    assert times == sorted(times)
    assert said[3][0].startswith("waiting: 4 launches before this one; anna: lab on 2 cores, for ")
    assert [p.name for p in folder.iterdir()] == [f"machine-{launch_queue.machine()}.lock"]


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (("machine",), ("machine",), False),
        (("machine",), ("core-0",), False),
        (("core-0",), ("machine",), False),
        (("core-0", "core-1"), ("core-1", "core-2"), False),
        (("core-0", "core-1"), ("core-2",), True),
        (("core-0", "gpu-a"), ("core-1", "gpu-a"), False),
        (("core-0", "gpu-a"), ("core-1", "gpu-b"), True),
    ],
)
def test_what_excludes_what(folder, one, other, together):
    with Turn(folder, "lab", "1 core", one, 0).taken(impatient):
        assert free(folder, *other) is together
        assert launch_queue.conflict(one, other) is not together
        for ticket in folder.glob("running-*"):  # the locks hold without any ticket, too
            ticket.unlink()
        assert free(folder, *other) is together
    assert free(folder, *other)


def test_one_that_waits_keeps_later_ones_from_what_it_needs(folder, take):
    holder = take("anna", "core-0")
    entered(holder)
    whole = take("bert", MACHINE)
    assert not free(folder, "core-1"), "otherwise bert, who needs the whole machine, might wait for ever"
    leave(holder)
    entered(whole)


def test_a_check_goes_before_measurements_that_wait(folder, take):
    holder = take("anna")
    entered(holder)
    measuring, check = take("bert"), take("carl", MACHINE, launch_queue.HEAD_START_S)
    leave(holder)
    entered(check)
    assert not is_in(measuring)
    leave(check)
    entered(measuring)


# A second launching process: does what each line of its standard input asks for.
SECOND = """
import os, sys
from labs.kit import cli, lab
from labs.kit.launch import run_on_ranks
from test_queue import EMPTY, meet
run_on_ranks(int, 1)
print("ready", flush=True)
for task in sys.stdin:
    queue, folder, seconds = task.split()
    os.environ["COURSE_QUEUE"] = queue.strip("-")
    print(*run_on_ranks(meet, 1, "second", folder, float(seconds))[0], flush=True)
command = cli.parse(lab.lab_module(EMPTY), "prog", ["--nproc", "1", "--timeout-s", "0.5"])
raise SystemExit(cli.run_here(EMPTY, command))
"""


def meet(name: str, folder: str, seconds: float) -> tuple[bool, float, float]:
    """On a rank: whether another one came within `seconds`, and when this one began and ended."""
    start, own = time.monotonic(), Path(folder, name)
    own.touch()
    while not (met := len(list(own.parent.iterdir())) == 2) and time.monotonic() - start < seconds:
        time.sleep(0.02)
    return met, start, time.monotonic()


@pytest.fixture
def second(folder):
    """A process with ranks of its own."""
    child = subprocess.Popen(
        [*PYTHON, "-c", SECOND],
        env=new_environment(COURSE_QUEUE=""),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.mark.drill
def test_two_processes_launch_at_once_without_the_queue_and_in_turn_with_it(folder, second, tmp_path, monkeypatch):
    def both(queue: str, seconds: float) -> list[list[float]]:
        place = Path(tempfile.mkdtemp(dir=tmp_path))
        second.stdin.write(f"{queue or '-'} {place} {seconds}\n")
        second.stdin.flush()
        monkeypatch.setenv("COURSE_QUEUE", queue)
        own = run_on_ranks(meet, 1, "first", str(place), seconds)[0]
        met, start, end = second.stdout.readline().split()
        return sorted([[*own[1:], own[0]], [float(start), float(end), met == "True"]])

    assert all(met for *_, met in both("", 25.0))
    (_, first_end, met), (second_start, *_) = both(str(folder), 0.5)
    assert not met and first_end < second_start

    # And from a shell: waiting is told, can be interrupted, and does not count for the time limit.
    monkeypatch.setenv("COURSE_NAME", "anna\x1b[2J")
    second.stderr.flush()
    with Turn(folder, "data_parallel", "2 cores", (MACHINE,), 0).taken(impatient):
        leave(second)
        told = wait_for(lambda: next((t for t in [second.stderr.readline()] if "anna" in t), ""))
        time.sleep(0.7)
        assert second.poll() is None, "--timeout-s counts from a run's own start"
        second.send_signal(signal.SIGINT)
        rest = second.communicate(timeout=20)[1]
        assert len(names(folder)) == 1, "its own ticket is gone"
    assert re.fullmatch(r"waiting: 1 launch before this one; anna\[2J: data_parallel on 2 cores, for \d+ s\n", told)
    assert rest == "interrupted: all ranks stopped, nothing was recorded\n" and second.returncode == 130


# Death, stops, interrupts


@pytest.mark.drill
def test_a_killed_holder_and_a_killed_waiter_hold_up_nobody(folder, take):
    holder, second, third = (take(name) for name in ("anna", "bert", "carl"))
    entered(holder)
    second.kill()
    second.wait()
    assert not is_in(third)
    holder.kill()
    holder.wait()
    entered(third)
    assert len(names(folder)) == 1, "the tickets of the dead are gone"


@pytest.mark.drill
def test_a_stopped_holder_is_named_and_a_stopped_waiter_is_overtaken(folder, take):
    holder, second, third = (take(name, silent_s=1.0) for name in ("anna", "bert", "carl"))
    entered(holder)
    holder.send_signal(signal.SIGSTOP)
    told = wait_for(
        lambda: next((t for t in [third.stdout.readline().decode()] if "stopped" in t), ""), what="a warning"
    )
    assert re.search(rf"anna: lab on 2 cores, for \d+ s \(stopped: whoever owns process {holder.pid} must", told)
    second.send_signal(signal.SIGSTOP)
    holder.send_signal(signal.SIGCONT)
    time.sleep(1.1)  # the children's SILENT_S
    leave(holder)
    entered(third)
    second.send_signal(signal.SIGCONT)
    assert not is_in(second)
    leave(third)
    entered(second)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_users_share_a_queue_whatever_their_umask(folder):
    def as_nobody(work) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.umask(0o077)
                os.setgid(65534)
                os.setuid(65534)
                code = work()
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def die_waiting() -> int:
        launch_queue.OwnTicket(folder, "lab", "1 core", (MACHINE,), 0)
        return 0  # without removing it

    before = os.umask(0o077)
    try:
        with Turn(folder, "lab", "1 core", (MACHINE,), 0).taken(impatient):
            assert as_nobody(lambda: 7 if free(folder) else 8) == 8
        assert as_nobody(lambda: 7 if free(folder) else 8) == 7, "its lock file is root's"
        os.close(launch_queue.OwnTicket(folder, "lab", "1 core", (MACHINE,), 0).fd)  # as death closes it
        assert as_nobody(die_waiting) == 0
        assert free(folder) and not names(folder)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()}
    assert modes == {f"machine-{launch_queue.machine()}.lock": 0o666}
    assert as_nobody(lambda: 7 if free(folder, "core-0") else 8) == 7
    assert free(folder, "core-0"), "a lock file that nobody made with umask 077"


# What others write, what a folder lacks


def test_files_that_are_no_living_tickets_are_ignored(folder):
    here = launch_queue.machine()
    (folder / f"waiting-{here}-{0:020d}-1.json").write_text("{")  # nobody locks it
    (folder / f"waiting-other-{0:020d}-2.json").write_text("{}")
    (folder / "new-1.json").write_text("")
    os.utime(folder / "new-1.json", (0, 0))
    os.symlink("/etc/passwd", folder / f"waiting-{here}-{0:020d}-3.json")
    os.mkfifo(folder / f"running-{here}-{0:020d}-4.json")
    broken = folder / f"waiting-{here}-{0:020d}-5.json"
    broken.write_text(json.dumps(["no", "ticket"]))
    with broken.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert free(folder)
    left = {p.name.rpartition("-")[2] for p in folder.glob("*.json")}
    assert left == {"2.json", "3.json", "4.json", "5.json"}, "what is dead and ours is removed"


def test_a_folder_that_cannot_work_is_one_line_before_anything_starts(folder, monkeypatch):
    def refused(path: str) -> str:
        monkeypatch.setenv("COURSE_QUEUE", path)
        with pytest.raises(BadInput) as error:
            launch(EMPTY, 1)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "mkdir -m 1777" in refused(f"{folder}/missing")
    assert "absolute" in refused("queue")
    monkeypatch.setenv("COURSE_QUEUE_SCOPE", "room")
    assert "must be machine or devices, not 'room'" in refused(str(folder))
    monkeypatch.delenv("COURSE_QUEUE_SCOPE")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert f"chmod 1777 {folder}" in refused(str(folder))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *_: None)
        assert "file locks do not hold there" in refused(str(folder))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
        assert "No locks available" in refused(str(folder))
    assert not list(folder.iterdir())


def test_without_the_variable_and_inside_a_rank_there_is_no_queue(folder, monkeypatch):
    monkeypatch.delenv("COURSE_QUEUE", raising=False)
    assert launch_queue.turn("lab", [CPU]).folder is None
    monkeypatch.setenv("COURSE_QUEUE", str(folder))
    assert launch_queue.turn("lab", [CPU]).folder == folder
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert launch_queue.turn("lab", [CPU]).folder is None


def test_a_rank_may_launch_in_the_turn_of_its_own_launch(folder, monkeypatch):
    monkeypatch.setenv("COURSE_QUEUE", str(folder))
    assert run_on_ranks(lambda: launch_queue.turn("lab", [CPU]).folder, 1) == [None]


# Claims, model, evidence


def test_claims_name_physical_cores_and_cards(tmp_path, monkeypatch):
    for cpu in range(4):
        file = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    monkeypatch.setattr(launch_queue, "affinity", lambda: (1, 3))
    assert launch_queue.claims_of([CPU], tmp_path) == ("core-1",)
    cards = FakeNvml([card("GPU-aa01"), card("GPU-bb02")])
    report = nvml.report(cards)
    monkeypatch.setattr(nvml, "report", lambda **_: report)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert launch_queue.claims_of([Device("cuda", 0, "card")], tmp_path) == ("core-1", "gpu-GPU-bb02")
    assert launch_queue.claims_of([Device("cuda", 1, "card")], tmp_path) == (MACHINE,), (
        "an unknown card may be anyone's"
    )


def test_the_waiting_model_agrees_with_a_simulation():
    def simulated(learners: int, launch_s: float, think_s: float, launches: int = 20_000) -> float:
        draw, free_at, waited = random.Random(0), 0.0, 0.0
        asks = [draw.expovariate(1 / think_s) for _ in range(learners)]
        for _ in range(launches):
            i = min(range(learners), key=asks.__getitem__)
            start = max(free_at, asks[i])
            waited += start - asks[i]
            free_at = start + draw.expovariate(1 / launch_s)
            asks[i] = free_at + draw.expovariate(1 / think_s)
        return waited / launches

    assert launch_queue.waiting_s(1, 10, 60) == 0
    for learners in (2, 8, 24):
        assert launch_queue.waiting_s(learners, 10, 60) == pytest.approx(simulated(learners, 10, 60), rel=0.05)


def test_the_disturbance_in_the_text_is_that_of_the_record():
    records = load(HERE.parent / "records/amd-epyc-2-cores-2026-11/data_parallel.jsonl")
    one, two, ddp = (records.one("step_s", mode=mode).samples for mode in ("single", "copies", "ddp"))
    beside, price = (estimate([a / b for a, b in zip(*pair, strict=True)], "x") for pair in ((two, one), (ddp, two)))
    text = " ".join(launch_queue.__doc__.split())
    assert f"took {beside.value:.2f} times as long, [{beside.low:.2f}, {beside.high:.2f}] at 95 %" in text
    assert beside.value >= price.value, "as much as all of DDP's communication cost"


# What is shown


class Handle:
    """Of IPython's display: keeps the pages."""

    pages: tuple[str, ...] = ()

    def update(self, page) -> None:
        self.pages += (page.data,)


@pytest.fixture
def cell(monkeypatch):
    """A notebook's cell, and what it shows."""
    handle = Handle()
    monkeypatch.setattr("IPython.display.display", lambda page, display_id: handle)
    monkeypatch.setattr(display, "_in_notebook", lambda: True)
    return handle


@pytest.fixture
def held(folder, cell, monkeypatch):
    """The queue is used, and somebody has it until the cell has shown who, or the test sets this event."""
    monkeypatch.setenv("COURSE_QUEUE", str(folder))
    monkeypatch.setenv("COURSE_NAME", "<anna>")
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Turn(folder, "data_parallel", "2 cores", (MACHINE,), 0).taken(impatient):
            taken.set()
            done.wait(90)

    def release() -> None:
        wait_for(lambda: done.is_set() or any("anna" in page for page in cell.pages), what="a cell that waits")
        done.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(10)
    threading.Thread(target=release).start()
    yield done
    done.set()
    thread.join()


def test_a_cell_shows_what_its_launch_waits_for(cell, held):
    launch(EMPTY, 1)
    assert "empty: 1 rank, queued" in cell.pages[0] and "waiting: 1 launch before this one" in cell.pages[0]
    assert re.search(r"&lt;anna&gt;: data_parallel on 2 cores, for \d+ s", cell.pages[0])
    assert "1 rank, done" in cell.pages[-1] and "waiting" not in cell.pages[-1]


def test_a_check_in_a_cell_shows_it_too_and_clears_it(cell, held):
    assert run_on_ranks(lambda: 7, 1) == [7]
    assert "&lt;anna&gt;: data_parallel" in cell.pages[0] and cell.pages[-1] == ""


def test_a_terminal_shows_it_in_the_bar_and_a_log_in_lines(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = display.TerminalView("lab")
    bar.waiting("waiting: anna")
    bar.close()
    assert "waiting: anna" in terminal.getvalue()
    monkeypatch.undo()
    log = display.TerminalView("lab")
    for text in ("waiting: anna, for 1 s", "waiting: anna, for 2 s", ""):
        log.waiting(text)
    assert capsys.readouterr().err == "waiting: anna, for 1 s\n"
