"""Show what PyTorch sees in this machine and how fast it is: arithmetic in each format, and memory.

    python check_gpu.py
    torchrun --nproc-per-node 2 check_gpu.py     # one report per machine

Run it before a long training run and keep the output: it reveals a slow or missing GPU, a wrong driver or a disabled
switch within a minute. Without a GPU, it reports on one CPU core. Needs only torch.
"""

import os
import platform
import shutil
import signal
import statistics
import subprocess
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

import torch

FORMATS = {
    "FP64": torch.float64,
    "FP32": torch.float32,
    "TF32": torch.float32,
    "BF16": torch.bfloat16,
    "FP16": torch.float16,
}


def seconds(function, device, budget):
    """Return the median time of a call in s. Calls for about `budget` s after an equally long warm-up."""
    for _ in ("warm-up", "timed"):
        times, end = [], time.perf_counter() + budget
        while not times or time.perf_counter() < end:
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a call returns when the work is queued, not when it is done
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def allow_tf32(allowed):
    """Allow or forbid TF32 in matrix products."""
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    else:  # before torch 2.9
        torch.backends.cuda.matmul.allow_tf32 = allowed


def speeds(device, size, budget):
    """Print TFLOP/s of a matrix multiplication in each format, and GB/s of a triad."""
    for name, dtype in FORMATS.items():
        if name == "TF32" and device.type != "cuda":
            continue
        allow_tf32(name == "TF32")  # FP32 data, TF32 products
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        try:
            flops = 2 * size**3 / seconds(lambda a=a, b=b: a @ b, device, budget)  # a multiplication and an addition
            print(f"  {name} matmul, {size} x {size}: {flops / 1e12:.3g} TFLOP/s")
        except RuntimeError as e:
            print(f"  {name} matmul: not on this device ({str(e).splitlines()[0]})")
    allow_tf32(False)
    n = (2**30 if device.type == "cuda" else 2**27) // 4  # 1074 or 134 MB each: larger than the caches
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    rate = 3 * 4 * n / seconds(lambda: torch.add(b, c, alpha=2, out=a), device, budget)  # two read, one written
    print(f"  triad a = b + 2c: {rate / 1e9:,.0f} GB/s")


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return  # under torchrun, ranks would disturb each other's timing
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}\n")  # one line, without the usage
    parser.add_argument("--size", type=int, default=0, help="rows of the matrices; 0: 8192 on a GPU, 512 on a CPU")
    parser.add_argument("--seconds", type=float, default=0.3, help="measuring time for each number")
    parser.add_argument("--cpu", action="store_true", help="report on the CPU even if there are GPUs")
    args = parser.parse_args()
    if args.size < 0 or not 0 < args.seconds < 1e6:
        parser.error("--size must be 0 or more, --seconds above 0")

    print(
        f"{platform.node()}: Python {platform.python_version()}, torch {torch.__version__}, "
        f"built for CUDA {torch.version.cuda}"
    )
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=index,name,driver_version,pstate,temperature.gpu", "--format=csv,noheader"]
        seen = subprocess.run(query, capture_output=True, text=True).stdout.rstrip() or "  nothing: nvidia-smi failed"
        print(f"driver sees (index, name, driver, performance state, degrees C):\n{seen}")
    if args.cpu or not torch.cuda.is_available():
        print("torch sees no GPU" if not args.cpu else "GPUs left out: --cpu")
        torch.set_num_threads(1)
        print(f"CPU: {os.cpu_count()} logical cores, {torch.backends.cpu.get_cpu_capability()}; on one of them")
        speeds(torch.device("cpu"), args.size or 512, args.seconds)
        return
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, cuDNN {torch.backends.cudnn.version()}")
    tf32 = f"matrix products {torch.backends.cuda.matmul.allow_tf32}, convolutions {torch.backends.cudnn.allow_tf32}"
    print(f"TF32 in place of FP32, before this program sets it: {tf32}")
    gpus = range(torch.cuda.device_count())
    for i in gpus:
        p, (free, total) = torch.cuda.get_device_properties(i), torch.cuda.mem_get_info(i)
        print(
            f"GPU {i}: {p.name}, capability {p.major}.{p.minor}, {p.multi_processor_count} multiprocessors, "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
        direct = [j for j in gpus if j != i and torch.cuda.can_device_access_peer(i, j)]
        if len(gpus) > 1:
            print(f"  reaches without the host: {direct or 'no other GPU'} (which link: nvidia-smi topo -m)")
        speeds(torch.device("cuda", i), args.size or 8192, args.seconds)


if __name__ == "__main__":
    main()
