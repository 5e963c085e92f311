"""The probe: its records and what follows from them, bad input, and what its command says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from labs import hardware_probe
from labs.common import models
from labs.common.timing import probe_report
from labs.common.timing.probing import training_step
from labs.common.timing.roofline import operators, training_step_work
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.rank import Rank
from labs.kit.record import Record, Records, load

RECORDED = load(Path(__file__).parent / "records" / "00.jsonl")
H200 = load(Path(__file__).parents[1] / "records" / "nvidia-h200-2026-11" / "hardware_probe.jsonl")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run():
    return launch("hardware_probe", nproc=2, oversubscribe=True, device="cpu", smoke=True, array_mib=4)


def test_records_cover_every_part(run):
    metrics = {r.metric for r in run}
    assert metrics >= {"matmul_flop_s", "memory_b_s", "operator_s", "tiny_pass_s", "model_flop_s", "busbw_b_s"}
    assert metrics >= {"matmul_relative_error", "all_reduce_error", "operator_flop", "operator_bytes"}
    assert all(len(r.samples) == 3 for r in run if r.kind == "measured" and "error" not in r.metric)
    assert len(run.where("matmul_relative_error")) == 2  # every rank answers for its own device
    assert {"mlp, 64 rows", "mlp, 1 row"} <= {p.name for p in hardware_probe.passes(run)}


def test_busbw_of_two_ranks_is_size_over_time(run):
    for r in run.where("all_reduce_s"):
        busbw = run.one("busbw_b_s", bytes=r.case["bytes"])
        assert busbw.samples == pytest.approx([r.case["bytes"] / s for s in r.samples])


def test_one_rank_has_no_all_reduce():
    alone = launch("hardware_probe", nproc=1, device="cpu", smoke=True, parts=("all_reduce", "copies"))
    assert {r.metric for r in alone} == {"matmul_relative_error", "all_reduce_error"}


def test_a_record_of_the_first_edition_of_the_probe_has_the_same_metrics_and_cases():
    """The committed H200 record and a new one are read by the same lines of the notebook."""
    for metric in ("matmul_flop_s", "memory_b_s", "operator_s", "model_flop_s", "model_flop", "model_bytes"):
        old, new = ({frozenset(r.case) for r in records.where(metric)} for records in (H200, RECORDED))
        assert old == new, metric


def test_copies_of_a_gpu_have_the_cases_of_the_recorded_ones(monkeypatch):
    """Without a GPU: tensors on the host in place of the device's, and a clock that says 1 ms."""
    ones, empty = torch.ones, torch.empty
    monkeypatch.setattr(torch, "ones", lambda shape, **_: ones(shape))
    monkeypatch.setattr(torch, "empty", lambda shape, **_: empty(shape))

    def timed(steps, config, device):
        for step in steps.values():
            step()
        return {name: [1e-3] for name in steps}

    monkeypatch.setattr(hardware_probe, "seconds_of", timed)
    rank = Rank(0, 1, 0, 1, torch.device("cuda"), "gloo", ())
    found = list(hardware_probe.copies(hardware_probe.Config(), rank))
    cases = [sorted(r.case.items()) for r in H200.where("host_device_b_s")]
    assert sorted(sorted(r.case.items()) for r in found) == sorted(cases)
    assert {r.value for r in found} == {2**26 / 1e-3}


def test_tf32_is_off_again_when_the_products_are_timed():
    rank = Rank(0, 1, 0, 1, CPU, "gloo", ())
    list(hardware_probe.matmul(hardware_probe.Config(smoke=True, matmul_sizes=(8,), dtypes=("fp32", "bf16")), rank))
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    torch.set_float32_matmul_precision("highest")  # other tests read the switch by its old name


# -- the bound of a pass


def made(metric, samples, unit="", **case):
    return Record("hardware_probe", metric, unit, tuple(samples), case=case)


def test_the_bound_is_a_sum_over_operators_and_launches_are_the_slope():
    """Two operators, one limited by arithmetic (3 s) and one by memory (4 s): 7 s, not max(4, 6) of the whole pass."""
    case = {"model": "mlp", "batch_size": 64}
    records = Records(
        [
            made("matmul_flop_s", [10.0], dtype="fp32", side=8),
            made("memory_b_s", [5.0], op="copy"),
            *[made("tiny_pass_s", [2.0 + 0.25 * n], layers=n, operators=n) for n in (1, 2, 4)],
            made("model_flop_s", [4.0], **case),
            made("model_flop", [40.0], **case),
            made("operator_flop", [30.0, 10.0], **case, operator="mm"),
            made("operator_bytes", [10.0, 20.0], **case, operator="mm"),
        ]
    )
    (found,) = hardware_probe.passes(records)
    assert (found.measured, found.arithmetic, found.memory) == (10.0, 3.0, 4.0)
    assert found.launches == pytest.approx(2 * 0.25) and found.limit == "memory"


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn_batchnorm"])
def test_the_device_and_meta_agree_where_no_kernel_is_fused(name):
    here = training_step_work(models.build(name), 4, "cpu")
    assert here == training_step_work(models.build(name), 4)


