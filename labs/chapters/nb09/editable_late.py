"""An editable round of notebook 09: the learner makes ranks late somewhere and sees which timers show it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from labs import last_to_arrive as lab
from labs.common.profiling import late_training
from labs.common.profiling.late_training import PHASES
from labs.common.timing.moments import seconds_between

Delay = Callable[[int, int, str], float | None]
WARM_UP, STEPS = 3, 10


def train(delay: Delay) -> dict:
    """On each rank: steps in which it sleeps `delay(rank, step, place)` ms in each place; its timers and waits, in s.

    Places are data, forward, backward and optimizer. None counts as no delay.
    """
    rank, waits, timers = dist.get_rank(), [], []
    workload = late_training.build(lab.Config())
    training = late_training.Training(workload, 32, torch.device("cpu"), lab.note_wait, waits)
    for step in range(-WARM_UP, STEPS):
        late = {place: 1e-3 * float(delay(rank, step, place) or 0) for place in PHASES} if step >= 0 else {}
        timers.append(training.step(late))
    kept = [seconds_between(*noted) for noted in waits[WARM_UP:]]
    return {"timers": timers[WARM_UP:], "waits": kept}


def tell(found: list[dict]) -> None:
    """Print medians of what each rank's timers say, and when each came to the steps' last all-reduce."""
    late = list(zip(*lab.late_by([f["waits"] for f in found]), strict=True))
    print(f"{'rank':>4}" + "".join(f"{p:>12}" for p in PHASES) + f"{'whole step':>12}{'arrives':>12}   (ms, medians)")
    for rank, of in enumerate(found):
        cells = [statistics.median(t[p] for t in of["timers"]) for p in PHASES]
        cells += [statistics.median(sum(t.values()) for t in of["timers"]), statistics.median(late[rank])]
        print(f"{rank:>4}" + "".join(f"{1e3 * s:>12.1f}" for s in cells))
    medians = [statistics.median(of_rank) for of_rank in late]
    last = max(range(len(medians)), key=medians.__getitem__)
    times = sum(max(range(len(step)), key=step.__getitem__) == last for step in zip(*late, strict=True))
    print(f"most often last to arrive: rank {last}, in {times} of {len(late[last])} steps")
