"""Typical mistakes: one module per notebook, MUTANTS = {exercise: {mistake: (function, words of its feedback)}}."""
