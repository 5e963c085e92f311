"""Labs of notebook 05, half B: kills during a save, and the cells that save, resume and write a snapshot."""

import json
import re
from pathlib import Path

import pytest
import torch

from labs import training_checkpoint
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

NOTEBOOK = json.loads((Path(__file__).parents[1] / "notebooks" / "05_checkpointing.ipynb").read_text())
CELLS = {cell["id"]: "".join(cell["source"]) for cell in NOTEBOOK["cells"]}


def kills(way, n, lost):
    rows = {"kills": (n,), "lost": [1.0] * lost + [0.0] * (n - lost)}
    return [Record("training_checkpoint", m, "1", v, case={"way": way}) for m, v in rows.items()]


@pytest.mark.parametrize(("lost", "word"), [(25, "renaming is safer"), (2, "inconclusive")])
def test_the_category(lost, word):
    run = Records(kills("onto the old file", 30, lost) + kills("beside it", 30, 0))
    assert training_checkpoint.category(run) == word
    assert "of 30 kills" in next(training_checkpoint.answer(run))


def test_a_short_run_kills():
    run = launch("training_checkpoint", 1, kills=2, ways=("beside it",))
    assert run.one("kills").value <= 2 and sum(run.one("lost").samples) == 0


def test_a_mixture_of_two_saves_is_seen():
    state = training_checkpoint.marked(7, 2**12)
    assert training_checkpoint.step_in(state) == 7
    assert training_checkpoint.step_in(state | {"0": torch.zeros(4)}) is None
    assert training_checkpoint.step_in("no state") is None


@pytest.mark.parametrize("values", [{"ways": ("hope",)}, {"ways": ()}, {"kills": 0}, {"folder": "/nowhere"}])
def test_bad_input_of_the_lab(values):
    with pytest.raises(BadInput, match=next(iter(values)) if "folder" not in values else "not a folder"):
        launch("training_checkpoint", 1, **values)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), None])
def test_the_snippet_for_out_of_memory_writes_its_file(tmp_path, monkeypatch, error):
    """It dumps when a step raises, and stops recording in either case."""
    snippet = next(
        code
        for source in CELLS.values()
        for code in re.findall(r"```python\n(.*?)```", source, re.S)
        if "_dump_snapshot" in code
    )
    recording = []

    def record(enabled="all", max_entries=0):
        recording.append(enabled)

    def dump(path):
        assert recording == ["all"], "the history must still be recorded"
        (tmp_path / path).write_text("history")

    def train_step(batch):
        if error:
            raise error

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    names = {"torch": torch, "loader": [1, 2], "train_step": train_step}
    if error:
        with pytest.raises(torch.OutOfMemoryError):
            exec(snippet, names)
    else:
        exec(snippet, names)
    assert (tmp_path / "snapshot.pickle").exists() == bool(error)
    assert recording == ["all", None]


def test_the_notebooks_program_resumes_to_the_same_losses(capsys):
    names = {}
    exec(re.sub(r".*labs\.(exercises|kit).*", "", CELLS["imports"]), names)
    exec(CELLS["train-b"], names)
    assert "all 40 losses equal: True" in capsys.readouterr().out
    assert not names["path"].with_name("last.pt.tmp").exists()
    first = names["train_classifier"](80, resume=True, forget=["optimizer"])
    assert first[0] == names["whole"][40] and first[1] != names["whole"][41]
