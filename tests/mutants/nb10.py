"""Typical mistakes in notebook 10: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from mutants import nb10_deadlock, nb10_post_mortem, nb10_replicas

MUTANTS = nb10_deadlock.MUTANTS | nb10_replicas.MUTANTS | nb10_post_mortem.MUTANTS
