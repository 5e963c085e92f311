"""Typical mistakes in the capstone: scripts that are still ill, and scripts that are fast because they do less."""

from __future__ import annotations

from collections.abc import Callable

from labs.chapters.nb12 import solution_capstone as cures
from labs.chapters.nb12.solution_capstone import SLOW, edited, fast_script

ILLNESSES = {
    "data": cures.DATA,
    "evaluation": cures.EVALUATION,
    "arithmetic": cures.FORMAT,
    "own lines": cures.STATISTICS,
    "saving": cures.SAVING,
}
"""Cures by the part of a step that the illness is in."""
FLOAT = {
    "return torch.from_numpy(pixels).unsqueeze(0)": "return torch.from_numpy(pixels).float().unsqueeze(0)",
    cures.NETWORK[0]: cures.NETWORK[1],
}
"""The cure of the format for a script that still prepares each image when it is asked for."""


def left(*parts: str) -> str:
    """The script with all illnesses cured but these."""
    text = SLOW.read_text()
    for name, cure in ILLNESSES.items():
        if name not in parts:
            text = edited(text, FLOAT if name == "arithmetic" and "data" in parts else cure)
    return text


def but(changes: dict[str, str]) -> Callable[[], str]:
    """The fast script, with something else changed, too."""
    return lambda: edited(fast_script(), changes)


LOOP = """                optimizer.zero_grad(set_to_none=False)
                loss = cross_entropy(model(x), y)
                loss.backward()
"""
MUTANTS = {
    "12.1": {
        "validation after every ten steps is left": (lambda: left("evaluation"), "one illness is left"),
        "two illnesses are left": (lambda: left("data", "arithmetic"), "2 are left"),
        "a batch four times as large": (
            but({'"--batch-size", type=int, default=128': '"--batch-size", type=int, default=512'}),
            "a step takes 512 images",
        ),
        "a smaller network": (but({"def __init__(self, width=8)": "def __init__(self, width=6)"}), "parameters"),
        "half of the data": (
            but({'Clothes(args.data, "train")': 'torch.utils.data.Subset(Clothes(args.data, "train"), range(5000))'}),
            "trains on 5,000 images",
        ),
        "gradients are zeroed after backward": (
            but({LOOP: "".join(LOOP.splitlines(True)[i] for i in (1, 2, 0))}),
            "the test loss is",
        ),
        "validated on a quarter of the test images": (
            but({"DataLoader(test, args.batch_size)": "DataLoader(test, args.batch_size, sampler=range(500))"}),
            "sees 500 of the 2000 test images",
        ),
        "no checkpoint any more": (but({'torch.save(state, args.folder / "last.pt")': "pass"}), "last.pt is missing"),
    },
}
