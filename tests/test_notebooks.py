"""The course run as `make course` runs it: other parameters, failures, interruption. nbval runs the defaults."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labs.kit import notebook_report
from labs.kit.course import execute, literal, main, own_parameters
from labs.kit.lab import check_layout, lab_module

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
OTHER = {"NPROC": 1, "SOLUTIONS": True}
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
NAP_S = 60


# Writes down what a kernel launches. COURSE_SMOKE makes it short.
NOTED = """
def _note():
    from functools import wraps
    from pathlib import Path
    from labs.kit import launch as module
    whole = module.launch

    @wraps(whole)
    def launch(lab, *args, **values):
        with Path({log!r}).open("a") as file:
            print(lab, file=file)
        return whole(lab, *args, **values)

    module.launch = launch
_note()
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Kernels whose launches are smoke runs. The file names what was launched, for IPython starts with NOTED."""
    startup, log = tmp_path / "ipython" / "profile_default" / "startup", tmp_path / "launched"
    startup.mkdir(parents=True)
    (startup / "note.py").write_text(NOTED.format(log=str(log)))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("COURSE_SMOKE", "1")
    return log


def test_what_refuses_one_rank_is_not_launched_on_one():
    """Not with NPROC=1 either: nproc=max(2, NPROC)."""
    for path in NOTEBOOKS:
        text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
        for name in set(re.findall(r'\blaunch\("(\w+)", nproc=(?:NPROC|1)\b', text)):
            lab = lab_module(name)
            check_layout(lab, lab.Config(), 1)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_with_one_rank_and_the_solutions(path, tmp_path, launched):
    """nbval runs it on two ranks, with every exercise still to do."""
    given = own_parameters(NOTEBOOKS, OTHER)[path]  # those that it has: 12 has no NPROC
    assert execute(path, tmp_path / path.name, given) == ""
    text = "\n".join(c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code")
    written = set(re.findall(r'^[^#\n]*\blaunch\("(\w+)"', text, re.M))
    assert set(launched.read_text().split() if launched.exists() else ()) == written
    checks = exercise_outputs(tmp_path / path.name)
    assert checks
    assert [text for text in checks if not re.match(r"[\w.]+ passed: ", text)] == []


def exercise_outputs(path):
    """What each cell that calls check() printed."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    outputs = [
        [o for o in c.outputs if o.output_type == "stream"] for c in cells if re.search(r"^check\(", c.source, re.M)
    ]
    return ["".join(o.text for o in streams) for streams in outputs]


def course(folder, *options, **kwargs):
    command = [sys.executable, "-m", "labs.kit.course", "--notebooks", folder, "--out", folder / "build", *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=250, **kwargs)


@pytest.fixture
def small(tmp_path):
    """A folder with a notebook that draws, one that fails and one after it."""
    figure = 'from IPython.display import HTML\nHTML(\'<img alt="a figure" src="data:image/png;base64,iVBORw0KGgo=">\')'
    parameters = new_code_cell("NPROC = 2", metadata={"tags": ["parameters"]})
    where = "import os, sys\nprint(NPROC, sys.prefix, os.path.basename(os.getcwd()))\n"
    where += "__import__('time').sleep(0.2)  # of four cells the page tells the slowest three"
    goals = "# Draw & see\n\n[next](b.ipynb)\n\n## You will\n\n- see `it`\n- go on\n  and on"
    write(tmp_path / "a.ipynb", new_markdown_cell(goals), parameters, new_code_cell(where), new_code_cell(figure))
    write(tmp_path / "b.ipynb", new_markdown_cell("# Fail"), new_code_cell("1 / 0"))
    write(tmp_path / "c.ipynb", new_markdown_cell("# Go on"), new_code_cell("1 + 1"))
    return tmp_path


def write(path, *cells):
    nbformat.write(new_notebook(cells=list(cells), metadata=KERNEL), path)


def test_course_goes_on_after_a_failure_and_writes_one_index(small):
    elsewhere = small / "elsewhere"
    elsewhere.mkdir()
    before = {p.name: p.read_bytes() for p in small.glob("*.ipynb")}
    done = course(small, "-p", "NPROC", "1", cwd=elsewhere)
    assert done.returncode == 1
    assert "2 passed, 1 failed" in done.stdout
    assert {p.name: p.read_bytes() for p in small.glob("*.ipynb")} == before, "a committed notebook is never written"
    index = (small / "build" / "index.html").read_text()
    for part in ("Draw &amp; see", "<li>see it</li>", "<li>go on and on</li>", 'alt="a figure"', "ZeroDivisionError"):
        assert part in index
    assert re.search(r"\[\d\] \d\.\d s, You will:\s<code>import os, sys</code>", index)
    assert re.search(r"slowest cells:\n  [ac] cell \[\d\]: \d\.\d s  \w", done.stdout)
    assert re.findall(r'<article class="(\w+)">', index) == ["passed", "failed", "passed"]
    page = (small / "build" / "a.html").read_text()
    assert f"1 {sys.prefix} {small.name}" in page
    assert 'href="b.html"' in page


