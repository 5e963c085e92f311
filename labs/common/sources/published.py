"""Published numbers that this course tests, each with its source."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from labs.kit.record import Record, Records, load

TABLES = Path(__file__).parents[3] / "records" / "published"


@cache
def table(name: str) -> Records:
    """Load the table records/published/`name`.jsonl. Its provenance says where it was read, and how reliably."""
    return load(TABLES / f"{name}.jsonl")


RTX_4090_ARTICLE = (
    '"GPU resource utilisation: PyTorch model parallel computation performance analysis report" (2025-12-24)'
)


def rtx_4090_epochs() -> Records:
    """Return an article's seconds per epoch on 1 to 4 RTX 4090; it gives no script, batch or data size."""
    table = {1: 12.5, 2: 7.8, 3: 6.2, 4: 5.1}
    return Records(
        Record(
            "article",
            "epoch_s",
            "s",
            (seconds,),
            "published",
            {"ranks": ranks},
            provenance={"source": RTX_4090_ARTICLE},
        )
        for ranks, seconds in table.items()
    )


def stated(article: str, metric: str, unit: str, *values: float) -> Records:
    """Return numbers from one of the five articles ("A" to "E"), with its title as the source."""
    from labs.kit.claim_registry import articles  # imports torch, which no other function here needs

    told = articles()[article]
    source = f'"{told.title_en}" ({told.date})'
    return Records([Record("article", metric, unit, values, "published", provenance={"source": source})])


GOYAL_2017 = "P. Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677 (2017), Table 1 and section 5.1"


PYTORCH_DDP = (
    "github.com/pytorch/pytorch at bf69c149, benchmarks/distributed/ddp/README.md: PyTorch 1.4, NCCL, V100 of a DGX, "
    "32 images per GPU, medians"
)


def ddp_on_v100() -> Records:
    """Return PyTorch's published seconds per iteration on one V100 without DDP, and on two in one machine with it."""
    return Records(
        Record(
            "pytorch",
            "step_s",
            "s",
            (r.value / 1e3,),
            "published",
            {"model": r.case["model"], "gpus": r.case["gpus"]},
            provenance={"source": PYTORCH_DDP},
        )
        for r in table("pytorch_ddp")
        if (r.case["gpus"], r.case["ddp"]) in ((1, False), (2, True))
    )
