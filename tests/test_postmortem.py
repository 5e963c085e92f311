"""What ranks left names the rank, the collective and the line; healthy or thin evidence accuses nobody."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from labs.watch import evidence
from labs.watch.diagnosis import diagnose

TRAIN = "/home/ann/train.py"
TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:5252"


def call(name, number, line, size=4, dtype="Float", group="0", backend="gloo", **more):
    """An entry of the flight recorder, as torch 2.13 writes it for gloo, whose state never changes."""
    frames = [
        {"name": name, "filename": TORCH, "line": 3252},
        {"name": "main", "filename": TRAIN, "line": line},
        {"name": "<module>", "filename": TRAIN, "line": 99},
    ]
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{backend}:{name}",
        "time_created_ns": number * 10**9,
        "input_sizes": [[size]],
        "input_dtypes": [dtype],
        "output_sizes": [[size]],
        "output_dtypes": [dtype],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 1000,
        "is_p2p": False,
        "frames": frames,
    } | more


def steps(n, *lines):
    """n steps, each with an all_reduce of the same size from each of these lines."""
    return [call("all_reduce", i + 1, line) for i, line in enumerate(lines * n)]


def leave(folder, rank, calls=None, stack=None, end=None, ranks=2, groups=None, crash=""):
    """The files of a rank."""
    if calls is not None:
        known = {"0": list(range(ranks))} | (groups or {})
        config = {name: {"name": name, "desc": "", "ranks": str(of)} for name, of in known.items()}
        text = json.dumps({"version": "2.10", "entries": calls, "pg_config": config, "pg_status": {}})
        (folder / f"rank{rank}.recorder.json").write_text(text)
    if stack is not None:
        frames = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in stack)
        (folder / f"rank{rank}.stacks.txt").write_text(
            f'{crash}\n\nThread 0x1 (most recent call first):\n  File "x.py", line 1 in watch\n\n'
            f"Thread 0x2 (most recent call first):\n{frames}"
        )
    if end is not None:
        evidence.write_end(folder, rank, **end)


def within(name, line):
    """The stack of a main thread that is in a collective."""
    return [(TORCH, 3252, name), (TRAIN, line, "main"), (TRAIN, 99, "<module>")]


def told(folder):
    return diagnose(evidence.read(folder))


HANGS = {"exit_code": None}
WELL = {"exit_code": 0}


def names(found, kind, ranks, collective, line):
    assert (found.kind, found.ranks, found.collective) == (kind, ranks, collective), found
    assert found.sure and (found.line.file, found.line.line) == (TRAIN, line), found
    return True


def test_a_skipped_collective_shows_by_its_line_when_the_next_one_met_it(tmp_path):
    """All sizes are alike: only lines and earlier steps tell that rank 1 went past line 10."""
    usual = steps(3, 10, 11)
    leave(tmp_path, 0, usual, within("all_reduce", 11), HANGS)
    leave(tmp_path, 1, [*usual[:4], call("all_reduce", 5, 11)], [(TRAIN, 20, "main")], WELL)
    assert names(told(tmp_path), "skipped", (1,), "all_reduce", 10)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("kind", "other"),
    [("shape", {"size": 3}), ("dtype", {"dtype": "Double"}), ("another collective", {"name": "broadcast", "line": 12})],
)
def test_of_two_ranks_that_differ_earlier_steps_show_which(tmp_path, wrong, kind, other):
    usual = steps(3, 10)
    odd = call(**({"name": "all_reduce", "number": 3, "line": 10} | other))
    for r in (0, 1):
        leave(tmp_path, r, [*usual[:2], odd] if r == wrong else usual, end=HANGS)
    assert names(told(tmp_path), kind, (wrong,), odd["profiling_name"][5:], other.get("line", 10))


def test_whoever_is_waited_for_at_the_end_of_the_chain(tmp_path):
    """Rank 0 waits for 1 in group 1; 1 waits for 2 in group 2; 2 is busy elsewhere. 3 shares a group with nobody."""
    groups = {"1": [0, 1], "2": [1, 2]}
    leave(tmp_path, 0, [call("all_reduce", 1, 10, group="1")], end=HANGS, groups=groups, ranks=4)
    leave(tmp_path, 1, [call("all_gather", 1, 12, group="2")], end=HANGS, groups=groups, ranks=4)
    leave(tmp_path, 2, [], [(TRAIN, 40, "save")], HANGS, groups=groups, ranks=4)
    leave(tmp_path, 3, [], [(TRAIN, 50, "main")], HANGS, groups=groups, ranks=4)
    assert names(told(tmp_path), "elsewhere", (2,), "all_gather", 12)


def test_a_rank_that_ended_well_too_early_and_one_that_waits_for_data(tmp_path):
    leave(tmp_path, 0, steps(3, 10), within("all_reduce", 10), {"exit_code": 1, "error": LOST})
    leave(tmp_path, 1, steps(2, 10), [(TRAIN, 30, "main")], WELL)
    assert names(told(tmp_path), "finished", (1,), "all_reduce", 10)
    loader = "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    leave(tmp_path, 1, stack=[(loader, 1291, "_try_get_data"), (TRAIN, 9, "main")], end=HANGS)
    assert names(told(tmp_path), "data", (1,), "all_reduce", 10)


def test_a_rank_that_left_nothing_died_if_a_connection_broke(tmp_path):
    leave(tmp_path, 0, steps(2, 10), end={"exit_code": 1, "error": LOST}, ranks=3)
    leave(tmp_path, 2, steps(2, 10), end={"exit_code": 1, "error": LOST}, ranks=3)
    found = told(tmp_path)
    assert names(found, "died", (1,), "all_reduce", 10) and "left nothing" in str(found)
    for r in (0, 2):
        leave(tmp_path, r, end=HANGS)
    found = told(tmp_path)
    assert found.ranks == (1,) and not found.sure and "elsewhere" in str(found), "its files may lie elsewhere"


def test_an_error_of_its_own_comes_before_what_followed_from_it(tmp_path):
    trace = f'Traceback (most recent call last):\n  File "{TRAIN}", line 17, in main\n    x\nValueError: bad label\n'
    leave(tmp_path, 0, steps(3, 10), end={"exit_code": 1, "error": LOST})
    leave(tmp_path, 1, steps(2, 10), end={"exit_code": 1, "error": "ValueError: bad label", "traceback": trace})
    found = told(tmp_path)
    assert names(found, "error", (1,), "all_reduce", 17) and "bad label" in found.sentences[0]


def test_two_that_receive_first(tmp_path):
    """gloo records no send and receive: the stacks tell."""
    for r in (0, 1):
        leave(tmp_path, r, [], within("recv", 14), HANGS, ranks=3)
    leave(tmp_path, 2, [call("barrier", 1, 20)], within("barrier", 20), HANGS, ranks=3)
    found = told(tmp_path)
    assert names(found, "point to point", (0, 1), "recv", 14)
    leave(tmp_path, 1, [], within("send", 15), HANGS, ranks=3)
    assert not told(tmp_path).sure, "who sends may be heard"


def test_healthy_ranks_are_not_accused(tmp_path):
    for r in (0, 1):
        leave(tmp_path, r, steps(4, 10 + r), [(TRAIN, 30, "main")], WELL)
    found = told(tmp_path)
    assert (found.kind, found.ranks, found.line, found.sure) == ("nothing wrong", (), None, True)
    for r in (0, 1):
        leave(tmp_path, r, end=HANGS)
    found = told(tmp_path)
    assert found.ranks == () and not found.sure and "nothing shows which" in str(found), "they may be slow"


def nccl(folder, rank, calls, prefix="nccl_trace_rank_", ranks=2):
    """A dump as ProcessGroupNCCL writes it: a pickle of plain values, named after the rank."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    values = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": calls, "nccl_version": "2.27"}
    (folder / f"{prefix}{rank}").write_bytes(pickle.dumps(values, 2))


