"""Checkpoints: whole or named as damaged, the last good one found, nothing lost whatever happens to the writer."""

import fcntl
import hashlib
import io
import multiprocessing
import os
import pickle
import random
import time
import zipfile

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from labs.common import checkpoints
from labs.common.checkpoints import Damaged, ResumableLoader, files, load, load_latest, save
from labs.common.checkpoints.resume import differences
from labs.kit.errors import BadInput
from labs.training_checkpoint import WAYS, kills


def state_of(step):
    return {"x": torch.full((50,), float(step)), "n": step, "name": "ä", "none": None, "list": [1, (2.5, True)]}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path / "run", step, state_of(step))
    return tmp_path / "run"


def names(folder):
    return sorted(os.listdir(folder))


def latest(folder):
    """Step of the last good checkpoint, and the lines about those that were skipped."""
    told = []
    found = load_latest(folder, on_damaged=lambda e: told.append(str(e)))
    return found and found[0], told


def sealed(body, step=3, version=files.VERSION):
    """`body` with a trailer that fits."""
    whole = body + files.FIELDS.pack(files.MAGIC, version, step, len(body))
    return whole + hashlib.sha256(whole).digest()


# -- saving and loading


def test_what_was_saved_is_loaded(folder):
    step, state = load_latest(folder)
    assert step == 3 and not list(differences(state, state_of(3)))
    assert load(folder / "step-00000002.pt")[0] == 2


def test_the_last_k_are_kept(tmp_path):
    for step in range(5):
        path = save(tmp_path, step, {}, keep=2)
        assert path.name == f"step-{step:08}.pt" and path.is_file()
    assert names(tmp_path) == ["step-00000003.pt", "step-00000004.pt"]


def test_going_back_deletes_neither_the_new_file_nor_later_ones(folder):
    save(folder, 0, state_of(0), keep=1)
    assert [p.name[-4:-3] for p in checkpoints.checkpoints(folder)] == ["0", "1", "2", "3"]
    save(folder, 2, state_of(7), keep=1)
    assert names(folder) == ["step-00000002.pt", "step-00000003.pt"]
    assert load(folder / "step-00000002.pt")[1]["n"] == 7


def test_other_tools_read_the_file(folder):
    path = folder / "step-00000003.pt"
    assert torch.load(path, weights_only=True)["n"] == 3
    assert torch.load(path, weights_only=True, mmap=True)["n"] == 3
    assert zipfile.ZipFile(path).testzip() is None


def test_nothing_there_is_none_and_nothing_good_is_an_error(tmp_path, folder):
    assert load_latest(tmp_path / "missing") is None and load_latest(tmp_path) is None
    for path in checkpoints.checkpoints(folder):
        path.write_bytes(b"")
    with pytest.raises(Damaged, match=r"^\S+ holds no good checkpoint: all 3 are damaged$"):
        load_latest(folder)


def test_a_folder_that_cannot_be_listed_is_no_empty_one(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        load_latest(tmp_path / "file")


@pytest.mark.parametrize("what", [np.float64(1), {"f": len}, pytest])
def test_what_could_not_be_loaded_is_not_saved(folder, what):
    before = names(folder)
    with pytest.raises((BadInput, TypeError, pickle.PicklingError)) as caught:
        save(folder, 4, {"x": what})
    assert names(folder) == before
    if isinstance(what, np.float64):
        assert "numpy" in str(caught.value) and "\n" not in str(caught.value)


# -- damage


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replace_by_dangling_link(path):
    path.unlink()
    path.symlink_to("nowhere")


def torch_file(**state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


DAMAGES = {
    "is empty": lambda p: p.write_bytes(b""),
    "cut off": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "another kind of file": lambda p: p.write_text("step,loss\n" * 20),
    "another kind": lambda p: p.write_bytes(torch_file(x=torch.ones(3))),
    "format version 2, this program reads version 1": lambda p: p.write_bytes(sealed(b"later", version=2)),
    "bytes of state,": lambda p: p.write_bytes(p.read_bytes()[:100] + p.read_bytes()[200:]),
    "SHA-256 has changed": lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])),
    "holds step 2: it was renamed": lambda p: p.write_bytes(p.with_name("step-00000002.pt").read_bytes()),
    "is a folder": replace_by_folder,
    "is not a file": replace_by_pipe,
    "cannot be read .No such file": replace_by_dangling_link,
    "as it was written, but torch refuses": lambda p: p.write_bytes(sealed(b"no zip")),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damage_is_named_and_the_previous_one_is_used(folder, words):
    path = folder / "step-00000003.pt"
    DAMAGES[words](path)
    with pytest.raises(Damaged, match=rf"^{path} .*{words}") as caught:
        load(path)
    assert "\n" not in str(caught.value) and caught.value.path == path
    assert latest(folder) == (2, [str(caught.value)])