def test_kernels_run_in_this_python_whatever_else_is_installed(small):
    """A user's own kernel named python3, and one on JUPYTER_PATH, must not be used."""
    other = small / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["/bin/false"], "display_name": "Other", "language": "python"}')
    places = {"JUPYTER_PATH": str(small / "jupyter"), "JUPYTER_DATA_DIR": str(small / "jupyter")}
    done = course(small, "a", env={**os.environ, **places, "JUPYTER_PREFER_ENV_PATH": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert sys.prefix in (small / "build" / "a.html").read_text()


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["-p", "NPROX", "1"], "no notebook has a parameter 'NPROX'; there are NPROC"),
        (["z"], "there is no notebook 'z'; there are a, b, c"),
    ],
)
def test_bad_input_is_one_line(small, refused, options, answer):
    assert answer in refused("--notebooks", small, *options)


def test_a_file_that_is_no_notebook_is_named(small, refused):
    (small / "b.ipynb").write_text("<<<<<<< HEAD")
    assert "b.ipynb is not a notebook" in refused("--notebooks", small, "b")


@pytest.fixture
def refused(monkeypatch, capsys):
    """What the command says, in one line, of options that it refuses; run in this process."""

    def refused(*options):
        monkeypatch.setattr(sys, "argv", ["course", *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 2 and len(told.splitlines()) == 1, told
        return told

    return refused


@pytest.mark.drill
def test_a_cell_that_takes_too_long_fails(small):
    write(small / "b.ipynb", new_markdown_cell("# Wait"), new_code_cell(f"import time\ntime.sleep({NAP_S})"))
    done = course(small, "b", "--cell-timeout", "2")
    assert done.returncode == 1
    assert "CellTimeoutError" in (small / "build" / "index.html").read_text()


@pytest.mark.drill
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_when_it_is_stopped(small, sent):
    started = small / "started"
    nap = f"import pathlib, subprocess, time\nsubprocess.Popen(['sleep', '{NAP_S}'])\n"
    nap += f"pathlib.Path({str(started)!r}).touch()\ntime.sleep({NAP_S})"
    write(small / "b.ipynb", new_markdown_cell("# Wait"), new_code_cell(nap))
    command = [sys.executable, "-m", "labs.kit.course", "--notebooks", small, "--out", small / "build", "b"]
    process = psutil.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(started.exists)
    family = process.children(recursive=True)
    assert len(family) >= 2  # the kernel and what its cell started
    process.send_signal(sent)
    assert process.wait(timeout=20) == 130
    assert psutil.wait_procs(family, timeout=3)[1] == []
    assert '<article class="stopped">' in (small / "build" / "index.html").read_text()


def wait_until(condition, timeout_s=40.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def timed(path, *seconds):
    """A notebook that papermill might have written, with one code cell per section and `seconds` for each."""
    cells = [new_markdown_cell("# Title"), new_code_cell("0", execution_count=1, metadata=took(1.5))]
    for number, s in enumerate(seconds, start=2):
        cells += [new_markdown_cell(f"## Part `{number}`\n\ntext"), new_markdown_cell("### Detail")]
        cells += [new_code_cell(f"\nx = {number} ** 2\ny", execution_count=number, metadata=took(s)), new_code_cell("")]
    write(path, *cells, new_markdown_cell("## End"))
    return path


def took(seconds):
    return {"papermill": {"duration": seconds}}


def test_cells_are_timed_by_section(tmp_path):
    path = timed(tmp_path / "01_x.ipynb", 2.0, 40.0)
    times = notebook_report.cell_times(path)
    assert [(t.section, t.seconds) for t in times] == [("Title", 1.5), ("Part 2", 2.0), ("Part 3", 40.0)]
    assert [str(t) for t in notebook_report.slowest(times, 2)] == [
        "01_x cell [3]: 40.0 s  x = 3 ** 2",
        "01_x cell [2]: 2.0 s  x = 2 ** 2",
    ]


def test_a_slow_machine_has_longer_limits_and_is_told_so(tmp_path):
    times = notebook_report.cell_times(timed(tmp_path / "01_x.ipynb", 30.0, 80.0))
    (said,) = notebook_report.over_the_limits(times, 1500.0, slower=3.0)
    assert said.startswith("This machine was 3.0 times slower") and "90 s and 30 min" in said
    assert len(notebook_report.over_the_limits(times, 1900.0, slower=2.0)) == 3
    assert notebook_report.over_the_limits([], 500.0, slower=3.0) == []


def test_the_pace_of_a_machine_is_the_usual_one_between_notebooks():
    usual = notebook_report.REFERENCE_S
    assert notebook_report.slowness([3 * usual, usual, 3.2 * usual]) == pytest.approx(3.0)
    assert notebook_report.slowness([usual / 2]) == notebook_report.slowness([]) == 1.0
    assert notebook_report.reference_s() > 0


def test_parameters_are_literals_or_text():
    assert [literal(text) for text in ("1", "[1, 2]", "ddp")] == [1, [1, 2], "ddp"]
