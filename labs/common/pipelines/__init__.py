"""Pipelines: models as chains of layers, schedules of micro-batches, and what runs them."""

from labs.common.pipelines.chains import CHAINS, Chain, chain, even_cuts, split

__all__ = ["CHAINS", "Chain", "chain", "even_cuts", "split"]
