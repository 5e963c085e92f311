"""Exercises of notebook 04: right answers of another style pass, and one wrong answer that no known mistake covers."""

import itertools
import math

import torch
from torch.nn.utils import clip_grad_norm_

from labs.exercises import nb04
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def divides_gradients(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
    """Steps at the end of a group, divides gradients in place of losses, loss in FP32 outside of autocast."""
    dtype, rows, waiting, skipped = {True: torch.float16, False: torch.bfloat16}[scaler.is_enabled()], 0, 0, 0
    optimizer.zero_grad(set_to_none=False)
    for i, (x, y) in enumerate(batches, 1):
        where = next(model.parameters()).device
        x, y = x.to(where, non_blocking=True), y.to(where)
        with torch.amp.autocast(device_type=where.type, dtype=dtype):
            output = model(x)
        scaler.scale(loss_fn(output.float(), y) * len(x)).backward()
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


def counts_by_a_hook(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
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


def test_two_other_epochs():
    passes("04.1", divides_gradients)
    passes("04.1", counts_by_a_hook)


def test_autocast_for_the_wrong_device_and_a_scaler_that_is_not_used_are_shown():
    def no_autocast(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
        for x, y in batches:
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return 0

    assert "FP16: format of each forward pass: expected" in examine("04.1", no_autocast).text


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
    skipped = [row["skipped"] for row in log]
    if any(skipped) and not falls:
        return "new scaler every step"
    if any(skipped) and all(skipped[skipped.index(True) :]):
        return "no zero_grad"
    return "clip before unscale_" if max(row["norm"] for row in log if not row["skipped"]) > 1000 else "fine"


def test_two_other_diagnoses():
    passes("04.3", by_the_last_rows)
    passes("04.3", by_what_changes)


def test_a_wrong_diagnosis_says_of_which_log():
    text = examine("04.3", lambda log: "fine").text
    assert "log 5 (steps 5 to 15 skipped" in text and "expected 'no zero_grad', got 'fine'" in text


def test_the_notebooks_logs_can_be_told_apart():
    assert [nb04.diagnose(log) for log in nb04.logs().values()] == [kind for kind, _ in nb04.SHOWN]
