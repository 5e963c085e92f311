"""Traced steps as records of the lab `memory_oracle`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from labs.common.oracle.fake import Source
from labs.common.oracle.fits import cards, largest_batch
from labs.common.oracle.reality import measured
from labs.common.oracle.step import Model
from labs.common.oracle.trace import CATEGORIES, Trace
from labs.kit.rank import Rank
from labs.kit.record import Kind, Record

POINTS = 150  # of a timeline, at most
GPU_HEADROOM = 1.2  # a large model really runs where this many times its peak is free
GPU_BUDGET_S = 40.0  # for all large models that really run: a launch ends after 120 s, and traces take a part of them


class Steps:
    """Steps of one model under the same conditions, as records."""

    real_s = 0.0
    """Seconds that large models have really run in this process."""

    def __init__(self, rank: Rank, part: str, source: Source, *, seq: int = 0, name: str = "", **given: Any):
        self.rank, self.source, self.given, self.seq = rank, source, given, seq
        start = time.perf_counter()
        self.model = Model(source, **given)
        self.build_s = time.perf_counter() - start
        kept = ("optimizer", "precision", "policy", "micro_batches", "target", "set_to_none")
        c = dataclasses.asdict(self.model.conditions)
        self.case = {"part": part, "model": name or part, "seq": seq, **{k: c[k] for k in kept}}

    def record(self, metric: str, unit: str, value: Any, kind: Kind = "modelled", **case: Any) -> Record:
        """Of these steps; `case` adds to theirs."""
        return self.rank.record(metric, unit, value, kind=kind, rank=0, **{**self.case, **case})

    def step(self, rows: int) -> Trace:
        """One trace; the first one's seconds are with those of building the model."""
        start = time.perf_counter()
        trace = self.model.step(rows)
        self.trace_s, self.build_s = time.perf_counter() - start + self.build_s, 0.0
        return trace

    def peak(self, rows: int, trace: Trace | None = None) -> Iterator[Record]:
        """Its peak by category, where in the step it is, and how long the trace took."""
        trace = trace or self.step(rows)
        for category, nbytes in trace.peak.items():
            yield self.record("peak_bytes", "B", nbytes, batch=rows, category=category)
        at = trace.peak_event
        yield self.record("peak_op", "1", at.step, batch=rows, phase=at.phase, op=at.op)
        yield self.record("trace_s", "s", self.trace_s, "measured", batch=rows)
        if self._may_run(trace):
            start = time.perf_counter()
            yield from self.real(rows)
            Steps.real_s += time.perf_counter() - start

    def _may_run(self, trace: Trace) -> bool:
        """Whether a step of this size runs on this GPU, and there is time for it."""
        if self.rank.device.type != "cuda" or Steps.real_s >= GPU_BUDGET_S:
            return False
        return trace.peak_bytes * GPU_HEADROOM < _free_bytes(self.rank.device)

    def real(self, rows: int) -> Iterator[Record]:
        """The same step on this device: on a CPU what tensors take, and what kernels take on top; a GPU's peak."""
        given = {k: v for k, v in self.given.items() if k != "target"}
        found = measured(self.source, rows, self.rank.device, **given)
        tensors = found.peak_bytes if found.tensor_bytes is None else found.tensor_bytes
        yield self.record("measured_bytes", "B", tensors, "measured", batch=rows)
        if found.tensor_bytes is not None:
            yield self.record("workspace_bytes", "B", found.peak_bytes - tensors, "measured", batch=rows)
        if found.allocated_bytes is not None and found.reserved_bytes is not None:
            yield self.record("allocated_bytes", "B", found.allocated_bytes, "measured", batch=rows)
            yield self.record("reserved_bytes", "B", found.reserved_bytes, "measured", batch=rows)

    def timeline(self, trace: Trace) -> Iterator[Record]:
        """A series for each phase and category: its samples are moments of the step, in order."""
        for phase, points in itertools.groupby(trace.curve(POINTS), key=lambda p: p[1]):
            ops, _, sizes = zip(*points, strict=True)
            yield self.record("timeline_op", "1", ops, batch=trace.rows, phase=phase)
            for c in CATEGORIES:
                series = [s[c] for s in sizes]
                yield self.record("timeline_bytes", "B", series, batch=trace.rows, phase=phase, category=c)

    def largest(self, memory_gb: float) -> Iterator[Record]:
        """The largest batch that fits, its peak, and the peak of one row more."""
        found = largest_batch(self.model, memory_gb * 1e9)
        yield self.record("largest_batch", "1", found.rows, memory_gb=memory_gb)
        if found.peak_bytes is not None:
            yield self.record("largest_batch_bytes", "B", found.peak_bytes, memory_gb=memory_gb)
        if found.next_bytes is not None:
            yield self.record("next_batch_bytes", "B", found.next_bytes, memory_gb=memory_gb)

    def cards(self, trace: Trace) -> Iterator[Record]:
        """What the step leaves of each card whose memory is known."""
        for card in cards(trace):
            if card.margin_bytes is None:
                yield self.rank.record("unknown_memory", "1", 1, kind="modelled", rank=0, gpu=card.gpu)
            else:
                case = {"batch": trace.rows, "gpu": card.gpu, "memory_gb": card.memory_bytes / 1e9}
                yield self.record("margin_bytes", "B", card.margin_bytes, verdict=card.verdict, **case)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.empty_cache()  # what models before this one have left would not count as free
    return torch.cuda.mem_get_info(device)[0]
