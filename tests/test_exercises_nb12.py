"""Exercises of notebook 12: right answers of another style pass, and what is left is shown."""

import copy

import pytest
import torch

from labs.exercises import nb12
from labs.kit.check import examine


def edited(*changes):
    """The reference script with these changes."""
    text = nb12.fixed_script()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


BATCHED = (
    "        return image, int(self.labels[i])\n",
    "        return image, int(self.labels[i])\n\n"
    "    def __getitems__(self, rows):\n"
    "        images = self.images[rows]\n"
    "        x, y = torch.randint(5, (2, len(rows))) if self.train else torch.full((2, len(rows)), 2)\n"
    "        across, down = x[:, None] + torch.arange(32), y[:, None] + torch.arange(32)\n"
    "        if self.train:\n"
    "            across = torch.where(torch.rand(len(rows), 1) < 0.5, across.flip(1), across)\n"
    "        first = torch.arange(len(rows))[:, None, None]\n"
    "        images = images[first, 0, down[:, :, None], across[:, None, :]].unsqueeze(1)\n"
    "        return list(zip(images, self.labels[rows].tolist()))\n",
)


@pytest.mark.parametrize("change", [(BATCHED,), (("lr=2e-3)\n    schedule", "lr=2e-3, fused=True)\n    schedule"),)])
def test_scripts_of_another_style_pass(change):
    outcome = examine("12.1", lambda: edited(*change))
    assert outcome.state == "passed", outcome.text


LEFT = {
    "steps with dropout: expected 60, got 2": (
        ("    model.train()\n    return", "    return"),
        ('loss {loss.item():.3f}"', 'loss {loss.item():.3f}  right {validate(model, test_loader):.1%}"'),
    ),
    "test images after epoch 1 and after epoch 2: expected [500, 500], got [0, 0]": (
        (": {validate(model, test_loader):.1%} of the test images are right", ""),
    ),
    "last.pt has the state of": (('"optimizer": optimizer, "schedule": schedule}', '"optimizer": optimizer}'),),
    "bits of a training pixel: expected 32, got 64": (
        ("dtype=torch.float32", "dtype=torch.float64"),
        ("build_model().to(", "build_model().double().to("),
    ),
    "at least 55% of the CPU time": (
        ('loss {loss.item():.3f}"', 'loss {loss.item():.3f}  right {validate(model, test_loader):.1%}"'),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("words", LEFT)
def test_a_fault_that_is_left_is_shown(words):
    assert words in examine("12.1", lambda: edited(*LEFT[words])).text


def test_a_file_that_is_missing_and_one_that_is_no_python(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n")
    assert "there is no file" in examine("12.1", lambda: "missing.py").text
    assert "line 1 of your script is no Python" in examine("12.1", lambda: str(broken)).text
    assert "ZeroDivisionError" in examine("12.1", lambda: "import torch\n1 / 0\n").text


def probes_on_copies(model, optimizer, step, x, y):
    """Save and load through hand-made copies, and compare how far each parameter moves."""
    weights = [p.detach().clone() for p in model.parameters()]
    moments, numbers = copy.deepcopy(optimizer.state_dict()), torch.random.get_rng_state()

    def moves(labels, fill):
        torch.random.set_rng_state(numbers)
        for p in model.parameters():
            p.grad = torch.ones_like(p) * fill
        step(x, labels)
        moved = [(p.detach() - w).clone() for p, w in zip(model.parameters(), weights, strict=True)]
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights, strict=True):
                p.copy_(w)
        optimizer.load_state_dict(copy.deepcopy(moments))
        return moved

    def alike(a, b):
        return all(torch.allclose(u, v, atol=1e-6) for u, v in zip(a, b, strict=True))

    usual, faults = moves(y, 0.0), set()
    if alike(usual, moves(y.flip(0).roll(3), 0.0)):
        faults.add(nb12.UNPAIRED)
    if not alike(usual, moves(y, -2.0)):
        faults.add(nb12.STALE)
    return list(faults)


def test_probes_of_another_style_pass():
    outcome = examine("12.2", probes_on_copies)
    assert outcome.state == "passed", outcome.text
