"""The lines of its own that a script spends its time in, and its memory after each step, as a patient leaves them."""

import subprocess
import sys

import pytest
from processes import new_environment

from labs.doctor import profile
from labs.doctor.findings import find, memory_growth, own_lines_s
from labs.doctor.script_process import Settings

pytestmark = pytest.mark.timeout(250)
SCRIPT = """
import time
import torch
from torch import nn

def statistics(model):
    time.sleep(0.02)

def criterion(output):
    time.sleep(0.01)
    return output.sum()

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
while True:
    optimizer.zero_grad()
    loss = criterion(model(torch.ones(4, 8)))
    loss.backward()
    optimizer.step()
    statistics(model)
    kept.append(torch.ones(250_000))  # 1 MB
"""

MODELS = """
import time
import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(0.01)
        return self.inner(x)

student, teacher = nn.Linear(8, 8), Slow().requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
while True:
    wanted = teacher(torch.ones(4, 8)) + teacher.forward(torch.ones(4, 8))
    optimizer.zero_grad()
    (student(torch.ones(4, 8)) - wanted).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Profile of 42 steps, without a counterfactual."""
    return look(tmp_path_factory.mktemp("patient"), SCRIPT)


def look(folder, text):
    script = folder / "train.py"
    script.write_text(text)
    settings = Settings([str(script)], str(folder), steps=42, seconds=0.0)
    command = [sys.executable, "-m", "labs.doctor.script_process", str(settings.save())]
    done = subprocess.run(command, env=new_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return profile.load(settings.path("profile"))


@pytest.mark.long
def test_the_line_that_takes_most_of_the_scripts_own_time_is_named_and_the_loss_is_not(seen):
    first = next(line for line in seen.lines if line.kind in ("prepare", "rest"))
    assert (first.kind, first.code) == ("prepare", "time.sleep(0.02)")
    assert any((line.kind, line.code) == ("loss", "time.sleep(0.01)") for line in seen.lines)
    assert 0.015 < own_lines_s(seen) < sum(seen.step_s) / 42 - 0.005  # of 20 ms; the loss's 10 ms are out
    found = find([seen])[0]
    assert found.name == "own_code" and found.where.endswith("  time.sleep(0.02)") and found.gain.low > 1.5


@pytest.mark.long
def test_a_frozen_model_is_no_line_of_the_scripts_own(tmp_path):
    seen = look(tmp_path, MODELS)
    [line] = [line for line in seen.lines if line.kind in ("model", "prepare")]
    assert (line.kind, line.code) == ("model", "time.sleep(0.01)")
    assert own_lines_s(seen) < 0.5 * sum(seen.spans_s["prepare"]) / 42
    assert "own_code" not in {f.name for f in find([seen])}


def test_memory_is_noted_after_each_step(seen):
    assert len(seen.memory["series"]) == len(seen.step_s) == 42
    grows = memory_growth(seen)
    assert 0.9e6 < grows.low <= grows.value < 1.5e6
    assert any(f.name == "growing" for f in find([seen])) and seen.memory["free"] > 0
