"""The experiments of notebook 07: the ring, slowed connections, buckets and compressed gradients."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import HERE, PYTHON, new_environment
from torch import nn

from labs import all_reduce_bytes, comm_overlap, gradient_compression, nccl_log, slow_link
from labs.common.communication import delay, wire
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.notebook import Results
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

STEADY = (0.998, 1.0, 1.002, 1.001, 0.999, 1.0, 1.0, 1.0, 1.0)
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "07_communication.ipynb"

pytestmark = pytest.mark.skipif(not wire.can_pace(), reason="this system cannot pace a connection")


def cell(name: str, **names) -> dict:
    """What the notebook's cell of this id leaves, run with these names."""
    [source] = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["id"] == name]
    exec(compile(source, name, "exec"), names)
    return names


# -- the ring


def ring_against_torch(ring, numbers: int) -> bool:
    """Whether whole numbers, which are summed without rounding, have the same bits as torch's sum."""
    x = torch.arange(numbers, dtype=torch.float32) * (dist.get_rank() + 1)
    by_hand, by_torch = x.clone(), x.clone()
    ring(by_hand)
    dist.all_reduce(by_torch)
    return torch.equal(by_hand, by_torch)


@pytest.mark.parametrize(("ranks", "numbers"), [(4, 2), (3, 100_003)])
def test_the_ring_in_the_notebook_sums_like_torch(ranks, numbers):
    ring = cell("ring", torch=torch, dist=dist, run_on_ranks=lambda *_: None)["ring_all_reduce"]
    assert run_on_ranks(ring_against_torch, ranks, ring, numbers) == [True] * ranks


def test_bytes_on_the_connections_are_those_of_the_ring():
    ring = cell("ring", torch=torch, dist=dist, run_on_ranks=lambda *_: None)["ring_all_reduce"]
    found = launch("all_reduce_bytes", 3, device="cpu", oversubscribe=True, by_hand=ring)
    if not found.where("sent"):
        pytest.skip("this kernel does not count the bytes of a connection")
    for name in ("by hand", "all_reduce", "all_gather"):
        assert found.one("sent", collective=name).value == pytest.approx(
            found.one("ring", collective=name).value, rel=0.02
        )
    assert found.one("ring", collective="all_reduce").value == pytest.approx(4 / 3)
    assert all_reduce_bytes.category(found) == "as a ring"


@pytest.mark.parametrize(("sent", "word"), [(1.5, "as a ring"), (1.6, "more"), (1.0, "fewer"), (None, "not counted")])
def test_an_all_reduce_is_compared_with_the_ring(sent, word):
    rows = [Record("x", "ring", "1", (1.5,), "modelled", case={"collective": "all_reduce"})]
    if sent is not None:
        rows.append(Record("x", "sent", "1", (sent,), case={"collective": "all_reduce"}))
    assert all_reduce_bytes.category(Records(rows)) == word


# -- the wire


def this_rank() -> Rank:
    return Rank(
        dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", ()
    )


def paced_times(b_s: float, numbers: int) -> dict:
    rank, x = this_rank(), torch.zeros(numbers)
    dist.all_reduce(x)
    fds = [fd for found in wire.links(rank).values() for fd in found]
    free = [wire.limit_of(fd) for fd in fds]
    with wire.paced(rank, b_s):
        held = [wire.limit_of(fd) for fd in fds]
        rank.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        seconds = time.perf_counter() - start
    for error in (ArithmeticError, KeyboardInterrupt):
        with contextlib.suppress(error), wire.paced(rank, b_s):
            raise error
    return {"free": free, "held": held, "seconds": seconds, "after": [wire.limit_of(fd) for fd in fds]}


def test_a_paced_wire_holds_bytes_back_and_is_free_again_whatever_happens():
    b_s, numbers = 2e7, 2**20
    for found in run_on_ranks(paced_times, 2, b_s, numbers):
        assert found["free"] and set(found["free"]) == {wire.NO_LIMIT} == set(found["after"])
        assert set(found["held"]) == {int(b_s)}
        assert found["seconds"] > 0.9 * 4 * numbers / b_s  # never faster than the wire; slower on a busy machine


