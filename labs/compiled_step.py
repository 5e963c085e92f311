"""Does torch.compile pay on this machine, after how many steps, and what makes it compile again?

    python -m labs.compiled_step --nproc 1
    torchrun --nproc-per-node 1 -m labs.compiled_step --model char_gpt --batch-size 32

About 20 s on 2 CPU cores, most of it the compiler's; it needs one (g++, or what CXX names; Triton on a GPU), and says
so where there is none. Rank 0 times the first step with an empty cache and with a full one (in the same process: a new
one has to load more), then eager and compiled steps in turn, counts what was fused, and counts graph breaks and
recompiles, which needs no compiler. Only the module is compiled, with its backward; the loss and the optimizer are not.
One process compiles one kernel after the other: torch itself takes up to 32 processes, and a model of many kernels
starts sooner there.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labs.common import models
from labs.kit import _compat, cli, measure
from labs.kit._compat import TorchDispatchMode
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder

DYNAMIC = {"auto": None, "static": False, "dynamic": True}
"""What torch.compile(dynamic=...) is given: by itself it compiles for one shape, then once more for any."""


@dataclass(frozen=True)
class Config:
    """What is compiled, and how long its steps are timed."""

    model: str = "block"
    """"block", small matrix products among many pointwise operations; or one of labs.models.MODELS; or
    package.module:factory."""
    batch_size: int = 4096
    """Samples of a step."""
    shapes: int = 12
    """Different batch sizes, one after the other, that show what a new shape costs."""
    seconds: float = 2.0
    """Time for eager and compiled steps in turn, in s; compiling comes on top."""
    rounds: int | None = None
    """Pairs of steps; by default as many as fit, at least 6."""
    smoke: bool = False
    """Nothing is compiled to machine code (backend aot_eager), two pairs of steps, and four shapes."""

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(2 <= self.shapes <= 64, f"shapes must be from 2 to 64, not {self.shapes}")
        measure.require_budget(self.seconds, self.rounds)
        models.require_known(self.model, besides=("block",))


def predict(startup_s: float, eager_s: float, compiled_s: float) -> float:
    """Steps after which compiling has paid: start-up over what a step saves. inf where a step saves nothing."""
    return startup_s / (eager_s - compiled_s) if compiled_s < eager_s else math.inf


class Block(nn.Module):
    """A residual block: one matrix product, then a gate that is written by hand, operation by operation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> (batch, width)."""
        y = self.linear(x)
        return x + y * torch.sigmoid(1.702 * y) + 0.1 * torch.sin(y) * y - 0.05 * y.square().clamp(max=3.0)


def block() -> models.Workload:
    """A block and a linear head on random rows: little to multiply, much to fuse."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 32), torch.randint(10, (batch_size,))

    return models.Workload(nn.Sequential(Block(), nn.Linear(32, 10)), make_batch, nn.functional.cross_entropy)


