"""Checkers of notebook 05: right answers of other kinds pass, drills do what they say, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from os import fsync, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from mutants import nb05 as mutants
from speeds import first
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb05 import exercise_drills as checkpoint_drills
from labs.chapters.nb05 import solutions as solution
from labs.chapters.nb05.exercise_drills import Drill, in_child
from labs.chapters.nb05.exercise_files import _damages
from labs.chapters.nb05.exercise_recompute import SCENES, Run, kept_by, plain
from labs.chapters.nb05.exercise_resume import pieces
from labs.chapters.nb05.exercise_states import a_state, difference, one_thread, same
from labs.chapters.nb05.exercise_trainer import Trainer
from labs.kit.check import TODO, Mistake, examine, get_exercise
from labs.parts.memory.chunked_loss import chunked_cross_entropy
from labs.parts.memory.recomputation import by_hand


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


# -- 05.1


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    fsync(descriptor)
    os.close(descriptor)


class FolderPerStep:
    """Each checkpoint is a folder with a manifest; torch writes the tensors' file itself, from C++."""

    def __init__(self, folder, keep):
        self.folder, self.keep = Path(folder), keep

    def steps(self):
        return sorted(int(p.name[5:]) for p in self.folder.glob("step-*") if p.name[5:].isdigit() and p.is_dir())

    def save(self, step, state):
        new = self.folder / "new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        try:
            torch.save(state, new / "state.pt")
            sums = {"state.pt": hashlib.sha256((new / "state.pt").read_bytes()).hexdigest(), "step": step}
            (new / "manifest.json").write_text(json.dumps(sums))
            for path in (new / "state.pt", new / "manifest.json", new):
                sync(path)
            os.rename(new, self.folder / f"step-{step}")
        finally:
            shutil.rmtree(new, ignore_errors=True)
        sync(self.folder)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old}")

    def load(self):
        for step in reversed(self.steps()):
            path = self.folder / f"step-{step}"
            try:
                sums = json.loads((path / "manifest.json").read_text())
                if hashlib.sha256((path / "state.pt").read_bytes()).hexdigest() == sums["state.pt"]:
                    return sums["step"], torch.load(path / "state.pt", weights_only=True)
            except (OSError, ValueError):
                continue
        if self.steps():
            raise RuntimeError("all damaged")
        return None


class NamesOfItsOwn(mutants.Files):
    """Functions of os by their own names, a temporary file with a random name, a CRC, names with zeros."""

    def __init__(self, folder, keep):
        super().__init__(folder, keep)

    def save(self, step, state):
        for stale in self.folder.glob("tmp-*"):
            stale.unlink()
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="tmp-", delete=False) as file:
            try:
                torch.save((step, state), buffer := io.BytesIO())
                file.write(zlib.crc32(buffer.getbuffer()).to_bytes(32, "big") + buffer.getvalue())
                file.flush()
                fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    file.close()  # tries to write once more what did not fit
                os.unlink(file.name)
                raise
        try:
            replace(file.name, self.folder / f"{step:06d}.checkpoint")
            sync(self.folder)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
            raise
        self.delete_old()

    def newest_first(self):
        return sorted(self.folder.glob("[0-9]" * 6 + ".checkpoint"), reverse=True)

    def checksum(self, data):
        return zlib.crc32(data).to_bytes(32, "big")

    def unpacked(self, data):
        return torch.load(io.BytesIO(data))  # weights_only=True is what it does by itself


class SyncsAll(mutants.Files):
    def write(self, path, data):
        path.write_bytes(data)
        os.sync()

    def sync_folder(self):
        os.sync()


class ToldByPrinting(mutants.Files):
    def save(self, step, state):
        print("saving", step)
        super().save(step, state)
        print("saved", step)


class OldOnesRenamedFirst(mutants.Files):
    """Old files get another name before they go, so that a kill in between leaves nothing that looks like one."""

    def delete_old(self):
        for stale in self.folder.glob("*.old"):
            stale.unlink()
        for old in self.newest_first()[self.keep :]:
            os.rename(old, old.with_suffix(".old"))
            old.with_suffix(".old").unlink()


