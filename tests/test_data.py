"""The data: complete, undamaged, attributed, and as documented."""

import shutil

import numpy as np
import pytest
from PIL import Image

from labs.common import data


def test_fashion_mnist_has_the_documented_shapes_and_equal_classes():
    d = data.fashion_mnist()
    assert d.x_train.shape == (10_000, 28, 28) and d.x_test.shape == (2_000, 28, 28)
    assert {a.dtype for a in (d.x_train, d.y_train, d.x_test, d.y_test)} == {np.dtype("uint8")}
    assert set(np.bincount(d.y_train)) == {1_000} and set(np.bincount(d.y_test)) == {200}
    assert len(data.FASHION_CLASSES) == 10
    assert d.x_train.min() == 0 and d.x_train.max() == 255


def test_moby_dick_is_ascii_of_the_documented_size():
    text = data.moby_dick()
    assert (len(text), len(set(text))) == (1_191_933, 80)
    assert "Call me Ishmael." in text[:100]


def test_photos_are_nine_jpegs_of_at_most_1600_pixels():
    paths = data.photos()
    assert len(paths) == 9
    for path in paths:
        with Image.open(path) as image:
            assert image.format == "JPEG" and max(image.size) <= 1600


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


LOADERS = {
    "fashion_mnist_12k.npz": data.fashion_mnist,
    "moby_dick.txt": data.moby_dick,
    "photos/sunset_by_Aitzol_Berasategi.jpg": data.photos,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_file_is_named_with_the_remedy(copy, name):
    with open(copy / name, "ab") as file:
        file.write(b"\r\n")
    with pytest.raises(data.DataError, match=rf"{name} is damaged.*git checkout -- labs/common/data/{name}"):
        LOADERS[name](copy)


@pytest.mark.parametrize("name", LOADERS)
def test_a_missing_file_is_named_with_the_remedy(copy, name):
    (copy / name).unlink()
    with pytest.raises(data.DataError, match=rf"{name} is missing.*git checkout -- labs/common/data/{name}"):
        LOADERS[name](copy)