def chosen_links() -> tuple[list[int], list[int]]:
    """(peers that this rank is connected to, limits of the connections between rank 0 and 1 only)."""
    rank = this_rank()
    dist.all_reduce(torch.zeros(8))
    dist.all_gather([torch.zeros(1) for _ in range(rank.world_size)], torch.zeros(1))
    links = wire.links(rank)
    with wire.paced(rank, 1e7, between=lambda one, other: {one, other} == {0, 1}):
        limits = {peer: {wire.limit_of(fd) for fd in fds} for peer, fds in links.items()}
    return sorted(links), sorted(peer for peer, found in limits.items() if found == {int(1e7)})


def test_only_the_chosen_connections_are_paced():
    found = run_on_ranks(chosen_links, 3)
    assert [peers for _, peers in found] == [[1], [0], []]
    assert all(peers == [r for r in range(3) if r != rank] for rank, (peers, _) in enumerate(found))


def limits_in_turn(mb_s: float) -> tuple[set[int], dict]:
    """(limits of this rank's connections while steps are timed over a wire of `mb_s`, seconds of these steps)."""
    rank, seen = this_rank(), set()
    dist.all_reduce(torch.zeros(8))
    fds = [fd for found in wire.links(rank).values() for fd in found]
    steps = {"look": lambda: seen.update(map(wire.limit_of, fds)), "nothing": lambda: time.sleep(0.01 * rank.rank)}
    return seen, wire.in_turn(steps, SimpleNamespace(smoke=False, rounds=3), rank, mb_s=mb_s)


def test_steps_are_timed_in_turn_over_the_wire_that_is_asked_for():
    found = run_on_ranks(limits_in_turn, 2, 20.0)
    assert all(seen == {int(2e7)} for seen, _ in found)
    seconds = found[0][1]
    assert seconds == found[1][1] and {name: len(s) for name, s in seconds.items()} == {"look": 3, "nothing": 3}
    assert min(seconds["nothing"]) > 0.009, "rank 1 sleeps for 10 ms: the slowest rank counts"


@pytest.mark.drill
@pytest.mark.skipif(not shutil.which("ss"), reason="needs ss, of iproute2, which shows the limits of all connections")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_run_leaves_no_connection_paced(how, code):
    def limited() -> bool:
        return "/187648000bps" in subprocess.run(["ss", "-tin"], capture_output=True, text=True, check=True).stdout

    command = [*PYTHON, "-m", "labs.slow_link", "--mb-s", "23.456", "--rounds", "9999"]
    with subprocess.Popen(
        command, cwd=HERE, env=new_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        assert soon(limited, 200), "the run paces its connections"
        run.send_signal(how)
        assert run.wait(60) == code
    assert soon(lambda: not limited(), 5)


def soon(fact, seconds: float) -> bool:
    """Whether `fact` is true within that time."""
    end = time.monotonic() + seconds
    while not (true := fact()) and time.monotonic() < end:
        time.sleep(0.1)
    return true


# -- the connection imitated


def test_a_paced_connection_needs_a_kernel_that_paces(monkeypatch):
    monkeypatch.setattr(wire, "can_pace", lambda: False)
    with (
        pytest.raises(BadInput, match="cannot pace"),
        wire.paced(Rank(0, 2, 0, 2, torch.device("cpu"), "gloo", ()), 1e7),
    ):
        pass


def delayed_times(mb_s: float) -> dict:
    """Seconds and results of an all-reduce and of a step of DDP over a wire acted out, and seconds without it."""
    rank, x = this_rank(), torch.full((2**18,), 1.0)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    ddp = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.1)
    delay.hold(ddp)
    gradients, seconds = [], {}
    for name in ("free", "slow", "slow", "free again"):  # DDP's first step is unlike the others
        with wire.slowed(rank, mb_s, delayed=True) if name == "slow" else contextlib.nullcontext():
            rank.barrier()
            start = time.perf_counter()
            delay.all_reduce(x)
            middle = time.perf_counter()
            ddp.zero_grad()
            ddp(torch.ones(4, 256) * (rank.rank + 1)).sum().backward()
            seconds[name] = middle - start, time.perf_counter() - middle
        gradients.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    return {"seconds": seconds, "same": all(torch.equal(g, gradients[0]) for g in gradients), "x": x[0].item()}


def test_an_exchange_over_an_emulated_wire_waits_as_long_as_the_formula_says():
    least_s = 0.105, 0.052
    for found in run_on_ranks(delayed_times, 2, 10.0):
        assert found["same"] and found["x"] == 2**4, "waiting changes no result"
        assert all(s > 0.95 * least for s, least in zip(found["seconds"]["slow"], least_s, strict=True))


