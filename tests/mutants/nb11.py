"""Typical mistakes in notebook 11: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from mutants import nb11_fooled, nb11_judge

MUTANTS = nb11_judge.MUTANTS | nb11_fooled.MUTANTS