def test_code_in_a_file_is_not_run(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    file = io.BytesIO()
    torch.save({"x": Evil()}, file)
    (folder / "step-00000003.pt").write_bytes(sealed(file.getvalue()))
    assert latest(folder)[0] == 2 and not (tmp_path / "ran").exists()


# -- a writer that dies, or finds no room


@pytest.mark.drill
@pytest.mark.parametrize(
    ("name", "count"), [("labs.common.checkpoints", 100), ("beside it", 15), ("onto the old file", 15)]
)
def test_kills_while_saving(tmp_path, name, count):
    found = list(kills(WAYS[name], tmp_path, count, 2**18, seed=2))
    assert len(found) == count and sum(k.saving for k in found) > count / 2
    lost = [k for k in found if k.lost]
    if name == "onto the old file":
        assert len(lost) > count / 3 and {k.found for k in lost} == {None}
        return
    assert lost == []
    assert any(k.leftovers for k in found)
    if name == "labs.common.checkpoints":
        assert max(k.leftovers for k in found) == 1, "each save clears what the one before left"
        save(tmp_path, 10**6, {})
        assert len(names(tmp_path)) == 3 and all(n.endswith(".pt") for n in names(tmp_path))


def test_everything_reaches_the_disk_in_this_order(folder, monkeypatch):
    """No power cut can be tried here; what can be tried is that nothing is done before what it depends on."""
    done, real = [], {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}

    def fsync(descriptor):
        done.append("fsync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "fsync file")
        real["fsync"](descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *a: done.append("replace") or real["replace"](*a))
    monkeypatch.setattr(os, "unlink", lambda *a: done.append("unlink") or real["unlink"](*a))
    save(folder, 4, state_of(4))
    assert done == ["fsync file", "replace", "fsync folder", "unlink"]
    assert names(folder) == [f"step-0000000{i}.pt" for i in (2, 3, 4)]


def test_new_folders_are_on_the_disk_before_what_they_hold(tmp_path, monkeypatch):
    done, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: done.append(os.fstat(d).st_ino) or real(d))
    save(tmp_path / "runs" / "x", 1, state_of(1))
    assert done[:2] == [tmp_path.stat().st_ino, (tmp_path / "runs").stat().st_ino] and len(done) == 4
    assert done[3] == (tmp_path / "runs" / "x").stat().st_ino


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_an_error_on_the_way_loses_nothing(folder, monkeypatch, name):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error; step 4 is not saved, earlier ones are: "):
        save(folder, 4, state_of(4))
    assert names(folder) == [f"step-0000000{i}.pt" for i in (1, 2, 3)] and latest(folder) == (3, [])


# -- several writers


def test_a_writer_that_is_still_writing_is_waited_for(folder):
    """What looks like a leftover is not, as long as somebody holds the lock."""
    partial = folder / "step-00000009.pt.abcd.partial"
    partial.touch()
    context = multiprocessing.get_context("fork")
    directory = os.open(folder, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    other = context.Process(target=save, args=(folder, 4, state_of(4)), daemon=True)
    other.start()
    try:
        time.sleep(0.15)
        assert partial.exists() and latest(folder)[0] == 3
        fcntl.flock(directory, fcntl.LOCK_UN)
        other.join(20)
        assert other.exitcode == 0 and not partial.exists() and latest(folder)[0] == 4
    finally:
        other.kill()
        other.join()
        os.close(directory)


# -- the state of a training


def parts(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    ]
    found = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3]),
        "scaler": torch.amp.GradScaler("cpu", growth_interval=2),
        "data": ResumableLoader(TensorDataset(torch.arange(40.0)), 4),
        "augment": np.random.default_rng(seed),
        "noise": torch.Generator().manual_seed(seed),
    }
    return found


