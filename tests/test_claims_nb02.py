"""Verdicts of notebook 02, from made-up records."""

import pytest

from labs.claims import nb02
from labs.kit.record import Record, Records


def made(lab, metric, value, **case):
    return Record(lab, metric, "1", [value * k for k in (0.99, 1.0, 1.01, 0.995)], case=case)


def run(both, waits, shares=(0.4, 0.8)):
    """Rates and shares of waiting without and with two workers; shares of the model with one and two workers."""
    found = [made("dataloader", "images_per_s", 600, way="model", workers=0, step="computes")]
    for n, loader in ((0, 300), (2, 500)):
        found.append(made("dataloader", "images_per_s", loader, way="loader", workers=n, step="none"))
    for (n, step), rate, wait in zip([(0, "computes"), (2, "computes"), (2, "sleeps")], both, waits, strict=True):
        found.append(made("dataloader", "images_per_s", rate, way="both", workers=n, step=step))
        found.append(made("dataloader", "wait_share", wait, way="both", workers=n, step=step))
    for items in ("wait", "compute"):
        found += [
            made("loader_workers", "model_share", share, items=items, workers=n) for n, share in enumerate(shares, 1)
        ]
    return Records(found)


@pytest.mark.parametrize(
    ("function", "records", "word"),
    [
        (nb02.a33_a_slow_loader_lets_the_model_wait, run((200, 350, 490), (0.6, 0.2, 0.3)), "holds"),
        (nb02.a33_a_slow_loader_lets_the_model_wait, run((200, 350, 490), (0.6, 0.01, 0.3)), "depends"),
        (nb02.d23_workers_are_the_cure, run((200, 350, 490), (0.6, 0.2, 0.3)), "holds"),
        (nb02.d23_workers_are_the_cure, run((200, 150, 490), (0.6, 0.2, 0.3)), "does not hold"),
        (nb02.e06_workers_load_in_parallel_and_cut_waiting, run((200, 350, 490), (0.6, 0.2, 0.3)), "holds"),
        (
            nb02.e06_workers_load_in_parallel_and_cut_waiting,
            run((1, 1, 1), (0.2, 0.6, 0.3), (0.4, 0.3)),
            "does not hold",
        ),
    ],
)
def test_rates_and_waits_decide(function, records, word):
    assert function(records).word == word
