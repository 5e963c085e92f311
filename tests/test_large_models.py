"""The large models have the published sizes, and in small they train."""

import pytest
import torch

from labs.common.models import large_models
from labs.common.models.large_models import BertShape


def parameters(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (large_models.Bert, 335_174_458),
        (large_models.ResNet, 60_192_808),
        (lambda: large_models.ResNet((3, 4, 6, 3)), 25_557_032),
    ],
    ids=["BERT-large", "ResNet-152", "ResNet-50"],
)
def test_parameters_are_those_published(make, count):
    with torch.device("meta"):
        assert parameters(make()) == count


def test_the_large_models_run_on_the_meta_device():
    with torch.device("meta"):
        for workload, out in ((large_models.bert(seq=512), (2, 76, 30522)), (large_models.resnet(), (2, 1000))):
            x, y = workload.make_batch(2)
            output = workload.module(x)
            assert output.shape == out
            assert workload.loss(output, y).shape == ()


@pytest.mark.parametrize("make", [large_models.tiny_bert, large_models.tiny_resnet])
def test_tiny_variants_learn_a_batch(make):
    torch.manual_seed(0)
    workload = make()
    x, y = workload.make_batch(4)
    optimizer = torch.optim.Adam(workload.module.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = workload.loss(workload.module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is not None for p in workload.module.parameters() if p.requires_grad)
    assert losses[-1] < 0.8 * losses[0]


def test_fused_attention_computes_the_same():
    eager, fused = (large_models.Bert(BertShape(2, 64, 4, 512, 64, attention=a)).eval() for a in ("eager", "sdpa"))
    fused.load_state_dict(eager.state_dict())
    tokens = torch.randint(512, (3, 40))
    torch.testing.assert_close(eager(tokens), fused(tokens))


def test_bert_predicts_about_15_percent_of_the_tokens():
    assert [large_models.masked_places(s) for s in (1, 128, 512)] == [1, 19, 76]