class PointerToTheNewest(mutants.Files):
    """A file `latest` beside the checkpoints, which comes after all and which load() can do without."""

    def save(self, step, state):
        super().save(step, state)
        unfinished = self.folder / "latest.unfinished"
        try:
            self.write(unfinished, str(step).encode())
            os.replace(unfinished, self.folder / "latest")
            self.sync_folder()
        finally:
            unfinished.unlink(missing_ok=True)


class NamesInAnOpenFolder(mutants.Files):
    """All names are relative to the descriptor of the folder."""

    def save(self, step, state):
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            file = os.open("unfinished", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, dir_fd=folder)
            try:
                with open(file, "wb") as opened:
                    opened.write(self.packed(step, state))
                    opened.flush()
                    os.fsync(opened)
                os.rename("unfinished", self.name(step), src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink("unfinished", dir_fd=folder)
                raise
            os.fsync(folder)
        finally:
            os.close(folder)
        self.delete_old()


RARE = (NamesOfItsOwn, ToldByPrinting, OldOnesRenamedFirst, PointerToTheNewest, NamesInAnOpenFolder)
RARER = [pytest.param(c, marks=pytest.mark.long) for c in RARE]


@pytest.mark.parametrize("right", first(1, [mutants.Files, FolderPerStep, *RARER]))
def test_other_files_that_survive_pass(right, capsys):
    passes("05.1", right)
    assert capsys.readouterr().out == ""


def test_a_sync_of_the_whole_machine_is_as_good(monkeypatch):
    monkeypatch.setattr(os, "sync", lambda: None)  # the machine is also that of others
    passes("05.1", SyncsAll)


@pytest.mark.drill
def test_a_drill_kills_at_the_byte_at_the_call_and_fails_the_write(tmp_path):
    file = tmp_path / "file"

    def act():
        file.write_bytes(bytes(1000))
        os.replace(file, tmp_path / "final")

    assert in_child(act, Drill(kill_at_byte=400)).killed and file.stat().st_size == 400
    assert in_child(act, Drill(kill_at_call=1)).killed and file.stat().st_size == 1000
    assert in_child(act, Drill(full_at_byte=400)).error.startswith("OSError") and file.stat().st_size == 400
    ended = in_child(act)
    assert [c.what for c in ended.calls] == ["open", "replace"] and not file.exists()


@pytest.mark.drill
def test_torchs_own_writer_is_killed_too(tmp_path):
    file = tmp_path / "file"
    assert in_child(lambda: torch.save(a_state(1), file), Drill(kill_at_byte=5000)).killed
    assert file.stat().st_size == 5000
    assert in_child(lambda: torch.save(a_state(1), file), Drill(full_at_byte=5000)).error


@pytest.mark.drill
def test_an_act_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(checkpoint_drills, "LIMIT_S", 0.3)
    before, started = children(), time.monotonic()
    with pytest.raises(Mistake, match="did not end"):
        in_child(lambda: time.sleep(60))
    assert time.monotonic() - started < 30, "it would have taken a minute"
    assert children() == before


@pytest.mark.drill
@pytest.mark.skipif(sys.platform != "linux", reason="a signal at a parent's death is Linux's")
def test_an_act_ends_with_the_process_that_watches_it(tmp_path):
    told = tmp_path / "pid"
    code = (
        "import os, pathlib, sys, time\nfrom labs.chapters.nb05.exercise_drills import in_child\n"
        "def act():\n    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n    time.sleep(600)\nin_child(act)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(told)])
    try:
        for _ in range(1200):
            if told.exists() and told.read_text():
                break
            time.sleep(0.1)
        child = psutil.Process(int(told.read_text()))
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.drill
def test_an_act_that_leaves_by_exit_or_signal_is_told_apart():
    with pytest.raises(Mistake, match="ends the whole process"):
        in_child(lambda: os._exit(3))
    assert in_child(lambda: sys.exit(3)).error.startswith("SystemExit")
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)).killed
    assert in_child(lambda: (_ for _ in ()).throw(KeyError("x"))).error.startswith("KeyError")