def steps(p, n):
    """`n` steps that draw from every source of random numbers; the losses."""
    losses = []
    while len(losses) < n:
        for (rows,) in p["data"]:
            x = torch.randn(8, 4) + random.random() + np.random.random() + p["augment"].random()
            x = x * torch.rand(1, generator=p["noise"]) + rows.sum()
            p["optimizer"].zero_grad()
            loss = p["model"](x).square().mean()
            p["scaler"].scale(loss).backward()
            p["scaler"].step(p["optimizer"])
            p["scaler"].update()
            p["scheduler"].step()
            losses.append(loss.item())
            if len(losses) == n:
                break
    return losses


def test_a_restored_training_goes_on_bit_for_bit(tmp_path):
    whole = parts()
    steps(whole, 13)
    save(tmp_path, 13, checkpoints.training_state(**whole))
    expected, end = steps(whole, 20), checkpoints.training_state(**whole)
    state = load_latest(tmp_path)[1]
    for _ in range(2):  # twice from one state: an optimizer must not change it
        other = parts(seed=5)
        random.seed(5)
        np.random.seed(5)
        checkpoints.restore(state, **other)
        assert steps(other, 20) == expected
        assert not list(differences(end, checkpoints.training_state(**other)))


def test_a_part_that_is_forgotten_is_named():
    whole = parts()
    state = checkpoints.training_state(**whole)
    with pytest.raises(BadInput, match="checkpoint lacks scaler: it holds model, optimizer, "):
        checkpoints.restore({k: v for k, v in state.items() if k != "scaler"}, **whole)
    with pytest.raises(BadInput, match="checkpoint lacks random"):
        checkpoints.restore({k: v for k, v in state.items() if k != "random"}, **whole)
    with pytest.raises(BadInput, match=r"also holds data, noise: pass it to restore\(\) as well"):
        checkpoints.restore(state, **{k: v for k, v in whole.items() if k not in ("data", "noise")})


def test_the_random_state_of_a_gpu_is_kept_and_put_back(tmp_path, monkeypatch):
    """A stand-in for a GPU: its state is in the file, comes back from it, and is left out where there is none."""
    on_gpu = [torch.arange(16, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: on_gpu[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", on_gpu.append)
    save(tmp_path, 1, {"random": checkpoints.random_state()})
    for available, states_set in ((False, 0), (True, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        checkpoints.set_random_state(load_latest(tmp_path)[1]["random"])
        assert len(on_gpu) == 1 + states_set
    assert torch.equal(on_gpu[0], on_gpu[1])


def test_random_states_of_ranks():
    draws, saved = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        saved.append(checkpoints.random_state())
        draws.append(torch.rand(1))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    state = checkpoints.training_state(model, optimizer, random=saved)
    for rank in (0, 1):
        checkpoints.restore(state, model, optimizer, rank=rank)
        assert torch.rand(1) == draws[rank]
    torch.manual_seed(7)
    own = torch.rand(1)
    torch.manual_seed(7)
    checkpoints.restore(state, model, optimizer, rank=2)
    assert torch.rand(1) == own, "a rank that was not there keeps its own"


# -- the position in the data


def handed_over(loader, batches=None):
    found = []
    for (rows,) in loader:
        found.append(rows.tolist())
        if len(found) == batches:
            break
    return found


def loader(n=41, batch=4, **options):
    return ResumableLoader(TensorDataset(torch.arange(n)), batch, seed=3, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_position_counts_what_was_handed_over(workers):
    first = loader(num_workers=workers)
    whole, again = handed_over(first), handed_over(first)
    assert len(whole) == len(first) == 10 and whole != again, "another order in the next epoch"
    assert first.state_dict() == {"epoch": 2, "samples": 0}
    stopped, resumed = loader(num_workers=workers), loader()
    before = handed_over(stopped, 3)
    assert stopped.state_dict() == {"epoch": 0, "samples": 12}, "not what the workers had read ahead"
    resumed.load_state_dict(stopped.state_dict())
    assert before + handed_over(resumed) == whole and handed_over(resumed) == again


def test_ranks_share_the_data_and_another_number_of_ranks_goes_on():
    two = [loader(rank=r, world_size=2) for r in range(2)]
    before = [row for x in two for batch in handed_over(x, 2) for row in batch]
    assert len(set(before)) == 16 and all(x.state_dict()["samples"] == 16 for x in two)
    one = loader()
    one.load_state_dict(two[0].state_dict())
    after = [row for batch in handed_over(one) for row in batch]
    assert len(set(before + after)) == len(before + after) == 40


# -- python -m labs.checkpoints
