"""Pipelines: models as chains of layers, where to cut them, schedules of micro-batches, and what runs them."""

from labs.parts.pipelines.chains import CHAINS, UNBALANCED, Chain, chain, even_cuts, split

__all__ = ["CHAINS", "UNBALANCED", "Chain", "chain", "even_cuts", "split"]