def test_an_error_that_cannot_be_told_ends_the_child_and_no_second_process_goes_on():
    class Unspeakable(Exception):
        __str__ = lambda self: 1 / 0  # noqa: E731

    def act():
        raise Unspeakable

    me = os.getpid()
    with contextlib.suppress(Mistake):
        assert in_child(act).error.startswith("Unspeakable")
    if os.getpid() != me:
        os._exit(0)
    assert in_child(act).error.startswith("Unspeakable")


def test_each_damage_changes_the_file_and_torch_alone_does_not_notice_all(tmp_path):
    torch.save(a_state(3), file := io.BytesIO())
    damaged = list(_damages(file.getvalue()))
    assert len(damaged) >= 35 and all(data != file.getvalue() for _, data in damaged)
    unnoticed = 0
    for _, data in damaged:
        try:
            unnoticed += not same(torch.load(io.BytesIO(data), weights_only=True), a_state(3))
        except Exception:
            continue
    assert unnoticed > 10


def test_states_are_compared_bit_for_bit():
    assert same(a_state(3), a_state(3)) and difference(a_state(3), a_state(4)) == "state['model']['weight']"
    assert not same({"a": torch.ones(1)}, {"a": torch.ones(1).double()})
    assert not same({"a": 1}, {"a": 1, "b": 2}) and not same({"a": 1, "b": 2}, {"a": 1})
    assert not same({"a": torch.ones(2)}, {"a": 1}) and not same(None, (1, {}))


def test_the_stub_of_a_class_is_to_do():
    class Checkpoints:
        def __init__(self, folder, keep):
            self.folder, self.keep = folder, keep

        def save(self, step, state):
            TODO  # noqa: B018
            torch.save(state, f"{self.folder}/{step}.pt")

        def load(self):
            return None

    class Resumable(Trainer):
        def state_dict(self):
            return {"model": self.model.state_dict()}

        def load_state_dict(self, state):
            return TODO

    assert examine("05.1", Checkpoints).state == "to do"
    assert examine("05.4", Resumable).state == "to do"


def test_an_error_in_a_method_shows_what_was_raised():
    class Broken(mutants.Files):
        def packed(self, step, state):
            return state.no_such_thing

    assert "AttributeError: 'dict' object has no attribute 'no_such_thing'" in examine("05.1", Broken).text


@pytest.mark.parametrize("exercise_id", ["05.1", "05.4"])
@pytest.mark.parametrize("junk", [None, 3, "text", print, object(), lambda: 1, lambda *_: None, lambda *_: {}])
def test_junk_is_told_not_raised(exercise_id, junk):
    assert examine(exercise_id, junk).state == "not yet"


class SaltedChecksum(mutants.Files):
    def checksum(self, data):
        return (hash(data) % 2**64).to_bytes(32, "big")


class LeavesAtOnce(mutants.Files):
    def save(self, step, state):
        try:
            super().save(step, state)
        except OSError:
            os._exit(1)


