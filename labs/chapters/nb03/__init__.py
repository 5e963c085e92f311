"""Notebook 03: figures, claims, exercises, solutions."""
