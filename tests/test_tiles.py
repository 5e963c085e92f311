"""Tiles: real crops, the same bytes each time, cut once, never half there, cut again when damaged."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from labs.common import data
from labs.common.data import derived
from labs.common.data.tiles import box, tiles
from labs.kit.errors import BadInput

SIZE = (64, 48)


class Heard(list):
    """A progress callback that keeps what it is told."""

    def __call__(self, done, total):
        self.append((done, total))


def small(folder, count=12, **options):
    return tiles(count, SIZE, folder=folder, **{"progress": Heard(), **options})


def contents(found):
    return [p.read_bytes() for p in found.paths]


def test_tiles_are_jpeg_crops_of_the_photo_that_is_their_label(tmp_path):
    found = small(tmp_path, quality=95)
    photos = [Image.open(p).convert("RGB") for p in data.photos()]
    assert found.labels == (0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2)
    for i, (path, label) in enumerate(zip(found.paths, found.labels, strict=True)):
        with Image.open(path) as tile:
            assert (tile.format, tile.size) == ("JPEG", SIZE)
            crop = photos[label].crop(box(i, photos[label].size, SIZE, seed=0))
            assert np.abs(np.asarray(tile, float) - np.asarray(crop, float)).mean() < 8


def test_bytes_depend_on_the_seed_and_the_number_of_the_tile_only(tmp_path):
    first = contents(small(tmp_path / "a"))
    assert contents(small(tmp_path / "b")) == first
    assert contents(small(tmp_path / "a", 5)) == first[:5]
    assert not set(contents(small(tmp_path / "a", seed=1))) & set(first)


def flip_a_byte(found):
    content = bytearray(found.paths[3].read_bytes())
    content[200] ^= 1
    found.paths[3].write_bytes(content)


def cut_short(found):
    os.truncate(found.paths[3], 100)


def other_encoder(found):
    manifest = json.loads((found.folder / derived.MANIFEST).read_text())
    manifest["recipe"]["encoder"] = "Pillow 1.0"
    (found.folder / derived.MANIFEST).write_text(json.dumps(manifest))


DAMAGE = {
    "flipped": flip_a_byte,
    "short": cut_short,
    "half a manifest": lambda found: os.truncate(found.folder / derived.MANIFEST, 50),
    "another encoder": other_encoder,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_tiles_are_cut_again(tmp_path, damage):
    found = small(tmp_path)
    before, heard = contents(found), Heard()
    damage(found)
    assert contents(small(tmp_path, progress=heard)) == before
    assert len(heard) == 12


def names(folder):
    return {p.name for p in folder.iterdir()}


KILLED = """
import os, signal, sys
from labs.common.data.tiles import tiles
tiles(12, (64, 48), folder=sys.argv[1], progress=lambda done, total: done == 3 and os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.mark.drill
def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=Path(data.FOLDER).parents[1])
    [partial] = [n for n in names(tmp_path) if n.endswith(derived.PARTIAL)]
    assert 3 <= len(names(tmp_path / partial)) < 13 and names(tmp_path) == {partial, ".lock"}
    heard = Heard()
    found = small(tmp_path, 5, progress=heard)  # another set: it removes what was left all the same
    assert len(heard) == 5 and names(tmp_path) == {found.folder.name, ".lock"}


@pytest.mark.drill
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_cut_leaves_nothing(tmp_path, error):
    def stop(done, total):
        raise error

    with pytest.raises(error):
        small(tmp_path, progress=stop)
    assert names(tmp_path) == {".lock"}


COUNTING = """
import sys
from labs.common.data.tiles import tiles
print(sum(1 for _ in tiles(90, (64, 48), folder=sys.argv[1], progress=lambda done, total: print("cut")).paths))
"""


def test_processes_that_need_the_same_tiles_cut_them_once(tmp_path):
    command = [sys.executable, "-c", COUNTING, tmp_path]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(data.FOLDER).parents[1]) for _ in range(2)
    ]
    lines = [process.communicate()[0].split() for process in started]
    assert sorted(map(len, lines)) == [1, 91] and {line[-1] for line in lines} == {"90"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"count": 0}, "count must be 1 to 999,999 tiles, not 0"),
        ({"size": (2000, 100)}, r"size 2000 x 100 does not fit into every photo: at most 1065 x 900"),
        ({"quality": 101}, "quality must be 1 to 95, not 101"),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, says):
    with pytest.raises(BadInput, match=f"^{says}$"):
        tiles(**arguments, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.drill
def test_a_full_disk_is_one_line_with_the_remedy_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(data.DataError, match=r"^cannot write to .*No space left on device\): free some space, or set"):
        small(tmp_path)
    assert names(tmp_path) == {".lock"}
