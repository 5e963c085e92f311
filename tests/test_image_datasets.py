"""Four formats, one content: items, pickling, workers, errors that name the file."""

import multiprocessing
import os
import pickle
import shutil
import tarfile
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from labs.common.data import DataError, photos
from labs.common.data.tiles import tiles
from labs.common.loading.image_datasets import (
    JpegFolder,
    MemoryMap,
    RamCache,
    TarShards,
    decode,
    write_memory_map,
    write_shards,
)
from labs.kit.errors import BadInput

N, SIDE = 10, 24


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tiles(N, (64, 48), folder=tmp_path_factory.mktemp("tiles"), progress=lambda done, total: None)


@pytest.fixture(scope="module")
def jpegs(kept):
    return JpegFolder(kept.paths, kept.labels, SIDE)


@pytest.fixture(scope="module")
def formats(kept, jpegs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    return {
        "jpeg": jpegs,
        "tar": TarShards(write_shards(kept.paths, kept.labels, folder, images_per_shard=4), SIDE),
        "map": MemoryMap(write_memory_map(jpegs, folder / "images.npy")),
        "ahead": MemoryMap(folder / "images.npy", ahead=True),
        "ram": RamCache(jpegs),
    }


NAMES = ["jpeg", "tar", "map", "ahead", "ram"]


def test_decode_is_pillows_picture_with_channels_first(kept):
    with Image.open(kept.paths[2]) as image:
        expected = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    found = decode(kept.paths[2], SIDE)
    assert (found.dtype, tuple(found.shape), found.is_contiguous()) == (torch.uint8, (3, SIDE, SIDE), True)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_all_formats_hold_the_same_items(formats, jpegs, kept, name):
    assert len(formats[name]) == N
    for i in (*range(N), -1):
        image, label = formats[name][i]
        assert (type(label), label) == (int, kept.labels[i])
        assert torch.equal(image, jpegs[i][0]) and image.is_contiguous()
    with pytest.raises(IndexError):
        formats[name][N]


@pytest.mark.parametrize("name", ["tar", "map", "ram"])
def test_workers_return_what_the_process_itself_returns(formats, jpegs, name):
    batches = list(DataLoader(formats[name], 4, num_workers=2))
    assert torch.equal(torch.cat([images for images, _ in batches]), torch.stack([image for image, _ in jpegs]))
    assert torch.cat([labels for _, labels in batches]).tolist() == [label for _, label in jpegs]


@pytest.mark.parametrize("name", ["tar", "map"])
def test_a_pickle_for_a_worker_that_is_not_forked_holds_no_images(formats, jpegs, name):
    formats[name][1]  # what is open now must not go along
    pickled = pickle.dumps(formats[name])
    assert len(pickled) < N * jpegs[0][0].nbytes / 2
    assert torch.equal(pickle.loads(pickled)[7][0], jpegs[7][0])


def test_workers_share_the_ram_cache(jpegs):
    cache = RamCache(jpegs)
    loader = DataLoader(cache, N, num_workers=1, persistent_workers=True)
    before = next(iter(loader))[0]
    cache.images.fill_(77)
    after = next(iter(loader))[0]
    assert not (before == 77).all() and (after == 77).all()


def test_writing_into_an_item_does_not_reach_the_file(formats):
    MemoryMap(formats["map"].path)[0][0].fill_(0)
    assert not (MemoryMap(formats["map"].path)[0][0] == 0).all()


def test_draft_decodes_fewer_pixels_of_a_photo_and_changes_no_tile(kept, monkeypatch):
    decoded = []
    convert = Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda image, mode: decoded.append(max(image.size)) or convert(image, mode)
    )
    whole, draft = (JpegFolder(photos()[:1], [0], 224, draft=d)[0][0].float() for d in (False, True))
    assert decoded == [1600, 400]  # of 1600 x 1082; 200 x 135 would be too small for 224
    assert (whole - draft).abs().mean() < 6
    assert torch.equal(*(JpegFolder(kept.paths, kept.labels, 40, draft=d)[0][0] for d in (False, True)))


# -- what cannot be read


def assert_names(dataset, workers, what):
    with pytest.raises(DataError, match=what) as info:
        list(DataLoader(dataset, 1, num_workers=workers))
    # The traceback keeps the iterator in a cycle: the garbage collector would end the worker, after waiting for 5 s.
    traceback.clear_frames(info.tb)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("kind", "workers"), [("cut short", 0), ("missing", 1)])
