"""After how many steps has torch.compile paid for itself?

    python -m labs.compiled_step --nproc 1
    python -m labs.compiled_step --nproc 1 --processes 2      # the second one finds the first one's cache

About 22 s on 2 CPU cores, most of it the compiler's. A new process takes eager steps, times its first compiled step
with an empty cache and torch's own number of compiler processes, then eager and compiled steps in turn. A step is
forward, loss and backward; only the module is compiled. It needs a C++ compiler on CPUs, Triton on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn

from labs.common import models
from labs.kit import _compat, cli, measure, supervise
from labs.kit.measure import Estimate
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records

LIMIT_S = 240.0
"""For one process. Compiling a large model takes minutes."""


@dataclass(frozen=True)
class Config:
    """What is compiled, and how long its steps are timed."""

    model: str = "gated"
    """"gated": a small matrix product and many pointwise operations; or one of labs.models.MODELS, or
    package.module:factory."""
    batch_size: Annotated[int, Ge(1)] = 4096
    """Samples of a step."""
    processes: Annotated[int, Interval(ge=1, le=3)] = 1
    """New processes one after the other: the first finds an empty cache, the others a full one."""
    rounds: Annotated[int, Ge(2)] = 60
    """Pairs of an eager and a compiled step."""
    smoke: bool = False
    """Nothing becomes machine code (backend aot_eager), and two pairs of steps."""

    def __post_init__(self) -> None:
        models.require_known(self.model, besides=("gated",))


class Gated(nn.Module):
    """A residual block: one matrix product, then a gate written operation by operation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        y = self.linear(x)
        return x + y * torch.sigmoid(1.702 * y) + 0.1 * torch.sin(y) * y - 0.05 * y.square().clamp(max=3.0)


def workload(name: str) -> models.Workload:
    """The model with its loss and batches."""
    if name != "gated":
        return models.build(name)
    return models.Workload(Gated(), lambda rows: (torch.randn(rows, 32), torch.randn(rows, 32)), nn.functional.mse_loss)


def cannot_compile(device: torch.device) -> str:
    """Why torch.compile's default backend cannot work here, in one line; "" if nothing speaks against it."""
    if device.type == "cuda":
        return "" if _compat.has_triton() else "torch.compile needs Triton for this GPU, and it isn't installed"
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if not shutil.which(compiler):
        return f"torch.compile needs a C++ compiler, and there is no {compiler}: install it, or let CXX name another"
    for folder in (sysconfig.get_path("include"), os.path.dirname(torch.__file__)):
        if " " in folder:  # seen with torch 2.13: g++ takes what follows the blank for a file
            return f"torch.compile names {folder} without quotes: use an environment in a folder without a blank"
    return ""


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 starts the processes; other ranks wait for it."""
    if rank.rank == 0:
        yield from _processes(config, rank)
    rank.barrier()


def _processes(config: Config, rank: Rank) -> Iterator[Record]:
    why = "" if config.smoke else cannot_compile(rank.device)
    with supervise.watched_folder() as folder, unpinned(rank):  # torch counts the cores to choose its processes
        for number in range(config.processes):
            if why:
                break
            rank.progress(number, config.processes, "compiling in a new process")
            found = in_new_process(config, rank.device, str(folder))
            if why := found.get("why", ""):
                break
            cache = "empty" if number == 0 else "full"
            yield rank.record("first_step_s", "s", found["first_s"], rank=0, cache=cache)
            for way in ("eager", "compiled"):
                yield rank.record("step_s", "s", found[way], rank=0, way=way, cache=cache)
            yield rank.record("compiler_processes", "1", found["threads"], rank=0, cache=cache)
            yield rank.record("gradient_error", "1", found["error"], rank=0, cache=cache)
            rank.progress(number + 1, config.processes, "steps in turn")
    if why:
        yield rank.record("not_possible", "1", 1.0, rank=0, why=why)


def in_new_process(config: Config, device: torch.device, folder: str) -> dict:
    """What `measured` returns in a new Python, whose caches and temporary files are in `folder`."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "TMPDIR": folder,  # precompiled headers go there, whatever the variables say
    }
    code = "import sys; from labs.compiled_step import measured; measured(*sys.argv[1:])"
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(config)), str(device)]
    done = supervise.run(command, LIMIT_S, env=environment)
    if done.returncode is None:
        return {"why": f"the compiler was stopped after {LIMIT_S:.0f} s"}
    if done.returncode:
        return {"why": " ".join((done.stderr.strip().splitlines() or ["no message"])[-1].split())[:300]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(config_json: str, device_name: str) -> None:
    """In the new process: print the seconds of the first compiled step and of steps in turn, as JSON."""
    config, device = Config(**json.loads(config_json)), torch.device(device_name)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = workload(config.model)
    module = work.module.to(device)
    x, y = (t.to(device) for t in work.make_batch(config.batch_size))

    def step(forward: Callable[[Tensor], Tensor]) -> None:
        module.zero_grad()
        work.loss(forward(x), y).backward()

    measure.time_steps(lambda: step(module), 3, device)
    start = time.perf_counter()
    compiled = torch.compile(module, backend="aot_eager" if config.smoke else "inductor")
    step(compiled)  # compiles forward, then backward
    measure.sync(device)
    first_s = time.perf_counter() - start
    step(module)
    expected = [p.grad.clone() for p in module.parameters()]
    step(compiled)
    largest = max(g.abs().max().item() for g in expected)
    error = max((p.grad - g).abs().max().item() for p, g in zip(module.parameters(), expected, strict=True)) / largest
    ways = {"eager": lambda: step(module), "compiled": lambda: step(compiled)}
    seconds = measure.interleave(ways, 2 if config.smoke else config.rounds, device)
    threads = 0 if config.smoke else _compat.inductor_config.compile_threads
    print(json.dumps({"first_s": first_s, "threads": threads, "error": error, **seconds}))


def break_even(run: Records, cache: str = "empty") -> Estimate:
    """Steps until compiling has paid, with the interval that the steps' difference gives."""
    eager, compiled = (run.one("step_s", way=way, cache=cache).samples for way in ("eager", "compiled"))
    saved = measure.estimate([a - b for a, b in zip(eager, compiled, strict=True)], "s")
    start_s = run.one("first_step_s", cache=cache).value - measure.estimate(compiled).value
    bounds = [start_s / s if s > 0 else float("inf") for s in (saved.value, saved.high, saved.low)]
    return Estimate(bounds[0], bounds[1], bounds[2], saved.n, "steps")


def category(records: Records) -> str:
    """By break-even with an empty cache: "under 1,000 steps", "over 1,000 steps", "never", "inconclusive"."""
    if records.where("not_possible"):
        return "not possible"
    even = break_even(records)
    if even.low == float("inf"):
        return "never"
    return "over 1,000 steps" if even.low > 1000 else "under 1,000 steps" if even.high < 1000 else "inconclusive"


def answer(run: Records) -> Iterator[str]:
    """Speedup, start-up and break-even of each process."""
    for r in run.where("not_possible"):
        yield f"Not compiled: {r.case['why']}."
    for r in run.where("first_step_s"):
        cache = r.case["cache"]
        eager, compiled = (run.one("step_s", way=way, cache=cache).samples for way in ("eager", "compiled"))
        even = break_even(run, cache)
        yield (
            f"Cache {cache}: the first compiled step takes {r.value:.1f} s; later ones are "
            f"{measure.paired_ratio(eager, compiled).value:.2f}x as fast as eager ones. Compiling has paid after "
            f"{even.value:,.0f} steps ({even.low:,.0f} to {even.high:,.0f})."
        )


if __name__ == "__main__":
    cli.main()
