"""Which of the script's own lines take its time: a thread looks now and then where the main thread is.

Only in "prepare" and "rest": what calls of torch take, the hooks measure. A line's time is its share of the looks, of
the time that was measured for these kinds; a line that was seen a few times only isn't reported. Where a line runs a
model that the hooks do not see, as a frozen teacher or model.forward(x), this is no work of the script's own.
"""

from __future__ import annotations

import linecache
import random
import sys
import threading
import time
from collections import Counter

from labs.doctor.hooks import Hooks
from labs.doctor.profile import Line, Profile

PERIOD_S = 0.005
"""On average; by lot, so that it does not go along with the steps. A look takes some 30 us, and the GIL."""
FEWEST = 6  # Looks at a line that make it known


class Sampler(threading.Thread):
    """Looks from `start` to `stop`."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(name="doctor", daemon=True)
        self.hooks, self.ended = hooks, threading.Event()
        self.took_s = 0.0  # Of the processor's time, by this thread: looking, and waking up for it
        self.seen: Counter[tuple[str, str, int]] = Counter()
        """By kind ("prepare", "model", "loss", "rest"), file and line."""

    def run(self) -> None:
        """Until the event is set."""
        draw = random.Random(0)
        while not self.ended.wait(draw.uniform(0.5, 1.5) * PERIOD_S):
            self._look()
            self.took_s = time.thread_time()

    def _look(self) -> None:
        hooks = self.hooks
        kind = hooks.spans.stack[-1]
        frame = sys._current_frames().get(hooks.spans.thread)
        if kind not in ("prepare", "rest") or frame is None:
            return
        if kind == "rest" and not hooks.backwards:
            kind = "loss"  # after a forward, before the first backward
        elif kind == "prepare" and hooks.in_forward(frame):
            kind = "model"
        self.seen[kind, *hooks.own_line(frame)] += 1

    def stop(self, profile: Profile) -> None:
        """Write what was seen into `profile`, as lines."""
        self.ended.set()
        self.join()
        for part, kinds in (("prepare", ("model", "prepare")), ("rest", ("loss", "rest"))):
            spans, looks = profile.spans_s.get(part, []), sum(n for key, n in self.seen.items() if key[0] in kinds)
            if not spans or not looks:
                continue
            ms = 1e3 * sum(spans) / len(spans) / looks
            profile.lines += [
                Line(kind, "", file, line, linecache.getline(file, line).strip(), 0.0, n * ms)
                for (kind, file, line), n in self.seen.items()
                if kind in kinds and n >= FEWEST
            ]
        profile.lines.sort(key=lambda line: -line.ms)
