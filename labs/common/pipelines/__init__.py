"""Pipelines: models as chains of layers, schedules of micro-batches, and the engine that runs them."""

from labs.common.pipelines.chains import Chain, chain, even_cuts, split

__all__ = ["Chain", "chain", "even_cuts", "split"]
