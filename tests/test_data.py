"""The data: complete, undamaged, attributed, and as documented."""

import shutil

import numpy as np
import pytest

from labs.common import data


def test_the_data_have_the_documented_sizes_and_equal_classes():
    d = data.fashion_mnist()
    assert d.x_train.shape == (10_000, 28, 28) and d.x_test.shape == (2_000, 28, 28)
    assert {a.dtype for a in (d.x_train, d.y_train, d.x_test, d.y_test)} == {np.dtype("uint8")}
    assert set(np.bincount(d.y_train)) == {1_000} and set(np.bincount(d.y_test)) == {200}
    assert len(data.FASHION_CLASSES) == 10
    assert len(data.moby_dick()) == 1_191_933 and len(data.photos()) == 9


def test_every_file_is_checked_and_attributed():
    attribution = (data.FOLDER / "ATTRIBUTION.md").read_text()
    files = {p.relative_to(data.FOLDER).as_posix() for p in data.FOLDER.rglob("*") if p.is_file()}
    content = {f for f in files if not f.endswith((".py", ".pyc", ".md", "SHA256SUMS"))}
    assert content == set(data.checksums())
    for name in content:
        assert name.rpartition("/")[2] in attribution
    for licence in ("creativecommons.org/licenses/by/4.0", "zero/1.0", "opensource.org/license/mit", "pddl"):
        assert licence in attribution


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(data.FOLDER, tmp_path / "data")
    return tmp_path / "data"


def test_a_damaged_file_is_named_with_the_remedy(copy):
    with open(copy / "fashion_mnist_12k.npz", "ab") as file:
        file.write(b"\r\n")
    remedy = r"fashion_mnist_12k.npz is damaged.*git checkout -- labs/common/data/fashion_mnist_12k.npz"
    with pytest.raises(data.DataError, match=remedy):
        data.fashion_mnist(copy)


def test_a_missing_file_is_named_with_the_remedy(copy):
    (copy / "moby_dick.txt").unlink()
    with pytest.raises(data.DataError, match=r"moby_dick.txt is missing.*git checkout -- labs/common/data/moby_dick"):
        data.moby_dick(copy)
