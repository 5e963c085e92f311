"""The wire, the ring, buckets and compressed gradients: what notebook 07 launches."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import HERE, PYTHON, new_environment
from speeds import first
from torch import nn

from labs import all_reduce_anatomy, bucket_overlap, gradient_compression, slow_link
from labs.all_reduce_anatomy import ring
from labs.common.communication import delay, wire
from labs.gradient_compression import compression
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

STEADY = (0.998, 1.0, 1.002, 1.001, 0.999, 1.0)

pytestmark = pytest.mark.skipif(not wire.can_pace(), reason="this system cannot pace a connection")


# -- the ring


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_picture_ends_with_every_sum_on_every_rank(ranks):
    *_, end = steps = list(ring.snapshots(ranks))
    everyone = frozenset(range(ranks))
    assert len(steps) == 1 + 2 * (ranks - 1)
    assert all(part == everyone for held in end.holds for part in held)
    scattered = steps[ranks - 1]
    assert [held.index(everyone) for held in scattered.holds] == [(r + 1) % ranks for r in range(ranks)]


def ring_against_torch(numbers: int) -> tuple[bool, bool]:
    """Whether whole numbers have the same bits as torch's sum, and whether the input was replaced in place."""
    x = torch.arange(numbers, dtype=torch.float32) * (dist.get_rank() + 1)
    by_hand, by_torch = x.clone(), x.clone()
    ring.ring_all_reduce(by_hand)
    dist.all_reduce(by_torch)
    return torch.equal(by_hand, by_torch), not torch.equal(by_hand, x)


@pytest.mark.parametrize("ranks, numbers", first(1, [(4, 2), (3, 10), (2, 10), (3, 100_003)]))
def test_the_ring_by_hand_sums_like_torch(ranks, numbers):
    assert run_on_ranks(ring_against_torch, ranks, numbers) == [(True, True)] * ranks


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

    command = [*PYTHON, "-m", "labs.slow_link", "--mb-s", "23.456", "--seconds", "600"]
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


# -- the wire acted out


def without_pacing(lab: str) -> tuple[set[str], list[str], str]:
    """A smoke run on a system whose kernel cannot pace: metrics, the sentence that says so, the name of the wire."""
    wire.can_pace = lambda: False
    module = importlib.import_module(f"labs.{lab}")
    config = module.Config(smoke=True, **({"mb_s": 50.0} if lab == "ddp_overlap" else {}))
    found = Records(module.run(config, this_rank()))
    return {r.metric for r in found}, wire.label(found), wire.named(found)


LIKEWISE = [pytest.param(n, marks=pytest.mark.long) for n in ("bucket_overlap", "ddp_overlap", "gradient_compression")]


@pytest.mark.parametrize("lab", ["slow_link", *LIKEWISE])
def test_where_no_kernel_paces_a_lab_runs_over_an_emulated_wire_and_says_so(lab):
    for metrics, label, name in run_on_ranks(without_pacing, 2, lab):
        assert {"acted_out", "step_s"} <= metrics and "no byte is held back" in label[0] and name == "emulated wire"


def test_two_levels_still_needs_a_kernel_that_paces(monkeypatch):
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


def bf16_mean() -> list[float]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model.register_comm_hook(None, compression.bf16_hook)
    model(torch.tensor([[1.0, 3.0]]) * (1 + dist.get_rank())).sum().backward()
    return model.module.weight.grad[0].tolist()


@pytest.mark.parametrize(
    "b_s",
    [
        0.0,
        1e3,
        float("nan"),
    ],
)
def test_no_wire_has_that_bandwidth(b_s):
    with pytest.raises(BadInput, match=r"bandwidth must be at least 0\.1 MB/s"):
        wire.require_rate(b_s)


# -- bad input, one line each, before any rank


