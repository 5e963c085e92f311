"""The closed forms of labs.common.data_parallel.scaling against numbers worked out by hand."""

import math

import pytest

from labs.common.data_parallel import scaling

EPOCH_S = {1: 12.5, 2: 7.8, 3: 6.2, 4: 5.1}  # the article's table, seconds per epoch


def test_amdahl_fit_of_the_articles_table():
    fit = scaling.fit_amdahl(list(EPOCH_S), list(EPOCH_S.values()))
    assert fit.serial == pytest.approx(2.85, abs=5e-3)
    assert fit.parallel == pytest.approx(9.70, abs=5e-3)
    assert fit.limit == pytest.approx(4.40, abs=5e-3)


def test_amdahl_finds_what_made_the_times():
    made = scaling.Amdahl(serial=1.0, parallel=3.0)
    fit = scaling.fit_amdahl([1, 2, 4, 8], [made.time(n) for n in (1, 2, 4, 8)])
    assert (fit.serial, fit.parallel) == pytest.approx((1.0, 3.0))
    assert (made.time(1), made.time(3), made.speedup(3), made.limit) == (4.0, 2.0, 2.0, 4.0)


def test_a_ring_without_overlap_looks_like_a_serial_part():
    c, p = 1.5, 6.0
    fit = scaling.fit_amdahl([1, 2, 3, 4], [p / n + 2 * c * (n - 1) / n for n in (1, 2, 3, 4)])
    assert (fit.serial, fit.parallel) == pytest.approx((2 * c, p - 2 * c))


def test_no_serial_part_has_no_limit():
    assert scaling.Amdahl(0.0, 5.0).limit == math.inf
    assert scaling.Amdahl(0.0, 5.0).speedup(7) == pytest.approx(7)


def test_one_number_of_ranks_is_no_fit():
    with pytest.raises(ValueError, match="at least two"):
        scaling.fit_amdahl([2, 2], [1.0, 1.1])


@pytest.mark.parametrize(("ranks", "sent"), [(1, 0), (2, 100), (4, 150), (5, 160)])
def test_ring_bytes_of_100_bytes(ranks, sent):
    assert scaling.ring_all_reduce_bytes(100, ranks) == pytest.approx(sent)


def test_data_parallel_bytes_by_hand():
    four = scaling.data_parallel_bytes(parameters=1000, buffers=10, inputs=400, outputs=40, ranks=4)
    assert four == {"replicate": 3030, "scatter": 300, "gather": 30, "scatter gradients": 30, "reduce gradients": 3000}
    assert set(scaling.data_parallel_bytes(1000, 10, 400, 40, ranks=1).values()) == {0}
