"""Verdicts on the articles' claims: a module per notebook, with named functions that read the notebook's records.

`python -m labs.claims` prints them all, and `all_claims()` returns them as a pandas table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def all_claims() -> pd.DataFrame:
    """Return a row per claim, by id: subject, claim, verdict, because, how it was decided, and its notebook.

    `.attrs["records"]` holds a record of each run that a verdict was computed from, for a figure's caption.
    """
    import pandas as pd

    from labs.claims.registry import claims, how_decided, recorded_verdict
    from labs.kit.claim_records import RECORDED, kept, kept_of_gpus
    from labs.kit.record import Records

    rows = {}
    for claim in claims():
        found = recorded_verdict(claim)
        rows[claim.id] = {
            "subject": claim.subject,
            "claim": claim.claim,
            "verdict": found.word if not found.word.startswith("needs") else "not tested",
            "because": found.because,
            "how": how_decided(claim, found),
            "notebook": claim.notebook,
        }
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("id")
    runs = [run for n in {c.notebook for c in claims()} for run in (kept(n, RECORDED), *kept_of_gpus(n)) if run]
    table.attrs["records"] = Records(run[0] for run in runs)
    return table