def test_a_wire_that_is_acted_out_carries_one_exchange_after_the_other():
    wire_ = delay.Delay(1e6)
    first, second = wire_.carry(2e5), wire_.carry(1e5)
    assert second - first == pytest.approx(0.1)


@pytest.mark.parametrize("b_s", [0.0, 1e3, float("nan")])
def test_no_connection_has_that_bandwidth(b_s):
    with pytest.raises(BadInput, match=r"bandwidth must be at least 0\.1 MB/s"):
        wire.require_rate(b_s)


# -- the experiments


def without_pacing(lab, config) -> tuple[set[str], list[str]]:
    wire.can_pace = lambda: False
    found = Records(lab.run(config, this_rank()))
    return {r.metric for r in found}, wire.label(found)


def small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("lab", [slow_link, gradient_compression], ids=lambda lab: lab.__name__)
def test_where_no_kernel_paces_an_experiment_waits_by_the_formula_and_says_so(lab):
    config = lab.Config(smoke=True, batch_size=8, mb_s=(50.0, 25.0))
    for metrics, label in run_on_ranks(without_pacing, 2, lab, config):
        assert {"acted_out", "step_s"} <= metrics and "no byte is held back" in label[0]


@pytest.fixture(scope="module")
def smoke():
    given = {"smoke": True, "oversubscribe": True, "device": "cpu"}
    return {
        slow_link: launch("slow_link", 2, model=small, batch_size=8, **given),
        comm_overlap: launch("comm_overlap", 2, width=64, layers=4, batch_size=4, bucket_mb=(0.01, 0.02), **given),
        gradient_compression: launch("gradient_compression", 2, batch_size=4, parts=("bytes", "time", "loss"), **given),
    }


@pytest.mark.parametrize("lab", [slow_link, comm_overlap, gradient_compression], ids=lambda lab: lab.__name__)
def test_an_answer_and_a_category_follow_from_a_smoke_run(smoke, lab):
    assert all(sentence.endswith(".") for sentence in lab.answer(smoke[lab]))
    assert isinstance(lab.category(smoke[lab]), str)


def test_the_kernel_counts_what_the_formulas_say(smoke):
    for r in smoke[gradient_compression].where("sent"):
        formula = smoke[gradient_compression].one("formula", way=r.case["way"]).value
        assert formula <= r.value < 1.05 * formula + 0.002, r.case


def test_buckets_of_every_size_are_timed_and_drawn(smoke):
    run = smoke[comm_overlap]
    sizes = {way: [r.case["bytes"] for r in run.where("span_s", way=way, part="exchange") if r.layout["rank"] == 0]
             for way in ("one bucket", "0.01 MiB buckets")}  # fmt: skip
    layer = 4 * 64 * 65
    assert sizes == {"one bucket": [4 * layer], "0.01 MiB buckets": [layer] * 4}
    assert len(run.where("step_s")) == 5


@pytest.mark.parametrize(
    ("full_s", "exchanges_s", "exposed"),
    [
        ([0.10], [0.05], 0.05),  # one bucket: all of it
        ([0.02, 0.10], [0.05, 0.05], 0.05),  # the first is done at 0.07, the last needs 0.05 after 0.10
        ([0.02, 0.10], [0.20, 0.05], 0.17),  # the first holds the second up until 0.22
        ([0.02, 0.10], [0.01, 0.0], 0.0),
    ],
)
def test_what_backward_cannot_hide(full_s, exchanges_s, exposed):
    assert slow_link.exposed_s(full_s, exchanges_s) == pytest.approx(exposed)


def test_seconds_of_an_exchange_by_hand():
    assert slow_link.exchange_s(10e6, 2, 100.0, 0.002) == pytest.approx(0.102)  # 2 x 1/2 x 10 MB at 100 MB/s
    assert slow_link.exchange_s(10e6, 4, 100.0) == pytest.approx(0.15)


def timed_links(ddp_s: dict[float, float], single_s=0.030, plain_s=0.032, exchange_s=None) -> Results:
    """A run of slow_link with these medians."""
    rows = [Record("slow_link", "bucket_bytes", "B", (2e6,), layout={"world_size": 2})]
    for mb_s, seconds in ddp_s.items():
        for way, s in (("single", single_s), ("no exchange", plain_s), ("ddp", seconds)):
            case = {"way": way, "mb_s": mb_s}
            rows.append(
                Record("slow_link", "step_s", "s", [s * k for k in STEADY], case=case, layout={"world_size": 2})
            )
        for bound in ("nothing hidden", "backward hides"):
            case = {"bound": bound, "mb_s": mb_s}
            rows.append(Record("slow_link", "bound_s", "s", (plain_s + 2.0 / mb_s,), "modelled", case=case))
    return Results(rows, 2)