@pytest.mark.parametrize(
    "module, arguments, told",
    [
        (slow_link, {"mb_s": (-1.0,)}, "bandwidth must be"),
        (slow_link, {"sizes": (6,)}, "sizes must be"),
        (gradient_compression, {"hidden": (0,)}, "hidden"),
        (gradient_compression, {"ways": ("fp32", "zip")}, "unknown way to send gradients 'zip'"),
        (bucket_overlap, {"bucket_cap_mb": (0.0,)}, "bucket_cap_mb must be positive"),
        (bucket_overlap, {"layers": 0}, "layers"),
    ],
)
def test_bad_input_is_one_line(module, arguments, told):
    with pytest.raises(BadInput, match=told) as error:
        module.Config(**arguments)
    assert "\n" not in str(error.value)


def test_one_rank_is_told_that_it_is_alone():
    for lab in ("slow_link", "gradient_compression", "bucket_overlap", "all_reduce_anatomy"):
        with pytest.raises(BadInput, match=r"one rank .*use nproc=2"):
            launch(lab, nproc=1, smoke=True)


def test_bytes_on_the_wire_are_those_of_the_ring():
    found = launch("all_reduce_anatomy", nproc=3, device="cpu", oversubscribe=True, smoke=True)
    assert found.one("max_error", numbers="integers").value == 0
    over = all_reduce_anatomy.over_needed(found)
    if not over:
        pytest.skip("this kernel does not count the bytes of a connection")
    for op in ("ring by hand", "all_reduce", "all_gather", "all_to_all"):
        assert 1 <= over[op] < 1.02, (op, over[op])  # headers of gloo are small against these buffers


# -- predictions


def test_a_bucket_waits_for_its_gradients_and_for_the_wire():
    predict = bucket_overlap.predict
    one_ms = 2 * 10**5  # bytes: a ring of two sends as many, 200 MB/s carry them in 1 ms
    assert predict([0.0, 0.010], [one_ms, one_ms], 2, 200, 0.0) == pytest.approx(0.011)  # waits for the gradient
    assert predict([0.0, 0.0], [one_ms, one_ms], 2, 200, 0.0) == pytest.approx(0.002)  # waits for the wire
    assert predict([0.0, 0.0], [one_ms, one_ms], 2, 200, 0.003) == pytest.approx(0.008)  # and pays latency twice
    assert predict([0.010], [0], 2, 200, 0.0) == pytest.approx(0.010)


def test_the_break_even_bandwidth_is_where_two_lines_cross():
    fixed_s, saved = 0.002, 1e6  # costs 2 ms, saves 1 MB: break-even at 500 MB/s
    more = {mb_s: fixed_s - saved / (1e6 * mb_s) for mb_s in (1000, 25)}
    found = gradient_compression.predict((1e-9, more[1000]), (1e-6 / 25, more[25]))
    assert found.b_s == pytest.approx(5e8) and found.saved_bytes == pytest.approx(saved)
    assert gradient_compression.Crossing(-0.001, saved).b_s == float("inf")
    assert gradient_compression.Crossing(0.001, -5.0).b_s == 0.0


def test_closed_forms_of_what_is_sent():
    layer = nn.Linear(100, 50)  # a matrix of 5,000 numbers and a bias of 50
    sent = {name: way.sent_bytes(list(layer.parameters()), 2) for name, way in compression.WAYS.items()}
    assert sent["fp32"] == 4 * 5050 and sent["fp16"] == 2 * 5050
    assert sent["powersgd_1"] == 4 * (150 + 50) and sent["powersgd_4"] == 4 * (600 + 50)
    assert sent["powersgd_16"] == 4 * (2400 + 50)
    assert compression._power_sgd(17).sent_bytes(list(layer.parameters()), 2) == 4 * 5050  # would not halve it
    assert sent["top_1%"] == 8 * 50  # 1 % of 5,050 numbers, 4 bytes a value and 4 a place


