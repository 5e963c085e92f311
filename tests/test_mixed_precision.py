"""What the lab counts agrees with hand counts, and bad input is one line."""

import pytest
import torch
from torch import nn

from labs import mixed_precision
from labs.common import models
from labs.common.memory.activation_bytes import activation_bytes
from labs.common.models import Workload
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.mixed_precision import amp_effects, amp_report, matmul_ladder

mse = nn.functional.mse_loss


# -- bytes that are saved


@pytest.mark.parametrize("name", ["mlp", "cnn", "char_gpt"])
def test_in_fp32_the_count_is_that_of_activation_bytes(name):
    workload = models.make(name)
    x, y = workload.make_batch(4)
    assert amp_effects.saved_bytes(workload, x, y, "fp32") == (activation_bytes(workload, x, y), 0)


@pytest.mark.parametrize("rows", [1, 64])
def test_saved_bytes_by_hand(rows):
    """Per row 1024 inputs, 512 and 256 outputs of ReLU in 2 B; log-probabilities and loss in 4 B, a label in 8 B.

    Backward needs the copies of the second and the third weight: the first layer's input needs no gradient.
    """
    workload = models.make("mlp")
    total, copies = amp_effects.saved_bytes(workload, *workload.make_batch(rows), "bf16")
    assert copies == 2 * (512 * 256 + 256 * 10)
    assert total - copies == rows * (2 * (1024 + 512 + 256) + 4 * 10 + 8) + 4


def test_weight_copies_do_not_grow_with_the_batch():
    workload = models.make("cnn")
    found = [amp_effects.saved_bytes(workload, *workload.make_batch(rows), "fp16") for rows in (2, 8)]
    assert found[0][1] == found[1][1] > 0 and found[0][0] < found[1][0]


# -- reading records


def step(samples, **case):
    return Record("mixed_precision", "step_s", "s", samples, case=case)


def test_speed_ups_are_paired():
    records = Records(
        [
            step((1.0, 10.0), model="mlp", precision="fp32"),
            step((0.5, 5.0), model="mlp", precision="bf16"),
            step((2.0, 20.0), model="mlp", precision="fp16"),
            step((9.0,), part="matmul", precision="fp32"),
        ]
    )
    found = amp_report.speed_ups(records)
    assert {key: e.value for key, e in found.items()} == {("mlp", "bf16"): 2.0, ("mlp", "fp16"): 0.5}


def test_ladder_and_crossing():
    def rung(side, bf16):
        case = {"part": "matmul", "side": side, "casts": False}
        return [step((1.0, 1.0), precision="fp32", **case), step(bf16, precision="bf16", **case)]

    found = matmul_ladder.ladder(Records(rung(32, (2.0, 2.0)) + rung(64, (0.5, 0.5)) + rung(128, (0.2, 0.4))), "bf16")
    assert [found[n].value for n in (32, 64)] == [0.5, 2.0] and matmul_ladder.crossing(found) == 64
    assert matmul_ladder.crossing({32: found[64], 64: found[32]}) is None  # faster only while small
    assert matmul_ladder.crossing({}) is None


# -- the lab


@pytest.fixture(scope="module")
def run():
    return launch("mixed_precision", nproc=1, smoke=True)


def test_every_model_has_every_format(run):
    formats = {"fp32", "bf16", "fp16"}
    for metric in ("step_s", "saved_bytes", "weight_copy_bytes"):
        found = [r for r in run.where(metric) if "model" in r.case]
        assert {(r.case["model"], r.case["precision"]) for r in found} == {
            (m, f) for m in ("cnn", "char_gpt", mixed_precision.EAGER_GPT, "mlp") for f in formats
        }
    products = run.where("step_s", part="matmul")
    assert {(r.case["side"], r.case["precision"], r.case["casts"]) for r in products} == {
        (n, f, c) for n in (32, 64) for f in formats for c in (False, True) if not (c and f == "fp32")
    }
    assert set(matmul_ladder.ladder(run, "bf16")) == {32, 64}
    assert len(amp_report.speed_ups(run)) == 8


def test_the_answer_has_every_model_and_turns_with_the_records(run):
    told = " ".join(mixed_precision.answer(run))
    assert "char_gpt_eager" in told and "% more bytes for backward" in told and "tried up to 64" in told
    product = {"part": "matmul", "side": 64}
    fast = [
        Record("m", "step_s", "s", samples, case={**product, "precision": f, "casts": f != "fp32"})
        for f, samples in (("fp32", (4.0,) * 8), ("bf16", (1.0,) * 8))
    ]
    assert "faster in BF16 from side 64 on" in " ".join(mixed_precision.answer(Records(fast)))
    slow = Records([fast[0], Record("m", "step_s", "s", (9.0,) * 8, case=fast[1].case)])
    assert "faster in BF16 at no size" in " ".join(mixed_precision.answer(slow))


def test_attention_written_out_is_the_same_attention():
    x = torch.randint(80, (2, 64))
    outputs = [models.make(name).module(x) for name in ("char_gpt", mixed_precision.EAGER_GPT)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_autocast_keeps_fewer_bytes_only_where_activations_rule(run):
    """At 2 rows the perceptron's weight copies are more than its activations save."""
    shares = amp_report.saved_shares(run)
    assert shares["mlp", "bf16"] < 0 < shares["char_gpt", "bf16"] < 0.5
    assert {shares[m, "fp32"] for m in ("mlp", "cnn")} == {0.0}


def test_what_is_too_slow_is_left_out_and_recorded():
    run = launch("mixed_precision", nproc=1, smoke=True, models=("mlp",), sides=(64, 32, 4096), budget_s=1e-9)
    assert {r.case["precision"] for r in run.where("step_s", model="mlp")} == {"fp32"}
    left_out = run.where("skipped_step_s")
    assert [r.case["precision"] for r in left_out if "model" in r.case] == ["bf16", "fp16"]
    assert {r.case["side"] for r in run.where("step_s", part="matmul")} == {32}  # a smoke run takes the smallest two
    assert {r.case["side"] for r in left_out if "side" in r.case} == {64}
    assert all(r.kind == "modelled" and "budget" in r.case["why"] for r in left_out)


def test_other_ranks_wait():
    run = launch("mixed_precision", nproc=2, smoke=True, oversubscribe=True, models=("mlp",), formats=("bf16",))
    assert {r.case["precision"] for r in run.where("step_s")} == {"fp32", "bf16"}
    assert {r.layout["rank"] for r in run} == {0}


def halves():
    return Workload(nn.Linear(4, 4).bfloat16(), lambda n: (torch.randn(n, 4).bfloat16(), torch.randn(n, 4)), mse)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"models": (f"{__name__}:halves",)}, "has bfloat16 parameters: give it float32 ones"),
        ({"formats": ("fp8",)}, "formats may hold fp32, tf32, bf16, fp16, not fp8"),
        ({"formats": ("tf32",)}, "this cpu does not support tf32: take formats of fp32, bf16, fp16"),
        ({"sides": (64, 0)}, "sides must be at least 1"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("mixed_precision", nproc=1, device="cpu", **values)
    assert "\n" not in str(e.value)
