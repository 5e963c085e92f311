"""Activation checkpointing: keep a block's input, drop what is inside, recompute it when backward needs it.

`recompute(module, policy)` applies one of these policies to any model:

  none         keeps every activation
  block        each block of the model keeps only its input
  stage        the same for each stage, where a model has several, such as ResNet's four
  segments:4   the same for 4 runs of blocks, of nearly equal length
  selective    each block, but also keeps the results of products with weights, and of fused attention

With ":keep_last" (segments:4:keep_last, block:keep_last) the last one is not recomputed: backward needs it at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labs.kit import _compat
from labs.kit._compat import DeviceContext, function_modes
from labs.kit.errors import BadInput, require

# What "selective" keeps. Not bmm: attention's products grow with the square of the sequence and are cheap to recompute
# (Korthikanti et al. 2022, arXiv 2205.05198, section 5).
aten = torch.ops.aten
KEPT = [
    aten.mm.default,
    aten.addmm.default,
    aten.convolution.default,
    _compat.flash_attention_on_cpu,
    _compat.flash_attention,
    _compat.efficient_attention,
    _compat.cudnn_attention,
]


def recompute(module: nn.Module, policy: str) -> nn.Module:
    """Apply `policy` to `module` in place and return it; "none" removes any other policy.

    Parameters, their names and the results don't change, and copy.deepcopy also copies the policy. BatchNorm counts its
    batch once. BadInput if the model doesn't support the policy.
    """
    ours = (recomputed_forward, segmented_forward)
    for m in module.modules():
        if isinstance(m.__dict__.get("forward"), MethodType) and m.forward.__func__ in ours:
            del m.forward
    runs, (name, _, _) = segments(module, policy), _parse(policy)
    if name == "segments":
        _cut(module, runs)
        return module
    units = stages(module) if name == "stage" else blocks(module) if name != "none" else []
    for unit, (_, _, again) in zip(units, runs, strict=bool(units)):
        if again:
            unit.recompute_selective = name == "selective"
            unit.forward = MethodType(recomputed_forward, unit)  # a bound method follows its module into a deep copy
    return module


def recomputed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace a module's `forward`: keep only the input; backward runs the forward again."""
    forward = partial(type(self).forward, self, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(contexts_of, self))


def segmented_forward(self: nn.Sequential, x: Any) -> Any:
    """Replace a Sequential's `forward`: one checkpoint per run of its blocks."""
    chain = _flat(self)
    for start, stop, again in self.recompute_segments:
        run = nn.Sequential(*chain[start:stop])
        x = checkpoint(run, x, use_reentrant=False, context_fn=partial(contexts_of, run)) if again else run(x)
    return x


class _SecondRun:
    """What the second run needs beyond PyTorch's handling of generators and autocast.

    BatchNorm updates copies of its running statistics, so that they don't count the same batch twice. Function modes of
    the first run are switched on again, because PyTorch switches them off within backward().
    """

    def __init__(self, module: nn.Module, cached: Any) -> None:
        self.module, self.cached, self.stack, self.own = module, cached, ExitStack(), []
        self.modes = [m for m in function_modes() if not isinstance(m, DeviceContext)]  # torch handles this one

    def __enter__(self) -> None:
        norms = [m for m in self.module.modules() if isinstance(m, _compat.Normalisation) and m.training]
        self.own = [(m, dict(m.named_buffers(recurse=False))) for m in norms]
        for m, buffers in self.own:
            _set(m, {name: b.clone() for name, b in buffers.items()})
        on = function_modes()
        for context in [m for m in self.modes if m not in on] + self.cached:
            self.stack.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self.stack.close()
        for m, buffers in self.own:
            _set(m, buffers)