def cannot_compile(device: torch.device) -> str:
    """Why torch.compile's default backend cannot work here, in one line; "" if nothing speaks against it."""
    if device.type == "cuda":
        if not _compat.has_triton():
            return "torch.compile needs Triton for this GPU, and it is not installed or does not support it"
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), "gcc")  # as Triton looks for it
        if not shutil.which(compiler):
            return f"Triton needs a C compiler, and there is no {compiler}: install it, or let CC name another"
        return ""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if not shutil.which(compiler):
        return f"torch.compile needs a C++ compiler, and there is no {compiler}: install it, or let CXX name another"
    for folder in (sysconfig.get_path("include"), os.path.dirname(torch.__file__)):
        if " " in folder:  # seen with torch 2.13: g++ takes what follows the blank for a file of its own
            return f"torch.compile names {folder} without quotes: use an environment in a folder without a blank"
    return ""


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """A folder for everything that torch.compile keeps, removed at the end, also of a killed process.

    Enter it before inductor is imported.
    """
    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"  # inductor sets the second one, if nobody has
    before = {name: os.environ.pop(name, None) for name in names}
    with watched_folder() as place:
        folder = str(place)
        usual, tempfile.tempdir = tempfile.tempdir, folder  # precompiled headers go there, whatever the variable says
        os.environ[names[0]] = os.path.join(folder, "cache")
        try:
            yield
        finally:
            tempfile.tempdir = usual
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 compiles; the others wait for it."""
    if rank.rank == 0:
        with empty_cache():
            yield from _steps(config, rank)
        yield from _breaks(rank)
        yield from _recompiles(config, rank)
    rank.barrier()


def train_step(workload: models.Workload, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    """Forward, loss and backward, as anybody writes them; `forward` is the module, or what torch.compile made of it."""
    workload.module.zero_grad()
    workload.loss(forward(x), y).backward()


def _steps(config: Config, rank: Rank) -> Iterator[Record]:
    """Start-up with an empty and a full cache, steps in turn, kernels of a step."""
    backend = "aot_eager" if config.smoke else "inductor"
    why = "" if config.smoke else cannot_compile(rank.device)
    if why:
        yield rank.record("not_possible", "1", 1.0, rank=0, why=why)
        return
    workload = block() if config.model == "block" else models.build(config.model)
    workload.module.to(rank.device)
    x, y = (t.to(rank.device) for t in workload.make_batch(config.batch_size))
    eager, codes, written = workload.module, [], []

    def eager_step() -> None:
        train_step(workload, eager, x, y)

    measure.time_steps(eager_step, 2, rank.device)
    rank.progress(0, 3, "importing the compiler")
    yield rank.record("import_s", "s", import_compiler(codes), rank=0)
    try:
        for done, cache in enumerate(("empty", "full"), 1):
            rank.progress(done, 3, f"first compiled step, cache {cache}")
            torch.compiler.reset()  # forgets what this process compiled; what lies in the cache stays
            compiled = torch.compile(eager, backend=backend)
            [first] = measure.time_steps(lambda c=compiled: train_step(workload, c, x, y), 1, rank.device)
            yield rank.record("first_step_s", "s", first, rank=0, cache=cache, backend=backend)
            written = written or list(codes)  # what the cache holds is handed over a second time
    except _compat.CompilerFailed as e:
        yield rank.record("not_possible", "1", 1.0, rank=0, why=" ".join(str(e).split())[:300])
        return

    def compiled_step() -> None:
        train_step(workload, compiled, x, y)

    yield rank.record("gradient_error", "1", gradient_error(workload, eager_step, compiled_step), rank=0)
    measure.time_steps(eager_step, 2, rank.device)
    measure.time_steps(compiled_step, 2, rank.device)
    rank.progress(3, 3, "eager and compiled steps in turn")
    seconds = measure.interleave(
        {"eager": eager_step, "compiled": compiled_step}, measure.rounds_of(config), rank.device
    )
    for way, samples in seconds.items():
        yield rank.record("step_s", "s", samples, rank=0, way=way, backend=backend)
    yield rank.record("kernels", "1", module_operations(eager, x), rank=0, way="eager")
    if written:
        calls = [name for code in written for name in kernel_calls(code)]
        yield rank.record("kernels", "1", len(calls), rank=0, way="compiled", names=calls)


def import_compiler(codes: list[str]) -> float:
    """Seconds to import dynamo and inductor, which `import torch` does not. `codes` will get what inductor writes."""
    begin = time.perf_counter()
    for name in ("dynamo", "compile_fx", "inductor_config", "GraphLowering"):
        getattr(_compat, name)
    seconds = time.perf_counter() - begin
    # No pool of workers, which would outlive the step: g++ runs beside us, one at a time
    _compat.inductor_config.compile_threads = 1
    _compat.GraphLowering.save_output_code = codes.append  # torch's own hook for it: it does nothing by itself
    return seconds


def kernel_calls(code: str) -> list[str]:
    """Names of the kernels that a file written by inductor calls, in order: fused loops, and calls of libraries.

    An operation of torch that inductor leaves as it is, such as a convolution's backward, counts as one.
    """
    body = code[code.rfind("def call(") :]
    kernel = r"(?:cpp_fused|triton_)\w*|extern_kernels\.\w+|torch\.ops\.(?!inductor\.)[\w.]+"
    return re.findall(rf"^\s+(?:\w+ = )?({kernel})(?:\.run)?\(", body, re.MULTILINE)


class _Operations(TorchDispatchMode):
    """Counts the operations of torch that compute something: no views, no new empty tensors."""

    NOTHING = re.compile(
        r"aten\.(t|transpose|view|_unsafe_view|expand|detach|alias|permute|select|slice|empty|unsqueeze|squeeze"
        r"|as_strided|split)\b"
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not self.NOTHING.match(str(func))
        return func(*args, **(kwargs or {}))


def module_operations(module: nn.Module, x: Tensor) -> int:
    """Operations of the module's own forward and backward, which is what is compiled: without loss and optimizer."""
    module.zero_grad()
    with _Operations() as seen:
        output = module(x)
    gradient = torch.ones_like(output)
    with seen:
        output.backward(gradient)
    return seen.count


def gradient_error(
    workload: models.Workload, eager_step: Callable[[], None], compiled_step: Callable[[], None]
) -> float:
    """Largest difference of the two ways' gradients, over the largest gradient."""
    gradients = []
    for step in (eager_step, compiled_step):
        step()
        gradients.append([p.grad.clone() for p in workload.module.parameters() if p.grad is not None])
    largest = max(g.abs().max().item() for g in gradients[0])
    error = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    return error / largest if error else 0.0  # all may be zero


# -- what ends a graph, and what starts the compiler again: counted by dynamo alone, without a compiler


def plain(x: Tensor, w: Tensor) -> Tensor:
    """Nothing but tensors: one graph."""
    return torch.relu(x @ w).mean()


def with_item(x: Tensor, w: Tensor) -> Tensor:
    """A number leaves the device in the middle."""
    h = torch.relu(x @ w)
    return (h / h.max().item()).mean()


def with_print(x: Tensor, w: Tensor) -> Tensor:
    """A look at a value, left over from a search."""
    h = torch.relu(x @ w)
    print("largest:", h.max())
    return h.mean()


