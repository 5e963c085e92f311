"""Notebook 04: figures, claims, exercises, solutions."""
