"""Typical mistakes in the exercises of notebook 09, each from its own file."""

from __future__ import annotations

from mutants import nb09_exposed, nb09_schedule

MUTANTS = {"09.1": nb09_schedule.MUTANTS} | nb09_exposed.MUTANTS
