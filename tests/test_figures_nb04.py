"""Sentences of notebook 04's figures and tables: each from records that choose it, and from others that do not."""

from __future__ import annotations

import pytest
import torch

from labs import amp_training
from labs.chapters.nb04 import figures
from labs.chapters.nb04 import figures_memory as memory_figures
from labs.kit.check import predict
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records
from labs.parts.precision import published_speed

GUESS = predict(5.0, "points", unit="points")


def about(value, spread=0.01, n=8):
    return Estimate(value, value - spread, value + spread, n, "x")


def test_the_title_of_the_speeds_counts_what_is_shown():
    found = {("cnn", "bf16"): about(2.0), ("cnn", "fp16"): about(0.1), ("mlp", "bf16"): about(1.0)}
    assert figures.speed_message(found) == (
        "Of 3 steps in other formats 1 are faster than FP32, 1 slower, 1 cannot be told"
    )
    assert "0 are faster than FP32, 1 slower" in figures.speed_message({("cnn", "fp16"): about(0.1)})


@pytest.mark.parametrize(
    ("fused", "eager", "words"),
    [
        (about(0.6), about(1.4), "fused attention gains less"),
        (about(1.4), about(0.6), "fused attention gains more"),
        (about(1.0, 0.5), about(1.2, 0.5), "cannot be told from this run"),
    ],
)
def test_the_two_kinds_of_attention_decide_what_is_said_of_them(fused, eager, words):
    found = {("char_gpt", "bf16"): fused, (figures.EAGER_GPT, "bf16"): eager}
    assert words in figures.attention_text(found)
    assert figures.attention_text({("char_gpt", "bf16"): fused}) == ""


@pytest.mark.parametrize(
    ("plain", "cast", "words"),
    [
        ((0.5, 2.0), (0.5, 2.0), "from side 64 on, with or without"),
        ((2.0, 2.0), (0.5, 0.9), "with autocast's casts at no side"),
        ((2.0, 2.0), (0.5, 2.0), "from side 32 on, with autocast's casts from side 64 on"),
        ((0.5, 0.6), (0.5, 0.6), "slower than FP32 at every side tried"),
        ((0.5, 1.0), (0.5, 0.6), "not shown to overtake FP32 at every side tried"),
    ],
)
def test_the_title_of_the_ladder(plain, cast, words):
    found = {
        ("bf16", c): dict(zip((32, 64), map(about, ratios), strict=True))
        for c, ratios in ((False, plain), (True, cast))
    }
    assert words in figures.ladder_message(found)
    assert "not measured" in figures.ladder_message({})


def test_what_is_said_of_stored_weights():
    exact = {"FP32": (1.46, 0.0), figures.ROUNDED: (2.08, 0.77)}
    text = figures.stored_text(exact | {"BF16": (2.09, 0.78)})
    assert "the loss is 0.63 nats higher" in text and "Rounding the parameters alone costs 0.62." in text
    assert "next to nothing" in figures.stored_text(exact | {"BF16": (2.09, 0.78), figures.ROUNDED: (1.46, 0.0)})
    assert "ends about where" in figures.stored_text(exact | {"BF16": (1.47, 0.78)})
    assert "takes little away" in figures.stored_text(exact | {"BF16": (1.47, 0.01)})


def trained(bf16=0.0, plain=0.5, n=8):
    found = []
    for name, lost in (("fp32", 0.0), ("bf16", bf16), ("fp16", 0.0), ("fp16, no scaling", plain)):
        samples = [0.8 + 0.01 * i - lost + (0.001 * (-1) ** i if name != "fp32" else 0) for i in range(n)]
        case = {"model": "perceptron", "precision": name, "loss_exponent": -14}
        found.append(Record("amp_training", "test_accuracy", "1", samples, case=case))
    return Records(found)


def test_the_accuracy_figure_says_what_its_intervals_say(capsys):
    figures.accuracy(trained(), GUESS)
    assert "no difference from FP32 beyond 0.1 points" in capsys.readouterr().out
    message = figures._accuracy_message(amp_training.against_fp32(trained()))
    assert message == "BF16 and scaled FP16: no difference from FP32 beyond 0.1 points"
    assert "can be told from FP32" in figures._accuracy_message(amp_training.against_fp32(trained(bf16=0.1)))
    assert "Too few seeds" in figures._accuracy_message(amp_training.against_fp32(trained(bf16=0.1, n=3)))
    few = figures._accuracy_text(trained(), amp_training.against_fp32(trained()), -14, GUESS)
    assert "one run could not tell" in few and "loses 50" in few


def test_defaults_are_those_of_the_scaler(capsys):
    memory_figures.scaler_defaults()
    scaler = torch.amp.GradScaler("cpu")
    assert scaler.get_scale() == 65536 and scaler.get_growth_interval() == 2000
    assert scaler.get_backoff_factor() == 0.5 and scaler.get_growth_factor() == 2.0


def test_published_ratios_are_those_of_the_same_gpu():
    rows = {(row["GPU"], row["in"]): row for row in published_speed.table()}
    assert rows["A100", "TF32"]["over FP32"] == "2.21 x" and rows["A100", "TF32"]["over TF32"] == ""
    lowered = rows["A100", "parameters in BF16, too; rest as before"]
    assert (lowered["over FP32"], lowered["over TF32"]) == ("3.63 x", "1.60 x")
    assert rows["A100 80 GB", "autocast"]["over TF32"] == "2.63 x"  # as its source says
    assert rows["V100 16 GB", "autocast"]["over FP32"] == "3.27 x"  # the source has 3.26, from unrounded rates


def test_what_fp16_cannot_hold_has_two_ends(capsys):
    shares = {"below_subnormal_share": (0.2, 0.0), "below_normal_share": (0.9, 0.0), "above_largest_share": (0.0, 0.3)}
    case, found = {"model": "m", "of": "activations"}, []
    for k, scale in enumerate((1.0, 65536.0)):
        one = {**case, "scale": scale, "precision": "fp32"}
        found += [
            Record("amp_training", m, "1", (v[k],), case=one) for m, v in {**shares, "zero_share": (0, 0)}.items()
        ]
        found.append(
            Record(
                "amp_training", "gradient_exponent_count", "count", (1.0, 2.0), case={**one, "exponents": [-20, -19]}
            )
        )
        for metric in ("zero_share", "expected_zero_share"):
            found.append(Record("amp_training", metric, "1", (0.1,), case={**one, "precision": "fp16"}))
    figures.gradients(Records(found), "m")
    assert "cannot hold 20.0% of these gradients; times 65,536, 30.0%" in capsys.readouterr().out


def test_steps_that_were_too_slow_are_named():
    case = {"model": "cnn", "precision": "fp16"}
    left = Records([Record("mixed_precision", "skipped_step_s", "s", (9.0,), "modelled", case)])
    assert figures.left_out_text(left).endswith("too long: CNN, FP16.") and figures.left_out_text(Records([])) == ""


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (3e-5, "less than 1 %"),
        (0.97, "about as far"),
        (1.7, "1.7 times as far"),
    ],
)
def test_how_far_parameters_move(moved, words):
    assert words in memory_figures.far(moved)


def test_the_limit_in_the_title_is_rounded_up():
    assert figures._limit([about(0.0, 0.0035), about(0.0, 0.001)]) == 0.4
    assert figures._limit([about(0.0, 0.001)]) == 0.1
