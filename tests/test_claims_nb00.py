"""Verdicts of notebook 00, each word of them from builds and records made up for it."""

from __future__ import annotations

import importlib.metadata

import pytest

from labs.claims.registry import claims, judge, judge_of
from labs.kit import hardware
from labs.kit.record import Record, Records


def made(metric, value, device="cpu", world=2):
    backend = "nccl" if device == "cuda" else "gloo"
    layout = {"world_size": world, "rank": 0, "backend": backend, "device": device}
    return Record("hardware_probe", metric, "", (value,), layout=layout)


CPU = {"torch": "2.13.0+cpu", "cuda": None, "rocm": None, "nccl": None, "arch_list": []}
CUDA = CPU | {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}
ON_GPUS, NCCL = [made("all_reduce_error", 0.0, "cuda")], ["nvidia-nccl-cu13"]
# claim: {word: (build, packages that torch requires, records)}
CASES = {
    "A22": {
        "does not hold": (CUDA, NCCL, ON_GPUS),
        "depends": (CUDA, ["filelock"], ON_GPUS),
        "needs 2 GPUs": (CPU, [], [made("all_reduce_error", 0.0)]),
    },
    "D29": {"does not hold": (CUDA, NCCL, []), "needs 1 GPU": (CPU, [], [])},
}
MINE = {c.id: c for c in claims() if c.notebook == "00"}


def test_every_judged_claim_is_in_the_table():
    assert set(CASES) == {c.id for c in MINE.values() if judge_of(c) is not None}


@pytest.mark.parametrize(("claim_id", "word"), [(c, word) for c, words in CASES.items() for word in words])
def test_the_word_follows_what_is_found(claim_id, word, monkeypatch):
    build, requires, records = CASES[claim_id][word]
    monkeypatch.setattr(hardware, "build", lambda: build)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    assert judge(MINE[claim_id], Records(records)).word == word