class HeaderIsCode(mutants.Files):
    def packed(self, step, state):
        torch.save({"step": step, "state": state}, buffer := io.BytesIO())
        header = repr({"sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}).encode()
        return header + b"\n" + buffer.getvalue()

    def checked(self, data):
        try:
            header, _, content = data.partition(b"\n")
            return content if eval(header)["sha256"] == hashlib.sha256(content).hexdigest() else None
        except Exception:
            return None


class InMemory(mutants.Files):
    saved: dict = {}  # noqa: RUF012

    def save(self, step, state):
        self.saved[str(self.folder)] = step, copy.deepcopy(state)

    def load(self):
        return self.saved.get(str(self.folder))


class OneMoreThanKeep(mutants.Files):
    def delete_old(self):
        for old in self.newest_first()[self.keep + 1 :]:
            old.unlink()


class OldOnesFirstWhereAnotherIsLeft(mutants.Files):
    """With keep=1 the old one stays until the new one is there; with keep=2 the older one makes room."""

    def save(self, step, state):
        for old in self.newest_first()[max(1, self.keep - 1) :]:
            self.remove(old)
        super().save(step, state)

    def remove(self, path):
        path.unlink()


class OldOnesGiveTheirSpace(OldOnesFirstWhereAnotherIsLeft):
    """No file is deleted; it becomes the unfinished one."""

    def remove(self, path):
        os.replace(path, self.unfinished())


class OldOnesBeforeTheNewName(mutants.Files):
    def write(self, path, data):
        super().write(path, data)
        for old in self.newest_first()[max(1, self.keep - 1) :]:
            old.unlink()


class NewestByTime(mutants.Files):
    def delete_old(self):
        for old in sorted(self.newest_first(), key=lambda p: -p.stat().st_mtime)[self.keep :]:
            old.unlink()


class AllThatBeginsAlike(mutants.Files):
    def delete_old(self):
        for path in {*self.folder.glob("step-*")} - {*self.newest_first()[: self.keep]}:
            path.unlink()


class NumbersOfAllThatBeginsAlike(mutants.Files):
    def delete_old(self):
        for old in sorted(self.folder.glob("step-*.pt"), key=lambda p: -int(p.stem[5:]))[self.keep :]:
            old.unlink()


class StepAmongTheState(mutants.Files):
    def packed(self, step, state):
        torch.save(state | {"step": step}, buffer := io.BytesIO())
        return self.checksum(buffer.getvalue()) + buffer.getvalue()

    def unpacked(self, data):
        state = torch.load(io.BytesIO(data), weights_only=True)
        return state.pop("step"), state


class NoStepZero(mutants.Files):
    def newest_first(self):
        return [path for path in super().newest_first() if path.name != "step-0.pt"]


class OnlyTheTwoNewest(mutants.Files):
    def load(self):
        if not (paths := self.newest_first()):
            return None
        good = filter(None, (self.checked(path.read_bytes()) for path in paths[:2]))
        return self.unpacked(next(good))


class AnyFileIsACheckpoint(mutants.Files):
    def load(self):
        if (loaded := super().load()) is None and any(self.folder.iterdir()):
            raise RuntimeError("all damaged")
        return loaded


class AnUnfinishedFileIsADamagedOne(mutants.Files):
    def load(self):
        if (loaded := super().load()) is None and self.unfinished().exists():
            raise RuntimeError("all damaged")
        return loaded


class DamagedOnesGetAnotherName(mutants.Files):
    def load(self):
        for path in (paths := self.newest_first()):
            if (data := self.checked(path.read_bytes())) is not None:
                return self.unpacked(data)
            path.rename(path.with_suffix(".damaged"))
        if paths:
            raise RuntimeError("all damaged")
        return None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (OneMoreThanKeep, "step-11.pt is still there: three checkpoints stay"),
        (OldOnesFirstWhereAnotherIsLeft, "a training with keep=2 has one left"),
        (OldOnesBeforeTheNewName, "a training with keep=2 has one left"),
        (OldOnesGiveTheirSpace, "of step 8 nothing is left"),
        (NewestByTime, "step 11 is there and step 12 is gone"),
        (AllThatBeginsAlike, "save() has deleted step-best.pt"),
        (NumbersOfAllThatBeginsAlike, "notes.md and step-best.pt lie in the folder, and save() raises ValueError"),
        (StepAmongTheState, "state['step'] is not what was saved"),
        (NoStepZero, "after save(0, state) load() gives None"),
        (AnyFileIsACheckpoint, "load() from a folder with nothing but notes.md raises RuntimeError"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (OnlyTheTwoNewest, "steps 9 and 10 are damaged, step 8 is whole, and load() raises"),
                (AnUnfinishedFileIsADamagedOne, "the very first save was killed"),
                (DamagedOnesGetAnotherName, "gives None when it is called again, as a restart does"),
            )
        ),
    ],
)
def test_what_the_text_names_and_the_example_does_not_show_is_told(wrong, words):
    assert words in examine("05.1", wrong).text


@pytest.mark.parametrize(
    ("wrong", "words"),
    first(
        2,
        [
            (SaltedChecksum, "load() in a new process raises RuntimeError"),
            (LeavesAtOnce, "ends the whole process with os._exit()"),
            (HeaderIsCode, "and eval in load() ran it"),
            (InMemory, "save() writes no file into the folder"),
        ],
    ),
)
def test_rarer_mistakes_with_files_are_told(wrong, words):
    assert words in examine("05.1", wrong).text


