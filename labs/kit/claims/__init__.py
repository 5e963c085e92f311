"""Claims on trial: what five articles state, and what the records of this course say about it.

    from labs.kit.claims import Verdict, table, verdict

    @verdict("A13")                                  # in labs/chapters/nb03/claims.py
    def _(evidence):
        step_s = evidence.one("step_s", ranks=2)     # LookupError here means "not tried yet"
        return Verdict("does not hold", f"{step_s.value:.3f} s per step on 2 ranks", step_s.kind)

    table(notebook="03", evidence=records)           # in the notebook

The statements are in claims.toml. `python -m labs.claims` prints them all.
"""

from labs.kit.claims.registry import Article, Claim, Verdict, articles, claims, verdict
from labs.kit.claims.trial import Table, gpu_count, judge, table

__all__ = [
    "Article",
    "Claim",
    "Table",
    "Verdict",
    "articles",
    "claims",
    "gpu_count",
    "judge",
    "table",
    "verdict",
]
