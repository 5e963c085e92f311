"""Two speeds: the formula by hand, sums and bytes on real ranks, what the records are made to say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from speeds import first
from torch.distributed.device_mesh import init_device_mesh

from labs import two_levels
from labs.chapters.nb08 import editable, figures_levels
from labs.common.communication import wire
from labs.kit.check import predict
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.two_levels import two_levels as levels
from labs.two_levels.two_levels import Nodes

STEADY = (0.998, 1.0, 1.002, 1.001, 0.999, 1.0)
paces = pytest.mark.skipif(not wire.can_pace(), reason="this system cannot pace a connection")


# -- the formula


def test_two_nodes_of_two_by_hand():
    """1 MB; 100 MB/s inside, 10 MB/s out of a node."""
    nodes, size = Nodes(2, 2, 1e8, 1e7), 1e6
    assert two_levels.predict("flat", size, nodes) == (1.5e6, 1.5e6, pytest.approx(0.15))
    assert two_levels.predict("ring, in turn", size, nodes) == (0, 3e6, pytest.approx(0.3))
    inside, across, seconds = two_levels.predict("hierarchical", size, nodes, gloo=False)
    assert (inside, across) == (2e6, 1e6)  # 4 halves inside: two ranks, two phases
    assert seconds == pytest.approx(2 * 0.005 + 0.1)
    assert two_levels.predict("fsdp", size, nodes, gloo=False) == (2.25e6, 2.25e6, pytest.approx(0.225))
    assert two_levels.predict("hsdp", size, nodes, gloo=False)[1] == 1e6
    assert two_levels.predict("ddp, accumulated", size, nodes, every=5)[1:] == (3e5, pytest.approx(0.03))


def test_what_crosses_does_not_grow_with_the_ranks_of_a_node_if_it_is_summed_inside_first():
    crossing = [two_levels.predict("hierarchical", 1e6, Nodes(4, k, 1e8, 1e7))[1] for k in (1, 2, 8)]
    assert crossing == [crossing[0]] * 3 == [1.5e6] * 3
    flat = [two_levels.predict("flat", 1e6, Nodes(4, k, 1e8, 1e7))[1] for k in (1, 2, 8)]
    assert flat == sorted(flat) and flat[0] == 1.5e6 and flat[-1] < 2e6


def test_the_inside_sets_the_time_where_it_is_the_slower_one():
    slow_inside = Nodes(2, 2, 1e6, 1e9)
    assert two_levels.predict("flat", 1e6, slow_inside)[2] == pytest.approx(1.5)
    assert two_levels.predict("hierarchical", 1e6, slow_inside, gloo=False)[2] == pytest.approx(1.001)


@pytest.mark.parametrize("nodes, per_node", [(2, 2), (2, 4), (3, 5)])
def test_rings_cross_as_often_as_the_formula_says(nodes, per_node):
    machines = Nodes(nodes, per_node, 1e8, 1e7)
    assert levels.crossings(machines.node_by_node(), machines) == nodes
    assert levels.crossings(machines.in_turn(), machines) == nodes * per_node
    assert sorted(machines.in_turn()) == machines.node_by_node()


# -- on real ranks


def this_rank() -> Rank:
    return Rank(
        dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", ()
    )


def by_hand(nodes: int, per_node: int) -> dict:
    """{way: (is it the sum, bytes by level in vectors)} of 120,000 whole numbers on each rank."""
    rank, machines = this_rank(), Nodes(nodes, per_node, 1e8, 1e7)
    mesh = init_device_mesh("cpu", (nodes, per_node), mesh_dim_names=("across", "inside"))
    groups = mesh["inside"].get_group(), mesh["across"].get_group()
    ways = {
        "node by node": lambda x: levels.ring_in_order(x, machines.node_by_node()),
        "in turn": lambda x: levels.ring_in_order(x, machines.in_turn()),
        "hierarchical": lambda x: levels.hierarchical_all_reduce(x, *groups),
    }
    found = {}
    for way, reduce in ways.items():
        x, right = (torch.arange(120_000.0) * (rank.rank + 1) for _ in range(2))
        reduce(x)
        dist.all_reduce(right)
        y = torch.zeros(120_000)
        sent = levels.sent_between(lambda reduce=reduce, y=y: reduce(y), rank)
        found[way] = torch.equal(x, right), sent and levels.sent_by_level(sent, machines)
    return found


@paces
@pytest.mark.parametrize("nodes, per_node", first(1, [(2, 2), (3, 1), (2, 3)]))
def test_ways_by_hand_sum_like_torch_and_send_what_the_formula_says(nodes, per_node):
    machines, size, slack = Nodes(nodes, per_node, 1e8, 1e7), 480_000, 0.02 * 480_000
    formula = {"node by node": levels.over_all("all_reduce", size, machines), "in turn": levels.in_turn(size, machines)}
    for found in run_on_ranks(by_hand, nodes * per_node, nodes, per_node):
        assert all(right for right, _ in found.values())
        for way, (_, (inside, across)) in found.items():
            want = levels.total(
                [formula[way]] if way in formula else levels.hierarchical(size, machines, gloo=True), machines
            )
            assert all(abs(b - want[0]) < slack for b in inside) and all(abs(b - want[1]) < slack for b in across), way


def limits() -> dict[int, set[int]]:
    """{peer: limits of the connections to it} while two speeds are set, with two lanes."""
    rank, nodes = this_rank(), Nodes(2, 2, 8e7, 1e7)
    for other in range(rank.world_size):  # opens every connection
        dist.broadcast(torch.zeros(1), other)
    links = wire.links(rank)
    with levels.two_speeds(rank, nodes, lanes=2):
        during = {peer: {wire.limit_of(fd) for fd in fds} for peer, fds in links.items()}
    after = {wire.limit_of(fd) for fds in links.values() for fd in fds}
    return {"during": during, "after": after}


@paces
def test_connections_get_the_speed_of_their_level_and_their_share_of_the_card():
    for rank, found in enumerate(run_on_ranks(limits, 4)):
        assert found["after"] == {wire.NO_LIMIT}
        assert found["during"]
        for peer, rates in found["during"].items():
            assert rates == {int(8e7) if peer // 2 == rank // 2 else int(5e6)}


@paces
@pytest.mark.quiet
def test_the_lab_counts_the_bytes_of_the_formula_and_its_page_says_so(capsys):
    run = launch("two_levels", nproc=4, device="cpu", oversubscribe=True, smoke=True)
    assert {r.metric for r in run} == {"max_error", "sent_bytes", "step_s", "cpu_s"}
    assert two_levels.counted_off(run) == [] and all(r.value == 0 for r in run.where("max_error"))
    assert {r.case["way"] for r in run.where("step_s")} == set(two_levels.WAYS)
    figures_levels.verdict_text(run)
    assert capsys.readouterr().out == (
        "sums by hand: those of torch, bit for bit\nbytes by level: those of the closed form\n"
    )
    figures_levels.exchanges(run, predict(0.7, "share of the flat time", unit="x"))
    figures_levels.bytes_table(run)
    assert len(list(two_levels.answer(run))) == 4


@paces
def test_the_editable_round_tells_what_crosses_and_a_wrong_sum(capsys):
    editable.tell(run_on_ranks(editable.count, 4, levels.hierarchical_all_reduce))
    editable.tell(run_on_ranks(editable.count, 4, lambda x, inside, across: dist.all_reduce(x, group=inside)))
    assert capsys.readouterr().out.splitlines() == [
        "the sum is right on all ranks",
        "inside each node 3.0 vectors are sent, out of each node 1.0",
        "the sum is WRONG on ranks [0, 1, 2, 3]",
        "inside each node 2.0 vectors are sent, out of each node 0.0",
    ]


# -- what the records are made to say


def made(measured: dict[str, float], noise=STEADY) -> Records:
    """A run with these measured seconds; the formula's are 10 ms for the fast way, 20 for the slow one."""
    formula = {"hierarchical": 0.010, "flat": 0.020}
    rows = []
    for way, seconds in measured.items():
        for kind, samples in (("modelled", [formula[way]]), ("measured", [seconds * k for k in noise])):
            rows.append(Record("two_levels", "step_s", "s", samples, kind, {"way": way}, {}, {"world_size": 4}))
    return Records(rows)


