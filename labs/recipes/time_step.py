"""How long does a training step take, and is another way faster? Measures both, each with a confidence interval.

    python time_step.py                              # A: FP32, B: BF16 by autocast; put your own into build_step()
    torchrun --nproc-per-node 2 time_step.py         # all ranks at once, each alone: how much they slow each other

For your own comparison, change the place marked YOUR STEP. Needs only torch.
"""

import os
import random
import signal
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def build_step(way, batch_size, device):  # YOUR STEP: return a function without arguments, for way "A" and for way "B"
    """Return an optimizer step on data already on the device; load_data.py measures loading."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(batch_size, 784, device=device), torch.randint(10, (batch_size,), device=device)

    def step():  # no .item(), .cpu() or print in here, because each waits for the device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=way == "B"):
            loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def seconds(step, device):
    """Return the time of one call, in s. The queue is empty before it, so a short GPU step includes its launches."""
    if device.type == "cuda":  # the GPU itself records both times, which leaves out the host's delay
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()  # wait until the GPU has reached `end`
        return start.elapsed_time(end) / 1e3  # elapsed_time is in ms
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def interval(samples):
    """Return the 95 % bootstrap confidence interval of the median, from 1,000 resamples."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(samples, k=len(samples))) for _ in range(1000))
    return medians[25], medians[974]


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
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step")
    parser.add_argument("--seconds", type=float, default=6, help="measuring time, after a quarter of it for warm-up")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if there is a GPU")
    args = parser.parse_args()
    require(args.batch_size > 0 and 0 < args.seconds < 1e6, "--batch-size must be 1 or more, --seconds above 0")
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # without torchrun: one rank
    rank, local_rank, local_ranks = (int(os.environ.get(name, alone)) for name, alone in defaults.items())
    cuda, gpus = torch.cuda.is_available() and not args.cpu, torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # events are recorded on the current device

    steps = {way: build_step(way, args.batch_size, device) for way in "AB"}
    for budget, least in ((args.seconds / 4, 1), (args.seconds, 20)):  # warm up first: clocks rise
        times, end = {"A": [], "B": []}, time.perf_counter() + budget
        while time.perf_counter() < end or len(times["A"]) < least:
            for way in ("AB", "BA")[len(times["A"]) % 2]:  # A B, B A, ...: drift affects both equally
                times[way].append(seconds(steps[way], device))

    lines = []
    for way, samples in times.items():
        middle, low, high = (1e3 * s for s in (median(samples), *interval(samples)))  # ms
        rate = args.batch_size / middle * 1e3
        lines.append(f"{way}: {middle:.3f} ms [{low:.3f}, {high:.3f}] per step, {rate:,.0f} samples/s")
        drift = median(samples[len(samples) // 2 :]) / median(samples[: len(samples) // 2])
        if not 0.95 < drift < 1.05:
            lines.append(f"   not steady: the second half took {drift:.2f} times as long; measure longer")
    ratios = [a / b for a, b in zip(times["A"], times["B"], strict=True)]  # pairs of neighbours in time
    low, high = interval(ratios)
    answer = "inconclusive" if low <= 1 <= high else f"B is {'faster' if low > 1 else 'slower'}"
    lines.append(f"A/B: {median(ratios):.3f} [{low:.3f}, {high:.3f}] of {len(ratios)} pairs: {answer}")
    print("\n".join(f"rank {rank}  {line}" for line in lines), flush=True)


if __name__ == "__main__":
    main()
