"""Numbers that others published and this course tests, each with its source."""

from __future__ import annotations

from labs.kit.record import Record, Records

RTX_4090_ARTICLE = (
    '"GPU resource utilisation: PyTorch model parallel computation performance analysis report" (2025-12-24)'
)


def rtx_4090_epochs() -> Records:
    """Seconds per epoch on 1 to 4 RTX 4090 as an article states them; it gives no script, batch or data size."""
    table = {1: 12.5, 2: 7.8, 3: 6.2, 4: 5.1}
    return Records(
        Record("article", "epoch_s", "s", (seconds,), "published", {"ranks": ranks},
               provenance={"source": RTX_4090_ARTICLE})
        for ranks, seconds in table.items()
    )  # fmt: skip