def _set(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, b in buffers.items():
        setattr(module, name, b)


def contexts_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the contexts of the first and the second run of `module`."""
    if not getattr(module, "recompute_selective", False):
        return torch.enable_grad(), _SecondRun(module, [])
    caching, cached = create_selective_checkpoint_contexts(KEPT)  # keeps what these operations return
    return caching, _SecondRun(module, [cached])


def _parse(policy: str) -> tuple[str, int, bool]:
    """Return (name, number of segments or 0, whether the last one is not recomputed)."""
    found = re.fullmatch(r"(none|(?:block|stage|selective|segments:([1-9]\d*))(:keep_last)?)", policy)
    if not found:
        raise BadInput(
            f"there is no policy {policy!r}: take none, block, stage, segments:4 (or another number) or selective"
        )
    return policy.split(":")[0], int(found[2] or 0), bool(found[3])


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of the model's chains (its outermost Sequentials and ModuleLists), in order.

    A Sequential of modules that have submodules is a stage, whose modules are the blocks. For a model with only plain
    layers in a row, these are the blocks. BadInput if there are none.
    """
    found = [block for chain in _chains(module) for block in _flat(chain)]
    require(
        len(found) > 0,
        f"{type(module).__name__} has no chain of blocks to recompute: its blocks must be in an "
        "nn.Sequential or nn.ModuleList",
    )
    return found


def stages(module: nn.Module) -> list[nn.Module]:
    """Return the Sequentials that hold the blocks, in order. BadInput if there are fewer than two."""
    blocks(module)
    found = [stage for chain in _chains(module) for stage in _stages(chain)]
    require(
        len(found) >= 2 and all(isinstance(s, nn.Sequential) for s in found),
        f"{type(module).__name__} has no stages, which are several nn.Sequential of blocks: take block or segments:2",
    )
    return found


def _stages(chain: nn.Module) -> Iterator[nn.Module]:
    inner = [m for m in chain.children() if _is_chain(m)]
    if not inner:
        yield chain
    for m in inner:
        yield from _stages(m)


def _is_chain(module: nn.Module) -> bool:
    """Return whether it is a container with modules that have submodules; one may also be plain layers (a stem)."""
    parts = list(module.children())
    return isinstance(module, nn.Sequential | nn.ModuleList) and any(len(list(p.children())) > 0 for p in parts)


def _flat(chain: nn.Module) -> list[nn.Module]:
    """Return its blocks, including those of the stages in it."""
    return [b for m in chain.children() for b in (_flat(m) if _is_chain(m) else [m])]


def _chains(module: nn.Module) -> list[nn.Module]:
    """Return the outermost containers of blocks; without any, the longest Sequential of plain layers."""

    def walk(m: nn.Module) -> Iterator[nn.Module]:
        if _is_chain(m):
            yield m
        else:
            for child in m.children():
                yield from walk(child)

    plain = [m for m in module.modules() if isinstance(m, nn.Sequential)]
    return list(walk(module)) or sorted(plain, key=len)[-1:]


def segments(module: nn.Module, policy: str) -> list[tuple[int, int, bool]]:
    """Return (first block, last + 1, whether it is recomputed) of each run of blocks under `policy`.

    Empty for "none". BadInput if the model doesn't support the policy.
    """
    name, count, keep_last = _parse(policy)
    if name == "none":
        return []
    total = len(blocks(module))
    if name == "segments":
        bounds = _shared_out(module, count, total)
    elif name == "stage":
        ends = itertools.accumulate((len(_flat(s)) for s in stages(module)), initial=0)
        bounds = list(itertools.pairwise(ends))
    else:
        bounds = segment_bounds(total, total)
    return [(a, b, not keep_last or b < total) for a, b in bounds]


def _shared_out(module: nn.Module, count: int, total: int) -> list[tuple[int, int]]:
    """Divide the model's chains into `count` segments of nearly equal length."""
    chains = _chains(module)
    require(
        all(isinstance(c, nn.Sequential) for c in chains),
        f"{type(module).__name__} calls its blocks one by one (nn.ModuleList), so segments cannot be cut: take "
        "block or selective",
    )
    require(
        len(chains) <= count <= total,
        f"segments:{count} of {total} blocks in {len(chains)} chain(s): take {len(chains)} to {total}",
    )
    lengths, shares = [len(_flat(c)) for c in chains], [1] * len(chains)
    for _ in range(count - len(chains)):
        longest = max(range(len(chains)), key=lambda i: lengths[i] / shares[i])
        shares[longest] += 1
    starts = itertools.accumulate(lengths, initial=0)
    cut = zip(starts, lengths, shares, strict=False)
    return [(start + a, start + b) for start, n, k in cut for a, b in segment_bounds(n, k)]


def _cut(module: nn.Module, runs: list[tuple[int, int, bool]]) -> None:
    start = 0
    for chain in _chains(module):
        stop = start + len(_flat(chain))
        own = [(a, b, again) for a, b, again in runs if start <= a < stop]
        chain.recompute_segments = [(a - start, b - start, again) for a, b, again in own]
        chain.forward = MethodType(segmented_forward, chain)
        start = stop


def segment_bounds(blocks: int, segments: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) block of each segment; their lengths differ by at most one."""
    ends = [round(i * blocks / segments) for i in range(segments + 1)]
    return list(itertools.pairwise(ends))