# -- 05.2


def all_subsets(blocks, x, kept_bytes, budget_bytes):
    """Every choice is tried, the smallest first; runs of blocks that go together are one segment."""
    n = len(blocks)
    again = next(
        c
        for k in range(n + 1)
        for c in itertools.combinations(range(n), k)
        if sum(kept_bytes[i] for i in range(n) if i not in c) <= budget_bytes
    )
    for twice, numbers in itertools.groupby(range(n), key=again.__contains__):
        segment = nn.Sequential(*(blocks[i] for i in numbers))
        x = checkpoint(segment, x, use_reentrant=False) if twice else segment(x)
    return x


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters, ctx.state = block, parameters, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            out = ctx.block(x)
        return None, *torch.autograd.grad(out, [x, *ctx.parameters], g)


def by_own_function(blocks, x, kept_bytes, budget_bytes):
    kept = np.array(kept_bytes)
    order = np.argsort(-kept)
    left = kept.sum() - np.concatenate([[0], np.cumsum(kept[order])])
    again = set(order[: int(np.argmax(left <= budget_bytes))].tolist())
    for i, block in enumerate(blocks):
        x = OwnFunction.apply(block, x, *block.parameters()) if i in again else block(x)
    return x


def by_hooks(blocks, x, kept_bytes, budget_bytes):
    left = dict(enumerate(kept_bytes))
    while sum(left.values()) > budget_bytes:
        del left[max(left, key=left.get)]
    for i, block in enumerate(blocks):
        x = block(x) if i in left else by_hand(block, x)
    return x


@pytest.mark.parametrize("right", [all_subsets, by_own_function, by_hooks])
def test_other_ways_to_keep_a_budget_pass(right):
    passes("05.2", right)


def test_the_budget_counts_what_blocks_keep_and_nothing_else():
    for scene in SCENES:
        with one_thread():
            kept = [kept_by(h) for h in scene.hidden]
            budget = scene.budget(kept)
            all_kept, own = (Run(scene).play(f, kept, budget) for f in (plain, solution.run_stack))
        assert all_kept.kept_bytes == sum(kept) and own.kept_bytes <= budget + 8192 * max(1, scene.over)
        assert {c.block for c in own.calls if c.in_backward} == set(np.argsort(kept)[::-1][: scene.over].tolist())
        assert all(torch.equal(a, b) for a, b in zip(own.gradients, all_kept.gradients, strict=True))
        assert (own.x_grad is None) == (not scene.x_needs_grad) and own.drawn == all_kept.drawn


def test_switching_requires_grad_on_for_the_callers_x_is_told():
    def run_stack(blocks, x, kept_bytes, budget_bytes):
        return solution.run_stack(blocks, x.requires_grad_(), kept_bytes, budget_bytes)

    assert "the caller's x requires a gradient now" in examine("05.2", run_stack).text


def takes_them_out_of_kept_bytes(blocks, x, kept_bytes, budget_bytes):
    again = set()
    while sum(kept_bytes) > budget_bytes:
        again.add(largest := kept_bytes.index(max(kept_bytes)))
        kept_bytes[largest] = 0
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def first_of_this_size(blocks, x, kept_bytes, budget_bytes):
    again, left = set(), sum(kept_bytes)
    for size in sorted(kept_bytes, reverse=True):
        if left > budget_bytes:
            again.add(kept_bytes.index(size))
            left -= size
    for i, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if i in again else block(x)
    return x


def patched(blocks, x, kept_bytes, budget_bytes):
    left = sum(kept_bytes)
    for i in sorted(range(len(blocks)), key=lambda i: -kept_bytes[i]):
        if left > budget_bytes:
            blocks[i].forward = functools.partial(checkpoint, blocks[i].forward, use_reentrant=False)
            left -= kept_bytes[i]
    return plain(blocks, x, kept_bytes, budget_bytes)


