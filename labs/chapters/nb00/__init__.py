"""Notebook 00: figures, claims, exercises, solutions."""
