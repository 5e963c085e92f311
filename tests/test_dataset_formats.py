"""What a format costs: the files, the orders, the page cache, and the lab from end to end."""

import mmap
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
from again import holds_soon

from labs import dataset_formats
from labs.common.data import photos
from labs.common.data.tiles import tiles
from labs.common.loading.image_datasets import RamCache
from labs.dataset_formats import AHEAD, COPY, Config, orders, predict
from labs.dataset_formats.image_formats import JPEG, MAP, RAM, TAR, formats_of, listed
from labs.dataset_formats.page_cache import can_evict, evict, flush, is_cached, private_bytes
from labs.kit.errors import BadInput
from labs.kit.launch import launch

ON_DISK = {JPEG, TAR, MAP}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tiles(12, (64, 48), folder=tmp_path_factory.mktemp("tiles"), progress=lambda done, total: None)


def test_predict_by_hand():
    assert predict(1000, 1e6) == pytest.approx(1000)
    assert predict(1000, 1e6, cpu_s=0.003) == pytest.approx(250)


def test_orders_are_equal_for_all_and_reach_every_image():
    one, two = orders(10, 4, seed=0), orders(10, 4, seed=0)
    rounds = [next(one) for _ in range(5)]
    assert rounds == [next(two) for _ in range(5)]
    taken = [i for indices in rounds for i in indices]
    assert sorted(taken) == sorted([*range(10), *range(10)])
    assert taken[:10] == taken[10:] != list(range(10))


def test_formats_are_written_once_and_again_when_damaged(kept, monkeypatch):
    decoded = RamCache(listed(kept.folder, 12, 16))
    formats = formats_of(kept, decoded, 16)
    [file] = formats.paths[MAP]
    before = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("labs.dataset_formats.image_formats.write_memory_map", lambda *_: pytest.fail("written again"))
        formats_of(kept, decoded, 16)
    file.write_bytes(before[:-1] + b"\1")
    formats_of(kept, decoded, 16)
    assert file.read_bytes() == before
    for opened in formats.open.values():
        assert len(opened()) == 12 and torch.equal(opened()[5][0], decoded[5][0])


def test_disk_bytes_are_those_of_the_formula(kept):
    formats = formats_of(kept, RamCache(listed(kept.folder, 12, 16)), 16)
    encoded = sum(p.stat().st_size for p in kept.paths)
    assert formats.disk_bytes(JPEG) == formats.disk_bytes(RAM) == encoded
    assert 0 < formats.disk_bytes(MAP) - 12 * (3 * 16 * 16 + 8) <= 256  # the header
    assert encoded + 12 * 3 * 512 < formats.disk_bytes(TAR) < encoded + 12 * 4 * 512 + 10240


@pytest.fixture
def file(kept, tmp_path_factory):
    path = kept.folder.parent / "for_the_page_cache"
    path.write_bytes(bytes(2**20))
    [old, *_] = photos()  # written long ago, so that this does not depend on `flush`
    if path.stat().st_dev != old.stat().st_dev or not can_evict(old):
        pytest.skip("this system does not let files be evicted from its page cache")
    return path


def test_evicted_files_are_gone_and_read_ones_are_back(file):
    def goes():
        flush([file])
        file.read_bytes()
        assert is_cached(file) and is_cached(file, 2**20 - 1)
        evict([file])
        return not is_cached(file, 2**19)

    # On a busy machine a page is sometimes held for a moment: seen once, at load 13.
    assert holds_soon(bool, goes(), goes)


def test_what_is_not_yet_written_cannot_be_evicted(file):
    file.write_bytes(bytes(2**20))
    flush([file])
    evict([file])
    assert not is_cached(file)


def test_private_bytes_grow_with_what_a_process_writes():
    """Pages newly mapped: a block from malloc may be one that this process wrote to before, and has freed."""
    pid, size = os.getpid(), 50_000_000
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        before = private_bytes(pid)
        block.write(b"\1" * size)
        written = private_bytes(pid)
    assert written - before == pytest.approx(size, rel=0.1)
    assert written - private_bytes(pid) == pytest.approx(size, rel=0.1)


def test_a_worker_is_measured_and_ended(kept):
    records = []
    rank = SimpleNamespace(
        cores=(), device=torch.device("cpu"), record=lambda metric, unit, samples, **case: records.append(metric)
    )
    list(dataset_formats.with_worker(RAM, RamCache(listed(kept.folder, 12, 16)), Config(images=12, batch=4), rank))
    assert set(records) == {"worker_images_per_s", "worker_bytes"} and multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"images": 0}, "images must be at least 1, not 0"),
        ({"batch": 513}, r"batch must be 1 to 512 \(images\), not 513"),
        ({"rounds": 1}, "rounds must be at least 2, not 1: one sample has no interval"),
    ],
)
def test_bad_values_are_one_line(values, says):
    with pytest.raises(BadInput, match=f"^{says}$"):
        Config(**values)


def test_every_format_is_measured():
    run = launch("dataset_formats", nproc=2, smoke=True, oversubscribe=True)
    assert {r.case["format"] for r in run.where("startup_s")} == {*ON_DISK, RAM}
    assert {r.case["format"] for r in run.where("worker_bytes")} == {*ON_DISK, RAM}
    warm = {r.case["format"]: r for r in run.where("images_per_s", cache="warm")}
    assert warm.keys() == {*ON_DISK, RAM, COPY, "photo", "photo, draft", "tile", "tile, draft"}
    assert all(len(r.samples) == 2 for r in warm.values())
    assert max(warm[MAP].samples) > 10 * min(warm[JPEG].samples)  # a hundred times, here and undisturbed
    cold = {r.case["format"] for r in run.where("images_per_s", cache="cold")}
    assert cold in (set(), ON_DISK | {AHEAD})
    assert {r.case["format"] for r in run.where("predicted_images_per_s")} == cold
    assert run.one("shared_bytes", format=RAM).value == 48 * 3 * 224 * 224
    assert run.one("disk_bytes", format=MAP).value > run.one("disk_bytes", format=TAR).value
