"""Notebook 02: figures, claims, exercises, solutions."""
