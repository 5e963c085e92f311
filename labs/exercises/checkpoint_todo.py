"""Exercises that ask for a class: "to do" as long as one of its methods mentions TODO."""

from __future__ import annotations

from typing import Any

from labs.kit.check import _is_todo, _ReturnedTodo


def refuse_todo(cls: Any) -> None:
    """Make the outcome "to do" if a method of the learner's class is still the stub."""
    if any(_is_todo(inspected) for inspected in vars(cls).values()):
        raise _ReturnedTodo("_ReturnedTodo")
