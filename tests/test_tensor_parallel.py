"""Tensor parallelism by hand: shares that cover every unit once, and the output and gradients of one process."""

import pytest
import torch
import torch.distributed as dist

from labs.common.sharding import blocks
from labs.common.sharding.blocks import Attention, Mlp, TransformerBlock
from labs.common.sharding.tensor import CopyToRanks, SumOverRanks, by_hand, share
from labs.kit.errors import BadInput
from labs.kit.launch import run_on_ranks


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_shares_cover_every_unit_once(ranks):
    for half, size in ((Attention(12, head_size=4, heads=5), 20), (Mlp(8, 33), 33)):
        shares = [share(half, r, ranks) for r in range(ranks)]
        assert [i for s in shares for i in range(size)[s]] == list(range(size))
        lengths = [(s.stop - s.start) // half.unit for s in shares]
        assert max(lengths) - min(lengths) <= 1
        assert all(s.start % half.unit == 0 for s in shares)


def test_more_ranks_than_heads_is_one_line():
    with pytest.raises(BadInput, match=r"^4 heads cannot be shared by 8 ranks: use at most 4$"):
        share(Attention(16, head_size=4, heads=4), 0, 8)


def test_block_made_of_halves_computes_the_same():
    from labs.common.models.text_models import Block

    torch.manual_seed(0)
    block, x = Block(32, heads=4), torch.randn(2, 5, 32)
    assert torch.allclose(blocks.separate(block)(x), block(x), atol=1e-6)


def _errors_without(function):
    """Relative errors of output and input gradient when f's backward, or g's forward, leaves out its sum."""
    if function == "f":
        CopyToRanks.backward = staticmethod(lambda ctx, gradient: (gradient, None))
    elif function == "g":
        SumOverRanks.forward = staticmethod(lambda ctx, part, group: part.clone())
    torch.manual_seed(0)
    whole, ours = (TransformerBlock(20, head_size=4, heads=5).double() for _ in range(2))  # 5 heads on 2 ranks
    ours.load_state_dict(whole.state_dict())
    found = []
    for module in (whole, by_hand(ours, dist.group.WORLD)):
        x = torch.linspace(-1, 1, 120, dtype=torch.float64).view(2, 3, 20).requires_grad_()
        y = module(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    return [float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize(("without", "least", "most"), [("", 0, 1e-12), ("f", 1e-3, 10), ("g", 1e-3, 10)])
def test_output_and_gradient_are_those_of_one_process_with_both_sums(without, least, most):
    for errors in run_on_ranks(_errors_without, 2, without):
        assert least <= max(errors) <= most
