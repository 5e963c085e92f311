"""The doctor's probes name wrong trainings by line, and are silent on healthy ones that look alike."""

import json
import os
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from forked import Forks

from labs.doctor.bottlenecks import Match
from labs.doctor.hooks import Hooks
from labs.doctor.probes import Probes, merge
from labs.doctor.probes.scene import Scene

PARTS = Path(__file__).with_name("doctor_probe_scripts.txt").read_text().split("=== ")[1:]
SCRIPTS = dict(part.split("\n", 1) for part in PARTS)
PRELUDE = SCRIPTS["prelude"]
END = "dist.destroy_process_group()\n"


def named(kind):
    return [name for name in SCRIPTS if name.startswith(kind)]


def line_of(code):
    return next(n for n, text in enumerate(code.splitlines(), 1) if text.endswith("# here"))


def probed(code, folder, monkeypatch):
    """Findings of a script that is run in this process, with the doctor's hooks."""
    script = folder / "train.py"
    script.write_text(PRELUDE + code)
    (folder / "scratch").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DOCTOR_PROBES_RAISE", "1")
    monkeypatch.setattr("labs.kit._compat.compiled_graphs", lambda: 0)  # this process may have run tests that compile
    probes = Probes(str(folder), str(folder / "scratch"))
    hooks = Hooks(str(folder), lambda spans: None, probes)
    hooks.install()
    try:
        runpy.run_path(str(script), run_name="__main__")
        return merge([probes.findings()])
    finally:
        hooks.remove()


@pytest.mark.parametrize("name", named("wrong, "))
def test_a_wrong_training_is_named_by_line(name, tmp_path, monkeypatch):
    first = (probed(SCRIPTS[name], tmp_path, monkeypatch) or [None])[0]
    assert first is not None and f"wrong, {first.probe}: " in name, first
    assert first.line == line_of(PRELUDE + SCRIPTS[name]), first


@pytest.mark.parametrize("name", named("healthy: "))
def test_a_healthy_training_is_not_accused(name, tmp_path, monkeypatch):
    assert [f for f in probed(SCRIPTS[name], tmp_path, monkeypatch) if f.wrong] == []


@pytest.fixture(scope="module")
def forks():
    root = str(Path(__file__).parents[1])
    with Forks(os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root, "DOCTOR_PROBES_RAISE": "1"}) as forks:
        yield forks


def probed_on_ranks(code, folder, forks):
    """Findings of a script that two ranks run."""
    script, harness = folder / "train.py", Path(__file__).with_name("doctor_probe_rank.py")
    script.write_text(PRELUDE + SCRIPTS["prelude of ranks"] + code + END)
    code, out, errors = forks.run([str(harness), str(script)], 2, forks.env, folder, 290)
    assert code == 0, out + errors
    return merge([json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)])


@pytest.mark.parametrize("name", named("wrong on ranks, "))
def test_wrong_ranks_are_named_by_line(name, tmp_path, forks):
    first = (probed_on_ranks(SCRIPTS[name], tmp_path, forks) or [None])[0]
    assert first is not None and f"wrong on ranks, {first.probe}: " in name, first
    assert first.line == line_of(PRELUDE + SCRIPTS["prelude of ranks"] + SCRIPTS[name]), first


@pytest.mark.parametrize("name", named("healthy on ranks: "))
def test_healthy_ranks_are_not_accused(name, tmp_path, forks):
    assert [f for f in probed_on_ranks(SCRIPTS[name], tmp_path, forks) if f.wrong] == []


LEAK = """
class Kept(Dataset):
    def __init__(self):
        self.seen = []
    def __len__(self):
        return 960
    def __getitem__(self, i):
        KEEP
        return X[i % 256], Y[i % 256]
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Kept(), 8, num_workers=1):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
"""
TWICE = """loader = DataLoader(Kept(), 8, sampler=range(160), num_workers=1, persistent_workers=True)
for x, y in (batch for epoch in range(6) for batch in loader)"""


def test_a_worker_that_keeps_what_it_reads_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("labs.doctor.probes.data.LOOK_S", 0.0)
    code = LEAK.replace("KEEP", "self.seen.append(os.urandom(50_000))  # here")
    (leak,) = probed(code, tmp_path, monkeypatch)
    assert (leak.probe, leak.line) == ("workers", line_of(PRELUDE + code)) and leak.words["per_worker"] > 4


def test_a_cache_without_a_bound_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("labs.doctor.probes.data.LOOK_S", 0.0)
    code = LEAK.replace("KEEP", "self.read(i, random.random())").replace(
        "    def __len__",
        "    @functools.cache  # here\n    def read(self, i, at):\n        return os.urandom(50_000)\n    def __len__",
    )
    code = "import functools\n" + code.replace("for x, y in DataLoader(Kept(), 8, num_workers=1)", TWICE)
    (leak,) = probed(code, tmp_path, monkeypatch)
    assert (leak.probe, leak.line) == ("workers", line_of(PRELUDE + code))


def test_a_worker_that_keeps_nothing_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("labs.doctor.probes.data.LOOK_S", 0.0)
    assert probed(LEAK.replace("KEEP", "os.urandom(50_000)"), tmp_path, monkeypatch) == []


def test_counterfactuals_are_not_observed(tmp_path, monkeypatch):
    monkeypatch.setattr(Scene, "away", lambda scene: True)
    assert probed(SCRIPTS["wrong, shapes: arithmetic"], tmp_path, monkeypatch) == []


FOUND = [("workers", True), ("shapes", True), ("effect", False)]


def test_wrong_results_come_first_and_ranks_that_agree_are_told_together():
    seen = [Match(probe, "t", "f", "a.py", 1, "", {}, wrong=wrong) for probe, wrong in FOUND]
    merged = merge([[asdict(m) for m in seen], [asdict(seen[0])]])
    assert [m.probe for m in merged] == ["shapes", "workers", "effect"]
    assert merged[0].where.startswith("a.py:1")


def test_a_probe_that_fails_is_left_out(tmp_path, monkeypatch):
    monkeypatch.delenv("DOCTOR_PROBES_RAISE", raising=False)
    monkeypatch.setattr(Scene, "parameters", lambda scene: 1 / 0)
    (tmp_path / "train.py").write_text("")
    probes = Probes(str(tmp_path), str(tmp_path))
    hooks = Hooks(str(tmp_path), lambda spans: None, probes)
    hooks.install()
    try:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(15):
            (weight**2).sum().backward()
            optimizer.step()
        assert probes.scene.step == 15 and len(probes.probes) < 8
    finally:
        hooks.remove()