def test_fused_attention_is_one_operator_on_the_device_and_many_on_meta():
    """GPT block, one row of 128 tokens: 32 operators and 134 MB on a CPU core; meta takes attention apart."""
    block = models.build(hardware_probe.GPT_BLOCK)
    here, meta = training_step_work(block, 1, "cpu"), training_step_work(models.build(hardware_probe.GPT_BLOCK), 1)
    assert here.operators == 32 and here.bytes == pytest.approx(133.8e6, rel=0.01)
    assert meta.operators > here.operators and meta.bytes > 1.05 * here.bytes
    assert here.flop == pytest.approx(meta.flop, rel=0.01)  # the fused backward computes the scores once more
    calls = operators(training_step(block, 1, CPU))
    attention = [c for c in calls if "attention" in c.name]
    scores = 2 * 12 * 128 * 128 * 64  # FLOPs of one product of queries and keys
    assert [c.flop for c in attention] == [2 * scores, 5 * scores]


# -- what follows from a real run


def test_the_recorded_run_decides():
    words = hardware_probe.category(RECORDED).split("; ")
    assert words[0] in ("BF16 faster", "BF16 slower") and words[1] == "32 KiB reach less than half of the bandwidth"
    assert "mlp, 64 rows: arithmetic" in words and "gpt_block, 1 row: arithmetic" in words


def test_the_time_of_a_tiny_pass_is_a_line_in_its_operators():
    tiny = RECORDED.where("tiny_pass_s")
    counts, seconds = [r.case["operators"] for r in tiny], [r.value for r in tiny]
    slope, fixed = np.polyfit(counts, seconds, 1)
    assert 1e-6 < slope < 1e-4
    assert np.allclose(seconds, fixed + slope * np.array(counts), rtol=0.3)


@pytest.mark.parametrize("records", [RECORDED, H200], ids=["CPU", "H200"])
def test_the_answer_names_formats_and_memory(records):
    text = " ".join(hardware_probe.answer(records))
    assert "FP32" in text and "BF16" in text and "The triad moves" in text and "WRONG" not in text
    wrong = Records([*records, made("all_reduce_error", [1.0])])
    assert "WRONG RESULTS: an all-reduce" in " ".join(hardware_probe.answer(wrong))


# -- the command


@pytest.fixture
def command(monkeypatch, capsys):
    """The command in this process, which has loaded torch: (exit code, what it printed, its errors)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hardware_probe", *args])
        with pytest.raises(SystemExit) as e:
            probe_report.main("hardware_probe", hardware_probe.__doc__, hardware_probe.Config, hardware_probe.answer)
        return e.value.code, *capsys.readouterr()

    return run


def test_what_ranks_print_stays_out_of_the_json_and_records_are_saved(command, monkeypatch, tmp_path):
    """gloo warns where the host's name cannot be resolved, and what ranks print is shown."""
    real = probe_report.preflight

    def with_a_warning(*args):
        print("[rank 0] [W socket.cpp:207] The hostname of the client socket cannot be retrieved.")
        return real(*args)

    monkeypatch.setattr(probe_report, "preflight", with_a_warning)
    _, said, errors = command(
        "--smoke", "--json", "--device", "cpu", "--nproc", "1", "--parts", "copies", "--out", str(tmp_path / "p.jsonl")
    )
    assert json.loads(said)["checks"] and "[rank 0]" in errors
    assert len(load(tmp_path / "p.jsonl")) == len(json.loads(said)["speed_limits"])


@pytest.mark.parametrize(
    "args, words",
    [
        (("--rounds", "1"), "rounds must be"),
        (("--array-mib", "-1"), "array_mib must be at least 0"),
        (("--nproc", "9999"), "oversubscribe"),
        (("--models", "no_such:factory", "--smoke"), "no_such"),
        (("--dtypes", "fp12"), "fp12"),
    ],
)
def test_bad_input_in_a_shell_is_one_line_and_exit_code_2(args, words, command, monkeypatch):
    monkeypatch.delenv("COURSE_OVERSUBSCRIBE", raising=False)
    code, said, errors = command(*args)
    assert (code, said) == (2, "") and words in errors and len(errors.strip().splitlines()) == 1


def test_two_ranks_share_a_single_core_with_a_warning(monkeypatch):
    from labs.kit import cli, hardware

    asked = []

    def place(nproc, device, oversubscribe):
        asked.append(oversubscribe)
        if not oversubscribe:
            raise BadInput("too few")

    monkeypatch.setattr(hardware, "place", place)
    assert probe_report._enough_or_shared(cli.Launch()).oversubscribe and asked == [False, True]
    with pytest.raises(BadInput):
        probe_report._enough_or_shared(cli.Launch(nproc=3))


def test_ranks_that_fail_are_a_failed_check(monkeypatch, capsys):
    from labs.kit import cli
    from labs.kit.failure import RankFailed

    def broken(*_):
        raise RankFailed("Traceback\nRuntimeError: no route\nrank 1 on node-7 failed")

    monkeypatch.setattr(probe_report, "_measure", broken)
    found, _, records = probe_report.preflight("hardware_probe", {}, cli.Launch())
    assert (found[-1].status, found[-1].detail, len(records)) == ("fail", "rank 1 on node-7 failed", 0)
    assert "no route" in capsys.readouterr().err
