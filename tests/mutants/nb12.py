"""Typical mistakes in notebook 12: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from mutants import nb12_capstone, nb12_first_cure

MUTANTS = nb12_capstone.MUTANTS | nb12_first_cure.MUTANTS
