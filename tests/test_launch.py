"""launch() and run_on_ranks(): what they return, show and leave alone."""

import io
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import redirect_stdout

import pytest
from processes import MARK, PYTHON, assert_no_survivors, leftovers, new_environment

from labs.kit import fork_server, lab, supervise
from labs.kit.display import NotebookView, View
from labs.kit.launch import RankFailed, launch, run_on_ranks
from labs.kit.record import Records

EMPTY, FAULTY = "labs_for_tests.empty", "labs_for_tests.faulty"


def test_a_launch_returns_records_trace_and_time():
    run = launch(EMPTY, 2)
    assert isinstance(run, Records) and run.seconds > 0 and run.monitor is not None
    assert run.one("ranks").samples == (2.0,), "the job's own record comes from rank 0 alone"
    assert [r.layout["rank"] for r in run.where("own_rank")] == [0, 1]
    assert run[0].lab == EMPTY and run[0].config == {"smoke": False} and run[0].kind == "measured"
    assert run[0].layout["world_size"] == 2 and run[0].provenance["torch"]


def test_course_smoke_makes_every_launch_a_smoke_run_that_does_not_say_otherwise(monkeypatch):
    monkeypatch.setenv("COURSE_SMOKE", "1")
    assert launch(EMPTY, 1)[0].config == {"smoke": True}
    assert launch(EMPTY, 1, smoke=False)[0].config == {"smoke": False}


def test_what_ranks_print_is_shown_with_their_rank(capsys):
    run = launch(FAULTY, 2, say="hello")
    shown = capsys.readouterr().out
    assert shown == run.printed
    assert shown == "".join(f"[rank {r}] hello\n[rank {r}] hello (stderr)\n" for r in (0, 1))


def test_functions_of_a_cell_run_on_ranks():
    offset = 10

    class Result:
        def __init__(self, value):
            self.value = value

    def function(factor):
        import torch.distributed as dist

        return Result(offset + factor * dist.get_rank()), dist.get_world_size()

    results = run_on_ranks(function, 3, 5)
    assert [(r.value, n) for r, n in results] == [(10, 3), (15, 3), (20, 3)]


def test_large_results_and_tensors_come_back():
    def function():
        import torch

        return torch.arange(2_000_000), "x" * 3_000_000

    for tensor, text in run_on_ranks(function):
        assert int(tensor[-1]) == 1_999_999 and len(text) == 3_000_000


def test_a_result_that_cannot_travel_is_the_ranks_error():
    with pytest.raises(RankFailed, match="cannot pickle 'generator' object"):
        run_on_ranks(lambda: (i for i in range(3)), 1)


def test_the_whole_chain_of_an_exception_is_told():
    def function():
        try:
            {}["key"]
        except KeyError as e:
            raise ValueError("no key") from e

    with pytest.raises(RankFailed) as failure:
        run_on_ranks(function, 1)
    lines = str(failure.value).splitlines()
    assert "KeyError: 'key'" in lines and "ValueError: no key" in lines
    assert "The above exception was the direct cause of the following exception:" in lines


def test_each_rank_has_a_core_and_a_thread_of_its_own():
    def function():
        import torch

        return torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1

    assert run_on_ranks(function) == [(1, 1), (1, 1)]


@pytest.mark.drill
def test_ranks_start_workers_as_under_torchrun_and_are_killed_with_them():
    def method():
        import multiprocessing

        return multiprocessing.get_start_method(allow_none=True), multiprocessing.get_start_method()

    import multiprocessing

    assert run_on_ranks(method, 1) == [(None, multiprocessing.get_context().get_start_method())]


def test_a_process_that_a_rank_forks_may_fork_again():
    def grandchild() -> int:
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if own := os.fork():
            os._exit(os.waitstatus_to_exitcode(os.waitpid(own, 0)[1]))
        os._exit(7)

    assert run_on_ranks(grandchild, 1) == [7]


