"""Tools for an instructor: preflight, room, slides."""
