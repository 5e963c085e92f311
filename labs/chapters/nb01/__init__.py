"""Notebook 01: figures, claims, exercises, solutions."""