class Watched(View):
    """A view that remembers what it was told."""

    seen, failed = (), None

    def draw(self, done, total, message):
        self.seen += ((done, total, message),)

    def close(self, failed=False):
        self.failed = failed


def test_a_view_hears_of_progress_and_of_the_end():
    view = Watched()
    launch(FAULTY, 1, view=view)
    assert view.last == (1, 2, "at the fault") and view.failed is False
    with pytest.raises(RankFailed):
        launch(FAULTY, fault="raise", view=view)
    assert view.last == (1, 2, "at the fault") and view.failed is True


def test_the_notebook_view_is_small_and_escapes(monkeypatch):
    shown = []

    class Handle:
        def update(self, page):
            shown.append(page.data)

    monkeypatch.setattr("IPython.display.display", lambda page, display_id: shown.append(page.data) or Handle())
    launch(FAULTY, 1, view=NotebookView("<lab>", 1))
    assert "&lt;lab&gt;: 1 rank, done" in shown[-1] and "at the fault" in shown[-1]
    assert max(map(len, shown)) < 16_000


def test_a_script_needs_no_main_guard_and_any_folders_will_do(tmp_path):
    """One that launches at its top level, with an odd folder for temporary files and another working directory."""
    folder = tmp_path / ("with space, ünïcode % and 'quotes', " + "x" * 120)
    folder.mkdir()
    environment, script = new_environment(TMPDIR=str(folder)), tmp_path / "script.py"
    script.write_text(
        "from labs.kit.launch import launch, run_on_ranks\nprint('once')\n"
        "def function():\n    return 'of the script'\nprint(run_on_ranks(function))\n"
        "print(launch('labs_for_tests.faulty', workers=1))\n"
    )
    done = subprocess.run([*PYTHON, script], env=environment, cwd="/", capture_output=True, text=True, timeout=250)
    said = "once\n['of the script', 'of the script']\n<1 records: ranks>\n"
    assert (done.stdout, done.stderr) == (said, "")
    assert_no_survivors(environment[MARK])
    assert not leftovers(folder)


def test_no_room_for_temporary_files_is_one_line(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(fork_server.BadInput, match=r"No space left on device.*TMPDIR"):
        fork_server.ForkServer()


@pytest.mark.drill
def test_the_watcher_removes_late_announcements(tmp_path):
    run = tmp_path / "run-0"
    run.mkdir()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        (run / f"rank-0-{process.pid}").touch()
        (run / "rank-1-999999999").touch()
        (run / "output-0").write_text("text")
        (run / "folder").mkdir()
        supervise.clear(run)
        assert process.wait(10) == -9
    assert not run.exists()
    supervise.clear(run)


def test_a_fork_server_that_was_there_before_is_used():
    code = (
        "import multiprocessing as m\nm.get_context('forkserver').SimpleQueue()\n"
        "from multiprocessing import forkserver\nforkserver.ensure_running()\n"
        "from labs.kit.launch import run_on_ranks\nprint(run_on_ranks(lambda: 7, 1, timeout_s=60))"
    )
    done = subprocess.run([*PYTHON, "-c", code], env=new_environment(), capture_output=True, text=True, timeout=250)
    assert (done.stdout, done.stderr) == ("[7]\n", "")


def test_launching_from_another_thread_works_without_signals():
    found = []
    thread = threading.Thread(target=lambda: found.append(run_on_ranks(lambda: 1)))
    with redirect_stdout(io.StringIO()):
        thread.start()
        thread.join(60)
    assert found == [[1, 1]]


def test_a_lab_is_found_while_another_thread_imports(monkeypatch):
    """The preflight loads JupyterLab in a thread meanwhile: sys.modules grows while it is looked through."""
    number = iter(range(10**6))

    def grows(name):
        monkeypatch.setitem(sys.modules, f"came_meanwhile_{next(number)}", sys)
        return False

    monkeypatch.setattr(lab, "_is_lab_code", grows)
    assert lab._fresh("labs.timing").__name__ == "labs.timing"
