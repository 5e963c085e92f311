"""Notebook 06: figures, claims, exercises, solutions."""
