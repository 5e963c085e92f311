"""Sentences of notebook 04's figures and tables: each from records that choose it, and from others that do not."""

from __future__ import annotations

import pytest
import torch

from labs.chapters.nb04 import figures, published_speed
from labs.chapters.nb04 import figures_memory as memory_figures
from labs.kit.measure import Estimate


def about(value, spread=0.01, n=8):
    return Estimate(value, value - spread, value + spread, n, "x")


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


def test_the_limit_in_the_title_is_rounded_up():
    assert figures._limit([about(0.0, 0.0035), about(0.0, 0.001)]) == 0.4
    assert figures._limit([about(0.0, 0.001)]) == 0.1
