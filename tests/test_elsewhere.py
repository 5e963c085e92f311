"""The machine that is not this one: is it really another, does a strict cell notice, and is nothing left of it?"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from importlib import util
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labs.kit import hardware
from labs.kit.course import execute

HERE = Path(__file__).parent
spec = util.spec_from_file_location("elsewhere", HERE / "elsewhere" / "__main__.py")
elsewhere = sys.modules["elsewhere"] = util.module_from_spec(spec)
spec.loader.exec_module(elsewhere)

FACTS = """
import datetime, json, locale, os, platform, sys, time
import torch
import labs
from labs.kit import hardware, host, nvml
gpus = [g.name for g in nvml.gpus()]
json.dump(dict(
    date=str(datetime.datetime.now(datetime.UTC).date()), zone=time.strftime("%z"), host=platform.node(),
    cpu=hardware.cpu_name(), cores=host.core_count(), reported=os.cpu_count(), encoding=locale.getencoding(),
    isa=torch.backends.cpu.get_cpu_capability(), gpus=gpus, cuda=torch.cuda.is_available(),
    columns=os.environ["COLUMNS"], user=os.getuid(), git=os.path.exists(".git"), labs=labs.__file__), sys.stdout)
"""
ZONES = {"Asia/Kathmandu": "+0545", "America/St_Johns": ("-0230", "-0330")}
pytestmark = pytest.mark.skipif("ELSEWHERE" in os.environ, reason="there is no machine within the machine")
root_on_linux = pytest.mark.skipif(not elsewhere.ROOT_USER, reason="only root on Linux changes names and users")


def answer(capfd, machine, code):
    """What `code` prints as JSON on that machine."""
    assert elsewhere.run(machine, [[sys.executable, "-c", code]]) == 0
    return json.loads(capfd.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", ["small", pytest.param("large", marks=pytest.mark.long)])
def test_a_process_sees_another_machine(name, capfd):
    machine = elsewhere.MACHINES[name]
    seen = answer(capfd, machine, FACTS)
    day = (datetime.now(UTC) + timedelta(days=machine.days)).date()
    assert seen["date"] in (str(day), str(day - timedelta(days=1)))
    assert seen["zone"] in ZONES[machine.zone]
    assert seen["gpus"] == list(machine.gpus) and not seen["cuda"]
    assert seen["columns"] == str(machine.columns)
    assert seen["labs"].endswith(f"/{machine.folder}/labs/__init__.py") and not seen["git"]
    if sys.platform == "linux":
        assert seen["cores"] == machine.usable
        assert seen["isa"] == {"small": "DEFAULT", "large": "AVX2"}[name]
    if elsewhere.ROOT_USER:
        names = {"host": machine.host, "cpu": machine.cpu, "reported": machine.reported, "user": elsewhere.USER}
        assert {k: seen[k] for k in names} == names
        assert seen["cpu"] != hardware.cpu_name()


def test_processes_agree_on_the_time(capfd):
    """Each computes its own other date; what one notes, another compares."""
    code = "import subprocess, sys, time\nnow = [sys.executable, '-c', 'import time; print(time.time())']\n"
    code += "print([time.time(), float(subprocess.check_output(now)), time.time()])"
    before, between, after = answer(capfd, elsewhere.MACHINES["small"], code)
    assert before < between < after


CELLS = {  # what it prints -> is it the same elsewhere?
    "1 + 1": True,
    "f'{1 / 3:.6f}, {1_234_567:,}'": True,
    "show(drawn(run.where(source='published')), alt='A figure that a file stands behind')": True,
    "import datetime; str(datetime.date.today())": False,
    "from labs.kit import hardware, host, nvml; hardware.cpu_name()": False,
    "host.core_count()": False,
    "len(nvml.gpus())": False,
    "[gpu.name for gpu in nvml.gpus()]": False,
    "show(drawn(run), alt='A figure of what was measured just now')": False,
    "torch.manual_seed(0); torch.nn.Conv2d(8, 8, 3)(torch.randn(8, 8, 32, 32)).double().std().item()": False,
}
SET_UP = """
import torch
from labs.kit.plot import figure, points, show
from labs.kit.record import Record, Records, provenance
run = Records([Record("a", "b", "s", [1.0], "measured", provenance=provenance()),
               Record("a", "b", "s", [1.0], "published", {"source": "published"}, provenance={"source": "a book"})])
def drawn(records):
    fig, ax = figure("A message", xlabel="x (s)", ylabel="y (s)", records=records)
    for record in records:
        points(ax, [1], [1], kind=record.kind)
    return fig
"""


@pytest.mark.long
@root_on_linux
@pytest.mark.timeout(300)
def test_a_strict_cell_that_shows_the_machine_fails_there(tmp_path, monkeypatch, capfd):
    """The run of all notebooks is worth something only if it can fail: planted, each kind in turn."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# Plant"), new_code_cell(SET_UP), *map(new_code_cell, CELLS)]
    nbformat.write(new_notebook(cells=cells, metadata=kernel), tmp_path / "planted.ipynb")
    assert execute(tmp_path / "planted.ipynb", tmp_path / "ran.ipynb", {}) == ""
    monkeypatch.setenv("PLANTED", (tmp_path / "ran.ipynb").read_text())
    plant = 'printf %s "$PLANTED" > notebooks/planted.ipynb && exec "$@" -v notebooks/planted.ipynb'
    planted = ["sh", "-c", plant, "sh"]
    assert elsewhere.run(elsewhere.MACHINES["small"], [[*planted, *elsewhere.pytest(full=True)[0]]]) == 1
    told = capfd.readouterr().out
    ended = [f"Cell {n} {'PASSED' if same else 'FAILED'}" for n, same in enumerate([True, *CELLS.values()])]
    assert [line for line in ended if line not in told] == []


def test_an_unknown_machine_is_told_at_once():
    done = subprocess.run([sys.executable, HERE / "elsewhere", "tiny"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no machine 'tiny'; there are small, large" in done.stderr


def test_files_to_share_are_asked_for():
    done = subprocess.run([sys.executable, HERE / "elsewhere", "--share", "--", "-q"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--share needs files after --" in done.stderr


@pytest.mark.long
def test_machines_share_the_files_and_one_that_fails_is_told():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # another user reads them
        files = [Path(folder, f"test_{name}.py") for name in ("first", "second")]
        for file in files:
            file.write_text("import os\n\ndef test_place():\n    assert os.environ['TZ'] == 'America/St_Johns'\n")
        command = [sys.executable, HERE / "elsewhere", "--share", "--", "-m", "", *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stdout
    assert done.stdout.endswith("== Elsewhere: small failed, large passed\n"), done.stdout
    assert "Asia/Kathmandu" in done.stdout


@pytest.mark.drill
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_it_is_stopped(sent):
    desks = set(Path(tempfile.gettempdir()).glob("elsewhere-*"))
    command = [sys.executable, HERE / "elsewhere", "large", "--", HERE / "sleeping.py", "-s"]
    process = psutil.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "asleep" in line:
            break
    family = process.children(recursive=True)
    assert len(family) >= 2  # the neighbour and pytest
    process.send_signal(sent)
    assert process.wait(timeout=250) == 130
    assert psutil.wait_procs(family, timeout=3)[1] == []
    assert set(Path(tempfile.gettempdir()).glob("elsewhere-*")) <= desks
