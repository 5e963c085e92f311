"""Profiles as a script's process would leave them, with times that a test has planted."""

import random

from labs.doctor.profile import AS_IS, KINDS, Loader, Profile

STEP_S = 0.050
WELL = {"data": 0.02, "forward": 0.3, "backward": 0.5, "optimizer": 0.12, "rest": 0.04, "prepare": 0.02}
STARVED = {"data": 0.5, "forward": 0.2, "backward": 0.25, "optimizer": 0.05}
"""Shares of a step."""


def made(
    parts=None, modes=None, *, step_s=STEP_S, rank=0, ranks=1, rounds=8, noise=0.01, steps=30, script="train.py", **more
):
    """`parts`: shares of a step; `modes`: seconds of a step in each. All within `noise` of it, by a seed of its own."""
    draw = random.Random(f"{rank} {step_s} {parts} {modes}")

    def about(seconds):
        return seconds * (1 + draw.uniform(-noise, noise))

    parts = parts or WELL
    spans = {kind: [about(step_s * parts.get(kind, 0.0)) for _ in range(steps)] for kind in KINDS}
    turns = {name: [[about(s)] for _ in range(rounds)] for name, s in {AS_IS: step_s, **(modes or {})}.items()}
    values = {
        "ended": "done",
        "exit_code": 0,
        "stage": "done",
        "steps": 100,
        "wall_s": 30.0,
        "samples": 32.0,
        "loader": Loader(32, 0, 0, "Images"),
        "training": {
            "parameters": 1_000_000,
            "dtypes": ["float32"],
        },
        "machine": {"cores": 2, "threads": 1},
    }
    return Profile(
        script,
        [script, "--lr", "0.1"],
        rank=rank,
        ranks=ranks,
        local_ranks=ranks,
        spans_s=spans,
        interleaved_s=turns,
        step_s=[sum(of[i] for of in spans.values()) for i in range(steps)],
        **values | more,
    )
