"""Checkers of notebook 05: right answers of other kinds pass, drills do what they say, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import random
import shutil
import signal
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
from torch import nn

from labs.chapters.nb05 import exercise_drills as checkpoint_drills
from labs.chapters.nb05 import exercises as nb05
from labs.chapters.nb05 import solutions as solution
from labs.chapters.nb05.exercise_drills import Drill, in_child
from labs.chapters.nb05.exercise_files import _damages
from labs.chapters.nb05.exercise_recompute import SCENES, Run
from labs.chapters.nb05.exercise_resume import pieces
from labs.chapters.nb05.exercise_states import a_state, difference, one_thread, same
from labs.chapters.nb05.exercise_trainer import Trainer
from labs.kit.check import TODO, Mistake, examine, get_exercise


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


@pytest.mark.parametrize("right", [mutants.Files, FolderPerStep, NamesOfItsOwn, ToldByPrinting, OldOnesRenamedFirst])
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
def test_an_act_that_leaves_by_exit_or_signal_is_told_apart():
    with pytest.raises(Mistake, match="ends the whole process"):
        in_child(lambda: os._exit(3))
    assert in_child(lambda: sys.exit(3)).error.startswith("SystemExit")
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)).killed
    assert in_child(lambda: (_ for _ in ()).throw(KeyError("x"))).error.startswith("KeyError")


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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (SaltedChecksum, "load() in a new process raises RuntimeError"),
        (LeavesAtOnce, "ends the whole process with os._exit()"),
        (HeaderIsCode, "and eval in load() ran it"),
        (InMemory, "save() writes no file into the folder"),
    ],
)
def test_rarer_mistakes_with_files_are_told(wrong, words):
    assert words in examine("05.1", wrong).text


# -- 05.2


def test_switching_requires_grad_on_for_the_callers_x_is_told():
    def checkpointed(block, x):
        return solution.checkpointed(block, x.requires_grad_())

    assert "the caller's x requires a gradient now" in examine("05.2", checkpointed).text


def with_a_dummy(block, x):
    """As torch's older way does it: backward() inside of backward() reaches the parameters by itself."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, dummy, x):
            ctx.x, ctx.state = x, torch.get_rng_state()
            return block(x)

        @staticmethod
        def backward(ctx, g):
            after = torch.get_rng_state()
            torch.set_rng_state(ctx.state)
            x = ctx.x.detach().clone().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(block(x), g)
            torch.set_rng_state(after)
            return None, x.grad

    return Recomputed.apply(torch.zeros((), requires_grad=True), x)


class ModuleLevel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *parameters):
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        ctx.state = torch.random.get_rng_state()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, g):
        with torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(ctx.state)
            _, vjp = torch.func.vjp(
                lambda *t: torch.func.functional_call(ctx.block, dict(zip(names(ctx), t[1:], strict=True)), t[0]),
                ctx.saved_tensors[0], *(p.detach() for p in ctx.parameters), has_aux=False,
            )  # fmt: skip
        return None, *vjp(g)


def names(ctx):
    return [name for name, _ in ctx.block.named_parameters()]


@pytest.mark.parametrize(
    "right",
    [with_a_dummy, lambda block, x: ModuleLevel.apply(block, x, *block.parameters())],
    ids=["with a dummy", "torch.func"],
)
def test_other_ways_to_recompute_pass(right):
    passes("05.2", right)


def test_the_reference_keeps_nothing_and_is_exact():
    for scene in SCENES:
        with one_thread():
            own, plain = (Run(scene, collect=False).play(f) for f in (solution.checkpointed, lambda block, x: block(x)))
        assert own.kept_bytes == 0 < plain.kept_bytes
        assert all(torch.equal(a, b) for a, b in zip(own.gradients, plain.gradients, strict=True))
        assert (own.x_grad is None) == (not scene.x_needs_grad) and own.drawn == plain.drawn


def test_the_reference_lets_frozen_parameters_be_and_runs_without_gradients():
    block = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    block[0].requires_grad_(False)
    solution.checkpointed(block, torch.ones(2, 3)).sum().backward()
    assert block[0].weight.grad is None and block[1].weight.grad is not None
    with torch.no_grad():
        assert torch.equal(solution.checkpointed(block, torch.ones(2, 3)), block(torch.ones(2, 3)))


@pytest.mark.parametrize("junk", [lambda block, x: None, lambda block, x: 3.0, lambda block, x: x.sum()])
def test_junk_for_a_tensor_is_told(junk):
    assert "not a tensor as block(x) does" in examine("05.2", junk).text


# -- 05.3


def test_large_inputs_ask_for_few_segments():
    assert solution.largest_batch(1e9, 0, 100, 1e6, 1e6)[1] == 10
    assert solution.largest_batch(1e9, 0, 100, 1e6, 1e3)[1] == 100
    assert solution.largest_batch(1e9, 0, 9, 1e6, 1e8) == (9, 1)


def test_with_inputs_as_large_as_a_layer_the_peak_is_two_roots():
    rows, segments = solution.largest_batch(2000 * 1e6, 0, 100, 1e6, 1e6)
    assert (rows, segments) == (100, 10)  # 20 MB per row, against 100 MB


def test_a_loop_is_as_good_and_numpy_numbers_are_numbers():
    def largest_batch(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
        best, segments = math_inf, 0
        for k in range(1, layers + 1):
            peak = k * input_bytes + -(-layers // k) * layer_bytes
            if peak < best:
                best, segments = peak, k
        return np.float64(max(0, (memory_bytes - fixed_bytes) // best)), torch.tensor(segments)

    math_inf = float("inf")
    passes("05.3", largest_batch)


def test_as_many_segments_as_layers_must_be_tried():
    def largest_batch(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
        def peak(k):
            return k * input_bytes + -(-layers // k) * layer_bytes

        k = min(range(1, layers), key=peak)
        return max(0, int((memory_bytes - fixed_bytes) // peak(k))), k

    assert "you never try as many segments as layers" in examine("05.3", largest_batch).text


def test_by_numpy_is_as_good():
    def largest_batch(memory_bytes, fixed_bytes, layers, layer_bytes, input_bytes):
        k = np.arange(1, layers + 1)
        peaks = k * input_bytes + np.ceil(layers / k) * layer_bytes
        return int(max(0, (memory_bytes - fixed_bytes) // peaks.min())), int(peaks.argmin()) + 1

    passes("05.3", largest_batch)


def test_no_slip_is_another_one_or_the_right_answer():
    right = [solution.largest_batch(*case) for case in nb05.JOBS]
    for slips, want in ((nb05.SEGMENTS, [k for _, k in right]), (nb05.ROWS, [rows for rows, _ in right])):
        seen = {tuple(map(float, want)): "right"}
        for wrong, what, _ in slips:
            made = tuple(float(wrong(case)) for case in nb05.JOBS)
            assert made not in seen, f"{what!r} is {seen[made]!r}"
            seen[made] = what


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


def test_from_the_article_on_one_piece_after_the_other():
    parts = ["scheduler", "scaler", "sampler", "generator", "torch", "numpy", "python"]
    words = ["the scheduler", "the loss scale", "the number of the epoch", "the sampler's generator",
             "torch's random state", "NumPy's", "Python's"]  # fmt: skip
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


def test_a_check_leaves_random_states_and_threads_as_they_were():
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    threads = torch.get_num_threads()
    for exercise_id in ("05.1", "05.2", "05.4"):
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
