"""Whether a dataset's samples are rows that it holds; and a learner's own package `labs`."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, random_split

from labs.doctor import __main__ as doctor
from labs.doctor import supervisor
from labs.doctor.rows import by_batch_ms, rows_in_memory


class Rows(Dataset):
    def __init__(self, of=lambda rows, i: (rows.x[i], int(rows.y[i]))):
        self.x, self.y, self.of = torch.arange(600.0).view(100, 6), np.arange(100), of

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return self.of(self, i)


HELD = {
    "a tensor and an array": Rows(),
    "in a dict, in another format": Rows(lambda rows, i: {"x": rows.x[i].half(), "label": float(rows.y[i])}),
    "a part of torch's own": random_split(TensorDataset(torch.randn(50, 2)), [40, 10])[0],
}
MADE = {
    "normalised": Rows(lambda rows, i: (rows.x[i] / 255, rows.y[i])),
    "augmented": Rows(lambda rows, i: rows.x[i] + 0 * torch.rand(())),
    "text": Rows(lambda rows, i: "a text"),
    "by the batch already": type("Batched", (Rows,), {"__getitems__": lambda rows, i: rows.x[i]})(),
    "it fails": Rows(lambda rows, i: 1 / 0),
    "a list": list(zip(torch.randn(9, 2), range(9), strict=True)),
    "a range": range(9),
    "an array": np.arange(9),
}


@pytest.mark.parametrize("name", HELD)
def test_rows_of_held_tensors_are_found_and_one_index_gives_a_batch(name):
    rows, indices = rows_in_memory(HELD[name]), torch.tensor([3, 1, 2])
    assert rows is not None and len(rows(indices)[0]) == 3 and by_batch_ms(HELD[name], 8) > 0
    assert by_batch_ms(HELD[name], None) is None


@pytest.mark.parametrize("name", MADE)
def test_what_is_more_than_a_row_is_none(name):
    assert by_batch_ms(MADE[name], 8) is None


def test_asking_leaves_the_dataset_and_the_random_numbers_as_they_were():
    """It may open a file when it's first read, which workers that are forked later must not share."""
    rows = Rows(lambda rows, i: (setattr(rows, "opened", True), rows.x[i] + 0 * torch.rand(()))[1])
    before = torch.get_rng_state()
    assert by_batch_ms(rows, 8) is None
    assert not hasattr(rows, "opened") and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("own", ["labs.py", "labs/__init__.py", "labs/data.py"])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_folder_with_a_package_labs_of_its_own_is_refused_before_anything_starts(
    own, by_name, tmp_path, monkeypatch, capsys
):
    """The script would get this course's package in place of its own."""
    (tmp_path / "labs").mkdir()
    for name in ("train.py", own):
        (tmp_path / name).write_text("x = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(supervisor, "examine", lambda *args: pytest.fail("it starts"))
    monkeypatch.setattr(sys, "argv", ["train-doctor", *(["-m", "train"] if by_name else ["train.py"])])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and f"{tmp_path / own} has the same name" in err


def test_a_folder_labs_that_holds_data_only_is_none_of_ours(tmp_path, monkeypatch):
    (tmp_path / "labs").mkdir()
    (tmp_path / "labs" / "day1.csv").touch()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert doctor.options(["train.py"]).argv == ["train.py"]
