"""Verdicts on cards: each word turns round when the datasheet says the opposite."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labs.chapters.nb08 import claims_cost
from labs.kit import claims as registry
from labs.kit import hardware
from labs.kit.record import Records

REAL = hardware.spec


def verdict(claim_id):
    return registry._judges[claim_id](Records())


def with_memory(monkeypatch, gb):
    """Cards as they are, but each with so much memory."""
    monkeypatch.setattr(hardware, "spec", lambda name: replace(REAL(name), memory_gb=gb))
    claims_cost.cost.divisions.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    claims_cost.cost.divisions.cache_clear()


def test_a_card_does_not_train_a_hundred_billion():
    found = verdict("B21")
    assert found.word == "depends" and found.kind == "modelled"
    assert "1.6 TB" in found.because and "20 to 40 A100" in found.because and "5 billion" in found.because


def test_with_two_terabytes_it_would(monkeypatch):
    with_memory(monkeypatch, 2000)
    assert verdict("B21").word == "holds"


@pytest.mark.parametrize(("gb", "word"), [(24, "depends"), (200, "holds"), (8, "does not hold")])
def test_what_a_4090_suits_depends_on_its_memory(monkeypatch, gb, word):
    with_memory(monkeypatch, gb)
    assert verdict("B23").word == word


def test_eight_a100_do_not_train_gpt_3():
    found = verdict("B32")
    assert found.word == "does not hold" and "4.4 times too large" in found.because
    assert "4.0 years at the peak" in found.because and "12 at" in found.because


def test_memory_alone_would_not_save_it_and_both_would(monkeypatch):
    with_memory(monkeypatch, 1000)
    assert verdict("B32").word == "does not hold", "it fits, and takes years"
    monkeypatch.setattr(claims_cost, "published_days", lambda gpus: 30.0)
    assert verdict("B32").word == "holds"


def test_every_verdict_of_this_module_belongs_to_the_notebook():
    own = {i for i, judge in registry._judges.items() if judge.__module__ == claims_cost.__name__}
    assert own == {"B21", "B23", "B32"}
    assert own <= {c.id for c in registry.claims("08")}
