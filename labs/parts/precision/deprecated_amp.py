"""The deprecated names of mixed precision beside torch.amp: what each one says, and whether it does anything here."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


def interfaces(device: torch.device) -> list[dict[str, Any]]:
    """One row per call: `interface`, `works` on this device, `categories` and `words` of its warnings, "; " between.

    An autocast works if a product of FP32 matrices inside it is FP16, a scaler if it is enabled.
    """
    kind = device.type
    autocasts: dict[str, Callable[[], Any]] = {
        "torch.cuda.amp.autocast()": lambda: torch.cuda.amp.autocast(),
        f"torch.amp.autocast({kind!r}, torch.float16)": lambda: torch.amp.autocast(kind, torch.float16),
    }
    scalers: dict[str, Callable[[], Any]] = {
        "torch.cuda.amp.GradScaler()": lambda: torch.cuda.amp.GradScaler(),
        "torch.amp.GradScaler()": lambda: torch.amp.GradScaler(),
        f"torch.amp.GradScaler({kind!r})": lambda: torch.amp.GradScaler(kind),
    }
    a, rows = torch.ones(2, 2, device=device), []
    for interface, make in (autocasts | scalers).items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = make()
            with made if interface in autocasts else nullcontext():
                works = (a @ a).dtype == torch.float16 if interface in autocasts else made.is_enabled()
        rows.append(
            {
                "interface": interface,
                "works": works,
                "categories": "; ".join(w.category.__name__ for w in caught),
                "words": "; ".join(" ".join(str(w.message).split()) for w in caught),
            }
        )
    return rows
