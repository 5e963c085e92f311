"""Typical mistakes in notebook 04: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_


def epoch(
    *,
    dtype=None,
    device="model",
    move=True,
    inside=False,
    around=False,
    article=False,
    weigh=True,
    clip="after unscale_",
    always=False,
    last=True,
    answer=lambda skipped: skipped,
):
    """A right epoch, except for what a keyword says."""

    def train_epoch(model, optimizer, scheduler, scaler, batches, loss_fn, accumulate, max_norm):
        home, skipped, held = next(model.parameters()).device, 0, []
        format_ = dtype or (torch.float16 if scaler.is_enabled() else torch.bfloat16)
        for i, batch in enumerate(batches, 1):
            held.append(batch)
            if len(held) < accumulate and not (last and i == len(batches)):
                continue
            rows = sum(len(x) for x, _ in held)
            optimizer.zero_grad()
            for x, y in held:
                if move:
                    x, y = x.to(home), y.to(home)
                kind = home.type if device == "model" else device
                with torch.cuda.amp.autocast() if article else torch.autocast(kind, format_):
                    loss = loss_fn(model(x), y) * (len(x) / rows if weigh else 1 / len(held))
                    if inside:
                        scaler.scale(loss).backward()
                if not inside:
                    scaler.scale(loss).backward()
            if clip == "before unscale_":
                clip_grad_norm_(model.parameters(), max_norm)
            scaler.unscale_(optimizer)
            if clip == "after unscale_":
                clip_grad_norm_(model.parameters(), max_norm)
            before, held = scaler.get_scale(), []
            optimizer.step() if around else scaler.step(optimizer)
            scaler.update()
            skipped += (fell := scaler.get_scale() < before)
            if always or not fell:
                scheduler.step()
        return answer(skipped)

    return train_epoch


def _diagnose(
    *,
    stuck=lambda log: all(row["skipped"] for row in log[-4:]),
    much=500.0,
    constant=lambda log: len({row["scale"] for row in log}) == 1 and any(row["skipped"] for row in log),
):
    """A right diagnosis, except for what a keyword says."""

    def diagnose(log):
        if constant(log):
            return "new scaler every step"
        if stuck(log):
            return "no zero_grad"
        norms = [row["norm"] for row in log if not row["skipped"]]
        return "clip before unscale_" if max(norms) > much else "fine"

    return diagnose


MUTANTS = {
    "04.1": {
        "every batch counts the same": (epoch(weigh=False), "every batch of a group counts the same"),
        "clip before unscale_": (epoch(clip="before unscale_"), "clipped while they were still scaled"),
        "last group dropped": (epoch(last=False), "fewer than `accumulate` batches, and it never made its step"),
        "schedule goes on": (epoch(always=True), "scheduler.step() ran also after a step that the scaler skipped"),
    },
    "04.3": {
        "every skipped step is a fault": (
            _diagnose(stuck=lambda log: any(row["skipped"] for row in log)),
            "a step that is skipped is no fault",
        ),
        "norm above max_norm": (_diagnose(much=4.0), "a norm above max_norm is no fault"),
        "a scale that stays": (
            _diagnose(constant=lambda log: len({row["scale"] for row in log}) == 1),
            "the scale may stay where it is",
        ),
        "all skipped is one thing": (_diagnose(constant=lambda log: False), "yet the scale never falls"),
    },
}
