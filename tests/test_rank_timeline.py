"""Traces of several ranks on one clock: planted offsets and delays are found, any file is read or refused in a line."""

import gzip
import itertools
import json
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from again import holds_soon
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import TRANSFER_S, made, written

from labs import last_to_arrive
from labs import rank_timeline as lab
from labs.common.profiling import intervals, late_training, traces
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.rank import Rank
from labs.rank_timeline import clock

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple), max_size=8)


def cells(of):
    """Which unit cells of an axis the spans cover."""
    return {k for a, b in of for k in range(a, b)}


@given(spans, spans)
def test_intervals_cover_what_cells_cover(a, b):
    assert cells(intervals.union(a)) == cells(a)
    assert cells(intervals.minus(a, b)) == cells(a) - cells(b)
    assert intervals.length(a) == len(cells(a))
    assert intervals.packed([x for x, _ in a], [y for _, y in a]) == intervals.union(a, 0)
    assert all(q[0] - p[1] > 3 for p, q in itertools.pairwise(intervals.union(a, gap=3)))
    assert cells(intervals.clip(a, 5, 12)) == cells(a) & {*range(5, 12)}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_planted_lateness_is_drawn_on_the_right_rank(tmp_path, backend, ranks):
    late = ranks - 1
    merged = lab.read_traces(written(tmp_path, made(ranks, backend=backend, late={late: 0.030})))
    assert {a.last for a in merged.last_arrivals} == {late} and len(merged.last_arrivals) == 6
    assert merged.late_s[late] == pytest.approx(0.030, abs=1e-3)
    assert all(a.by_s == pytest.approx(0.030, abs=1e-3) for a in merged.last_arrivals)
    for rank, lanes in enumerate(merged.lanes):
        waits = intervals.length(lanes["wait"]) / 6
        assert waits == pytest.approx(TRANSFER_S + (0.030 if rank != late else 0), abs=1e-3)
        assert intervals.length(lanes["forward"]) == pytest.approx(6 * 0.005, rel=0.05)
    assert f"rank {late} comes last in 6 of 6 steps" in lab.blame(merged)


@settings(max_examples=60, deadline=None)
@given(
    ahead=st.floats(-0.05, 0.05),
    late=st.floats(0, 0.05),
    who=st.integers(0, 1),
    seed=st.integers(0, 99),
    backend=st.sampled_from(["gloo", "nccl"]),
    same=st.booleans(),
)
def test_a_planted_offset_is_recovered_and_never_outside_of_what_is_called_certain(
    tmp_path_factory, ahead, late, who, seed, backend, same
):
    """Also when one rank is late in every step, and when both files claim to come from one machine."""
    hosts = ["one", "one" if same else "two"]
    found = made(2, backend=backend, late={who: late}, clocks={1: ahead}, hosts=hosts, seed=seed)
    offset = lab.read_traces(written(tmp_path_factory.mktemp("t"), found)).offsets[1]
    assert abs(offset.s - ahead) < 2e-3
    assert offset.low - 1e-6 <= ahead <= offset.high + 1e-6
    assert abs(offset.s - ahead) <= max(2e-4, 3 * offset.spread, clock.COMMON_S * same)


def test_steps_that_only_one_rank_recorded_are_left_out(tmp_path):
    found = made(2, steps=6, clocks={1: 0.02}, hosts=["a", "b"])
    first = next(e for e in found[0]["traceEvents"] if e["name"] == "ProfilerStep#1")["ts"]
    found[0]["traceEvents"] = [e for e in found[0]["traceEvents"] if e["ts"] >= first or e["ph"] == "M"]
    merged = lab.read_traces(written(tmp_path, found))
    assert merged.offsets[1].s == pytest.approx(0.02, abs=5e-4) and merged.offsets[1].collectives == 15