def of_nccl(name, number, line, state="completed", **more):
    return call(name, number, line, backend="nccl", state=state, retired=state == "completed", **more)


def test_dumps_of_nccl(tmp_path):
    """A hang under NCCL: started on rank 0, not called on rank 1, whose dump was made by the same watchdog."""
    nccl(tmp_path, 0, [of_nccl("all_reduce", 1, 10), of_nccl("all_reduce", 2, 10, state="started")])
    nccl(tmp_path, 1, [of_nccl("all_reduce", 1, 10)])
    found = told(tmp_path)
    assert (found.ranks, found.collective, found.line.line) == ((1,), "all_reduce", 10)
    nccl(tmp_path, 1, [of_nccl("all_reduce", 1, 10), of_nccl("all_reduce", 2, 10, size=5, state="scheduled")])
    assert names(told(tmp_path), "shape", (1,), "all_reduce", 10)


ABORTED = "Fatal Python error: Aborted"


def test_a_batch_of_sends_and_receives_is_no_hang(tmp_path):
    """torch leaves its members "scheduled" for ever; only the entry that closes the batch gets a state."""
    for r, other in ((0, 1), (1, 0)):
        batch = [
            of_nccl(name, 1, 20, state, is_p2p=True, p2p_seq_id=1, collective_seq_id=0)
            for name, state in (
                (f"send {r}->{other}", "scheduled"),
                (f"recv {r}<-{other}", "scheduled"),
                ("coalesced", "completed"),
            )
        ]
        after = [of_nccl("all_reduce", 1, 10), *[of_nccl("all_reduce", 2, 10, state="started")] * (r == 0)]
        nccl(tmp_path, r, [*batch, *after])
    found = told(tmp_path)
    assert (found.ranks, found.collective, found.line.line) == ((1,), "all_reduce", 10), found


