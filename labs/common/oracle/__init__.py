"""Peak memory of a training step, by category, of any model on any machine, without allocating it.

    trace = step(factory, rows=64, optimizer="adam", precision="bf16", policy="block", target="cuda")
    trace.peak_bytes, trace.peak, trace.timeline("activations")
    largest_batch(factory, 24e9, optimizer="adam", target="cuda").rows
    cards(trace)

From a shell: python -m labs.memory_oracle --model package.module:factory
  internals  the private parts of torch that this stands on
  fake       models and batches without memory
  tracker    notes what operations allocate and free
  trace      what was noted: events, categories, the peak
  step       a training step under the tracker
  fits       the largest batch, the cards
  gpt        a GPT of any size, to be counted
  reality    the same step for real: what an allocator says
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
