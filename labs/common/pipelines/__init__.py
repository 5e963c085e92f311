"""Pipelines: models as chains of layers, schedules of micro-batches, and what runs them."""

from labs.common.pipelines.chains import Chain, chain, even_cuts, split

__all__ = ["Chain", "chain", "even_cuts", "split"]
