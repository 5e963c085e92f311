"""Thousands of ranks: counts of fake ranks against closed forms, numbers by hand, and two real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from speeds import first
from torch.nn.parallel import DistributedDataParallel

from labs import many_ranks
from labs.common.oracle.gpt import GptShape, gpt
from labs.common.sharding.tensor import by_hand
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.record import Records
from labs.many_ranks import five_ways
from labs.many_ranks.fake_ranks import all_reduce_hook, fake_job, out_of_job
from labs.many_ranks.five_ways import Job

SMALL = GptShape(layers=4, width=32, vocabulary=64, heads=8, places=16)


# -- closed forms by hand


def test_ddp_on_16_ranks_by_hand():
    [term] = five_ways.predict(Job(SMALL, 16, 8), "ddp")
    parameters = sum(p.numel() for p in gpt(SMALL).module.parameters())
    assert (term.kind, term.ranks, term.sent) == ("all_reduce", 16, 2 * 15 / 16 * 4 * parameters)
    levels = five_ways.predict_levels(Job(SMALL, 16, 8), "ddp")
    assert levels["across"] == pytest.approx(term.sent / 8)  # one link of eight leaves the node


def test_rows_that_are_fewer_than_ranks_are_padded():
    """32 rows on 64 ranks: a rank sends as if there were 64."""
    few, many = (sum(t.sent for t in five_ways.predict(Job(SMALL, n, 8), "fsdp")) for n in (32, 1024))
    assert many > 7 * few
    assert [
        sum(t.sent for t in five_ways.predict(Job(SMALL, n, 8), "hsdp") if t.kind != "all_reduce") for n in (32, 1024)
    ] == [pytest.approx(7 / 8 * _sharded())] * 2


def _sharded() -> float:
    """Gathered for forward and backward, the tables and the last norm once, and scattered, in bytes."""
    outside = (SMALL.vocabulary + SMALL.places + 2) * SMALL.width
    return 4 * (3 * SMALL.parameters - outside)


def test_shares_of_tensor_ranks_and_stages_hold_every_parameter():
    stages = five_ways.stages(SMALL, 4)
    assert [sum(p.numel() for p in s.parameters()) for s in stages] == [
        five_ways.stage_parameters(SMALL, 4, i) for i in range(4)
    ]
    with fake_job(4):
        module = by_hand(five_ways.blocks.separated(gpt(SMALL).module), dist.group.WORLD)
    assert sum(p.numel() for p in module.parameters()) == five_ways.tensor_parameters(SMALL, 4)


@pytest.mark.parametrize(
    "members, per_node, share",
    [(range(8), 8, 0), (range(16), 8, 2 / 16), ([3], 1, 0), ([0, 8, 1, 9], 8, 1)],
)
def test_the_share_of_links_that_cross(members, per_node, share):
    assert five_ways.crossing_share(list(members), per_node) == share


# -- fake ranks against closed forms


@pytest.mark.parametrize("ranks", [2, 16, *(pytest.param(n, marks=pytest.mark.long) for n in (64, 512))])
def test_fake_ranks_send_the_bytes_of_the_closed_form(ranks):
    job = Job(SMALL, ranks, 8)
    for way in five_ways.WAYS:
        calls, levels = many_ranks.audit(job, way)
        assert calls
        assert five_ways.alike(five_ways.counted(calls), five_ways.summed(five_ways.predict(job, way))), way
        assert levels == pytest.approx(five_ways.predict_levels(job, way), rel=1e-9), way
        assert not dist.is_initialized()


@pytest.mark.parametrize(("ranks", "per_node", "share"), [(24, 8, 2 / 6), (32, 8, 0)])
def test_a_stage_whose_ranks_begin_within_a_node(ranks, per_node, share):
    """Ranks 12 to 17 of 24 lie on two nodes of 8: two of their ring's six links cross."""
    job = Job(SMALL, ranks, per_node)
    messages, gradients = five_ways.predict(job, "pipeline")
    assert gradients.ranks == ranks // 4
    across = five_ways.predict_levels(job, "pipeline")["across"]
    assert across == pytest.approx(messages.sent + share * gradients.sent)
    assert many_ranks.audit(job, "pipeline")[1]["across"] == pytest.approx(across)