@pytest.mark.parametrize(
    ("slow", "fast", "word"),
    [(0.1, 0.04, "above some"), (0.1, 0.07, "at none"), (0.05, 0.04, "at all"), (0.1, 0.06, "inconclusive")],
)
def test_where_splitting_pays(slow, fast, word):
    assert slow_link.category(timed_links({25.0: slow, 400.0: fast})) == word


def test_the_notebooks_error_percentages_are_those_of_a_hand_computation(capsys):
    """At 25 MB/s the bound is 32 + 80 ms, and 126 ms are 12.5 % more; at 100 MB/s 52 ms, and 65 ms are 25 % more."""
    import pandas as pd

    from labs.kit.notebook import compare

    run = timed_links({25.0: 0.126, 100.0: 0.065, 400.0: 0.037})
    guess = SimpleNamespace(reveal=lambda value: None)
    found = cell("wire-table", links={"wide": run, "deep": run}, NPROC=2, compare=compare, pd=pd, guess_wide=guess)
    table = found["tables"]["wide"]
    assert table["bound"].tolist() == pytest.approx([112, 52, 37])
    assert table["ddp above bound, %"].tolist() == pytest.approx([12.5, 25.0, 0.0], abs=1e-6)
    # 60/126 = 0.476, 60/65 = 0.923, 60/37 = 1.622
    assert found["pays"]["wide"] == "above some bandwidth between 100 and 400 MB/s"
    assert "wide: 1 bucket(s) of 2.0 MB; splitting pays above some" in capsys.readouterr().out
    answers = list(slow_link.answer(run))
    assert "+12 %" in answers[0] and "+25 %" in answers[1] and "+0 %" in answers[2]


def test_the_notebooks_shares_of_bytes_are_those_of_a_hand_computation():
    import numpy as np
    import pandas as pd

    told = []
    guess = SimpleNamespace(reveal=lambda value, kind: told.append(value))
    found = cell("compress-bytes", np=np, pd=pd, deep=gradient_compression.deep, guess_top=guess)
    share = 100 * found["share"]
    assert share["FP16"].tolist() == pytest.approx([50] * 3)
    assert share["top 1%"].tolist() == pytest.approx([2, 8, 64]) and told == [pytest.approx(64)]
    assert share["int8 by all-gather"].tolist() == pytest.approx([25, 100, 800])
    # 784 x 256 and 12 of 256 x 256 become 4 (a + b); 10 x 256 has 2,560 > 8 x 266; all vectors are whole
    thin = 4 * (784 + 256) + 12 * 4 * 512 + 4 * 266 + 256 + 12 * 3 * 256 + 10
    whole = 785 * 256 + 12 * (256 * 256 + 3 * 256) + 257 * 10
    assert share["PowerSGD"].tolist() == pytest.approx([100 * thin / whole] * 3)
    config = gradient_compression.Config()
    shapes = [p.shape for p in gradient_compression.deep().parameters()]
    for way, column in (("fp16", "FP16"), ("powersgd", "PowerSGD"), ("top-k", "top 1%")):
        for ranks in (2, 8, 64):
            lab = [gradient_compression.sent_bytes(w, shapes, ranks, config) for w in (way, "fp32")]
            assert 100 * lab[0] / lab[1] == pytest.approx(share.loc[ranks, column], rel=1e-3)


def test_the_published_sweeps_percentages_by_hand(capsys):
    """busbw is 2 x 7/8 of size over time: 16 MiB in 276.6 us are 106.1 GB/s, 16 GiB in 127,997 us 234.9 GB/s."""
    import matplotlib.pyplot as plt

    from labs.kit.notebook import recorded

    found = cell("nccl-figure", recorded=recorded, plt=plt, sweep=None, show_figure=lambda *_, **__: None)
    assert found["percent"][2**24] == pytest.approx(100 * 106.15 / 234.89, rel=1e-3)
    assert found["percent"][2**20] == pytest.approx(100 * 18.01 / 234.89, rel=1e-3)
    plt.close("all")


def compressed(gain: dict[float, float]) -> Records:
    rows = []
    for mb_s, ratio in gain.items():
        for way, s in (("fp32", 0.05 * ratio), ("powersgd", 0.05)):
            rows.append(Record("x", "step_s", "s", [s * k for k in STEADY], case={"way": way, "mb_s": mb_s}))
    return Records(rows)


