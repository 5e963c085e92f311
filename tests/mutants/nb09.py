"""Typical mistakes in notebook 09's exercises, a file for each."""

from __future__ import annotations

from mutants import nb09_schedule

MUTANTS = {"09.1": nb09_schedule.MUTANTS}
