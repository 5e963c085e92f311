"""Datasheet peaks of GPUs, with their source.

A card that is not in `gpus.toml`, or a figure that is not sourced there, is None: no share of a peak is
computed from a guess.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = {"fp32": "fp32", "tf32": "tensor_tf32", "bf16": "tensor_bf16", "fp16": "tensor_fp16"}


@dataclass(frozen=True)
class Peak:
    """A dense datasheet peak, in FLOP/s, with its source."""

    flop_s: float
    gpu: str
    dtype: str
    source: str
    url: str


@dataclass(frozen=True)
class Spec:
    """One row of the table; None where no figure is sourced. TFLOP/s are dense."""

    gpu: str
    names: tuple[str, ...]
    source: str
    url: str
    memory_gb: float | None = None
    bandwidth_gb_s: float | None = None
    bus_bits: int | None = None
    pin_gbit_s: float | None = None
    fp32: float | None = None
    tensor_tf32: float | None = None
    tensor_bf16: float | None = None
    tensor_fp16: float | None = None
    halved: bool = False
    """The tensor figures are half of a figure "with sparsity"."""
    link: str | None = None
    link_gb_s: float | None = None
    tdp_w: float | None = None
    note: str = ""

    def tflops(self, dtype: str) -> float | None:
        """Dense TFLOP/s of "fp32", "tf32", "bf16" or "fp16"."""
        return getattr(self, DTYPES[dtype])


@functools.cache
def specs() -> tuple[Spec, ...]:
    """All rows of gpus.toml, in its order."""
    text = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return tuple(_spec(gpu, dict(row), text["sources"]) for gpu, row in text["gpu"].items())


def _spec(gpu: str, row: dict[str, Any], sources: dict[str, dict[str, str]]) -> Spec:
    source = sources[row.pop("source")]
    return Spec(gpu, tuple(row.pop("names")), source["title"], source["url"], **row)


def spec(name: str) -> Spec | None:
    """The row of the card with this NVML name, or with this name in the table; None if it is not there.

    Names must match in full: "NVIDIA H200 NVL" is another product than "NVIDIA H200".
    """
    wanted = name.strip().casefold()
    return next((s for s in specs() if wanted in (n.casefold() for n in (s.gpu, *s.names))), None)


def peak(name: str, dtype: str) -> Peak | None:
    """Dense peak of a card for "fp32", "tf32", "bf16" or "fp16". None when it is not known."""
    row = spec(name)
    tflops = row.tflops(dtype) if row else None
    return Peak(tflops * 1e12, row.gpu, dtype, row.source, row.url) if row and tflops else None


def bus_bandwidth_gb_s(bus_bits: int, pin_gbit_s: float) -> float:
    """Peak memory bandwidth: pins x bits per second and pin / 8 bits per byte, in 10^9 byte/s."""
    return bus_bits * pin_gbit_s / 8