def in_evaluation_mode(blocks, *rest):
    return solution.run_stack([block.eval() for block in blocks], *rest)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (takes_them_out_of_kept_bytes, "kept_bytes holds other numbers afterwards"),
        (first_of_this_size, "two blocks of the same size: 49 kB are kept"),
        (patched, "the caller's blocks are others afterwards"),
        (in_evaluation_mode, "a block is in another mode"),
    ],
)
def test_what_the_next_step_would_suffer_from_is_told(wrong, words):
    assert words in examine("05.2", wrong).text


@pytest.mark.parametrize("junk", [lambda *_: None, lambda *_: 3.0, lambda blocks, x, *_: x.sum()])
def test_junk_for_a_tensor_is_told(junk):
    assert "not a tensor as the last block does" in examine("05.2", junk).text


# -- 05.3


class InForward(torch.autograd.Function):
    """Gradients are made in forward, chunk by chunk, and only scaled in backward: no second run at all."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):
        count, total = (labels != -100).sum(), 0.0
        grads = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(labels), chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            p = (h @ weight.T).log_softmax(1)
            used = (y != -100).float()
            target = y.clamp(min=0)[:, None]
            total = total - (p.gather(1, target)[:, 0] * used).sum()
            p = p.exp_().scatter_add_(1, target, -torch.ones_like(h[:, :1])) * used[:, None] / count
            grads[0][start : start + chunk] = p @ weight
            grads[1].add_(p.T @ h)
        ctx.save_for_backward(*grads)
        return total / count

    @staticmethod
    def backward(ctx, g):
        return *(g * t for t in ctx.saved_tensors), None, None


def module_per_chunk(hidden, weight, labels, chunk_tokens):
    """A criterion that adds up, chunks by index, a shape of (1,)."""
    criterion = nn.CrossEntropyLoss(reduction="sum", ignore_index=-100)

    def one(start):
        part = slice(start, start + chunk_tokens)
        return criterion(nn.functional.linear(hidden[part], weight), labels[part])

    sums = [checkpoint(one, start, use_reentrant=False) for start in range(0, len(hidden), chunk_tokens)]
    return (torch.stack(sums).sum() / labels.ne(-100).sum()).reshape(1)


@pytest.mark.parametrize("right", [InForward.apply, module_per_chunk], ids=["gradients in forward", "by index"])
def test_other_ways_to_chunk_pass(right):
    passes("05.3", lambda *arguments: right(*arguments))


def test_the_labs_own_chunked_loss_is_that_of_all_logits_at_once():
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64, requires_grad=True) for n in (50, 90))
    labels = torch.randint(90, (50,), generator=draw)
    whole, parts = (chunked_cross_entropy(hidden, weight, labels, chunks) for chunks in (1, 7))
    assert torch.allclose(whole, parts, rtol=1e-12)
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (whole, parts)), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)


# -- 05.4


class AsTensors(Trainer):
    """Flat, and random states as tensors."""

    def state_dict(self):
        state = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        _, keys, *rest = np.random.get_state()
        version, words, gauss = random.getstate()
        self_state = {"numpy": torch.tensor(keys.astype(np.int64)), "rest": rest, "python": torch.tensor(words)}
        others = {k: copy.deepcopy(getattr(self, k).state_dict()) for k in ("optimizer", "scheduler", "scaler")}
        sampler = {"at": [self.sampler.epoch, self.sampler.position], "order": self.sampler.order.tolist()}
        generators = {"drawn": self.sampler.generator.get_state(), "torch": torch.get_rng_state()}
        return state | self_state | others | sampler | generators | {"version": version, "gauss": gauss}

    def load_state_dict(self, state):
        self.model.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("model.")})
        for k in ("optimizer", "scheduler", "scaler"):
            getattr(self, k).load_state_dict(state[k])
        self.sampler.epoch, self.sampler.position = state["at"]
        self.sampler.order = torch.tensor(state["order"])
        self.sampler.generator.set_state(state["drawn"])
        torch.set_rng_state(state["torch"])
        np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["rest"]))
        random.setstate((state["version"], tuple(state["python"].tolist()), state["gauss"]))


@pytest.mark.parametrize("right", [AsTensors, mutants.Complete])
def test_other_complete_states_pass(right):
    passes("05.4", right)


class InTheClass(mutants.Complete):
    def state_dict(self):
        type(self).kept = super().state_dict()
        return {"epoch": self.sampler.epoch}

    def load_state_dict(self, state):
        super().load_state_dict(copy.deepcopy(self.kept))


def test_a_state_that_stays_in_the_class_is_told():
    assert "brings back what another trainer has saved last" in examine("05.4", InTheClass).text


def test_the_reference_leaves_the_state_as_it_was_when_the_training_goes_on_from_it():
    trainer = solution.Resumable(1)
    trainer.step()
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    trainer.load_state_dict(state)
    trainer.step()
    assert same(state, kept)


class TakesTheStateApart(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict({name: state.pop(name) for name in self.loads})


class TakesWhatIsThere(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict({name: state.pop(name) for name in list(state)})


class SavedInEvaluationMode(mutants.Complete):
    def state_dict(self):
        self.model.eval()
        return super().state_dict()


class LoadedForEvaluation(mutants.Complete):
    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.model.eval()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (TakesTheStateApart, "load_state_dict(state) works once: a second one from the same state raises KeyError"),
        (TakesWhatIsThere, "a second one from the same state does not bring back the parameters"),
        (SavedInEvaluationMode, "state_dict() itself puts the model into evaluation mode"),
        (LoadedForEvaluation, "load_state_dict() leaves the model in evaluation mode"),
    ],
)
def test_what_is_no_piece_of_the_state_is_told(wrong, words):
    assert words in examine("05.4", wrong).text


def test_from_the_article_on_one_piece_after_the_other():
    parts = ["scheduler", "scaler", "sampler", "generator", "torch", "numpy", "python"]
    words = [
        "the scheduler",
        "the loss scale",
        "the number of the epoch",
        "the sampler's generator",
        "torch's random state",
        "NumPy's",
        "Python's",
    ]
    for i, word in enumerate(words):
        told = examine("05.4", mutants._without(*parts[i:]))
        assert word in told.text.splitlines()[0], told.text
    assert f"({len(parts[1:]) + 2} more after it)" in examine("05.4", mutants._without(*parts)).text


def test_every_piece_of_the_trainer_changes_and_matters():
    trainer = Trainer(1)
    before = pieces(trainer)
    for _ in range(8):
        trainer.step()
    after = pieces(trainer)
    assert [name for name in before if same(before[name], after[name])] == []


@pytest.mark.long
def test_a_check_leaves_random_states_and_threads_as_they_were():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    threads = torch.get_num_threads()
    for exercise_id in ("05.1", "05.2", "05.3", "05.4"):
        examine(exercise_id, get_exercise(exercise_id).reference)
    drawn = torch.rand(()).item(), np.random.random(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    assert drawn == (torch.rand(()).item(), np.random.random(), random.random())
    assert torch.get_num_threads() == threads


@pytest.mark.drill
def test_nothing_is_left_behind():
    processes = children()
    before = set(Path(tempfile.gettempdir()).glob("checkpoints-*"))
    for cls in (solution.Checkpoints, mutants.NoChecksum):
        examine("05.1", cls)
    assert set(Path(tempfile.gettempdir()).glob("checkpoints-*")) == before
    assert children() == processes


def test_a_chunk_that_is_looked_up_in_backward_is_named():
    def chunked_loss(hidden, weight, labels, chunk_tokens):
        total = 0.0
        for h, y in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True):
            total += checkpoint(
                lambda: nn.functional.cross_entropy(h @ weight.T, y, reduction="sum"),  # noqa: B023
                use_reentrant=False,
            )
        return total / (labels != -100).sum()

    assert "the gradient of the last chunk's" in examine("05.3", chunked_loss).text


def test_torch_has_a_loss_without_all_logits():
    def chunked_loss(hidden, weight, labels, chunk_tokens):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
        return nn.functional.linear_cross_entropy(hidden, weight, labels, options=options)

    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("before torch 2.13")
    passes("05.3", chunked_loss)
