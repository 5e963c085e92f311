"""What the articles advise, and what in the doctor's report says whether it helps *your* training."""

from __future__ import annotations

import pandas

from labs.kit.claim_registry import claims
from labs.kit.display import show_table

TRIED: dict[str, tuple[str, str]] = {
    "A34": ("counterfactual", "more workers; pinned memory"),  # the second on a GPU only
    "E06": ("counterfactual", "same batch again"),
    "E08": ("counterfactual", "more workers"),
    "A16": ("counterfactual", "no waiting line; no printing"),
    "E16": ("counterfactual", "half precision"),  # its speed
    "E22": ("counterfactual", "larger batch"),  # its throughput
    "C23": ("counterfactual", "no exchange"),
    "E18": ("rule", "zero-grad-missing"),
    "B34": ("counterfactual", "no exchange"),
    "B37": ("rule", "set-epoch-missing"),
}
"""By claim: how the doctor tries it, and under which names."""


def show() -> None:
    """A row for each statement: the notebook that tried it here, and what tries it on a script of your own."""
    by_id = {claim.id: claim for claim in claims()}
    rows = [
        {
            "claim": f"{name} ({by_id[name].source})",
            "statement": by_id[name].claim,
            "tried in": by_id[name].notebook,
            "on your script": f"{how}: {what}",
        }
        for name, (how, what) in TRIED.items()
    ]
    show_table(pandas.DataFrame(rows).set_index("claim"), folded=f"{len(rows)} pieces of advice, and what tries them")