def test_collectives_of_a_part_of_the_ranks_are_left_out(tmp_path):
    """Such as a rank's own group for tensor parallelism, in each step."""
    found = made(2, steps=6, clocks={1: 0.02}, hosts=["a", "b"], backend="nccl")
    for rank, of in enumerate(found):
        for e in [e for e in of["traceEvents"] if e["name"].startswith("nccl")]:
            args = e["args"] | {"Process Group Name": str(1 + rank)}
            of["traceEvents"].append(e | {"ts": e["ts"] + 1000 + 500 * rank, "dur": 20.0, "args": args})
    merged = lab.read_traces(written(tmp_path, found))
    assert merged.offsets[1].s == pytest.approx(0.02, abs=5e-4) and merged.offsets[1].collectives == 18


def test_traces_of_two_runs_contradict_each_other(tmp_path):
    one, other = made(2, seed=1), made(2, seed=1)
    for event in other[1]["traceEvents"]:
        event["ts"] *= 3
    with pytest.raises(BadInput, match="contradict"):
        lab.read_traces(written(tmp_path, [one[0], other[1]]))


def test_without_common_collectives_the_clock_is_not_known(tmp_path):
    found = made(2)
    found[1]["traceEvents"] = [e for e in found[1]["traceEvents"] if "all" not in e["name"]]
    merged = lab.read_traces(written(tmp_path, found))
    assert merged.offsets[1].how == "not known" and merged.arrivals == []
    assert "cannot be told" in lab.blame(merged)


def test_nobody_is_blamed_for_the_difference_of_two_clocks(tmp_path):
    """Two processes of a machine set their clocks 0.8 ms apart: 0.8 ms late in every step says nothing."""
    found = made(2, steps=12, clocks={1: 8e-4})
    assert "Who holds the others up cannot be told: rank 1" in lab.blame(lab.read_traces(written(tmp_path, found)))
    found = made(2, steps=12, clocks={1: 8e-4}, late={1: 0.005})
    assert "Who holds the others up: rank 1" in lab.blame(lab.read_traces(written(tmp_path, found)))


def test_short_collectives_between_a_gpus_kernels_are_exposed(tmp_path):
    """As in tensor parallelism: 100 us of all-reduce after each layer, and nothing else runs. No gap is closed."""
    kernels = [
        {"ph": "X", "cat": "kernel", "tid": 7, "pid": 0, "ts": 300.0 * k, "dur": 200.0, "name": "gemm"}
        for k in range(10)
    ]
    nccl = [
        e | {"ts": e["ts"] + 200, "dur": 100.0, "name": name, "tid": 20}
        for e, name in zip(
            kernels,
            [
                "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
                "ncclSymDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymDevArgs)",
                "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
            ]
            * 3,
            strict=False,
        )
    ]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": kernels + nccl}))
    trace = traces.read(path)
    assert [c.name for c in trace.collectives] == ["allreduce"] * 10
    assert intervals.length(clock.lanes_of(trace)["wait"]) == pytest.approx(10 * 1e-4)


