"""Peak memory of a training step, by category, for any model on any machine, without allocating it.

    trace = step(factory, rows=64, optimizer="adam", precision="bf16", policy="block", target="cuda")
    trace.peak_bytes, trace.peak, trace.timeline("activations")
    largest_batch(factory, 24e9, optimizer="adam", target="cuda").rows
    cards(trace)

On the command line: python -m labs.memory_oracle --model package.module:factory

  internals  the private parts of PyTorch that this uses
  fake       models and batches without storage
  tracker    records what operations allocate and free
  trace      the record: events, categories, the peak
  step       a training step under the tracker
  fits       the largest batch, the cards
  gpt        a GPT of any size, for counting
  reality    the same step for real, as an allocator sees it
"""

from labs.common.oracle.fake import Source
from labs.common.oracle.fits import Card, Largest, cards, largest_batch
from labs.common.oracle.gpt import GptShape, gpt
from labs.common.oracle.reality import Measured, measured
from labs.common.oracle.step import Conditions, Model, step
from labs.common.oracle.trace import CATEGORIES, Event, Trace

__all__ = [
    "CATEGORIES",
    "Card",
    "Conditions",
    "Event",
    "GptShape",
    "Largest",
    "Measured",
    "Model",
    "Source",
    "Trace",
    "cards",
    "gpt",
    "largest_batch",
    "measured",
    "step",
]
