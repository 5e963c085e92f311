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


GOYAL_2017 = "P. Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677 (2017), Table 1 and section 5.1"


def imagenet_batches() -> Records:
    """Top-1 error in % of ResNet-50 on ImageNet (mean of 5 runs), SGD, learning rate 0.1 x batch / 256."""
    rows = ((256, "none", 23.60, 0.12), (8192, "gradual", 23.74, 0.09), (8192, "none", 24.84, 0.37),
            (8192, "constant", 25.88, 0.56))  # fmt: skip
    return Records(
        Record("paper", "top_1_error", "%", (error,), "published",
               {"batch": batch, "warm_up": warm_up, "plus_minus": spread}, provenance={"source": GOYAL_2017})
        for batch, warm_up, error, spread in rows
    )  # fmt: skip
