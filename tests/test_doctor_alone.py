"""The doctor in an environment of its own: it needs four packages, and nothing else of the course."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_training import environment

ROOT = Path(__file__).parents[1]

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
def test_the_doctor_needs_torch_numpy_scipy_and_psutil(tmp_path):
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