@pytest.mark.parametrize("way", first(1, ["hsdp", "pipeline", "fsdp", "tensor"]))
def test_a_large_model_takes_no_memory(way):
    """GPT-3's width: 4 blocks are 29 GB in FP32."""
    job = Job(GptShape(4, 12288, 50257, 96, 128), 16, 8)
    calls, _ = many_ranks.audit(job, way)
    assert five_ways.alike(five_ways.counted(calls), five_ways.summed(five_ways.predict(job, way)))


# -- private parts of torch


def test_a_fake_job_is_left_whatever_happens_and_is_refused_within_another():
    with pytest.raises(ArithmeticError), fake_job(100, 7):
        assert (dist.get_rank(), dist.get_world_size()) == (7, 100)
        dist.all_reduce(torch.ones(1))  # nobody is there, and nobody waits
        with pytest.raises(BadInput, match="a rank of a job already"), fake_job(2):
            pass
        raise ArithmeticError
    assert not dist.is_initialized()
    with pytest.raises(BadInput, match="no rank 3 among 3"), fake_job(3, 3):
        pass


def meet_again() -> tuple[bool, float, tuple[int, int]]:
    """Ranks leave their job, one plays another one, and they sum again."""
    me = dist.get_rank()
    with out_of_job():
        alone = not dist.is_initialized()
        if me == 0:
            with fake_job(512, 3):
                pass
    x = torch.tensor([float(me + 1)])
    dist.all_reduce(x)
    return alone, x.item(), (dist.get_rank(), dist.get_world_size())


def test_ranks_meet_again_after_a_fake_job():
    assert run_on_ranks(meet_again, 2) == [(True, 3.0, (0, 2)), (True, 3.0, (1, 2))]


def gradients_by_hook() -> bool:
    """Whether DDP with the hook has the gradients of DDP as it is."""
    found = []
    for hooked in (True, False):
        torch.manual_seed(0)
        module = DistributedDataParallel(torch.nn.Linear(5, 3))
        if hooked:
            module.register_comm_hook(None, all_reduce_hook)
        module(torch.full((2, 5), float(dist.get_rank()))).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    return torch.equal(*found) and bool(found[0].any())


def test_the_hook_computes_what_ddp_computes():
    assert run_on_ranks(gradients_by_hook, 2) == [True, True]


# -- the lab


@pytest.fixture(scope="module")
def run() -> Records:
    return launch("many_ranks", nproc=2, device="cpu", smoke=True, width=64, vocabulary=128)


def test_real_ranks_make_the_calls_of_fake_ones(run):
    assert {r.case["way"]: r.value for r in run.where("same_calls")} == dict.fromkeys(five_ways.WAYS, 1.0)
    assert many_ranks.wrong(run) == []


def test_the_kernel_counts_the_bytes_of_the_closed_form(run):
    counted = [r for r in run.where("tcp_sent_bytes") if r.kind == "measured"]
    if not counted:
        pytest.skip("this kernel does not count what a connection sends")
    for record in counted:
        form = next(r for r in run.where("tcp_sent_bytes", way=record.case["way"]) if r.kind == "modelled")
        for found, said in zip(record.samples, form.samples, strict=True):
            assert said <= found < 1.05 * said + 20_000, record.case  # headers: 48 bytes a message


# -- ZeRO


# -- bad input


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"ways": ("magic",)}, "magic"),
        ({"ranks": (12,)}, "do not fill nodes of 8"),
        ({"layers": 2}, "4 stages"),
        ({"heads": 4}, "4 heads cannot be shared by 8"),
        ({"ways": ("ddp",), "width": 12288}, "make the model smaller"),
    ],
)
def test_bad_input_is_one_line(arguments, told):
    with pytest.raises(BadInput, match=told) as error:
        many_ranks.Config(**arguments)
    assert "\n" not in str(error.value)
