"""Verdicts of notebook 00, each word of them from cards, builds and records made up for it."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from labs.chapters.nb00 import claims as nb00
from labs.kit import hardware
from labs.kit.claims import claims, judge, judge_of
from labs.kit.record import Record, Records


def made(metric, value, device="cpu", world=2):
    backend = "nccl" if device == "cuda" else "gloo"
    layout = {"world_size": world, "rank": 0, "backend": backend, "device": device}
    return Record("hardware_probe", metric, "", (value,), layout=layout)


PRODUCT, SUM = made("matmul_relative_error", 2e-7), made("all_reduce_error", 0.0)
CPU = {"torch": "2.13.0+cpu", "cuda": None, "rocm": None, "nccl": None, "arch_list": []}
CUDA = CPU | {"torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9"}


def cards(**changes):
    """The hardware table with other figures: {"T4": {"bus_bits": 128}}."""
    known = hardware.specs()
    return lambda patch: patch.setattr(
        hardware, "specs", lambda: tuple(dataclasses.replace(s, **changes.get(s.gpu, {})) for s in known)
    )


def everywhere(**change):
    return cards(**{s.gpu: change for s in hardware.specs()})


def build(found, requires=()):
    def apply(patch):
        patch.setattr(hardware, "build", lambda: found)
        patch.setattr(importlib.metadata, "requires", lambda name: list(requires))

    return apply


def kernels(how):
    return lambda patch: patch.setattr(hardware, "runs_on", lambda capability, arch_list: how)


def accepts_anything(patch):
    patch.setattr(nb00, "Requirement", str)


def without_utilization(patch):
    patch.delattr(nb00.torch.cuda, "utilization")


def as_it_is(patch):
    pass


# claim: {word: (what is changed, records)}
CASES = {
    "A22": {
        "does not hold": (build(CUDA, ["nvidia-nccl-cu13"]), [made("all_reduce_error", 0.0, "cuda")]),
        "depends": (build(CUDA, ["filelock"]), [made("all_reduce_error", 0.0, "cuda")]),
        "needs 2 GPUs": (build(CPU), [SUM]),
    },
    "B04": {
        "does not hold": (as_it_is, []),
        "holds": (cards(**{"A100 40GB SXM": {"bandwidth_gb_s": 400}}), []),
    },
    "B05": {"does not hold": (as_it_is, []), "holds": (cards(**{"A100 80GB SXM": {"tensor_fp16": 624}}), [])},
    "B20": {
        "depends": (as_it_is, []),
        "holds": (everywhere(bandwidth_gb_s=1555), []),
        "does not hold": (everywhere(bandwidth_gb_s=2039), []),
    },
    "B22": {"does not hold": (as_it_is, []), "holds": (cards(**{"RTX 4090": {"bandwidth_gb_s": 936}}), [])},
    "B24": {"holds": (as_it_is, []), "does not hold": (cards(T4={"memory_gb": 15}), [])},
    "B25": {"holds": (as_it_is, []), "depends": (cards(T4={"tensor_fp16": 130}), [])},
    "B44": {"depends": (as_it_is, []), "holds": (kernels("ptx"), []), "does not hold": (kernels(None), [])},
    "C02": {"depends": (as_it_is, []), "holds": (kernels("ptx"), [])},
    "D01": {
        "depends": (as_it_is, []),
        "holds": (everywhere(memory_gb=16), []),
        "does not hold": (everywhere(memory_gb=80), []),
    },
    "D28": {"does not hold": (as_it_is, []), "holds": (accepts_anything, [])},
    "D29": {"does not hold": (build(CUDA), []), "needs 1 GPU": (build(CPU), [])},
    "E03": {"does not hold": (build(CPU), [PRODUCT]), "not tried yet": (build(CPU), [])},
    "E04": {"depends": (kernels(None), []), "holds": (kernels("machine code"), [])},
    "E25": {"does not hold": (as_it_is, []), "holds": (without_utilization, [])},
}
MINE = {c.id: c for c in claims() if c.notebook == "00"}


def test_every_judged_claim_is_in_the_table_with_two_words():
    assert set(CASES) == {c.id for c in MINE.values() if judge_of(c) is not None}
    assert all(len(words) >= 2 for words in CASES.values())


@pytest.mark.parametrize(("claim_id", "word"), [(c, word) for c, words in CASES.items() for word in words])
def test_the_word_follows_what_is_found(claim_id, word, monkeypatch):
    change, records = CASES[claim_id][word]
    change(monkeypatch)
    found = judge(MINE[claim_id], Records(records), gpus=2)
    assert found.word == word, found
    assert found.because.count(". ") <= 2 and len(found.because) < 300


def test_what_was_measured_does_not_decide_a_command_that_was_not_run():
    assert judge(MINE["E03"], Records([PRODUCT])).kind == ""


def test_a_sentence_about_a_coincidence_goes_with_it(monkeypatch):
    cards(**{"A100 40GB SXM": {"tdp_w": 250}, "RTX 3090": {"bandwidth_gb_s": 800}, "T4": {"tensor_bf16": 65}})(
        monkeypatch
    )
    assert "watts" not in judge(MINE["B04"], gpus=0).because
    assert "RTX 3090's" not in judge(MINE["B22"], gpus=0).because
    assert "no BF16" not in judge(MINE["B25"], gpus=0).because
