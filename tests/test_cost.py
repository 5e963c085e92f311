"""The bill of a training run: arithmetic by hand, limits, what an offer may be, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labs import cost
from labs.common.cost_model import published
from labs.kit.errors import BadInput

QUIET = {"startup_min": 0.0, "gpu_mtbf_days": 0.0, "save_s": 0.0}


def one(offer="H100 SXM:64:2.0", **values) -> cost.Bill:
    config = cost.Config(offers=(offer,), **values)
    return cost.bill(config, config.parsed()[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"offers": ("H100 SXM:many",)}, 'an offer is "CARD:GPUS"'),
        ({"offers": ("H100 SXM:0",)}, "1 to 1,000,000 GPUs"),
        ({"offers": ("H100 SXM:8:nan",)}, "a price is more than 0"),
        ({"offers": ("H100 SMX:8",)}, "did you mean"),
        ({"offers": ("V100 SXM2:8",)}, "no memory"),
        ({"offers": ()}, "at least one"),
        ({"params": 0.5}, "params must be at least 1"),
        ({"network_gb_s": 0.0}, "network_gb_s must be more than 0"),
        ({"reached": 1.5}, "reached must be at most 1"),
        ({"budget": 10.0}, "needs a price in every offer"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        cost.Config(**values)
    assert "\n" not in str(e.value)


def test_the_bill_by_hand():
    b = one(**QUIET, tokens=2048 * 1024 * 1000)
    seconds = 1000 * b.estimate.step.step_s
    assert b.days.value == pytest.approx(seconds / 86_400) and b.gpu_hours.value == pytest.approx(64 * seconds / 3600)
    assert b.money.value == pytest.approx(2.0 * 64 * seconds / 3600)
    assert b.days.high / b.days.value == pytest.approx(
        b.estimate.band.high
    ) and b.days.low / b.days.value == pytest.approx(b.estimate.band.low)


def test_startup_is_paid_and_has_no_band_and_failures_lengthen():
    quiet, late = one(**QUIET), one(**{**QUIET, "startup_min": 60.0})
    assert late.days.value - quiet.days.value == pytest.approx(1 / 24)
    assert late.days.high - quiet.days.high == pytest.approx(1 / 24), "a known number has no band"
    failing = one(gpu_mtbf_days=100.0)
    assert failing.lost_share > one().lost_share > 0 and failing.days.value > one().days.value
    with pytest.raises(BadInput, match="nothing is ever finished: take fewer GPUs"):
        one(save_s=1e9)


def test_an_offer_without_a_band_or_a_plan_has_no_days_and_is_never_the_cheapest():
    config = cost.Config(offers=("L40S:256:0.01", "A100 80GB SXM:2:0.01", "H100 SXM:64:3"), params=13e9, batch=1024)
    found = cost.bills(config)
    assert [b.days is None for b in found] == [True, True, False]
    assert "no published run says" in found[0].refusal and found[1].refusal == "no plan fits into its memory"
    assert cost.cheapest(found) is found[2]
    lines = cost.answer(config, found)
    assert lines[0].startswith("Least money") and sum("L40S" in line for line in lines) == 1
    assert one("H100 SXM:64", network_gb_s=1.0).days is None, "slow network"


def made(price, days, gpus=64) -> cost.Bill:
    return replace(one(), offer=cost.Offer("H100 SXM", gpus, price), days=cost.Range(days, 0.9 * days, 1.5 * days))


def test_limits_are_kept_at_the_upper_end():
    cheap, sure, dear = made(1.0, 8), made(2.0, 6), made(15.0, 1)
    assert cost.cheapest([cheap, sure, dear]) is cheap
    assert cost.cheapest([cheap, sure, dear], deadline_days=10) is sure, "8 days may become 12"
    assert cost.cheapest([cheap, sure, dear], deadline_days=2) is dear
    assert cost.cheapest([cheap, sure, dear], deadline_days=1) is None
    money = sure.money.high
    assert cost.cheapest([sure], budget=money) is sure and cost.cheapest([sure], budget=0.99 * money) is None
    assert cost.cheapest([made(None, 4, gpus=64), made(None, 3, gpus=128)]).offer.gpus == 64, "GPU-hours"


def test_the_command_answers_first_and_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cost"])
    cost.main()
    printed = capsys.readouterr().out
    assert (
        printed.startswith("Least GPU-hours without limits")
        and "money" not in printed
        and published.BIAS[:20] in printed
    )
    for wrong in (["--offers", "H100"], ["--save-s", "1e9"]):
        monkeypatch.setattr("sys.argv", ["cost", *wrong])
        with pytest.raises(SystemExit) as e:
            cost.main()
        assert e.value.code == 2 and capsys.readouterr().err.count("\n") == 1