def test_ranks_that_nccls_watchdog_aborted_did_not_die_of_themselves(tmp_path):
    """torch dumps, then aborts each process: Python's handler adds the line of each rank."""
    usual = [of_nccl("all_reduce", i, 10) for i in (1, 2, 3)]
    nccl(tmp_path, 0, [*usual, of_nccl("all_reduce", 4, 10, state="started")], evidence.DUMP_NAME)
    nccl(tmp_path, 1, usual, evidence.DUMP_NAME)
    leave(tmp_path, 0, stack=within("all_reduce", 10), crash=ABORTED)
    leave(tmp_path, 1, stack=[(TRAIN, 40, "save")], crash=ABORTED)
    found = told(tmp_path)
    assert names(found, "elsewhere", (1,), "all_reduce", 10) and "train.py:40" in str(found)
    shown = command(tmp_path).stdout
    assert "2 of 4 files are torch's own dumps" in shown and "all_reduce of 4 Float numbers" in shown
    assert "started" in shown and ABORTED in shown


@pytest.mark.parametrize("setting", ["", evidence.DUMP_FILE, evidence.OLDER_DUMP_FILE])
def test_without_a_folder_it_reads_where_torch_writes(tmp_path, setting):
    environ = {"XDG_CACHE_HOME": str(tmp_path)} | ({setting: f"{tmp_path}/torch/of_job_"} if setting else {})
    prefix = evidence.torch_dump_prefix(environ)
    prefix.parent.mkdir()
    for rank, n in ((0, 3), (1, 2)):
        dump = {"version": "2.10", "entries": [of_nccl("all_reduce", i + 1, 10) for i in range(n)], "pg_config": {}}
        kind = pickle.dumps(dump, 2) if rank else json.dumps(dump).encode()  # of _dump_nccl_trace_json
        prefix.with_name(f"{prefix.name}{rank}").write_bytes(kind)
    (prefix.parent / "other_job_7").write_bytes(b"no dump")
    done = command(env={**os.environ, **environ})
    assert done.stdout.startswith("Rank 1 did not call all_reduce (number 3 of group 0)"), done


@pytest.mark.parametrize("with_stacks", [True, False])
def test_calls_without_python_frames_as_ddp_makes_them_on_gpus(tmp_path, with_stacks):
    """Autograd's own thread calls. Stacks tell where the main threads are; without them no line is made up."""

    def of_ddp(number, size=4, state="completed"):
        return of_nccl("all_reduce", number, 0, state=state, size=size, frames=[])

    backward = [("/venv/lib/python3.11/site-packages/torch/_tensor.py", 648, "backward"), (TRAIN, 30, "main")]
    if with_stacks:
        leave(tmp_path, 0, stack=backward)
        leave(tmp_path, 1, stack=[(TRAIN, 40, "save")])
    nccl(tmp_path, 0, [of_ddp(1), of_ddp(2, state="started")])
    nccl(tmp_path, 1, [of_ddp(1)])
    late = told(tmp_path)
    nccl(tmp_path, 1, [of_ddp(1), of_ddp(2, size=5, state="scheduled")])
    other_size = told(tmp_path)
    usual = [of_ddp(i, size=3 + i % 2) for i in (1, 2, 3, 4)]  # two buckets a step
    nccl(tmp_path, 0, [*usual, of_ddp(5, size=4, state="started"), of_ddp(6, size=3, state="scheduled")])
    nccl(tmp_path, 1, [*usual, of_ddp(5, size=3, state="started")])
    skipped = told(tmp_path)
    for found, kind, line in ((late, "elsewhere", 30), (other_size, "shape", 40), (skipped, "skipped", 30)):
        assert (found.kind, found.ranks, found.collective) == (kind, (1,), "all_reduce"), found
        assert "None" not in str(found)
        assert (found.line and found.line.line) == (line if with_stacks else None), found
        assert ("its line was not recorded" in str(found)) == (not with_stacks), found
    if with_stacks:
        assert "its main thread is at train.py:30" in str(late) and "is at train.py:40" in str(other_size)