def top_k_twice() -> list[list[float]]:
    """Gradients after the hook in two steps, of a layer whose gradient is 3, 1, 2, 0 on every rank."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1, bias=False), bucket_cap_mb=compression.ONE_BUCKET_MB)
    model.register_comm_hook(compression.TopK(0.5), compression.top_k_hook)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([[3.0, 1.0, 2.0, 0.0]])).sum().backward()
        found.append(model.module.weight.grad[0].tolist())
    return found


def sent_in_the_end() -> list[float]:
    """What four steps give, added up: the first has a gradient of 6, 4 and 6, 0, the others have none."""
    layers = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        layers[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=compression.ONE_BUCKET_MB)
    with torch.no_grad():
        layers[1].weight.copy_(torch.tensor([[1.0], [0.0]]))
    model.register_comm_hook(compression.TopK(1 / 4), compression.top_k_hook)
    total = torch.zeros(4)
    for weight in (2.0, 0.0, 0.0, 0.0):
        model.zero_grad()
        (weight * model(torch.tensor([[3.0, 2.0]]))[0, 0]).backward()
        total += torch.cat([p.grad.flatten() for p in model.parameters()])
    return total.tolist()


def by_hooks() -> tuple[list[float], list[list[float]], list[float]]:
    return bf16_mean(), top_k_twice(), sent_in_the_end()


def test_compressed_gradients_are_the_mean_and_what_top_k_leaves_out_comes_later_to_its_own_parameter():
    for mean, steps, total in run_on_ranks(by_hooks, 2):
        assert mean == [1.5, 4.5], "bfloat16 over gloo"
        assert steps[0] == [3, 0, 2, 0]  # two of four are sent
        assert steps[1] == [3, 2, 0, 0] or steps[1] == [3, 0, 2, 0]  # 1 + 1 left out ties with 2
        assert sum(map(sum, steps)) >= 5 + 5 + 5, "what is left out is sent later"
        assert total == [6, 4, 6, 0]  # after the first step DDP turns its bucket's order round


# -- sentences turn round with the records


def step(lab, metric, seconds, **case):
    samples = [seconds * k for k in STEADY]
    return Record(
        lab,
        metric,
        "s",
        samples,
        case.pop("kind", "measured"),
        case,
        {"model": "mlp", "batch_size": 64},
        {"world_size": 2, "rank": None, "backend": "gloo", "device": "cpu"},
    )


def dialled(ddp_s: dict[float, float], alone_s: float = 0.010) -> Records:
    rows = [Record("slow_link", "gradient_bytes", "B", [1e6])]
    for mb_s, seconds in ddp_s.items():
        rows += [
            step("slow_link", "step_s", alone_s, way="single", mb_s=mb_s),
            step("slow_link", "step_s", seconds, way="ddp", mb_s=mb_s),
            step("slow_link", "all_reduce_s", 1 / (mb_s or 1e3), mb_s=mb_s, size=1e6),
        ]
        if mb_s:
            rows.append(step("slow_link", "all_reduce_s", 1 / mb_s, mb_s=mb_s, size=1e6, kind="modelled"))
    return Records(rows[1:] + rows[:1])


@pytest.mark.parametrize(
    "ddp_s, told",
    [
        ({0.0: 0.011, 400: 0.012, 100: 0.018, 25: 0.050}, "DDP pays from somewhere between 25 and 100 MB/s on"),
        ({0.0: 0.030, 400: 0.032, 25: 0.050}, "DDP does not pay up to 400 MB/s"),
        ({0.0: 0.020, 400: 0.020, 25: 0.020}, "whether DDP pays cannot be told"),
    ],
)
def test_from_where_on_ddp_pays(ddp_s, told):
    assert slow_link.pays_text(dialled(ddp_s)).startswith(told)
    assert told in " ".join(slow_link.answer(dialled(ddp_s)))


@pytest.mark.parametrize(
    ("measured_s", "told"),
    [
        ({400: 1 / 400, 100: 1.2 / 100}, "1 are within 10 %"),
        ({900: 2 / 900, 100: 1 / 100}, "Of 1 all-reduces at 100 to 100 MB/s"),
    ],
)
def test_the_formula_is_judged_on_wires_well_below_what_there_is(measured_s, told):
    lab, size = "slow_link", 1e6
    rows = [step(lab, "all_reduce_s", 1e-3, mb_s=0.0, size=size)]
    for mb_s, seconds in measured_s.items():
        rows += [
            step(lab, "all_reduce_s", 1 / mb_s, mb_s=mb_s, size=size, kind="modelled"),
            step(lab, "all_reduce_s", seconds, mb_s=mb_s, size=size),
        ]
    assert told in slow_link.ring_text(Records(rows))


@pytest.mark.parametrize(
    ("fp16", "powersgd_4", "lost", "told"),
    [
        (0.005, 0.002, "powersgd_4", "fp16 has the best median: 2 x"),
        (0.005, 0.002, "", "powersgd_4 has the best median: 5.00 x"),
        (0.010, 0.012, "", "no way is surely faster"),
    ],
)
def test_a_way_is_chosen_that_is_faster_and_learns_as_much(fp16, powersgd_4, lost, told):
    lab, rows = "gradient_compression", []
    for way, seconds in {"fp32": 0.010, "fp16": fp16, "powersgd_4": powersgd_4}.items():
        rows.append(step(lab, "step_s", seconds, way=way, mb_s=100.0))
        worse = 0.1 if way != "fp32" and lost in (way, "both") else 0.0
        shares = [0.8 + k / 100 - worse for k in range(6)]
        rows.append(Record(lab, "accuracy", "1", shares, "measured", {"way": way}))
    assert told in gradient_compression.choice_text(Records(rows), 100.0)


def compressed(gain_s: dict[float, float], tried_s: dict[float, float], predicted: float) -> Records:
    lab, rows = "gradient_compression", []
    for mb_s, seconds in gain_s.items():
        rows += [step(lab, "step_s", 0.010, way="fp32", mb_s=mb_s), step(lab, "step_s", seconds, way="fp16", mb_s=mb_s)]
    rows.append(Record(lab, "break_even_mb_s", "MB/s", [predicted], "modelled", {"way": "fp16"}))
    for times, seconds in tried_s.items():
        case = {"beside": "fp16", "times": times, "mb_s": times * predicted}
        rows += [
            step(lab, "tried_step_s", 0.010, way="fp32", **case),
            step(lab, "tried_step_s", seconds, way="fp16", **case),
        ]
    return Records(rows)


@pytest.mark.parametrize(
    "tried_s, predicted, told",
    [
        ({0.5: 0.008, 2.0: 0.012}, 100, "predicted at 100 MB/s, found between 50 and 200"),
        ({0.5: 0.010, 2.0: 0.010}, 100, "cannot tell"),
        ({}, 0.0, "never gains; but it did at 25 MB/s"),
    ],
)
def test_break_even_in_words(tried_s, predicted, told):
    run = compressed({0.0: 0.010, 25: 0.005}, tried_s, predicted)
    assert told in gradient_compression.tried_text(gradient_compression.crossings(run)["fp16"])


def test_a_training_over_a_slow_wire_takes_the_time_of_its_bytes():
    """Three steps of 0.41 MB on two ranks, and each rank sends as much: at 4 MB/s they cannot end before 0.3 s."""
    run = launch("gradient_compression", nproc=2, device="cpu", oversubscribe=True, smoke=True, train_mb_s=4.0)
    plain, half = (run.one("train_s", way=way, mb_s=4.0) for way in ("fp32", "fp16"))
    assert len(plain.samples) == 2 and min(plain.samples) > 0.2 and min(half.samples) > 0.1
    assert any(
        line.startswith("Trainings of the perceptron 784-128-10 at 4 MB/s") for line in gradient_compression.answer(run)
    )
