"""What notebook 12 shows of the doctor: visits, figures, a counterfactual of one's own, a loop that is read."""

import importlib.metadata
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doctor_training import environment
from torch.nn.functional import cross_entropy

from labs.chapters.nb12 import editable_counterfactual as editable
from labs.chapters.nb12 import figures_visit, reading, visit
from labs.doctor_trial.cases import BY_NAME
from labs.kit.check import predict
from labs.kit.plot import to_png

ROOT = Path(__file__).parents[1]


@pytest.fixture
def shown(monkeypatch, capsys):
    """What a drawing function prints, says, and writes as alternative text."""
    monkeypatch.setattr(figures_visit, "show", lambda fig, alt: print(alt, to_png(fig)[:4]))
    for module in (figures_visit, visit, reading):
        monkeypatch.setattr(module, "say", lambda text, folded="": print(f"<{folded}>", text), raising=False)

    def of(draw, *args, **more):
        capsys.readouterr()
        draw(*args, **more)
        return capsys.readouterr().out

    return of


# Visits


def test_cures_change_the_patient_and_one_takes_the_bad_line_away():
    case = BY_NAME["slow_loader"]
    texts = visit.cured_texts(case)
    assert texts[visit.FIRST_CURE["slow_loader"]] == case.cured != case.text
    assert len({case.text, *texts.values()}) == 3


@pytest.mark.long
def test_a_visit_names_the_late_rank(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(visit, "SECONDS", 3.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = visit.examine("straggler")
    assert "straggler" in [f.name for f in found.findings] and "torchrun" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


# A counterfactual of one's own


@pytest.fixture
def clock(monkeypatch):
    """Time passes as the ways say; nothing is trained."""
    now = [0.0]
    monkeypatch.setattr(editable.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(editable.measure, "within", lambda rounds, budget: itertools.islice(rounds, 8))
    return now


def test_steps_are_compared_in_turn_and_only_the_first_way_trains_on(clock, capsys):
    weights = []

    def as_it_is(job):
        clock[0] += 0.04
        job.train(*job.kept)
        weights.append(job.model[0].weight.sum().item())

    def half(job):
        clock[0] += 0.02
        before = job.model[0].weight.detach().clone()
        job.train(*job.kept)
        assert not torch.equal(before, job.model[0].weight)

    editable.compare(as_it_is, half)
    told = capsys.readouterr().out
    assert "2.00 x" in told and "8 rounds" in told

    def only(job):
        job.train(*job.kept)
        alone.append(job.model[0].weight.sum().item())

    def nothing(job):
        clock[0] += 0.01

    alone = []
    editable.compare(only, nothing)
    assert alone == weights, "what the other way trained was put back"


# Reading


def test_a_loop_is_read_and_a_mended_one_is_not_objected_to(shown):
    def hasty(model, loader, optimizer):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()

    def mended(model, loader, optimizer):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    said = shown(reading.read, hasty, predict(1, "lines", unit="lines"))
    assert "line 4: loss.backward()" in said and "zero-grad-missing" in said and "exactly" in said
    assert "No rule objects" in shown(reading.read, mended)


# In an environment of one's own

HIDE = """
import sys
NEEDED = {"labs", "torch", "numpy", "psutil", "scipy"}
INSTALLED = NAMES
class Without:
    # torch looks whether some packages are there, and gets None, as where they are not
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        return None if top in INSTALLED and top not in NEEDED else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
TRAINING = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(10_000):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.long
def test_the_doctor_needs_what_the_notebook_says_and_nothing_else_of_the_course(tmp_path):
    """Other packages of this environment are hidden, but those that torch itself needs."""
    needed = {"typing_extensions", "sympy", "mpmath", "networkx", "fsspec", "filelock", "tqdm", "setuptools", "triton"}
    kept = needed | set(sys.stdlib_module_names)
    packages = importlib.metadata.packages_distributions()  # torch has more than one: torchgen
    others = {name for name, of in packages.items() if name not in kept and "torch" not in of}
    (tmp_path / "sitecustomize.py").write_text(HIDE.replace("NAMES", repr(others)))
    (tmp_path / "train.py").write_text(TRAINING)
    env = {**environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "labs.doctor", "--steps", "12", "--seconds", "2", "train.py"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WHERE A STEP GOES" in done.stdout and "No module named" not in done.stdout + done.stderr
    page = (ROOT / "notebooks" / "12_your_own_training.ipynb").read_text()
    assert "pip install path/to/this/course" in page
