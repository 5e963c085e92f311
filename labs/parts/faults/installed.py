"""What claims about errors rest on: what the installed torch says, how ranks end, what a GPU does. About 10 s.

from labs.parts.faults import installed
records = installed.facts()
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from labs.kit.launch import run_on_ranks
from labs.kit.record import Record, Records

LAB = "installed"
MESSAGES = ("Mixed precision requires", "requires all GPUs", "GPUs to be identical")
"""What article B quotes, in parts; torch would hold any of them as it is."""
CONTROLS = ("device_ids can only be None or contain a single element", "Connection closed by peer")
"""Messages that are there, in a Python file and in a library: a search that does not find them proves nothing."""
VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LONG_S = 60.0


def facts() -> Records:
    """All that can be found here, as Records."""
    return Records([*messages(), *unequal_ranks(), *endings(), *error_handling(), *on_gpu()])


def messages(folder: Path | None = None) -> Iterator[Record]:
    """How many files of the installed torch hold each of MESSAGES, and CONTROLS; Python files and libraries."""
    folder = folder or Path(torch.__file__).parent
    files = [*folder.rglob("*.py"), *folder.glob("lib/*.so*")]
    hits = dict.fromkeys((*MESSAGES, *CONTROLS), 0)
    for path in files:
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            for message in hits:
                hits[message] += text.find(message.encode()) >= 0
    for message, count in hits.items():
        yield Record(LAB, "files_with", "files", (count,), case={"message": message, "of": len(files)})


def unequal_ranks() -> Iterator[Record]:
    """By how much the parameters of two ranks differ after DDP steps with unlike ranks: threads, speed, batch."""
    spread = max(run_on_ranks(_train_unlike, 2))
    yield Record(LAB, "spread_of_unequal_ranks", "", (spread,), layout={"world_size": 2, "backend": "gloo"})


def _train_unlike() -> float:
    """Three steps, rank 1 with another number of threads, a smaller batch and a pause; the spread of parameters."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = dist.get_rank()
    torch.set_num_threads(1 + rank)
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(8 - 4 * rank, 4)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02 * rank)
    weight = model.module.weight.detach().clone()
    highest, lowest = weight.clone(), weight.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return float((highest - lowest).max())


ENDING = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
dist.all_reduce(torch.ones(1))
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""


def endings() -> Iterator[Record]:
    """Two ranks in child processes that end with and without destroy_process_group.

    For each the worst exit code of the ranks (-15: it had to be ended), what they printed, and shared memory or
    processes left.
    """
    for last in ("destroy", "just end"):
        with tempfile.TemporaryDirectory() as folder:
            before = _shared()
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-W", "default", "-c", ENDING, f"{folder}/store", str(rank), last],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(2)
            ]
            told = [_last_words(rank) for rank in ranks]
            case = {"last": last}
            codes = [rank.returncode for rank in ranks]
            yield Record(LAB, "exit_code", "", (max(codes, key=abs),), case=case, layout=_two("gloo"))
            lines = [line for text in told for line in text.splitlines() if line.strip()]
            case["first"] = lines[0][:200] if lines else ""
            yield Record(LAB, "lines_at_exit", "lines", (len(lines),), case=case, layout=_two("gloo"))
            yield Record(LAB, "left", "files", (len(_shared() - before),), case={"last": last}, layout=_two("gloo"))


def _last_words(rank: subprocess.Popen[str]) -> str:
    try:
        return rank.communicate(timeout=LONG_S)[1]
    except subprocess.TimeoutExpired:
        rank.terminate()
        return rank.communicate()[1]


def _two(backend: str) -> dict[str, object]:
    return {"world_size": 2, "backend": backend}


def _shared() -> set[str]:
    """torch's own files in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("torch_*")} if folder.is_dir() else set()


def error_handling(header: str | None = None) -> Iterator[Record]:
    """What torch's header says of the variable that article B names for latency: its comment and its modes.

    Nothing if the header is not installed.
    """
    path = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    if header is None and not path.exists():
        return
    text = path.read_text("utf-8") if header is None else header
    comment = re.search(r"((?://[^\n]*\n)+)[^\n]*" + VARIABLE + r" = \{", text)
    modes = re.search(r"enum ErrorHandlingMode \{(.*?)\}", text, re.DOTALL)
    if not comment or not modes:
        return
    about = ((comment[1], "variable"), (modes[1] + " ".join(re.findall(r"// \w+: [^\n]*", text)), "modes"))
    said = " ".join(re.sub(r"//|\s+", " ", part) for part, _ in about)
    speed = len(re.findall(r"latenc|bandwidth|faster|throughput|speed", said, re.IGNORECASE))
    case = {"variable": VARIABLE, "modes": re.findall(r"(\w+) = \d", modes[1]), "says": comment[1].strip()[-200:]}
    yield Record(LAB, "words_about_speed", "words", (speed,), case=case)


def on_gpu() -> Iterator[Record]:
    """Where the default device points without set_device, and what NCCL_DEBUG prints; nothing without a GPU."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return
    for where in ("in the program", "before it"):
        lines = _child(DEBUGGED.format(inside=where == "in the program"), {} if where != "before it" else DEBUG)
        told = [line for line in lines if "NCCL INFO" in line]
        timed = [line for line in told if re.search(r"\d\s*(?:ms|us|GB/s)\b", line)]
        yield Record(LAB, "nccl_lines", "lines", (len(told),), case={"set": where, "timed": len(timed)})
    if torch.cuda.device_count() > 1:
        last = torch.cuda.device_count() - 1
        current = int(_child(f"import torch; torch.ones(1).cuda({last}); print(torch.cuda.current_device())", {})[-1])
        yield Record(LAB, "current_device", "", (current,), case={"tensor_on": last})


DEBUG = {"NCCL_DEBUG": "INFO"}
DEBUGGED = """
import os, torch, torch.distributed as dist
if {inside}: os.environ["NCCL_DEBUG"] = "INFO"
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(10): dist.all_reduce(torch.ones(1, device="cuda"))
dist.destroy_process_group()
"""


def _child(program: str, environment: dict[str, str]) -> list[str]:
    """What a Python program prints."""
    told = {key: value for key, value in os.environ.items() if key not in DEBUG} | environment
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S, env=told, check=True
    )
    return (done.stderr + done.stdout).strip().splitlines()