def with_if(x: Tensor, w: Tensor) -> Tensor:
    """Python decides by a tensor's value."""
    h = torch.relu(x @ w)
    if h.max() > 1:
        h = h / h.max()
    return h.mean()


HABITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tensors only": plain,
    ".item()": with_item,
    "print": with_print,
    "if of a tensor": with_if,
}


def breaks(forward: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int, list[str]]:
    """(graphs, breaks, why each) of a function of tensors, as dynamo cuts it. Nothing is compiled to machine code."""
    torch.compiler.reset()
    logging.getLogger(_compat.DYNAMO).setLevel(logging.ERROR)  # what it would warn of is returned
    with contextlib.redirect_stdout(io.StringIO()):
        found = _compat.dynamo.explain(forward)(*inputs)
    return found.graph_count, found.graph_break_count, [r.reason.strip().split("\n")[0] for r in found.break_reasons]


def _breaks(rank: Rank) -> Iterator[Record]:
    for habit, forward in HABITS.items():
        graphs, count, why = breaks(forward, torch.randn(8, 4), torch.randn(4, 4))
        yield rank.record("graph_breaks", "1", count, rank=0, habit=habit, graphs=graphs, why=why)


def graphs_after(sizes: list[int], dynamic: bool | None) -> list[int]:
    """How many graphs have been made after a step of each batch size: a new one is a new compilation."""
    torch.compiler.reset()
    counters = _compat.compile_counters
    counters.clear()
    compiled, w, made = torch.compile(plain, backend="eager", dynamic=dynamic), torch.randn(4, 4), []
    for size in sizes:
        compiled(torch.randn(size, 4), w)
        made.append(counters["stats"]["unique_graphs"])
    return made


def _recompiles(config: Config, rank: Rank) -> Iterator[Record]:
    sizes = [64 - k for k in range(4 if config.smoke else config.shapes)]
    for name, dynamic in DYNAMIC.items():
        yield rank.record("graphs", "1", graphs_after(sizes, dynamic), rank=0, dynamic=name)


# -- what the records say


def gain(run: Records) -> Estimate:
    """Seconds of a compiled step over an eager one, pair by pair."""
    return measure.paired_ratio(run.one("step_s", way="compiled").samples, run.one("step_s", way="eager").samples)


def startup_s(run: Records, cache: str = "empty") -> float:
    """Import and first step, less a usual compiled step."""
    usual = measure.estimate(run.one("step_s", way="compiled").samples).value
    return max(0.0, run.one("import_s").value + run.one("first_step_s", cache=cache).value - usual)


def break_even(run: Records, cache: str = "empty") -> Estimate:
    """Steps until compiling has paid, with the interval that the ratio's gives; inf where a step may save nothing."""
    ratio, start = gain(run), startup_s(run, cache)
    eager = measure.estimate(run.one("step_s", way="eager").samples).value
    value, low, high = (predict(start, eager, eager * r) for r in (ratio.value, ratio.low, ratio.high))
    return Estimate(value, low, high, ratio.n, "steps")


def in_steps(found: Estimate) -> str:
    """ "1,200 steps (1,000 to 1,500)", or that it never pays, or that this cannot be told."""
    if math.isinf(found.low):
        return "never: a compiled step is no faster"
    if math.isinf(found.high):
        return "never, as far as this run can tell: no difference between the steps is shown"
    return f"{_round(found.value):,} steps ({_round(found.low):,} to {_round(found.high):,})"


def _round(steps: float) -> int:
    """Two digits: the third is noise."""
    digits = max(0, len(str(int(steps))) - 2)
    return int(round(steps, -digits))


def answer(run: Records) -> Iterator[str]:
    """Break-even, gain and start-up; then breaks and recompiles."""
    for r in run.where("not_possible"):
        yield f"Not compiled: {r.case['why']}."
    if run.where("step_s"):
        backend = run.one("step_s", way="compiled").case["backend"]
        yield measure.verdict(gain(run), f"A compiled step ({backend}) against an eager one, seconds") + "."
        yield (
            f"Start-up: {startup_s(run):.1f} s with an empty cache, {startup_s(run, 'full'):.1f} s with a full one "
            f"in the same process, each taken once. It has paid after: {in_steps(break_even(run))}; with a full "
            f"cache {in_steps(break_even(run, 'full'))}."
        )
    kernels = {r.case["way"]: int(r.value) for r in run.where("kernels")}
    if "compiled" in kernels:
        yield (
            f"Forward and backward of the module: {kernels['eager']} operations of torch became "
            f"{kernels['compiled']} kernels."
        )
    said = [f"{r.case['habit']} {int(r.value)}" for r in run.where("graph_breaks")]
    yield f"Graph breaks: {', '.join(said)}."
    made = [f"{r.case['dynamic']} {int(r.samples[-1])}" for r in run.where("graphs")]
    shapes = len(run.where("graphs")[0].samples)
    yield f"Graphs made for {shapes} batch sizes: {', '.join(made)}."


if __name__ == "__main__":
    cli.main()
