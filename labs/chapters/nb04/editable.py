"""The editable round of notebook 04: a learner's FP16 step on ranks, beside the same training in FP32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from labs.kit.failure import RankFailed
from labs.kit.launch import run_on_ranks

Step = Callable[[nn.Module, torch.optim.Optimizer, GradScaler, Tensor, Tensor], Tensor]
STEPS, MAX_NORM = 5, 0.1
NEAR = 0.05  # FP16 has 11 bits, 0.05 % per number: a step that is right stays far below


def compare_with_fp32(step: Step, ranks: int) -> None:
    """Print how the norm that clipping saw, and the parameters after five steps, compare with training in FP32.

    `step(model, optimizer, scaler, x, y)` is one training step; it returns the norm that `clip_grad_norm_` returned.
    An error of the step is told in one line.
    """
    try:
        norm, norm32, moved, error = run_on_ranks(_both, ranks, step)[0]
    except RankFailed as e:
        print(f"Your step stops: {_last_line(str(e))}")
        return
    norm_is = "as" if abs(norm / norm32 - 1) < NEAR else f"{norm / norm32:,.4g} times what it is"
    print(f"The norm that clipping saw is {norm_is} in FP32.")
    if error < NEAR:
        print(f"After {STEPS} steps on {ranks} ranks the parameters are as in FP32: the step is right.")
    else:
        print(
            f"After {STEPS} steps on {ranks} ranks the parameters have moved {moved:.3g} times as far as in FP32, "
            f"and are {100 * error:.3g} % of that way off: the step runs, and it is wrong."
        )


def fp32_step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, x: Tensor, y: Tensor) -> Tensor:
    """The step that there is to compare with."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return norm


def _both(step: Step) -> tuple[float, float, float, float]:
    """(norm, norm in FP32) of the first step; (distance moved / that in FP32, difference / distance in FP32)."""
    (norm, start, end), (norm32, _, end32) = _train(step), _train(fp32_step)
    way = (end32 - start).norm()
    return norm, norm32, float((end - start).norm() / way), float((end - end32).norm() / way)


def _train(step: Step) -> tuple[float, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    start = parameters_to_vector(model.parameters()).detach().clone()
    torch.manual_seed(1 + torch.distributed.get_rank())  # each rank has a batch of its own
    x = torch.randn(32, 64)
    y = x[:, :50].reshape(32, 10, 5).sum(2).argmax(1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    norms = [step(ddp, optimizer, scaler, x, y) for _ in range(STEPS)]
    if not isinstance(norms[0], Tensor):
        raise TypeError("the step must return the norm that clip_grad_norm_ returned")
    return float(norms[0]), start, parameters_to_vector(model.parameters()).detach()


def _last_line(text: str) -> str:
    """The error itself: the last line of a traceback that begins with an exception's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.partition(":")[0].endswith(("Error", "Exception"))), lines[0])
