"""A layer that a device does not have in a format is a result of every lab that takes a model, never its end."""

import pytest
import torch
from torch import nn

from labs.common import models
from labs.common.precision import amp
from labs.kit.launch import launch

HERE = "test_not_possible:no_fp16"


class NoFp16(nn.Module):
    """As an LSTM on a CPU, whose FP16 oneDNN does not have; on every machine."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        """A linear layer, in any format but FP16."""
        out = self.layer(x)
        if out.dtype == torch.float16:
            raise RuntimeError("could not create a primitive descriptor\nfor this layer")
        return out


def no_fp16():
    return models.Workload(NoFp16(), lambda n: (torch.randn(n, 8), torch.randint(4, (n,))), nn.functional.cross_entropy)


def test_it_is_told_in_torchs_words_and_changes_nothing():
    workload = no_fp16()
    before, batch = torch.get_rng_state(), [torch.ones(2, 8), torch.zeros(2, dtype=torch.int64)]
    said = amp.impossible(workload.module, workload.loss, batch, "fp16")
    assert said == "RuntimeError: could not create a primitive descriptor for this layer"
    assert amp.impossible(workload.module, workload.loss, batch, "bf16") == ""
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in workload.module.parameters())


@pytest.mark.parametrize(
    ("lab", "values"),
    [
        ("mixed_precision", {"models": (HERE,), "sides": (32,)}),
        ("autocast_ops", {"models": (HERE,), "precisions": ("fp16", "bf16")}),
        ("loss_scaling", {"model": HERE}),
        ("amp_training", {"gradient_models": (HERE,), "samples": 256, "formats": ("fp32",), "loss_exponents": (0,)}),
    ],
)
def test_the_lab_says_so_and_goes_on(lab, values):
    run = launch(lab, nproc=1, smoke=True, **values)
    refused = run.where("not_possible")
    assert {r.case["precision"] for r in refused} == {"fp16"}
    assert all("primitive descriptor for this layer" in r.case["why"] for r in refused)
