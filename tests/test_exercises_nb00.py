"""Checkers of notebook 00: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from labs.kit.check import examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def by_uuid_objects(cuda_uuids, nvml_uuids):
    known = {uuid.UUID(text.lower().removeprefix("gpu-")): i for i, text in enumerate(nvml_uuids)}
    return [known.get(uuid.UUID(text)) for text in cuda_uuids]


def by_search(cuda_uuids, nvml_uuids):
    plain = [text[4:].lower() for text in nvml_uuids]
    return tuple(plain.index(text.lower()) if text.lower() in plain else None for text in cuda_uuids)


@pytest.mark.parametrize("right", [by_uuid_objects, by_search])
def test_other_ways_to_find_a_card_pass(right):
    passes("00.1", right)


def cores(share):
    def usable_cores(affinity, cpu_max):
        quota, period = cpu_max.split()
        return len(affinity) if quota == "max" else share(len(affinity), int(quota), int(period))

    return usable_cores


@pytest.mark.parametrize(
    "right",
    [
        cores(lambda n, quota, period: np.clip(quota // period, 1, n)),  # a NumPy integer
        cores(lambda n, quota, period: min(n, quota // period) or 1),
    ],
)
def test_other_whole_numbers_of_cores_pass(right):
    passes("00.2", right)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (cores(lambda n, quota, period: min(n, quota // period or n)), "half a core became 8 cores"),
        (cores(lambda n, quota, period: 0.5 if quota < period else min(n, quota // period)), "half a core gives 0.5"),
        (lambda affinity, cpu_max: cores(lambda n, q, p: min(n, q // p))(range(max(affinity) + 1), cpu_max), "6 cores"),
    ],
)
def test_half_a_core_and_cores_by_number_are_told(wrong, words):
    assert words in examine("00.2", wrong).text


@pytest.mark.parametrize(
    ("exercise_id", "right"),
    [
        ("00.3", lambda i, p, b: 1 / max(1 / p, 1 / (i * b))),
        ("00.3", lambda i, p, b: np.minimum(p, np.float64(i) * b)),
        ("00.4", lambda s, t, n: 2 * s * (1 - 1 / n) / t * 1e-9),
        ("00.4", lambda s, t, n: np.float64(s) / 1e9 / t * (2 - 2 / n)),
    ],
)
def test_other_ways_to_compute_pass(exercise_id, right):
    passes(exercise_id, right)
