"""Where and when numbers were taken: the header of every record file."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """What a reader needs to judge a number from this machine, taken now (UTC)."""
    return {**_machine(), "utc": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _machine() -> dict[str, Any]:
    import torch

    from labs.kit import hardware

    return {
        **hardware.summary(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": hardware.nccl_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of this checkout, with '-dirty' if it was edited; None outside of git."""
    try:
        out = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() or None
