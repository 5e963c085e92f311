"""Notebook 05: figures, claims, exercises, solutions."""
