"""Verdicts of notebook 08: on machines that meet."""

from __future__ import annotations

from labs.chapters.nb08 import claims_nodes

__all__ = ["claims_nodes"]  # imported to register their verdicts