def test_an_unreadable_jpeg_is_named(kept, tmp_path, kind, workers):
    bad = tmp_path / "bad.jpg"
    if kind == "cut short":
        bad.write_bytes(kept.paths[0].read_bytes()[:700])
    dataset = JpegFolder([kept.paths[0], bad, kept.paths[1]], [0, 1, 2], SIDE)
    assert_names(dataset, workers, r"bad\.jpg \(item 1\) cannot be read as an image: ")


def test_an_unreadable_image_in_a_shard_is_named(kept, tmp_path):
    (tmp_path / "bad.jpg").write_text("not an image")
    dataset = TarShards(write_shards([kept.paths[0], tmp_path / "bad.jpg"], [0, 1], tmp_path), SIDE)
    assert_names(dataset, 1, r"000000\.tar at byte \d+ \(item 1\) cannot be read as an image: ")


def packed(path, mode="w", **files):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            (path.parent / name).write_bytes(content)
            tar.add(path.parent / name, name.replace("_", "."))
    return path


BAD_SHARDS = {
    "compressed": lambda f: packed(f / "x.tar", "w:gz", a_jpg=b"1", a_cls=b"0"),
    "no label": lambda f: packed(f / "x.tar", a_jpg=b"1"),
}


@pytest.mark.parametrize("make", BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_a_file_that_is_no_shard_is_named(tmp_path, make):
    with pytest.raises(DataError, match=r"^.*x\.tar (is no uncompressed tar file|holds \d images)"):
        TarShards([make(tmp_path)])


def saved(array):
    return lambda path, good: np.save(path, array)


BAD_MAPS = {
    "text": lambda path, good: path.write_text("not an array"),
    "cut short": lambda path, good: path.write_bytes(good[:-1]),
    "another array": saved(np.zeros((3, 4))),
}


@pytest.mark.parametrize("make", BAD_MAPS.values(), ids=BAD_MAPS)
def test_a_file_that_is_no_memory_map_is_named(formats, tmp_path, make):
    with open(formats["map"].path, "rb") as good:
        make(tmp_path / "x.npy", good.read())
    with pytest.raises(DataError, match=r"^.*x\.npy is no memory map of images: "):
        MemoryMap(tmp_path / "x.npy")


def test_too_little_shared_memory_is_one_line_instead_of_a_bus_error(jpegs, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(os.path, "isdir", lambda folder: True)
    with pytest.raises(DataError, match=r"^/dev/shm has 0 MB free, the images need 0 MB: take fewer .*--shm-size"):
        RamCache(jpegs)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: JpegFolder([], []), "0 paths and 0 labels"),
        (lambda: JpegFolder(["a.jpg"], [0], side=0), "side must be at least 1 pixel, not 0"),
        (lambda: write_shards(["a.jpg"], [0], ".", 0), "images_per_shard must be at least 1, not 0"),
    ],
)
def test_bad_input_is_one_line(make, says):
    with pytest.raises(BadInput, match=f"^{says}"):
        make()


# -- writing


def test_shards_are_plain_tar_files_of_pairs_with_the_same_bytes_each_time(kept, tmp_path):
    first, again = (write_shards(kept.paths, kept.labels, tmp_path / f, images_per_shard=4) for f in "ab")
    assert [p.name for p in first] == ["000000.tar", "000001.tar", "000002.tar"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    with tarfile.open(first[1]) as tar:
        assert tar.getnames()[:2] == ["000004.jpg", "000004.cls"]
        assert tar.extractfile("000004.jpg").read() == kept.paths[4].read_bytes()


class Fails(torch.utils.data.Dataset):
    """A dataset whose second item cannot be had."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            raise RuntimeError("item 1")
        return torch.zeros(3, 2, 2, dtype=torch.uint8), 0


@pytest.mark.drill
def test_a_write_that_fails_leaves_the_earlier_file(jpegs, tmp_path):
    path = write_memory_map(jpegs, tmp_path / "images.npy")
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="item 1"):
        write_memory_map(Fails(), path)
    with pytest.raises(FileNotFoundError):
        write_shards([tmp_path / "missing.jpg"], [0], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["images.npy"] and path.read_bytes() == before


def test_a_closed_memory_map_opens_again(formats, jpegs):
    formats["map"].close()
    assert torch.equal(formats["map"][3][0], jpegs[3][0])
