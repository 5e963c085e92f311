"""Typical mistakes in notebook 08: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from mutants import nb08_elastic, nb08_levels

MUTANTS = nb08_levels.MUTANTS | nb08_elastic.MUTANTS