@pytest.mark.parametrize(
    "measured, noise, agree, against, open_",
    [
        ({"hierarchical": 0.011, "flat": 0.021}, STEADY, 1, [], 0),
        ({"hierarchical": 0.021, "flat": 0.011}, STEADY, 0, [("hierarchical", "flat")], 0),
        ({"hierarchical": 0.011, "flat": 0.011}, STEADY, 0, [], 1),
    ],
)
def test_the_order_is_judged_by_the_records(measured, noise, agree, against, open_):
    order = two_levels.ranking(made(measured, noise))
    assert (order.agree, order.contradict, order.open) == (agree, against, open_)


def test_a_close_pair_is_shown_and_not_judged():
    apart = made({"hierarchical": 0.011, "flat": 0.010})
    assert two_levels.close(apart, "hierarchical", "flat") is None, "the formula decides this pair"
    formulas = {"hierarchical": (0.009,), "flat": (0.010,)}
    near = Records([replace(r, samples=formulas[r.case["way"]]) if r.kind == "modelled" else r for r in apart])
    formula, ratio = two_levels.close(near, "hierarchical", "flat")
    assert formula == pytest.approx(0.9) and ratio.low > 1
    assert two_levels.close(near, "flat", "hierarchical") is None, "the formula's faster one comes first"
    assert two_levels.close(near, "hsdp", "ddp") is None, "ways that were not tried"
    assert two_levels.ranking(near) == two_levels.Ranking(0, [], 0)