class Evil:
    """A pickle of this runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_a_file_that_runs_code_or_is_cut_short_is_named_and_the_rest_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dumps"
    folder.mkdir()
    nccl(folder, 0, steps(2, 10), ranks=4)
    (folder / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": Evil()}))
    nccl(folder, 2, steps(1, 10), ranks=4)
    whole = (folder / "nccl_trace_rank_2").read_bytes()
    (folder / "nccl_trace_rank_3").write_bytes(whole[: len(whole) // 2])
    read = evidence.read(folder)
    assert [len(e.calls or ()) for e in read] == [2, 0, 1, 0] and not (tmp_path / "pwned").exists()
    assert "nccl_trace_rank_1: names posix.system" in read[1].problems[0]
    assert read[3].problems[0].startswith("nccl_trace_rank_3: ") and "cut short" in read[3].problems[0]
    for text in ("", "{", "[]", '{"entries": [{}]}', '{"entries": 3}', "\x00\xff"):
        (folder / "rank1.recorder.json").write_text(text)
        [problem, *_] = (p for p in evidence.read(folder)[1].problems if "recorder" in p)
        assert problem.startswith("rank1.recorder.json: ") and "\n" not in problem
        diagnose(evidence.read(folder))


@pytest.mark.long
def test_the_private_calls_of_torch_are_still_there(tmp_path):
    """All that is private stands in `evidence.recorded`: gloo's entries have lines, numbers, sizes and their group."""
    code = """
import os
os.environ["TORCH_FR_BUFFER_SIZE"] = "10"
import pathlib, sys, torch, torch.distributed as dist
from labs.watch import evidence
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
folder = pathlib.Path(sys.argv[1])
evidence.write_recorder(folder, 0), evidence.write_stacks(folder, 0)
from labs.kit import _compat
dump = next(_compat.flight_recorders())(includeCollectives=True, includeStackTraces=True, onlyActive=False)
(folder.parent / "dump").mkdir()
(folder.parent / "dump" / "nccl_rank_0").write_bytes(dump)
"""
    (tmp_path / "train.py").write_text(code)
    subprocess.run([sys.executable, tmp_path / "train.py", tmp_path / "out"], check=True, timeout=250)
    [of] = evidence.read(tmp_path / "out")
    [made] = of.calls
    assert (made.name, made.backend, made.number) == ("all_reduce", "gloo", 1)
    assert (made.sizes, made.dtypes) == (((3,),), ("Float",))
    assert made.own[0].source == "dist.all_reduce(torch.ones(3))" and made.done
    assert of.groups == {made.group: (0,)} and of.stack[-1].name == "<module>" and not of.problems
    [of] = evidence.read(tmp_path / "dump")
    assert [(c.name, c.sizes) for c in of.calls] == [("all_reduce", ((3,),))], "torch's own pickle, as NCCL dumps it"


def command(*arguments, env=None):
    words = [sys.executable, "-m", "labs.postmortem", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=250, env=env)


def test_the_command_answers_first_and_its_exit_code_says_whether_it_knows(tmp_path):
    leave(tmp_path, 0, steps(3, 10), within("all_reduce", 10), HANGS)
    leave(tmp_path, 1, steps(2, 10), [(TRAIN, 30, "main")], WELL)
    done = command(tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("Rank 1 did not call all_reduce (number 3 of group 0)")
    lines = done.stdout.splitlines()
    assert lines[-3].split() == ["rank", "last", "collective", "state", "number", "line", "end"]
    assert "train.py:10" in lines[-2] and "still ran" in lines[-2] and "exit code 0" in lines[-1]
    (tmp_path / "rank1.end.json").write_text("{")
    leave(tmp_path, 1, steps(3, 10), end=None)
    done = command(tmp_path)
    assert done.returncode == 1 and "nothing shows which" in done.stdout and "not used: rank1.end.json" in done.stdout


def test_bad_input_is_one_line(tmp_path):
    for folder, says in ((tmp_path, "holds no evidence"), (tmp_path / "none", "No such file")):
        done = command(folder)
        assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_to_read_evidence_or_an_error_needs_no_torch():
    code = "import sys, labs.postmortem, labs.symptom; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