def test_a_gpus_step_lasts_from_its_first_stream_to_its_last(tmp_path):
    """Kineto writes gpu_user_annotation once for each stream, the copy's last and shortest."""
    found = made(2, backend="nccl", late={1: 0.03})
    for trace in found:
        steps = [e for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")]
        for tid, share in ((7, 1.0), (20, 0.5), (30, 0.01)):
            trace["traceEvents"] += [
                e | {"cat": "gpu_user_annotation", "tid": tid, "dur": share * e["dur"]} for e in steps
            ]
    merged = lab.read_traces(written(tmp_path, found))
    assert all(b - a > 0.02 for a, b in merged.steps[0].values())
    assert {c.step for c in merged.traces[0].collectives} == {*range(6)}


BAD = {
    "nothing": b"",
    "words": b"no trace",
    "number": b"17",
    "object": b"{}",
    "other": b'{"traceEvents": 3}',
    "no events": b'{"traceEvents": []}',
    "half": b'{"traceEvents": [{"ph": "X", "ts": 1, "dur"',
    "binary": bytes(range(256)),
    "base": b'{"baseTimeNanoseconds": "x", "traceEvents": [{"ph":"X","cat":"cpu_op","ts":1,"dur":1,"name":"a"}]}',
    "gzip": gzip.compress(b'{"traceEvents": []}')[:-9],
    "deep": b"[" * 100_000,
    "colon": b'{"traceEvents" [1]}',
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_one_line(tmp_path, name):
    path = tmp_path / "bad.json"
    path.write_bytes(BAD[name])
    with pytest.raises(BadInput, match=r"bad\.json") as told:
        lab.read_traces([path])
    assert len(str(told.value)) < 300 and str(told.value).isprintable()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_merged_chrome_trace_is_on_one_clock_with_a_process_for_each_rank(tmp_path, backend):
    found = made(2, clocks={1: 0.05}, hosts=["a", "b"], backend=backend)
    paths = written(tmp_path, found)
    _, path = lab.write(lab.read_traces(paths), tmp_path / "out", paths[::-1])
    events = json.loads(path.read_text("utf-8"))["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1} and all(isinstance(e.get("tid", 0), int) for e in events)
    ends = [
        [
            e["ts"] + e["dur"]
            for e in events
            if e["pid"] == r
            and "all_reduce" in e["name"].lower().replace("allreduce", "all_reduce")
            and e["cat"] != "cpu_op"
        ]
        for r in (0, 1)
    ]
    assert ends[0] == pytest.approx(ends[1], abs=300)  # us
    assert min(e["ts"] for e in events if e["ph"] == "X") >= -1
    assert sum(e["ph"] == "X" for e in events) == sum(e["ph"] == "X" for t in found for e in t["traceEvents"])


READ = """
import resource, sys
from labs.common.profiling import clock, timeline_page, traces
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merged = clock.merge([traces.read(sys.argv[1])])
timeline_page.write_chrome(merged, [sys.argv[1]], sys.argv[1] + ".merged")
print(merged.traces[0].events, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.long
def test_a_large_trace_is_opened_in_little_memory(tmp_path):
    """40 MB of operators, all beside each other, so that none can be joined with another: the worst case."""
    path, n = tmp_path / "large.json", 150_000
    op = '{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 5, "tid": 1, "ts": %d, "dur": 400, "args": %s},\n'
    args = json.dumps(
        {
            "External id": 1,
            "Input Dims": [[32, 256], [256, 256]],
            "Input type": ["float"] * 4,
            "Record function id": 0,
            "Sequence number": 123456,
            "Ev Idx": 1,
            "Fwd id": 0,
        }
    )
    with path.open("w") as out:
        out.write('{"baseTimeNanoseconds": 1790857026000000000, "traceEvents": [\n')
        out.writelines(op % (1000 * k, args) for k in range(n))
        out.write('{"ph": "i", "name": "end", "ts": 1}]}')
    done = subprocess.run([sys.executable, "-c", READ, str(path)], text=True, capture_output=True, check=True)
    events, grown = map(int, done.stdout.split())
    assert events == n + 1
    # 3 million events, 500 steps of 6000, would stay below 1 GB
    assert (grown - 16 * 2**20) / n < 2**30 / 3e6, (
        f"{grown / n:.0f} bytes for each event of {path.stat().st_size / n:.0f}"
    )


def drawn_as_planted(run):
    """Offsets within 2 ms of the planted ones, the late rank last, and late by about what was planted."""
    offsets = {r.case["of_rank"]: r.value for r in run.where("clock_offset_s")}
    planted = {r.case["of_rank"]: r.value for r in run.where("planted_offset_s")}
    late = {r.case["of_rank"]: statistics.median(r.samples) for r in run.where("late_s")}
    [delay] = run.where("planted_s")
    right = max(late, key=late.__getitem__) == delay.case["of_rank"]
    return (
        right
        and all(abs(offsets[r] - planted[r]) < 2e-3 for r in planted)
        and (late[delay.case["of_rank"]] > 0.5 * delay.value)
    )


@pytest.mark.parametrize(("ranks", "shift_ms"), [(2, 50.0), (4, -50.0)])
def test_real_traces_are_merged(ranks, shift_ms, tmp_path):
    def again():
        return launch(
            "rank_timeline", ranks, oversubscribe=True, device="cpu", steps=8, shift_ms=shift_ms, folder=str(tmp_path)
        )

    first = again()
    assert holds_soon(drawn_as_planted, first, again)
    assert {r.case["lane"] for r in first.where("spans_s")} == {*clock.LANES}
    paths = sorted(tmp_path.glob("rank*.json"))
    assert len(paths) == ranks and json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    merged = lab.read_traces(paths)
    assert merged.ranks == tuple(range(ranks)) and [len(s) for s in merged.steps] == [8] * ranks
    assert "".join(lab.answer(first)) and len(list(lab.sentences(merged))) == 2 + ranks


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.json"], "missing.json: No such file"),
        (["."], "Is a directory"),
        (["bad.json"], "it ends in the middle"),
        (["rank0.json", "--folder", "bad.json"], "is not a folder"),
        (["rank0.json", "--nosuch"], "unrecognized arguments"),
        (["--place", "lunch"], "place must be one of"),
        (["--late-rank", "5"], "late_rank 5 needs more ranks"),
        (["--folder", "bad.json/x"], "is not a folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, said, monkeypatch, capsys):
    written(tmp_path, made(1))
    (tmp_path / "bad.json").write_text('{"traceEvents": [')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rank_timeline", *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("labs.rank_timeline", run_name="__main__", alter_sys=True)
    told = capsys.readouterr().err
    assert ended.value.code == 2 and len(told.splitlines()) == 1 and said in told, told


def test_traces_of_yours_are_read_from_the_shell(tmp_path):
    written(tmp_path, made(2, backend="nccl", late={0: 0.02}))
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress((tmp_path / "rank1.json").read_bytes()))
    words = ["rank0.json", "rank1.json.gz", "--folder", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "labs.rank_timeline", *words], cwd=tmp_path, text=True, capture_output=True
    )
    assert done.returncode == 0 and "rank 0 comes last in 6 of 6 steps" in " ".join(done.stdout.split()), done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"timeline.html", "merged.json"}


def timeline_and_stopwatch(folder):
    """On a rank: its trace, and how long it waited at each step's last all-reduce by a stopwatch of its own."""
    waits, r = [], dist.get_rank()
    workload = late_training.build(lab.Config())
    training = late_training.Training(workload, 32, torch.device("cpu"), last_to_arrive.note_wait, waits)
    rank = Rank(r, dist.get_world_size(), r, dist.get_world_size(), torch.device("cpu"), "gloo", ())
    lab.record(training, {"backward": 0.03} if r == 1 else {}, 8, Path(folder) / f"rank{r}.json", rank)
    return traces.read(Path(folder) / f"rank{r}.json"), [b - a for a, b in waits[-8:]]


def within_2_ms(found):
    """The merged traces draw the late rank where the stopwatches have it. Whatever the machine did, both saw it."""
    read, waits = zip(*found, strict=True)
    drawn = clock.merge(read).late_s
    seen = [statistics.median(late) for late in zip(*last_to_arrive.late_by(list(waits)), strict=True)]
    return all(abs(a - b) < 2e-3 for a, b in zip(drawn, seen, strict=True)) and max(drawn) == drawn[1] > 0.015


@pytest.mark.quiet
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_real_lateness_is_drawn_where_stopwatches_see_it(ranks, tmp_path):
    def again():
        return run_on_ranks(timeline_and_stopwatch, ranks, str(tmp_path))

    assert holds_soon(within_2_ms, again(), again)
