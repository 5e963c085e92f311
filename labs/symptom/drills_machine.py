"""Faults of the machine, the container and the environment, and their cures; see drills.py."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from unittest import mock

import torch
from torch.utils.data import DataLoader

from labs.kit._compat import DYNAMO
from labs.symptom.drill_kit import command, drill, script

# Memory ---------------------------------------------------------------------------------------------------------------


@drill()
def host_memory(cured):
    torch.empty(10**3 if cured else 10**15, dtype=torch.uint8)  # bytes


@drill()
def no_cuda(cured):
    torch.zeros(1, device="cpu" if cured else "cuda")


@drill()
def long_dash(cured):
    dashes = "--" if cured else "\N{EM DASH}"
    arguments = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "pip"]
    return command([*arguments, f"{dashes}quiet"])


@drill()
def local_rank_argument(cured):
    parser = argparse.ArgumentParser("train.py")
    parser.add_argument("--epochs", type=int)
    if not cured:
        parser.parse_args(["--local-rank=0", "--epochs", "3"])  # as python -m torch.distributed.launch calls it
    parser.parse_args(["--epochs", "3"])  # as torchrun does, which puts LOCAL_RANK into the environment


@drill()
def hidden_gpus(cured):
    device = "cpu" if cured else "cuda"
    return script(f"import torch\ntorch.amp.GradScaler({device!r})\n", CUDA_VISIBLE_DEVICES="")


@drill()
def many_workers(cured):
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(
        0, {min(before)}
    )  # as a container or scheduler that gives one core; os.cpu_count() knows nothing of it
    try:
        DataLoader(range(4), num_workers=len(os.sched_getaffinity(0)) if cured else 2)
    finally:
        os.sched_setaffinity(0, before)


@drill()
def few_files(cured):
    kept = "batch.clone()" if cured else "batch"
    return script(f"""
        import resource, torch
        from torch.utils.data import DataLoader
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        loader = DataLoader(torch.ones(200, 1), num_workers=1, multiprocessing_context="fork")
        kept = [{kept} for batch in loader]
    """)


@drill()
def read_only_cache(cured):
    with tempfile.TemporaryDirectory() as folder:
        home = folder if cured else "/sys"  # where nobody may make a folder, not even root
        with mock.patch.dict(os.environ, {"TORCH_HOME": f"{home}/torch"}):
            os.makedirs(torch.hub.get_dir())


@drill()
def file_too_large(cured):
    most = 10**6 if cured else 1000  # bytes
    return script(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most}))
        with open("last.pt", "wb") as file:
            file.write(bytes(10_000))
    """)


@drill()
def ascii_only(cured):
    return script("print('\\N{CHECK MARK}')", PYTHONIOENCODING="utf-8" if cured else "ascii")


@drill()
def no_such_launcher(cured):
    module = "torch.distributed.run" if cured else "torch.multiprocessing"
    return command([sys.executable, "-m", module, "--help"])


@drill()
def no_such_version(cured):
    wanted = "pip" if cured else "torch==1.12.0+cu116"
    pip = [sys.executable, "-m", "pip", "--isolated"]  # a machine's constraints or folder of wheels: other words
    return command([*pip, "install", "--dry-run", "--no-deps", "--no-index", wanted], PIP_CONFIG_FILE=os.devnull)


# Compiling, each in a child process: importing the compiler takes seconds


@drill()
def no_compiler(cured):
    backend = "eager" if cured else "inductor"  # without a compiler only what needs none is left
    program = f"import torch\ntorch.compile(torch.sin, backend={backend!r})(torch.ones(3))\n"
    return script(program, CXX="no-such-compiler")


@drill()
def compiled_again(cured):
    return script(f"""
        import torch
        from {DYNAMO} import config
        config.recompile_limit = 2
        double = torch.compile(lambda x: x * 2, backend="eager", dynamic={cured})
        for rows in range(3, 8):
            double(torch.ones(rows))
    """)


@drill()
def not_compilable(cured):
    return script(f"""
        import torch
        @torch.compile(backend="eager", fullgraph={not cured})
        def positive(x):
            if x.sum() > 0:  # a branch on data: the graph breaks here
                return x
            return -x
        positive(torch.ones(3))
    """)
