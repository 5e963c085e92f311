"""The scaling model against published runs: one row of each series calibrates, the others are predicted.

Fixed before anything was fitted or any error of this model was seen:
* A series is one model in one number format, on one machine, with one program, from one source.
* RULE: its smallest configuration calibrates, that is the row with the fewest GPUs, of these the smallest batch.
* HELD_OUT: two rows whose errors are not looked at while the model is built. They are in no error that was printed
  before the model's formulas were final, and they are reported on their own.
"""

from __future__ import annotations

HELD_OUT = (
    {"table": "rtx_3090", "model": "VGG-16", "batch": 128, "gpus": 8},
    {"table": "llm_foundry", "model": "70b", "gpus": 128},
)