def test_powersgd_is_judged_on_the_slowest_link():
    assert gradient_compression.category(compressed({400.0: 0.8, 25.0: 1.8})) == "faster"
    assert gradient_compression.category(compressed({400.0: 1.8, 25.0: 1.0})) == "inconclusive"


@pytest.mark.parametrize(
    ("ratio", "noise", "word"), [(1.01, 0.01, "as well"), (1.2, 0.01, "worse"), (1.1, 0.05, "inconclusive")]
)
def test_learning_as_well_needs_a_margin(ratio, noise, word):
    plain = [0.5] * 9
    losses = [0.5 * (ratio + noise * k / 4) for k in range(-4, 5)]
    records = [Record("x", "loss", "1", s, case={"way": w}) for w, s in (("fp32", plain), ("fp16", losses))]
    assert gradient_compression.learns(gradient_compression.excess(Records(records), "fp16")) == word


def start_of_powersgd(steps: int) -> list[int]:
    """The step from which PowerSGD compresses in a training of so many steps."""
    found = []
    rank, real = this_rank(), gradient_compression.wrap

    def wrap(*args, **kwargs):
        found.append(kwargs["powersgd_from"])
        return real(*args, **kwargs)

    gradient_compression.wrap = wrap
    data = torch.randn(200, 1, 28, 28), torch.zeros(200, dtype=torch.long)
    gradient_compression.train("powersgd", 0, *data, gradient_compression.Config(steps=steps, width=8, blocks=1), rank)
    return found


def test_powersgd_starts_after_a_tenth_of_the_steps():
    assert run_on_ranks(start_of_powersgd, 2, 30) == [[3]] * 2


# -- the cell that reads NCCL's log


@pytest.mark.parametrize("gpus", [0, 1])
def test_without_two_gpus_the_notebook_says_so_and_reads_published_lines(gpus, capsys):
    def sweep(gpus):
        raise AssertionError("no sweep with fewer than two GPUs")

    fakes = SimpleNamespace(all_reduce_sweep=sweep, published=nccl_log.published, answer=nccl_log.answer)
    cuda = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: gpus))
    found = cell("nccl-log", torch=cuda, nccl_log=fakes)
    said = capsys.readouterr().out
    assert found["sweep"] is None and f"this machine has {gpus}" in said and "issue 1453" in said
    assert "Tree with LL from 4 B to 64 KiB; Tree with LL128 from 128 KiB to 256 KiB" in said


def test_with_two_gpus_the_notebook_reads_its_own_log(capsys):
    line = "a:1:2 [0] NCCL INFO AllReduce: 4096 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..3}"
    asked = []
    fakes = SimpleNamespace(all_reduce_sweep=lambda n: (asked.append(n), (Records(), line))[1], answer=nccl_log.answer)
    found = cell("nccl-log", torch=SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 4)), nccl_log=fakes)
    said = capsys.readouterr().out
    assert asked == [4] and isinstance(found["sweep"], Records)
    assert "Your NCCL on 4 GPUs" in said and "For AllReduce, NCCL chose Ring with Simple at 4 KiB." in said


# -- bad input, one line each, before any rank


@pytest.mark.parametrize(
    ("lab", "values", "words"),
    [
        ("slow_link", {"mb_s": (-1.0,)}, "mb_s: a bandwidth must be at least 0.1 MB/s"),
        ("slow_link", {"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ("gradient_compression", {"parts": ("speed",)}, "parts must be some of bytes, time, loss"),
        ("gradient_compression", {"share": 1.0}, "share must be less than 1"),
        ("comm_overlap", {"bucket_mb": (0.0,)}, "bucket_mb must contain distinct positive sizes"),
        ("all_reduce_bytes", {"megabytes": 0}, "megabytes must be at least 1, not 0"),
        ("all_reduce_bytes", {"by_hand": "nowhere:f"}, "by_hand 'nowhere:f' cannot be imported"),
    ],
)
def test_bad_input_is_one_line(lab, values, words):
    with pytest.raises(BadInput, match=words) as error:
        launch(lab, 2, oversubscribe=True, **values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lab", ["slow_link", "gradient_compression", "all_reduce_bytes"])
def test_one_rank_is_told_that_it_is_alone(lab):
    with pytest.raises(BadInput, match=r"at least two ranks: use nproc=2"):
        launch(lab, 1, smoke=True)
