"""Verdicts of notebook 08: on machines that meet, and on cards and what they train; a file for each."""

from __future__ import annotations

from labs.chapters.nb08 import claims_cost, claims_nodes

__all__ = ["claims_cost", "claims_nodes"]  # imported to register their verdicts
