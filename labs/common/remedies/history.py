"""Find which line of code created the tensors that are still alive."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from labs.common.oracle.tracker import Block, Tracker

TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Site:
    """Where a tensor was created: Python lines outside torch, innermost first, and torch's operation."""

    stack: tuple[tuple[str, int], ...]
    op: str

    @property
    def line(self) -> str:
        """The line of the loop, for example "leaks.py:68"."""
        return _short(self.stack[-1])

    @property
    def code(self) -> str:
        """The text of that line."""
        return linecache.getline(*self.stack[-1]).strip()

    @property
    def inner(self) -> str:
        """The innermost line, in the model for example."""
        return _short(self.stack[0])


class History(Tracker):
    """What operations allocate and free, and the lines that each block comes from.

    On a GPU, CUDA's memory history records the same. Stacks end below the function with code `root`, which runs in the
    thread that creates the History.
    """

    def __init__(self, root: CodeType) -> None:
        super().__init__()
        self.root, self.thread = root, threading.get_ident()
        self.sites: dict[Block, Site] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Handle each operation; PyTorch calls this with the mode switched off."""
        before = len(self.moves)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        made = [block for block, sign, *_ in self.moves[before:] if sign > 0]
        if made:
            site = Site(_stack(self.root, self.thread), func.overloadpacket.__name__)
            self.sites.update((block, site) for block in made)
        return out

    def largest_site(self) -> tuple[Site | None, float]:
        """Return (where most bytes still alive come from, their share), without what existed before.

        Compares lines of the loop, whatever operations they call.
        """
        left = [(self.sites[b], b.nbytes) for b, _ in self.live.values() if b in self.sites]
        by_line, by_site = Counter(), Counter()
        for site, size in left:
            by_line[site.line] += size
            by_site[site] += size
        if not by_line:
            return None, 0.0
        line, size = by_line.most_common(1)[0]
        return next(s for s, _ in by_site.most_common() if s.line == line), size / by_line.total()


def _stack(root: CodeType, thread: int) -> tuple[tuple[str, int], ...]:
    """Return (file, line) outwards from the caller of all __torch_dispatch__, without torch's files.

    On a GPU, backward runs in an autograd thread that no Python function called. Its frames are followed by the stack
    of `thread`, which waits in backward().
    """
    stacks, found = [sys._getframe(1).f_back], []
    if threading.get_ident() != thread:
        stacks.append(sys._current_frames()[thread])
    for frame in stacks:
        while frame is not None and frame.f_code is not root:
            if not frame.f_code.co_filename.startswith(TORCH) and frame.f_code.co_name != "__torch_dispatch__":
                found.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
    return tuple(found)


def _short(place: tuple[str, int]) -> str:
    return f"{Path(place[0]).name}:{place[1]}"
