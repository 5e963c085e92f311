"""Where does the time of a training step go? Shares of a step from torch.profiler, and a trace for ui.perfetto.dev.

    python profile_step.py
    torchrun --nproc-per-node 2 profile_step.py      # with DDP: also each rank's exposed communication

For your own training, change the place marked YOUR TRAINING and keep the names of the ranges. Needs only torch.
"""

import json
import os
import signal
import sys
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

NEXT = {  # share -> what to check if it is large
    "data": "does the loader keep up? load_data.py tells how many workers it needs",
    "host-to-device": "pin_memory=True in the loader and non_blocking=True in .to()",
    "forward": "the operations of forward in the trace; 16 bits (train_ddp_amp.py), torch.compile",
    "backward": "the operations of backward in the trace; 16 bits (train_ddp_amp.py), torch.compile",
    "exposed communication": "is another rank late? Compare the ranks' other shares; then buckets, larger batches",
    "optimizer": "fused=True, or foreach=True where there is no fused one",
    "overhead": "Python between the ranges: .item(), logging, saving, metrics",
    "idle": "the GPU waits for launches: larger batches, torch.compile, and no .item() or .cpu() in the step",
}


def build_training(batch_size, device, ranks):  # YOUR TRAINING: a function that runs one step in these five ranges
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).to(device)
    model = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(50 * batch_size, 784), torch.randint(10, (50 * batch_size,)))
    loader = DataLoader(data, batch_size, pin_memory=device.type == "cuda")
    batches = (batch for _ in iter(int, 1) for batch in loader)  # repeats epochs forever

    def step():
        with record_function("data"):
            x, y = next(batches)
        with record_function("host-to-device"):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with record_function("forward"):
            loss = cross_entropy(model(x), y)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step


def shares(trace):
    """Return (seconds of each share over all steps of a Chrome trace, number of steps).

    On a GPU, the kernels count; on a CPU, the main thread. Each moment belongs to the first layer that covers it:
    computation hides copies and communication.
    """
    bars = [(e["ts"], e["ts"] + e["dur"], e["name"], e["cat"], e) for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = [bar for bar in bars if bar[2].startswith("ProfilerStep#") and bar[3] == "user_annotation"]
    host = [bar for bar in bars if bar[4]["tid"] == steps[0][4]["tid"]]
    named = {n: [bar for bar in host if bar[2:4] == (n, "user_annotation")] for n in NEXT}

    def range_at(moment):  # the range that the host was in
        return next((n for n, spans in named.items() if any(bar[0] <= moment < bar[1] for bar in spans)), "overhead")

    calls = {bar[4].get("args", {}).get("correlation"): bar[0] for bar in bars if bar[3].startswith("cuda_")}
    device = [bar for bar in bars if bar[3] in ("kernel", "gpu_memcpy", "gpu_memset")]
    exchange = [bar for bar in device or bars if bar[2].startswith(("nccl", "gloo:"))]
    copies = [bar for bar in device if "HtoD" in bar[2]]
    compute = {name: [] for name in NEXT}
    for bar in device or [bar for bar in host if bar[3] == "cpu_op"]:
        if "HtoD" not in bar[2] and not bar[2].startswith(("nccl", "c10d::", "record_param_comms")):
            compute[range_at(calls.get(bar[4].get("args", {}).get("correlation"), bar[0]))].append(bar)
    order = ("forward", "backward", "optimizer", "data", "host-to-device", "overhead")
    layers = [*((n, compute[n]) for n in order), ("host-to-device", copies), ("exposed communication", exchange)]
    # Without a GPU, a rank that waits for data waits for nothing else
    layers.insert(len(layers) if device else 0, ("data", named["data"]))
    layers += [("host-to-device", named["host-to-device"])]
    layers += [("idle" if device else name, named[name]) for name in order[:3]] + [("overhead", steps)]
    edges = sorted(
        (t, i, sign) for i, (_, of) in enumerate(layers) for bar in of for t, sign in ((bar[0], 1), (bar[1], -1))
    )
    open_bars, last, seconds = [0] * len(layers), 0, Counter()
    for t, i, sign in edges:
        if open_bars[-1]:  # inside a step
            seconds[next(name for (name, _), n in zip(layers, open_bars, strict=True) if n)] += (t - last) / 1e6
        open_bars[i], last = open_bars[i] + sign, t
    return seconds, len(steps)


def require(condition, message):
    """Exit with code 2 and one message per machine unless `condition` holds."""
    if not condition:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        else:
            time.sleep(10)  # torchrun ends this rank once the printing one is gone
        sys.exit(2)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler prints when it starts and stops
    warnings.filterwarnings("ignore", "Warning: Profiler clears events")
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step and rank")
    parser.add_argument("--steps", type=int, default=10, help="steps in the trace, all in memory; 10 before are not")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for trace_rank0.json and so on")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    args = parser.parse_args()
    require(args.batch_size > 0 and 0 < args.steps <= 1000, "--batch-size must be 1 or more, --steps from 1 to 1000")
    require(
        args.out.is_dir() and os.access(args.out, os.W_OK), f"--out {args.out}: there is no such folder to write to"
    )
    rank, local_rank, ranks, local_ranks = (
        int(os.environ.get(name, d))
        for name, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1))
    )
    cuda, gpus = torch.cuda.is_available() and not args.cpu, torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks > 1:  # collective: waits for all ranks
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    step, clock = build_training(args.batch_size, device, ranks), []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    plan = schedule(wait=8, warmup=2, active=args.steps, repeat=1)  # a short trace of warm steps
    with profile(activities=activities, schedule=plan) as profiler:
        for i in range(10 + args.steps):
            start = time.perf_counter()
            step()
            if cuda and i in (9, 9 + args.steps):
                torch.cuda.synchronize()  # the queue is empty where the trace begins and ends
            clock.append(time.perf_counter() - start)
            profiler.step()
    path = args.out / f"trace_rank{rank}.json"
    profiler.export_chrome_trace(str(path))
    seconds, steps = shares(json.loads(path.read_text()))
    whole = sum(seconds.values())
    lines = [
        f"{name:22} {1e3 * seconds[name] / steps:9.3f} ms {seconds[name] / whole:7.1%}"
        for name in NEXT
        if name != "idle" or cuda
    ]
    lines.append(
        f"{'together':22} {1e3 * whole / steps:9.3f} ms per step; by the host's clock "
        f"{1e3 * sum(clock[10:]) / steps:.3f} ms"
    )
    largest = max(seconds, key=seconds.get)
    lines.append(f"largest: {largest}. Look at: {NEXT[largest]}")
    lines.append(f"{path}: open it at ui.perfetto.dev, which keeps it on your machine")
    print("\n".join(f"rank {rank}  {line}" for line in lines), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