@pytest.mark.parametrize(
    ("hsdp_s", "words"), [(0.05, "20 ms are no links but FSDP2's own work"), (0.03, "of their time")]
)
def test_hsdp_is_held_against_its_collectives_by_hand(hsdp_s, words):
    """What is more than the same messages take is FSDP2's; if nothing is, nothing is said of it."""
    seconds = {"hsdp": hsdp_s, "hsdp, by hand": 0.03}
    run = Records(
        Record("two_levels", metric, "s", [s * k for k in STEADY], "measured", {"way": way})
        for way, s in seconds.items()
        for metric in ("step_s", "cpu_s")
    )
    assert words in figures_levels._own_work(run)
    assert figures_levels._own_work(Records(r for r in run if r.case["way"] == "hsdp")) == ""


def test_bytes_that_are_not_the_formulas_are_named():
    def sent(kind, b):
        return Record(
            "two_levels",
            "sent_bytes",
            "B",
            [b],
            kind,
            {"way": "flat", "level": "across"},
            {"width": 500, "layers": 1},
            {"world_size": 4},
        )

    assert two_levels.counted_off(Records([sent("modelled", 1.5e6), sent("measured", 1.51e6)])) == []
    assert two_levels.counted_off(Records([sent("modelled", 1.5e6), sent("measured", 2e6)])) == ["flat, across"]


# -- bad input


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"nodes": 1}, "nodes must be at least 2"),
        ({"across_mb_s": 0.0}, "bandwidth must"),
        ({"ways": ("zigzag",)}, "not zigzag"),
    ],
)
def test_bad_input_is_one_line(arguments, told):
    with pytest.raises(BadInput, match=told) as error:
        two_levels.Config(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("nproc, told", [(2, "use nproc=4"), (5, "use nproc=4"), (6, "multiple of 6")])
def test_ranks_that_make_no_nodes_are_told(nproc, told):
    with pytest.raises(BadInput, match=told):
        two_levels.check_layout(two_levels.Config(), nproc)
