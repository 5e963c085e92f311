"""What the lab counts agrees with hand counts, its advice follows from the numbers, and bad input is one line."""

import os
import subprocess

import pytest
import torch
from processes import PYTHON, new_environment
from torch import nn

from labs import mixed_precision
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records
from labs.parts import models
from labs.parts.memory.activation_bytes import activation_bytes
from labs.parts.models import Workload
from labs.parts.precision import amp_effects, amp_report, matmul_ladder
from labs.parts.precision.amp_effects import Agreement, agreement
from labs.parts.precision.amp_report import Effect, advice

CPU = torch.device("cpu")
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


# -- agreement with FP32


def test_agreement_by_hand():
    reference = (2.0, torch.tensor([3.0, 4.0, 0.0, 0.0, 1e-9]))
    found = agreement((2.1, torch.tensor([3.0, 4.5, 0.0, 1e-3, 0.0])), reference)
    assert found.loss_error == pytest.approx(0.05) and found.gradient_error == pytest.approx(0.1, rel=1e-3)
    assert found.underflow_share == pytest.approx(1 / 3) and found.overflow_share == 0 and found.finite


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_an_overflow_is_not_finite(wrong):
    reference = (2.0, torch.tensor([3.0, 4.0]))
    found = agreement((2.0, torch.tensor([3.0, wrong])), reference)
    assert found.overflow_share == 0.5 and not found.finite
    assert not agreement((wrong, torch.tensor([3.0, 4.0])), reference).finite


@pytest.mark.parametrize("reference", [(1.0, [0.0, 0.0]), (float("nan"), [1.0, 1.0]), (1.0, [float("inf"), 1.0])])
def test_a_reference_that_is_none_is_refused(reference):
    with pytest.raises(BadInput, match="nothing to compare"):
        agreement((1.0, torch.ones(2)), (reference[0], torch.tensor(reference[1])))


def linear(weight=1.0, size=1.0):
    """One weight; the gradient is the mean of the inputs, each of `size`."""
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, weight)
    return Workload(module, lambda n: (torch.full((n, 1), size), torch.zeros(n)), lambda o, y: o.mean())


def test_inputs_that_fp16_flushes_to_zero_are_seen():
    workload = linear(size=1e-9)
    batch = workload.make_batch(4)
    reference = amp_effects.gradient(workload, *batch, "fp32")
    assert reference[1].item() == pytest.approx(1e-9)
    lost = agreement(amp_effects.gradient(workload, *batch, "fp16, no scaling"), reference)
    assert lost.underflow_share == 1 and lost.gradient_error == 1
    # The input itself is below FP16's smallest number, which no scaling of the loss helps; BF16 holds it.
    # This loss is FP16 itself, as few are: 65536 overflows at once, and the scale must fall first.
    tried = list(amp_effects.fp16_agreements(workload, *batch, reference))
    assert not tried[0][1].finite and tried[-1][1].finite and tried[-1][1].underflow_share == 1
    assert agreement(amp_effects.gradient(workload, *batch, "bf16"), reference).gradient_error < 2**-8


