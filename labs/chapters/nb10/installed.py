"""What claims about errors rest on: what the installed torch says, how ranks end, what a GPU does. About 10 s.

from labs.chapters.nb10 import installed
records = installed.facts()
"""

from __future__ import annotations

import json
import mmap
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from labs.kit import supervise
from labs.kit.record import Record, Records, attach_provenance

LAB = "installed"
MESSAGES = ("Mixed precision requires", "requires all GPUs", "GPUs to be identical")
"""What article B quotes, in parts; torch would hold any of them as it is."""
CONTROLS = ("device_ids can only be None or contain a single element", "Connection closed by peer")
"""Messages that are there, in a Python file and in a library: a search that does not find them proves nothing."""
OF_GPU = "Watchdog caught collective operation timeout"
"""A message of ProcessGroupNCCL: where it is missing, there is no GPU code in which a message could be found."""
VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
LONG_S = 60


def facts() -> Records:
    """All that can be found here, as Records."""
    return attach_provenance([*messages(), *endings(), *error_handling(), *on_gpu()])


def messages(folder: Path | None = None) -> Iterator[Record]:
    """How many files of the installed torch hold each of MESSAGES, CONTROLS, OF_GPU; Python files and libraries."""
    folder = folder or Path(torch.__file__).parent
    files = [*folder.rglob("*.py"), *folder.glob("lib/*.so*")]
    hits = dict.fromkeys((*MESSAGES, *CONTROLS, OF_GPU), 0)
    for path in files:
        if not path.is_file() or not path.stat().st_size:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            for message in hits:
                hits[message] += text.find(message.encode()) >= 0
    for message, count in hits.items():
        yield Record(LAB, "files_with", "files", (count,), case={"message": message, "of": len(files)})


PAIRS = 5
ENDING = """
import gc, glob, json, os, signal, sys
import torch, torch.distributed as dist

gc.freeze()  # at their end, ranks need not look through torch's own objects: less than half the CPU time
folder, pairs, longest_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
found = {}
for last in ("destroy", "just end"):
    ranks, before = {}, set(glob.glob("/dev/shm/torch_*"))
    for pair in range(pairs):
        for rank in range(2):
            child = os.fork()  # torch is loaded once; a forked Python ends as any Python does
            if child:
                ranks[child] = pair
                continue
            signal.alarm(longest_s)
            os.dup2(os.open(f"{folder}/{last}-{pair}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            store = f"file://{folder}/store-{last == 'destroy'}-{pair}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
            dist.all_reduce(torch.ones(1))
            if last == "destroy":
                dist.destroy_process_group()
            sys.exit()
    codes = [0] * pairs
    for child, pair in ranks.items():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        codes[pair] = max(code, codes[pair], key=abs)
    found[last] = {"codes": codes, "left": len(set(glob.glob("/dev/shm/torch_*")) - before)}
print(json.dumps(found))
"""


def endings() -> Iterator[Record]:
    """PAIRS pairs of ranks at a time that end with and without destroy_process_group, forked from a child process.

    For each pair the worst exit code of its ranks (-14: it had to be ended) and the lines that they printed; and how
    many of torch's files in shared memory are left.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "default", "-c", ENDING, folder, str(PAIRS), str(LONG_S)]
        done = supervise.run(command, 4 * LONG_S)
        if done.returncode != 0:
            raise RuntimeError(f"the ranks that end failed: {done.stderr[-500:]}")
        for last, found in json.loads(done.stdout.splitlines()[-1]).items():
            told = [
                [line for rank in range(2) for line in _lines(Path(folder, f"{last}-{pair}-{rank}"))]
                for pair in range(PAIRS)
            ]
            case = {"last": last}
            yield Record(LAB, "exit_code", "", tuple(found["codes"]), case=case, layout=_two("gloo"))
            first = next((lines[0][:200] for lines in told if lines), "")
            lines = tuple(len(lines) for lines in told)
            yield Record(LAB, "lines_at_exit", "lines", lines, case=case | {"first": first}, layout=_two("gloo"))
            yield Record(LAB, "left", "files", (found["left"],), case=case, layout=_two("gloo"))


def _lines(printed: Path) -> list[str]:
    return [line for line in printed.read_text().splitlines() if line.strip()]


def _two(backend: str) -> dict[str, object]:
    return {"world_size": 2, "backend": backend}


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
    for where in ("in the program", "after the first all-reduce", "before it"):
        lines = _child(DEBUGGED.format(where=where), {} if where != "before it" else DEBUG)
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
where = "{where}"
if where == "in the program": os.environ["NCCL_DEBUG"] = "INFO"
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1, device="cuda"))
if where == "after the first all-reduce": os.environ["NCCL_DEBUG"] = "INFO"
for _ in range(9): dist.all_reduce(torch.ones(1, device="cuda"))
dist.destroy_process_group()
"""


def _child(program: str, environment: dict[str, str]) -> list[str]:
    """What a Python program prints."""
    told = {key: value for key, value in os.environ.items() if key not in DEBUG} | environment
    done = supervise.run([sys.executable, "-c", program], LONG_S, env=told)
    if done.returncode != 0:
        raise RuntimeError(f"a program that should print how NCCL is set failed: {done.stderr[-500:]}")
    return (done.stderr + done.stdout).strip().splitlines()
