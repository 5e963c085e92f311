"""Every policy gives the gradients of none, bit for bit, and drops what it says."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from labs.common import models
from labs.common.memory import saved_tensors
from labs.common.memory.recomputation import blocks, recompute, segment_bounds
from labs.common.models.large_models import BertLayer, BertShape, bert, resnet, tiny_bert
from labs.common.models.text_models import char_gpt
from labs.kit.errors import BadInput
from labs.kit.launch import run_on_ranks

SHAPE = BertShape(layers=4, hidden=32, heads=2, vocabulary=64, places=16)
MODELS = {
    "bert": lambda: bert(SHAPE, 16),
    "char_gpt": char_gpt,
    "resnet": lambda: resnet((1, 2, 1, 1), 8, 10, 32),
    "mlp": models.mlp,
    "cnn_batchnorm": models.cnn_batchnorm,
}
POLICIES = ["block", "segments:1", "segments:2", "segments:2:keep_last", "selective", "block:keep_last", "stage"]


def gradients(workload, x, y, lowered=False):
    torch.manual_seed(3)
    workload.module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=lowered):
        loss = workload.loss(workload.module(x), y)
    loss.backward()
    return [p.grad for p in workload.module.parameters()], torch.get_rng_state()


def same(a, b):
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


# -- the same training


@pytest.mark.parametrize(("name", "lowered"), [*((name, False) for name in MODELS), ("char_gpt", True)])
def test_gradients_buffers_and_random_state_are_those_without_a_policy(name, lowered):
    torch.manual_seed(0)
    workload = MODELS[name]()
    x, y = workload.make_batch(4)
    start = copy.deepcopy(workload.module.state_dict())
    reference, state = gradients(workload, x, y, lowered)
    reference, buffers = [g.clone() for g in reference], [b.clone() for b in workload.module.buffers()]
    for policy in POLICIES:
        if policy == "stage" and name != "resnet":
            continue
        workload.module.load_state_dict(start)
        recompute(workload.module, policy)
        found, after = gradients(workload, x, y, lowered)
        assert same(reference, found), policy
        assert same(buffers, workload.module.buffers()), policy
        assert torch.equal(state, after), policy
        assert list(workload.module.state_dict()) == list(start)


def test_two_ranks_of_ddp_agree_with_each_policy():
    def train():  # a rank cannot import this module
        found = []
        for policy in ("none", "block", "segments:2", "selective"):
            torch.manual_seed(0)
            workload = tiny_bert()
            module = DistributedDataParallel(recompute(workload.module, policy))
            torch.manual_seed(torch.distributed.get_rank())
            x, y = workload.make_batch(2)
            workload.loss(module(x), y).backward()
            found.append([p.grad for p in module.parameters()])
        return [all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)) for other in found[1:]]

    assert run_on_ranks(train, 2) == [[True] * 3] * 2


# -- what is dropped, and when it is computed


@pytest.mark.parametrize(
    ("policy", "runs"),
    [
        ("none", [1, 1, 1, 1]),
        ("block", [2, 2, 2, 2]),
        ("segments:2:keep_last", [2, 2, 1, 1]),
        ("block:keep_last", [2, 2, 2, 1]),
    ],
)
def test_how_often_a_block_runs(policy, runs):
    workload, calls = bert(SHAPE, 16), [0] * 4
    for i, block in enumerate(blocks(workload.module)):

        def count(*args, i=i):
            calls[i] += 1

        block.attention.register_forward_hook(count)
    x, y = workload.make_batch(2)
    recompute(workload.module, policy)
    workload.loss(workload.module(x), y).backward()
    assert calls == runs


def test_a_checkpointed_chain_keeps_its_inputs():
    module = nn.Sequential(*(BertLayer(SHAPE) for _ in range(4)))
    x = torch.randn(2, 16, 32)
    for policy, inputs in (("block", 4), ("segments:2", 2), ("segments:1", 1)):
        saved = saved_tensors.count(lambda p=policy: recompute(module, p)(x).sum(), module.parameters())
        assert saved.activations == inputs * x.nbytes


def test_selective_computes_no_product_with_a_weight_again():
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    counts = {}
    for policy in ("none", "block", "selective"):
        module = recompute(nn.Sequential(BertLayer(SHAPE), BertLayer(SHAPE)), policy)
        with Names() as seen:
            module(torch.randn(2, 16, 32)).sum().backward()
        counts[policy] = {name: seen.names.count(name) for name in ("addmm", "bmm", "gelu")}
    assert counts["none"] == {"addmm": 12, "bmm": 12, "gelu": 2}
    assert counts["block"] == {"addmm": 24, "bmm": 16, "gelu": 4}
    assert counts["selective"] == {"addmm": 12, "bmm": 16, "gelu": 4}


# -- where it works


@pytest.mark.parametrize("policy", ["block", "segments:2", "selective"])
def test_on_tensors_without_memory_by_the_rules_of_both_devices(policy):
    for rules in (nullcontext(), saved_tensors.CudaRules(None)):
        with FakeTensorMode(), rules:
            module = recompute(nn.Sequential(*(BertLayer(SHAPE) for _ in range(2))), policy)
            module(torch.randn(2, 16, 32)).sum().backward()
            assert all(p.grad is not None for p in module.parameters())
    workload = bert(SHAPE, 16)
    plain = saved_tensors.trace(workload, 4, "fp32")
    recompute(workload.module, policy)
    assert saved_tensors.trace(workload, 4, "fp32").activations < plain.activations / 4


# -- which blocks


def test_segment_bounds():
    assert segment_bounds(24, 4) == [(0, 6), (6, 12), (12, 18), (18, 24)]
    lengths = [b - a for a, b in segment_bounds(24, 7)]
    assert sum(lengths) == 24
    assert max(lengths) - min(lengths) == 1


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("all", "there is no policy 'all': take none, block, stage, segments:4"),
        ("segments:5", r"segments:5 of 4 blocks in 1 chain\(s\): take 1 to 4"),
        ("stage", "has no stages"),
    ],
)
def test_a_policy_that_cannot_be_is_one_line(policy, message):
    with pytest.raises(BadInput, match=message) as e:
        recompute(bert(SHAPE, 16).module, policy)
    assert "\n" not in str(e.value)


def test_a_model_without_a_chain():
    with pytest.raises(BadInput, match="Linear has no chain of blocks"):
        recompute(nn.Linear(2, 2), "block")
    assert recompute(nn.Linear(2, 2), "none")
