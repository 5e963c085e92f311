"""The probe as a lab and as a preflight: bad input, records, what its command says."""

from __future__ import annotations

import json
import sys

import pytest

from labs import hardware_probe
from labs.common.timing import probe_report
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import load


@pytest.fixture(scope="module")
def run():
    return launch("hardware_probe", nproc=2, oversubscribe=True, device="cpu", smoke=True, array_mib=4)


def test_records_cover_every_part(run):
    metrics = {r.metric for r in run}
    assert metrics >= {"matmul_flop_s", "convolution_flop_s", "memory_b_s", "operator_s", "model_flop_s", "busbw_b_s"}
    assert metrics >= {"matmul_relative_error", "all_reduce_error", "ceiling_speedup", "model_bytes"}
    assert all(len(r.samples) == 3 for r in run if r.kind == "measured" and "error" not in r.metric)
    assert {r.kind for r in run.where("model_bytes")} == {"modelled"}
    assert len(run.where("matmul_relative_error")) == 2  # every rank answers for its own device


def test_ceiling_speedup_is_the_ratio_of_its_own_rates(run):
    for job in ("matmul", "triad"):
        alone, all_ranks = (run.one("ceiling_rate", job=job, ranks=n).samples for n in (1, 2))
        ratio = [b / a for a, b in zip(alone, all_ranks, strict=True)]
        assert run.one("ceiling_speedup", job=job).samples == pytest.approx(ratio)


def test_busbw_of_two_ranks_is_size_over_time(run):
    for r in run.where("all_reduce_s"):
        busbw = run.one("busbw_b_s", bytes=r.case["bytes"])
        assert busbw.samples == pytest.approx([r.case["bytes"] / s for s in r.samples])


def test_one_rank_has_no_ceiling_and_no_all_reduce():
    alone = launch("hardware_probe", nproc=1, device="cpu", smoke=True, parts=("ceiling", "all_reduce"))
    assert {r.metric for r in alone} == {"matmul_relative_error", "all_reduce_error"}


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
