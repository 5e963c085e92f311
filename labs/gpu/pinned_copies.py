"""Do pinned memory, non_blocking and a separate stream hide the copy of a batch to the GPU?

    python -m labs.gpu.pinned_copies --nproc 1

About 10 s on an H200. Copies eight batches of images to the GPU and multiplies each by a matrix there: with every way
to copy, and with batches already on the GPU, interleaved. There are no workers and no decoding, so a batch of 77 MB is
always ready and only the copy is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

COUNT = 8
"""Batches per measurement."""
FEATURES = 1024


@dataclass(frozen=True)
class Config:
    """How large batches are, and how much is computed on each."""

    batch_size: Annotated[int, Ge(1)] = 128
    """Images per batch."""
    side: Annotated[int, Ge(1)] = 224
    """Pixels per side; images have three channels in FP32."""
    products: Annotated[int, Ge(1)] = 4
    """Matrix products per batch."""
    rounds: Annotated[int, Ge(2)] = 9
    """Rounds; each way runs once per round."""
    smoke: bool = False
    """Two images of 32 pixels, and two rounds."""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure seconds per batch for each way to copy. Without CUDA, only the two ways that don't need it."""
    rows, side, device = (2, 32, rank.device) if config.smoke else (config.batch_size, config.side, rank.device)
    pageable = [torch.randn(rows, 3 * side * side) for _ in range(COUNT)]
    weights = torch.randn(3 * side * side, FEATURES, device=device)

    def work(x: Tensor) -> None:
        for _ in range(config.products):
            x @ weights

    def one_stream(batches: list[Tensor], non_blocking: bool = False) -> Callable[[], None]:
        def step() -> None:
            for batch in batches:
                work(batch.to(device, non_blocking=non_blocking))

        return step

    ways = {"none": one_stream([batch.to(device) for batch in pageable]), "pageable": one_stream(pageable)}
    if device.type == "cuda":
        pinned = [batch.pin_memory() for batch in pageable]
        ways |= {
            "pageable non_blocking": one_stream(pageable, non_blocking=True),
            "pinned": one_stream(pinned),
            "pinned non_blocking": one_stream(pinned, non_blocking=True),
            "pinned side_stream": side_stream(pinned, work, device),
        }
    for step in ways.values():
        measure.time_steps(step, 2, device)
    seconds = measure.interleave(ways, 2 if config.smoke else config.rounds, device)
    for way, samples in seconds.items():
        size = pageable[0].nbytes
        yield rank.record("batch_s", "s", [s / COUNT for s in samples], copy=way, bytes=size, products=config.products)


def side_stream(batches: list[Tensor], work: Callable[[Tensor], None], device: torch.device) -> Callable[[], None]:
    """Make a step that copies the next batch on a separate stream while the GPU works."""
    copies = torch.cuda.Stream(device)

    def copied(batch: Tensor) -> Tensor:
        with torch.cuda.stream(copies):
            return batch.to(device, non_blocking=True)

    def step() -> None:
        compute = torch.cuda.current_stream(device)
        ahead = copied(batches[0])
        for following in [*batches[1:], None]:
            compute.wait_stream(copies)
            batch = ahead
            batch.record_stream(compute)  # otherwise a later copy could reuse its memory while it is being read
            if following is not None:
                ahead = copied(following)
            work(batch)

    return step


def answer(records: Records) -> Iterator[str]:
    """Report each way's time, and how many times as fast as pageable memory it is."""
    batch_s = {r.case["copy"]: r for r in records.where("batch_s")}
    plain = batch_s["pageable"]
    said = ", ".join(f"{way} {r.value * 1e3:.2f} ms" for way, r in batch_s.items())
    yield f"A batch of {plain.case['bytes'] / 1e6:.1f} MB, copied and used, by how it is copied: {said}."
    for way, r in batch_s.items():
        if r is not plain:
            yield f"{way}: {measure.paired_ratio(plain.samples, r.samples)} as fast as with pageable."


if __name__ == "__main__":
    cli.main()
