"""Checkers of notebook 04: right answers of another shape pass."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from mutants import nb04 as mutants
from torch.nn.utils import clip_grad_norm_

from labs.chapters.nb04 import exercise_amp, exercise_log
from labs.chapters.nb04 import solutions as solution
from labs.kit.check import examine

# -- 04.1


def with_an_iterator(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
    """Steps at the end of a group, divides gradients in place of losses, asks update() by a comparison."""
    dtype, rows, waiting, skipped = {True: torch.float16, False: torch.bfloat16}[scaler.is_enabled()], 0, 0, 0
    optimizer.zero_grad(set_to_none=False)
    for i, (x, y) in enumerate(batches, 1):
        where = next(model.parameters()).device
        x, y = x.to(where, non_blocking=True), y.to(where)
        with torch.amp.autocast(device_type=where.type, dtype=dtype):
            output = model(x)
        loss = loss_fn(output.float(), y) * len(x)
        scaler.scale(loss).backward()
        rows, waiting = rows + len(x), waiting + 1
        if waiting == accumulate or i == len(batches):
            scaler.unscale_(optimizer)
            for p in model.parameters():
                p.grad /= rows
            clip_grad_norm_(model.parameters(), max_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            lost = scaler.get_scale() < before
            skipped += lost
            if not lost:
                scheduler.step()
            optimizer.zero_grad(set_to_none=False)
            rows = waiting = 0
    return skipped


def counted_by_a_hook(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
    """Notices a skipped step by the optimizer itself; clips by hand; returns a tensor."""
    taken, groups = [], [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    handle = optimizer.register_step_post_hook(lambda *_: taken.append(1))
    for group in groups:
        optimizer.zero_grad()
        n = sum(x.shape[0] for x, _ in group)
        for x, y in group:
            x, y = (t.to(next(model.parameters()).device) for t in (x, y))
            with torch.autocast(x.device.type, torch.float16 if scaler.is_enabled() else torch.bfloat16):
                loss = loss_fn(model(x), y)
            scaler.scale(loss * x.shape[0] / n).backward()
        scaler.unscale_(optimizer)
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt().item()
        for p in model.parameters():
            p.grad *= min(1.0, max_norm / norm) if math.isfinite(norm) else 1.0
        before = len(taken)
        scaler.step(optimizer)
        scaler.update()
        if len(taken) > before:
            scheduler.step()
    handle.remove()
    return torch.tensor(len(groups) - len(taken))


@pytest.mark.parametrize("right", [with_an_iterator, counted_by_a_hook])
def test_other_epochs_that_do_the_same_pass(right):
    assert examine("04.1", right).state == "passed", examine("04.1", right).text


def test_torch_is_left_as_it_was_after_pretending_to_be_a_gpu():
    assert examine("04.1", solution.train_epoch).state == "passed"
    assert not {"device", "is_cuda", "to", "cuda"} & {*vars(torch.Tensor)} and torch.ones(1).device.type == "cpu"
    assert torch.ones(1).to(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("slip", exercise_amp.SLIPS, ids=lambda s: s.name)
def test_every_slip_is_named(slip):
    outcome = examine("04.1", exercise_amp._epoch(slip.name))
    assert outcome.state == "not yet" and slip.what in outcome.text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"article": True}, "torch.cuda.amp.autocast is deprecated"),
        ({"around": True}, "went around the scaler"),
        ({"answer": lambda skipped: None}, "not a number"),
        ({"answer": lambda skipped: skipped + 1}, "you return 1"),
        ({"dtype": torch.float32}, "outside of any autocast"),
        ({"dtype": torch.float16}, "the scaler is off, and the forward pass ran in float16"),
        ({"inside": True}, "backward() ran inside autocast"),
        ({"device": "cpu"}, 'autocast is for "cpu", whatever the device'),
        ({"move": False}, "the batches stay on the CPU where the model is on a GPU"),
    ],
)
def test_what_is_seen_without_a_comparison(wrong, words):
    assert words in examine("04.1", mutants.epoch(**wrong)).text


def test_each_planted_overflow_halves_the_scale_and_skips_one_step():
    seen = exercise_amp.run(solution.train_epoch, exercise_amp.JOBS[2])
    assert (len(seen.applied), seen.scale, seen.answer, seen.lrs) == (2, 8.0, 2, [0.05, 0.025, 0.0125])


def with_the_batches(change):
    return lambda model, optimizer, scheduler, scaler, batches, *rest: solution.train_epoch(
        model, optimizer, scheduler, scaler, change(batches), *rest
    )


class StaysWhereItIs:
    """A target that no `.to()` moves, until loss_fn gets it."""

    def __init__(self, y):
        self.y = y

    def to(self, *_):
        return self.y


def all_rows_of_a_group_at_once(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
    groups = [zip(*batches[i : i + accumulate], strict=True) for i in range(0, len(batches), accumulate)]
    whole = [tuple(map(torch.cat, group)) for group in groups]
    return solution.train_epoch(model, optimizer, scheduler, scaler, whole, loss_fn, 1, max_norm)


def a_scaler_of_its_own(model, optimizer, scheduler, scaler, *rest):
    own = torch.amp.GradScaler("cpu", enabled=scaler.is_enabled())
    return solution.train_epoch(model, optimizer, scheduler, own, *rest)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (mutants.epoch(answer=lambda skipped: skipped > 0), "you return True, and 2 steps were skipped"),
        (with_the_batches(lambda batches: [batches.pop(0) for _ in range(len(batches))]), "4 batches 0 are left"),
        (with_the_batches(lambda batches: [(x, StaysWhereItIs(y)) for x, y in batches]), "y stays on the CPU"),
        (all_rows_of_a_group_at_once, "there are 4 batches, and model(x) ran 2 times"),
        (a_scaler_of_its_own, "the scaler that was given made no step"),
    ],
)
def test_what_a_right_gradient_does_not_show_is_told(wrong, words):
    assert words in examine("04.1", wrong).text


# -- 04.3


def by_the_last_rows(log):
    norms = sorted(row["norm"] for row in log if math.isfinite(row["norm"]))
    if norms and norms[len(norms) // 2] > 0.1 * log[-1]["scale"]:
        return "clip before unscale_"
    scales, skipped = [row["scale"] for row in log], [row["skipped"] for row in log]
    if any(skipped) and len(set(scales)) == 1:
        return "new scaler every step"
    return "no zero_grad" if skipped[-1] and skipped[-2] else "fine"


def by_what_changes(log):
    falls = sum(b["scale"] < a["scale"] for a, b in itertools.pairwise(log))
    skipped = sum(row["skipped"] for row in log)
    after_first = [row["skipped"] for row in log][[row["skipped"] for row in log].index(True) :] if skipped else []
    if skipped and not falls:
        return "new scaler every step"
    if skipped and all(after_first):
        return "no zero_grad"
    return "clip before unscale_" if max(row["norm"] for row in log if not row["skipped"]) > 1000 else "fine"


@pytest.mark.parametrize("right", [by_the_last_rows, by_what_changes])
def test_other_diagnoses_by_other_signs_pass(right):
    assert examine("04.3", right).state == "passed", examine("04.3", right).text


def test_the_logs_are_what_their_names_say():
    fine, endless, scaled, forgetful = (
        exercise_log.training_log(d, 3, **({"scale": exercise_log.TOO_LARGE, "overflow": None} if "new" in d else {}))
        for d in exercise_log.DIAGNOSES
    )
    assert [row["skipped"] for row in fine].count(True) == 1 and not fine[-1]["skipped"]
    assert all(row["skipped"] for row in endless[5:]) and endless[-1]["scale"] < 100
    assert all(row["norm"] > 1000 for row in scaled if not row["skipped"])
    assert all(row["skipped"] for row in forgetful) and len({row["scale"] for row in forgetful}) == 1
