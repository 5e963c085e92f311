"""The strategy tool: its advice on known cases, its refusals, its command line."""

from __future__ import annotations

import math

import pytest

from labs.common.cost_model import published
from labs.kit.errors import BadInput
from labs.strategy import Config, advise, answer, main


def said(**values) -> str:
    return " ".join(answer(advise(Config(**values))))


def test_a_time_comes_from_one_model_with_the_band_of_its_regime():
    config = Config(params=7e9, gpus=8)
    advice = advise(config)
    band = published.bands()["NVLink"]
    assert advice.estimate.band == band and advice.estimate.step == advice.choice.step
    assert str(advice.estimate.seconds) in said(params=7e9, gpus=8) and str(band) in said(params=7e9, gpus=8)
    assert advise(Config(params=7e9, gpus=64)).estimate.band.regime == "fast network"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gpu": "L4", "params": 1e9}, "no published run says"),
        ({"gpu": "L4", "params": 1e9, "tflops": 50.0}, "one node with PCIe"),
        ({"gpus": 16, "params": 1e9, "network_gb_s": 1.0}, "per GPU between nodes"),
    ],
)
def test_where_published_runs_support_no_band_there_is_a_plan_but_no_time(values, reason):
    advice = advise(Config(**values))
    assert advice.choice and advice.estimate.seconds is None and reason in said(**values)


def test_ddp_holds_gradients_twice_and_the_answer_says_what_the_view_saves():
    text = said(params=1e9, gpus=4, gpu="H100 SXM")
    assert "Use DDP" in text and "gradient_as_bucket_view=True would save 4 GB" in text
    assert "bucket_view" not in said(params=7e9), "FSDP2"


def test_nothing_fits_and_the_answer_says_what_would():
    advice = advise(Config(params=7e9, gpus=2, gpu="L4"))
    text = " ".join(answer(advice))
    assert advice.choice is None and advice.estimate is None and "Time" not in text
    assert f"{advice.enough_gpus} of these GPUs are enough" in text and "LoRA" in text and "host memory" in text
    assert advise(Config(params=7e9, gpus=advice.enough_gpus, gpu="L4")).choice


def test_gpus_that_cannot_share_the_batch_are_named():
    assert "a batch of 40 allows DDP" in said(params=1e8, batch=33) and "evenly" not in said(params=1e8, batch=32)
    assert "peer-to-peer" in said(params=1e8, gpu="RTX 4090") and "peer-to-peer" not in said(params=1e8, gpu="L4")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"params": 0}, "params must be at least 1"),
        ({"params": math.nan}, "params must be"),
        ({"gpus": 5000}, "at most 4096"),
        ({"network_gb_s": 0.0}, "network_gb_s must be more than 0"),
        ({"gpu": "A100"}, "did you mean 'A10'"),
        ({"gpu": "RTX 3090"}, "no link"),
    ],
)
def test_bad_values_are_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        Config(**values)
    assert "\n" not in str(e.value)


def test_the_command_answers_first_and_names_its_sources(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["strategy", "--params", "7e9"])
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("Use FSDP2") and "naive split" in printed and "datasheet" in printed
    monkeypatch.setattr("sys.argv", ["strategy", "--parms", "1e9"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and "did you mean '--params'" in capsys.readouterr().err
