"""Reference solution of exercise 10.2."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist


def replica_check(module, rank, world):
    """(name of the first tensor that differs, the ranks whose bits are not rank 0's), or None; the same on all."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    digests = []
    for _, t in tensors:
        bits = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # bytes: NaN is equal to itself, any dtype
        digests.append(int.from_bytes(hashlib.sha256(bits.numpy().data).digest()[:8], "little", signed=True))
    mine = torch.tensor(digests)  # int64: 8 bytes for each tensor of any size
    every = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(every, mine)  # one collective, the same on all ranks, whatever they found
    for i, (name, _) in enumerate(tensors):
        if others := [r for r in range(world) if every[r][i] != every[0][i]]:
            return name, others
    return None
