"""Verdicts of notebook 04, from made-up records."""

import pytest

from labs.claims import nb04
from labs.kit.record import Record, Records


def memory(*gigabytes):
    """amp_memory's peaks: (sequences, GB in FP32, GB in BF16)."""
    return Records(
        Record("amp_memory", "peak_bytes", "B", [1e9 * size], "modelled", {"format": f, "batch": n, "category": "all"})
        for n, *sizes in gigabytes
        for f, size in zip(("fp32", "bf16"), sizes, strict=True)
    )


@pytest.mark.parametrize(
    ("judge_", "peaks", "expected"),
    [
        (nb04.a30_autocast_saves_about_20_percent, [(1, 7, 7), (12, 25, 20)], "depends"),
        (nb04.a30_autocast_saves_about_20_percent, [(8, 18, 15), (12, 25, 20)], "holds"),
        (nb04.b10_bert_large_from_24_to_12_gb, [(1, 7, 7), (12, 25, 20)], "does not hold"),
        (nb04.b10_bert_large_from_24_to_12_gb, [(1, 7, 7), (12, 25, 12)], "holds"),
    ],
)
def test_peaks_decide(judge_, peaks, expected):
    assert judge_(memory(*peaks)).word == expected


def scaling(case, error, right=1e-4):
    signs = {"steps taken": 0.0, "distance moved, FP32 = 1": 0.5}
    return [
        Record("loss_scaling", metric, "1", samples, case={"case": name} | sign, config={"steps": 20})
        for name, value in (("right", right), (case, error))
        for metric, samples, sign in [
            ("weight_error", [value], {}),
            ("skipped", [1.0, 0.0], {}),
            *(("count", [v], {"sign": sign}) for sign, v in signs.items()),
        ]
    ]


@pytest.mark.parametrize(
    ("judge_", "case", "wrong"),
    [
        (nb04.b09_a_loop_without_zero_grad_is_complete, "no zero_grad", "does not hold"),
        (nb04.e20_four_calls_make_a_step, "clip before unscale_", "depends"),
    ],
)
def test_weights_decide(judge_, case, wrong):
    assert judge_(Records(scaling(case, 1.0))).word == wrong
    assert judge_(Records(scaling(case, 1e-4))).word == "holds"


def gradients(plain, scaled):
    case = {"rows": 8, "tokens": 512}
    return [
        Record("amp_training", "gradient_error", "1", [error], case=case | {"way": way})
        for way, error in (("FP16, no scaler", plain), ("FP16, scaler", scaled))
    ]


def test_a_scaler_must_bring_gradients_nearer_and_survive_an_overflow():
    judged = nb04.e19_gradscaler_keeps_fp16_stable
    fine, broken = (scaling("no zero_grad", 1.0, right=r) for r in (1e-4, 1.0))
    assert judged(Records(gradients(0.07, 0.001) + fine)).word == "holds"
    assert judged(Records(gradients(0.07, 0.001) + broken)).word == "depends"
    assert judged(Records(gradients(0.001, 0.07) + broken)).word == "does not hold"


@pytest.mark.parametrize(
    ("device", "factor", "expected"),
    [("cpu", 10, "depends"), ("cuda", 10, "does not hold"), ("cuda", 0.5, "holds")],
)
def test_a_cpu_refutes_nothing_about_gpus(device, factor, expected):
    noise = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)
    records = Records(
        Record(
            "mixed_precision",
            "step_s",
            "s",
            [k * n for n in noise],
            case={"model": "mlp", "precision": f},
            layout={"device": device},
        )
        for f, k in (("fp32", 1.0), ("fp16", factor))
    )
    assert nb04.e16_fp16_speeds_up_training(records).word == expected
