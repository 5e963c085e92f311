"""Why parameters stay in FP32: BF16 ones lose their small updates. A helper module, not a lab."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, ROWS = 200, 64


def train(parameters: torch.dtype, autocast: bool, rounded: bool = False) -> tuple[float, float]:
    """(last loss in nats, share of the first layer's weights that a step leaves as they are) of 200 small steps.

    `rounded`: each step ends with parameters rounded to BF16, and nothing else is.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).to(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    x, weight, unmoved = torch.randn(ROWS, 64), model[0].weight, 0.0
    y = x[:, :50].reshape(ROWS, 10, 5).sum(2).argmax(1)
    for _ in range(STEPS):
        before = weight.detach().clone()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = cross_entropy(model(x.to(parameters)), y)
        loss.backward()
        optimizer.step()
        if rounded:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        unmoved += float((weight == before).float().mean()) / STEPS
    return loss.item(), unmoved
