"""The bill of a training: arithmetic by hand, limits, what an offer may be, tables and sentences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from labs import cost
from labs.chapters.nb08 import figures_cost as figures
from labs.common.planning import blind_test, scaling
from labs.common.planning.calibration import GPT3
from labs.kit import hardware
from labs.kit.check import predict
from labs.kit.errors import BadInput

QUIET = {"startup_min": 0.0, "gpu_mtbf_days": 0.0, "save_s": 0.0}
BAND = blind_test.band_across()


def one(offer="H100 SXM:64:2.0", **values) -> cost.Bill:
    config = cost.Config(offers=(offer,), **values)
    return cost.bill(config, config.parsed()[0])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100 SXM:many", 'an offer is "CARD:GPUS"'),
        ("H100 SXM:0", "1 to 1,000,000 GPUs"),
        ("H100 SXM:8:nan", "a price is positive"),
        ("H100 SMX:8", "did you mean"),
        ("V100 SXM2:8", "have no source"),
    ],
)
def test_an_offer_that_is_none_is_one_line(text, words):
    with pytest.raises(BadInput, match=words) as e:
        cost.Config(offers=(text,))
    assert "\n" not in str(e.value)


def test_an_offer_is_read():
    offer = cost.Offer.of("h100 sxm: 64 : 2.5")
    assert (offer.card, offer.gpus, offer.price) == ("H100 SXM", 64, 2.5) and str(offer) == "64 x H100 SXM"
    assert cost.Offer.of("L4:1").price is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"params": 0.5}, "at least 1"),
        ({"network_gb_s": 0.0}, "positive"),
        ({"offers": ()}, "at least one"),
        ({"reserved_gb": 90.0}, "leaves no memory"),
        ({"budget": 10.0}, "needs a price in every offer"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words):
        cost.Config(**values)


def test_the_bill_by_hand():
    """Without start-up and failures: steps x a step; the rest is multiplication."""
    b = one(**QUIET, tokens=2048 * 1024 * 1000, power_factor=1.5)
    assert b.training.steps == pytest.approx(1000) and b.training.lost_share == 0
    seconds = 1000 * b.step.step_s
    assert b.seconds.value == pytest.approx(seconds)
    assert b.gpu_hours.value == pytest.approx(64 * seconds / 3600) and b.days.value == pytest.approx(seconds / 86_400)
    assert b.money.value == pytest.approx(2.0 * 64 * seconds / 3600)
    assert b.energy_kwh.value == pytest.approx(1.5 * 0.7 * 64 * seconds / 3600), "700 W by the datasheet"
    assert b.seconds.high / b.seconds.value == pytest.approx(BAND.high)
    assert b.seconds.low / b.seconds.value == pytest.approx(BAND.low)


def test_a_share_that_was_timed_has_the_narrower_band():
    assert cost.Config(reached=0.4).error == blind_test.band() and cost.Config().error == BAND
    assert BAND.high / BAND.low > blind_test.band().high / blind_test.band().low


def test_arithmetic_alone_is_a_lower_bound():
    b = one(**QUIET, reached=0.5)
    flop = 6 * 7e9 * 20 * 7e9
    ideal_s = flop / (64 * 0.5 * 989.4e12)
    assert ideal_s < b.seconds.value < 2 * ideal_s


def test_startup_is_paid_and_has_no_band_and_failures_lengthen():
    quiet, late = one(**QUIET), one(**{**QUIET, "startup_min": 60.0})
    assert late.seconds.value - quiet.seconds.value == pytest.approx(3600)
    assert late.seconds.high - quiet.seconds.high == pytest.approx(3600), "a known number has no band"
    failing = one(gpu_mtbf_days=100.0)
    assert failing.training.lost_share > one().training.lost_share > 0
    assert failing.seconds.value > one().seconds.value


def test_twice_the_price_is_twice_the_money_and_no_price_is_none():
    assert one("H100 SXM:64:4").money.value == pytest.approx(2 * one("H100 SXM:64:2").money.value)
    assert one("H100 SXM:64").money is None


def test_what_does_not_fit_has_no_bill():
    assert one("A100 80GB SXM:8", params=175e9) is None
    assert one("A100 80GB SXM:1024", params=175e9) is not None
    b = one("L4:8", params=7e9)
    assert b is None or b.memory_bytes <= 22e9


def test_the_fastest_plan_that_fits_is_taken():
    b = one()
    config = cost.Config(offers=("H100 SXM:64",))
    assert b.memory_bytes <= 78e9 and b.plan.ranks == 64
    work = scaling.Work.of(config.job())
    cluster = scaling.of_card("H100 SXM", 64, 8, 25.0, config.share_of_peak("H100 SXM")[0])
    recomputing = replace(b.plan, recompute=True)
    assert scaling.step(work, cluster, recomputing).step_s >= b.step.step_s


def made(price, days, gpus=64, card="H100 SXM") -> cost.Bill:
    seconds = cost.Range(*(86_400 * days * f for f in (1.0, 0.9, 1.5)))
    return replace(one(), offer=cost.Offer(card, gpus, price), seconds=seconds)


def test_limits_are_kept_at_the_upper_end():
    cheap, sure, dear = made(1.0, 8), made(2.0, 6), made(15.0, 1)
    assert cost.cheapest([cheap, sure, dear]) is cheap
    assert cost.cheapest([cheap, sure, dear, None], deadline_days=10) is sure, "8 days may become 12"
    assert cost.cheapest([cheap, sure, dear], deadline_days=2) is dear
    assert cost.cheapest([cheap, sure, dear], deadline_days=1) is None
    money = sure.money.high
    assert cost.cheapest([sure], budget=money) is sure and cost.cheapest([sure], budget=0.99 * money) is None
    assert cost.within(cheap, deadline_days=10, certain=False) and not cost.within(cheap, deadline_days=10)


def test_without_prices_gpu_hours_decide():
    assert cost.cheapest([made(None, 4, gpus=64), made(None, 3, gpus=128)]).offer.gpus == 64


@pytest.mark.parametrize(
    ("offers", "starts"),
    [
        (("H100 SXM:64", "A100 80GB SXM:128"), "Fewest GPU-hours"),
        (("H100 SXM:64:2.5", "A100 80GB SXM:128"), "Fewest GPU-hours"),
        (("H100 SXM:64:2.5", "A100 80GB SXM:128:1.2"), "Cheapest"),
        (("H100 SXM:64",), "Cheapest"),
    ],
)
def test_nothing_is_called_cheapest_of_several_without_their_prices(offers, starts):
    assert next(cost.answer(cost.Config(offers=offers))).startswith(starts)


def test_gpus_that_do_not_divide_the_batch_are_no_lack_of_memory():
    said = " ".join(cost.answer(cost.Config(params=1e9, offers=("A10:100000",))))
    assert "in the plans that share the batch evenly" in said and "a batch of 100,000 allows both" in said
    assert "evenly" not in " ".join(cost.answer(cost.Config(params=1e9, offers=("A10:64",))))


def test_a_large_batch_of_a_small_model_is_cut_as_far_as_it_has_to_be():
    found = one("T4:1", params=3e8, batch=8192)
    assert found and found.memory_bytes < 14e9


def test_failures_that_never_let_a_step_finish_are_one_line():
    with pytest.raises(BadInput, match="nothing is ever finished: take fewer GPUs"):
        one(params=7e9, save_s=1e9)


def test_the_command_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cost", "--save-s", "1e9"])
    with pytest.raises(SystemExit) as e:
        cost.main()
    assert e.value.code == 2
    assert "nothing is ever finished" in (err := capsys.readouterr().err) and err.count("\n") == 1


GPT_3 = 174.6e9  # parameters: Brown et al. 2020, table 2.1
NARAYANAN_DAYS = 34.0  # on 1,024 A100: Narayanan et al. 2021, arXiv:2104.04473, section 5.1


def test_the_published_estimate_for_gpt_3_is_inside_the_band():
    config = cost.Config(
        params=GPT_3,
        tokens=300e9,
        batch=1536,
        offers=("A100 80GB SXM:1024",),
        layers=GPT3["layers"],
        hidden=GPT3["hidden"],
    )
    days = cost.bill(config, config.parsed()[0]).days
    for params in (1.7e11, 1.75e11, 1.8e11):
        near = cost.bill(replace(config, params=params), config.parsed()[0]).days
        assert near.value / params == pytest.approx(days.value / GPT_3, rel=0.02), "no jump between sizes"
    stated = 8 * 300e9 * 175e9 / (1024 * 140e12) / 86_400
    assert round(stated) == NARAYANAN_DAYS, "the paper's formula (4) and what it puts in"
    assert 0.5 * days.low < NARAYANAN_DAYS < 1.5 * days.high, "another table calibrated the card"


def test_tables_and_sentences_follow_the_bills(monkeypatch):
    said, alts = [], []
    monkeypatch.setattr(figures, "say", lambda text, folded="": said.append(text))
    monkeypatch.setattr(figures, "show", lambda fig, alt: alts.append(alt))
    slow_and_fast = ("A100 80GB SXM:64:1.0", "H100 SXM:256:3.0")
    config = cost.Config(offers=slow_and_fast, deadline_days=3.0)
    figures.offers_figure(config, predict(10_000, "money"))
    assert "256 x H100 SXM" in alts[0].split(".")[0] and "256 x H100 SXM takes" in said[0]
    assert "No other offer keeps the limits" in said[0], "the other one is late"
    assert "A100 80GB SXM: taken to reach" in said[0] and "H100 SXM: taken to reach" in said[0]
    hopeless = replace(config, deadline_days=0.01)
    figures.offers_figure(hopeless, predict(10_000, "money"))
    assert "no offer" in alts[1] and "takes" not in said[1]
    middle = one(slow_and_fast[0], params=7e9).days
    figures.offers_figure(replace(config, deadline_days=(middle.value + middle.high) / 2), predict(1, "money"))
    assert "By the middle of the band alone one would book 64 x A100 80GB SXM" in said[2]
    cheap = replace(config, deadline_days=100.0, offers=("A100 80GB SXM:64:0.5", slow_and_fast[1]))
    figures.offers_figure(cheap, predict(1, "money"))
    assert "bands do not touch" in said.pop(), "half of the money at most"
    dear = replace(cheap, offers=slow_and_fast)
    figures.offers_figure(dear, predict(1, "money"))
    assert "bands of 256 x H100 SXM overlap" in said.pop(), "cheaper in the middle is not cheaper for certain"
    assert "no plan fits" in cost.table([None], [cost.Offer("L4", 1)]).to_string()


def test_every_card_with_sources_makes_an_offer():
    usable = [s.gpu for s in hardware.specs() if s.memory_gb and s.link_gb_s and s.tflops("fp16")]
    assert {"H100 SXM", "A100 80GB SXM", "L4", "T4"} <= set(usable)
    for gpu in usable:
        b = one(f"{gpu}:8", params=1e8)
        assert b and 0 < b.days.value < math.inf and b.power_w > 0


def test_the_command_answers_first_and_knows_no_price(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cost"])
    cost.main()
    said = capsys.readouterr().out
    assert said.startswith("Fewest GPU-hours (which is cheapest takes") and "money" not in said and "erred by" in said
    monkeypatch.setattr("sys.argv", ["cost", "--offers", "H100"])
    with pytest.raises(SystemExit) as wrong:
        cost.main()
    assert wrong.value.code == 2 and capsys.readouterr().err.count("\n") == 1


def test_links_of_cards_without_peer_to_peer_are_told_as_a_best_case():
    of = lambda card: " ".join(cost.arithmetic(cost.Config(params=1e8, offers=(f"{card}:4",))))  # noqa: E731
    assert "no peer-to-peer" in of("RTX 4090") and "peer-to-peer" not in of("L40S")