def small_gradient():
    """Two layers whose product is tiny behind the first: FP16 loses the first one's gradient without scaling."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1e-4)
    return Workload(module, lambda n: (torch.randn(n, 8).abs(), torch.ones(n)), lambda o, y: (o.float() * 1e-4).mean())


def test_underflow_in_backward_is_seen_and_scaling_removes_it():
    torch.manual_seed(0)
    workload = small_gradient()
    batch = workload.make_batch(4)
    reference = amp_effects.gradient(workload, *batch, "fp32")
    plain = agreement(amp_effects.gradient(workload, *batch, "fp16, no scaling"), reference)
    ((_, scaled),) = amp_effects.fp16_agreements(workload, *batch, reference)
    assert plain.underflow_share > 0.5 and scaled.underflow_share == 0 and scaled.gradient_error < 0.01


def test_the_scale_falls_until_nothing_overflows():
    workload = linear(size=100.0)
    batch = workload.make_batch(4)
    reference = amp_effects.gradient(workload, *batch, "fp32")
    tried = list(amp_effects.fp16_agreements(workload, *batch, reference))
    assert [scale for scale, _ in tried] == [65536.0, 4096.0, 256.0]
    assert [a.finite for _, a in tried] == [False, False, True] and tried[0][1].overflow_share == 1


def test_a_forward_overflow_is_cured_by_no_scale():
    workload = linear(weight=1e5)
    batch = workload.make_batch(4)
    tried = list(amp_effects.fp16_agreements(workload, *batch, amp_effects.gradient(workload, *batch, "fp32")))
    assert len(tried) == len(amp_effects.SCALES) and not any(a.finite for _, a in tried)


def test_dropout_is_off_while_gradients_are_compared_and_on_again_after():
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2))
    workload = Workload(module, lambda n: (torch.randn(n, 4), torch.randn(n, 2)), mse)
    batch = workload.make_batch(8)
    first, second = (amp_effects.gradient(workload, *batch, "fp32")[1] for _ in range(2))
    assert torch.equal(first, second) and module[1].training


# -- advice


def effect(speed=1.0, saved=0.0, error=0.001, underflow=0.0, spread=0.01):
    return Effect(Estimate(speed, speed - spread, speed + spread, 8, "x"), saved, error, underflow)


def test_a_gain_of_both():
    said = advice({"bf16": effect(2.0, 0.4)}, noise=0.5)
    assert said.startswith("BF16 is safe: its gradient is off by 0.1 %, batches differ by 50 %. AMP gains speed and")
    assert "BF16 runs at 2.00 x [1.99, 2.01] the speed of FP32; for backward BF16 keeps 40 % less" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("speed", "saved", "words"),
    [
        (1.0, 0.0, "AMP gains nothing here"),
        (0.5, -0.2, "AMP gains nothing here"),
        (2.0, -0.2, "AMP gains speed:"),
        (0.5, 0.4, "AMP pays for memory with time"),
        (1.0, 0.4, "AMP gains memory only"),
    ],
)
def test_gains_follow_from_speed_and_bytes(speed, saved, words):
    assert words in advice({"bf16": effect(speed, saved)}, 0.5)


def test_a_speed_that_the_interval_does_not_bear_out_is_no_gain():
    assert "AMP gains nothing here" in advice({"bf16": effect(2.0, spread=1.5)}, 0.5)


def test_fp16_needs_scaling_where_elements_vanish_or_the_gradient_is_worse():
    scaled, noise = effect(), 0.5
    plain = amp_report.NO_SCALING
    needs = [{plain: effect(underflow=0.3)}, {plain: effect(error=0.2)}, {plain: effect(error=None)}]
    for more in needs:
        assert "FP16 needs scaling" in advice({"fp16": scaled, **more}, noise)
    assert "30 % of the gradient's elements become 0 without it, 0 % with it" in advice(
        {"fp16": scaled, plain: effect(underflow=0.3)}, noise
    )
    assert "no need of scaling yet" in advice({"fp16": scaled, plain: effect(underflow=1e-4)}, noise)


def test_errors_as_large_as_the_difference_of_batches_are_not_safe():
    assert "BF16 is coarse here" in advice({"bf16": effect(error=0.06)}, noise=0.5)
    assert "off by 4 %, batches differ by 133 %" in advice({"bf16": effect(error=0.04)}, noise=1.33)
    assert "BF16 is not safe" in advice({"bf16": effect(error=None)}, noise=0.5)


def test_what_overflows_at_every_scale_is_no_gain():
    said = advice({"fp16": effect(5.0, 0.5, None), amp_report.NO_SCALING: effect(error=None)}, 0.5)
    assert "FP16 overflows whatever the scale" in said and "gains" not in said


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
    assert amp_report.speed_ups(records, "bf16")["mlp", "fp32"].value == 0.5


def test_ladder_and_crossing():
    def rung(side, bf16):
        case = {"part": "matmul", "side": side, "casts": False}
        return [step((1.0, 1.0), precision="fp32", **case), step(bf16, precision="bf16", **case)]

    found = matmul_ladder.ladder(Records(rung(32, (2.0, 2.0)) + rung(64, (0.5, 0.5)) + rung(128, (0.2, 0.4))), "bf16")
    assert [found[n].value for n in (32, 64)] == [0.5, 2.0] and matmul_ladder.crossing(found) == 64
    assert matmul_ladder.crossing({32: found[64], 64: found[32]}) is None  # faster only while small
    assert matmul_ladder.crossing({}) is None


def test_predict_by_hand():
    assert mixed_precision.predict(0.5, 2.0) == pytest.approx(4 / 3)
    assert mixed_precision.predict(1.0, 4.0) == pytest.approx(4.0)
    assert mixed_precision.predict(0.5, 2.0, cast_share=0.5) == pytest.approx(0.8)


def report_records(tf32=None):
    case = {"model": "m", "batch": 4}
    times = {"fp32": (4.0, 4.0), "bf16": (2.0, 2.0)} | ({"tf32": tf32} if tf32 else {})
    found = [step(samples, precision=f, **case) for f, samples in times.items()]
    for f in times:
        found.append(Record("m", "saved_bytes", "B", (50.0 if f == "bf16" else 100.0,), case={"precision": f, **case}))
        if f != "fp32":
            for metric in ("underflow_share", "gradient_error"):
                found.append(Record("m", metric, "1", (0.001,), case={"precision": f, "scale": 1.0, **case}))
    return Records([*found, Record("m", "batch_noise", "1", (0.5,), case=case)])


def test_the_baseline_is_tf32_where_that_is_faster():
    plain = amp_report.report(report_records())
    assert plain["baseline"] == "fp32" and plain["effects"]["bf16"].speed_up.value == 2.0
    assert plain["effects"]["bf16"].saved_share == 0.5
    fast = amp_report.report(report_records(tf32=(2.0, 2.0)))
    assert fast["baseline"] == "tf32" and fast["effects"]["bf16"].speed_up.value == 1.0
    assert "AMP gains memory only: BF16 runs at 1" in fast["advice"] and "of TF32" in fast["advice"]
    assert amp_report.report(report_records(tf32=(5.0, 5.0)))["baseline"] == "fp32"


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


# -- a model of one's own


def test_your_own_model_gets_a_report():
    run = launch("mixed_precision", nproc=1, smoke=True, batch_size=4, model=f"{__name__}:small_gradient")
    found = amp_report.report(run)
    assert set(found["effects"]) == {"bf16", "fp16", amp_report.NO_SCALING}
    assert found["effects"][amp_report.NO_SCALING].underflow_share > 0.5
    assert found["effects"]["fp16"].underflow_share == 0
    assert "FP16 needs scaling" in found["advice"] and list(mixed_precision.answer(run)) == [found["advice"]]
    assert not run.where("step_s", part="matmul")


def test_left_out_formats_are_named_in_the_report():
    run = launch("mixed_precision", nproc=1, smoke=True, model="mlp", budget_s=1e-9)
    assert "No 16-bit format was compared with FP32." in amp_report.report(run)["advice"]
    assert "FP16 was left out" in amp_report.report(run)["advice"]


class Counter(nn.Module):
    """A parameter, but an integer one."""

    def __init__(self):
        super().__init__()
        self.count = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        """x + 0."""
        return x + self.count


def integers():
    return Workload(Counter(), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), mse)


def halves():
    return Workload(nn.Linear(4, 4).bfloat16(), lambda n: (torch.randn(n, 4).bfloat16(), torch.randn(n, 4)), mse)


def not_a_number():
    return Workload(
        nn.Linear(4, 4), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), lambda o, y: mse(o, y) * torch.nan
    )


def not_a_number_later():
    """Only from three rows on: two go through when the model is built."""
    loss = lambda o, y: mse(o, y) * (torch.nan if len(y) > 2 else 1.0)  # noqa: E731
    return Workload(nn.Linear(4, 4), lambda n: (torch.randn(n, 4), torch.randn(n, 4)), loss)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": f"{__name__}:integers"}, "no parameter that requires a gradient"),
        ({"model": f"{__name__}:halves"}, "has bfloat16 parameters: give it float32 ones"),
        ({"model": f"{__name__}:not_a_number"}, "its first loss is nan"),
        ({"model": f"{__name__}:not_a_number_later", "batch_size": 4}, "the loss in FP32 is nan"),
        ({"models": ("resnet",)}, "there is no model 'resnet'"),
        ({"models": ()}, "models must name some of"),
        ({"formats": ("fp8",)}, "formats may hold fp32, tf32, bf16, fp16, not fp8"),
        ({"formats": ("tf32",)}, "this cpu does not support tf32: take formats of fp32, bf16, fp16"),
        ({"rounds": 1}, "rounds must be at least 2, not 1"),
        ({"batch_size": -1}, "batch_size must be at least 1"),
        ({"sides": (64, 0)}, "sides must be at least 1"),
        ({"budget_s": 0.0}, "budget_s must be positive"),
        ({"least_s": float("nan")}, "least_s must be positive"),
    ],
)
def test_bad_input_is_one_line(values, words):
    with pytest.raises(BadInput, match=words) as e:
        launch("mixed_precision", nproc=1, device="cpu", **values)
    assert "\n" not in str(e.value)


@pytest.mark.long  # test_timing has the same
def test_from_a_shell_bad_input_is_one_line_and_exit_code_2():
    command = [*PYTHON, "-m", "labs.mixed_precision", "--nproc", "1", "--model", f"{__name__}:integers"]
    environment = new_environment()
    environment["PYTHONPATH"] += os.pathsep + os.path.dirname(__file__)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_agreement_is_exact_with_itself():
    assert agreement((1.0, torch.ones(3)), (1.0, torch.ones(3))) == Agreement(0.0, 0.0, 0.0, 0.0)
