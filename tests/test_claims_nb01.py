"""Verdicts of notebook 01, from made-up records."""

import pytest

from labs.claims import nb01
from labs.kit.record import Record, Records

NOISE = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)


def record(lab, metric, seconds, **case):
    samples = [seconds * k for k in NOISE]
    return Record(lab, metric, "s", samples, case=case, config={"model": "mlp"}, layout={"world_size": 2})


def loop(printed=1.0, waited=1.0, warm=1.0):
    rungs = {"as printed": printed, "synchronise": waited, "warm up": warm}
    return [record("timing", "answer_s", s, rung=rung) for rung, s in rungs.items()]


def neighbour(blocks):
    return [
        record("measure_validation", "step_s", b if side == "B" else 1.0, part="neighbour", order=order, side=side)
        for order, b in (("one after the other", blocks), ("in turn", 1.0))
        for side in "AB"
    ]


def batches(ddp_s=0.0, **steps):
    return [
        record("batch_size", metric, s + (ddp_s if mode == "ddp" else 0.0), batch=int(name[1:]), **more)
        for name, s in steps.items()
        for metric, mode, more in (
            ("step_s", "single", {"mode": "single"}),
            ("step_s", "ddp", {"mode": "ddp"}),
            ("activation_bytes", "", {}),
        )
    ]


@pytest.mark.parametrize(
    ("function", "records", "word"),
    [
        (nb01.c07_the_clock_may_start_at_once, loop(waited=2.0), "does not hold"),
        (nb01.c07_the_clock_may_start_at_once, loop(), "holds"),
        (nb01.c08_data_may_be_made_inside_the_loop, loop(printed=2.0), "depends"),
        (nb01.c08_data_may_be_made_inside_the_loop, loop(), "holds"),
        (nb01.c10_throughput_is_a_core_metric, batches(b4=1.0, b256=8.0), "holds"),
        (nb01.c10_throughput_is_a_core_metric, batches(b4=1.0, b256=80.0), "depends"),
        (nb01.c15_batch_32_to_256_shows_it, batches(b32=1.0, b256=4.0, b2048=32.0), "holds"),
        (nb01.c15_batch_32_to_256_shows_it, batches(b32=1.0, b256=4.0, b2048=16.0), "depends"),
        (nb01.c15_batch_32_to_256_shows_it, batches(b32=1.0, b256=8.0, b2048=64.0), "does not hold"),
        (nb01.c22_the_method_is_complete, loop(waited=2.0) + neighbour(1.0), "does not hold"),
        (nb01.c22_the_method_is_complete, loop() + neighbour(2.0), "does not hold"),
        (nb01.c22_the_method_is_complete, loop() + neighbour(1.0), "holds"),
        (nb01.e23_a_larger_batch_is_more_efficient, batches(ddp_s=1.0, b4=1.0, b256=10.0), "holds"),
    ],
)
def test_what_decides(function, records, word):
    assert function(Records(records)).word == word
