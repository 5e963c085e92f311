"""Verdicts of notebook 07, from made-up records."""

import pytest

from labs.claims import nb07
from labs.kit.record import Record, Records

STEADY = (0.999, 1.0, 1.001, 1.0, 1.0, 1.0)


def links(ddp_s, model="mlp"):
    """slow_link: one rank takes 10 ms, two without exchange 11 ms; DDP takes `ddp_s` at 25 and 400 MB/s."""
    return [
        Record("slow_link", "step_s", "s", [s * k for k in STEADY], case={"way": way, "mb_s": mb_s},
               config={"model": model}, layout={"world_size": 2}, provenance={"utc": model})
        for mb_s, ddp in zip((25.0, 400.0), ddp_s, strict=True)
        for way, s in (("single", 0.010), ("no exchange", 0.011), ("ddp", ddp))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("judge", "ddp_s", "word"),
    [
        (nb07.a19_cards_of_one_kind_scale_alike, (0.1, 0.012), "does not hold"),
        (nb07.a19_cards_of_one_kind_scale_alike, (0.012, 0.012), "holds"),
        (nb07.b06_memory_and_tflops_make_synchronising_efficient, (0.1, 0.012), "does not hold"),
        (nb07.b06_memory_and_tflops_make_synchronising_efficient, (0.1, 0.1), "holds"),
        (nb07.c14_world_size_shows_efficiency, (0.1, 0.012), "does not hold"),
        (nb07.c14_world_size_shows_efficiency, (0.012, 0.012), "depends"),
    ],
)
def test_links_decide(judge, ddp_s, word):
    found = judge(Records(links(ddp_s)))
    assert found.word == word and "25 MB/s" in found.because


@pytest.mark.parametrize(("share", "word"), [(0.04, "depends"), (0.2, "does not hold")])
def test_powersgds_bytes_decide(share, word):
    run = [Record("gradient_compression", "sent", "1", (share,), case={"way": "powersgd"})]
    found = nb07.b18_powersgd_cuts_ninety_percent(Records(run))
    assert found.word == word and f"{100 * share:.1f} %" in found.because


@pytest.mark.parametrize(("best_s", "word"), [(0.2, "depends"), (0.101, "does not hold")])
def test_the_exchange_with_the_best_buckets_decides(best_s, word):
    ways = {"no exchange": 0.1, "one bucket": 0.3, "default buckets": 0.25, "4 MiB buckets": best_s}
    rows = [Record("comm_overlap", "step_s", "s", [s * k for k in STEADY], case={"way": w}) for w, s in ways.items()]
    found = nb07.c23_synchronisation_matters(Records(rows))
    assert found.word == word and "4 MiB buckets" in found.because


def test_nothing_is_judged_without_a_run():
    with pytest.raises(LookupError):
        nb07.b18_powersgd_cuts_ninety_percent(Records())
