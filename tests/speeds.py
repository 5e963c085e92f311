"""Which of many cases `make test` tries; `make test-all` tries them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """`cases` for parametrize, in tuples if there are several arguments: all but the first `number` are long."""
    cases = list(cases)
    return [*cases[:number], *(_long(c) for c in cases[number:])]


def besides(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """`cases` for parametrize: those that are not among `quick` are long."""
    cases = list(cases)
    assert not set(quick) - set(cases), f"no such case: {sorted(map(str, set(quick) - set(cases)))}"
    return [c if c in quick else _long(c) for c in cases]


def _long(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long)
