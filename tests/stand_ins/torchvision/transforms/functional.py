"""Imported by scripts, and not called."""
