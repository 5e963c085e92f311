"""The character GPT sees only the past, learns, and its held-out text is not trained on."""

import math

import pytest
import torch

from labs.common import models
from labs.common.data import moby_dick
from labs.common.models import text_models


@pytest.fixture(scope="module")
def gpt():
    return models.build("char_gpt")


def test_it_has_the_stated_size(gpt):
    assert sum(p.numel() for p in gpt.module.parameters()) == 159_296
    x, y = gpt.make_batch(3)
    assert x.shape == y.shape == (3, text_models.CONTEXT) and x.dtype == y.dtype == torch.int64
    assert gpt.module(x).shape == (3, 64, 80)


def test_a_target_is_the_next_character_of_the_book(gpt):
    x, y = gpt.make_batch(2)
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = "".join(text_models.vocabulary()[i] for i in (*x[0].tolist(), y[0, -1].item()))
    assert text in moby_dick()


def test_untrained_it_knows_nothing(gpt):
    x, y = gpt.make_batch(16)
    assert gpt.loss(gpt.module(x), y).item() == pytest.approx(math.log(80), rel=0.02)


def test_no_prediction_depends_on_later_characters(gpt):
    x, _ = gpt.make_batch(1)
    changed = x.clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 80
    with torch.no_grad():
        a, b = gpt.module(x), gpt.module(changed)
    assert torch.equal(a[0, :40], b[0, :40]) and not torch.equal(a[0, 40:], b[0, 40:])


def test_the_loss_is_a_mean_over_rows(gpt):
    x, y = gpt.make_batch(6)
    with torch.no_grad():
        parts = [gpt.loss(gpt.module(x[i : i + 2]), y[i : i + 2]) for i in (0, 2, 4)]
        assert sum(parts).item() / 3 == pytest.approx(gpt.loss(gpt.module(x), y).item(), rel=1e-5)


def test_held_out_text_is_the_last_tenth_and_always_the_same(gpt):
    x, y = text_models.held_out(5)
    assert torch.equal(x, text_models.held_out(5)[0]) and torch.equal(x[:, 1:], y[:, :-1])
    read = lambda row: "".join(text_models.vocabulary()[i] for i in row.tolist())  # noqa: E731
    text = moby_dick()
    boundary = round((1 - text_models.HELD_OUT) * len(text))
    assert text[boundary:].startswith(read(x[0])) and text.endswith(read(y[-1]))


def test_training_rows_end_before_the_held_out_part(gpt, monkeypatch):
    starts = []
    monkeypatch.setattr(text_models, "_rows", lambda text, places: starts.append((len(text), places.max())))
    gpt.make_batch(100_000)
    length, last = starts[0]
    assert length == round(0.9 * len(moby_dick())) and last + text_models.CONTEXT + 1 <= length


def test_it_learns():
    workload = models.make("char_gpt", seed=1)
    optimizer = torch.optim.AdamW(workload.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        x, y = workload.make_batch(4)
        loss = workload.loss(workload.module(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.7
