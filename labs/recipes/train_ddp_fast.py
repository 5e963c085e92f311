"""Train fast with DDP: data ready in time, no needless waiting, and optionally 16 bits and a compiler.

    python train_ddp_fast.py                             # one rank
    torchrun --nproc-per-node 2 train_ddp_fast.py        # two ranks: one per GPU or CPU core
    torchrun --nproc-per-node 2 train_ddp_fast.py --bf16 --compile --workers 4
    torchrun --nproc-per-node 2 -m labs.doctor train_ddp_fast.py --steps 5000     # what is left, with the course

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

DATA = Path(__file__).resolve().parent.parent / "common" / "data" / "fashion_mnist_12k.npz"


class Block(nn.Module):
    """A transformer's MLP block: (batch, width) -> (batch, width)."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


def build_model(dropout):  # YOUR MODEL: any nn.Module
    """Build a model: (batch, 1, 28, 28) images -> (batch, 10) logits; 631,050 parameters."""
    blocks = [Block(128, dropout) for _ in range(4)]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), *blocks, nn.Linear(128, 10))


def load_data(path):  # YOUR DATA: two datasets of (input, target) pairs, for training and testing
    """Load Fashion-MNIST: float32 images (N, 1, 28, 28), standardised to mean 0 and variance 1; labels (N,), 0 to 9."""
    with np.load(path) as arrays:
        x, y, x_test, y_test = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train", "x_test", "y_test"))
    x, x_test = (((images / 255 - 0.286) / 0.353).unsqueeze(1) for images in (x, x_test))
    return TensorDataset(x, y.long()), TensorDataset(x_test, y_test.long())


def require(condition, message):
    """Exit with code 2 and one message per machine unless `condition` holds."""
    if not condition:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        else:
            time.sleep(10)  # torchrun ends this rank once the printing one is gone
        sys.exit(2)


def save(module, path):
    """Replace the file at `path` by these weights. A process killed here leaves the old file intact."""
    part = path.with_name(path.name + ".part")
    torch.save(module.state_dict(), part)
    os.replace(part, path)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback
    if sys.platform == "linux":
        multiprocessing.set_start_method("fork", force=True)  # Python 3.14's fork server would outlive os._exit

    # Options and data: bad values end the program before it touches a device
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)  # argparse would print its usage from every rank
    parser.add_argument("--data", type=Path, default=DATA, help="npz file with x_train, y_train, x_test, y_test")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, on all ranks together")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of a block's output that is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the dropout")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--workers", type=int, default=0, help="processes per rank that load, if samples are read late")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in BF16 where autocast allows it")
    parser.add_argument("--compile", action="store_true", help="compile the model: needs a C++ compiler (GPU: C)")
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument("--save-every", type=float, default=300, help="seconds from one save to the next")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    parser.add_argument("--float64", action="store_true", help=SUPPRESS)  # to compare recipes without rounding
    args = parser.parse_args()
    require(min(args.steps, args.batch_size, args.log_every) > 0, "--steps, --batch-size, --log-every: 1 or more")
    require(args.workers >= 0 and args.save_every > 0, "--workers must be 0 or more, --save-every above 0")
    require(0 < args.lr < float("inf") and 0 <= args.dropout < 1, "--lr must be above 0, --dropout from 0 to below 1")
    require(0 <= args.seed < 2**32, "--seed must be from 0 to 4294967295")
    require(not args.save or args.save.absolute().parent.is_dir(), f"--save {args.save}: there is no such folder")
    if args.float64:
        torch.set_default_dtype(torch.float64)
    require(args.data.exists(), f"--data {args.data}: there is no such file; the course has fashion_mnist_12k.npz")
    train, test = load_data(args.data)
    require(args.batch_size <= len(train), f"--batch-size {args.batch_size} is more than the {len(train)} samples")

    # Device: torchrun sets each rank's variables; plain python starts a single rank
    peers = max(int(os.environ.get(name, "1")) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    require("RANK" in os.environ or peers == 1, f"{peers} processes, each alone: let srun or mpirun start torchrun")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    require(args.batch_size % ranks == 0, f"--batch-size {args.batch_size} must be a multiple of the {ranks} ranks")
    cuda = torch.cuda.is_available() and not args.cpu
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    usual = "clang++" if sys.platform == "darwin" else "g++"
    compilers = [os.environ.get("CC", "gcc"), "clang"] if cuda else [os.environ.get("CXX", usual)]
    found = any(map(shutil.which, compilers))
    require(found or not args.compile, f"--compile needs {compilers[0]}: install it, or leave --compile out")
    if cuda:
        torch.cuda.set_device(device)  # or every rank's first allocation lands on GPU 0
        torch.set_float32_matmul_precision("high")  # FP32 products may use TF32: see notebook 04
    # Collective: waits for all ranks. device_id binds NCCL to this GPU now instead of at the first collective
    # timeout: a rank that waits longer raises (gloo) or is killed by an NCCL thread, which no except catches. Allow
    # more than one rank's longest save or validation
    dist.init_process_group(
        "nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=timedelta(minutes=5)
    )

    # Data loader: load_data does what can be done once for all epochs, workers do the rest
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)  # each rank draws a different n-th of the data
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(
        train,
        args.batch_size // ranks,
        sampler=sampler,
        drop_last=True,
        pin_memory=cuda,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout).to(device)
    # Collective: copies rank 0's weights and buffers to all ranks. BatchNorm would see only this rank's samples: see
    # nn.SyncBatchNorm.convert_sync_batchnorm
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    fast = torch.compile(model) if args.compile else model  # the same weights; compiles during the first steps
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    # fused: a few kernels update all parameters, instead of a loop
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)

    # Train
    if rank == 0:
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other
    step, logged, clock = 0, 0, time.perf_counter()
    saved = clock
    while step < args.steps:
        sampler.set_epoch(step // len(loader))  # or every epoch has the same order
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):  # weights and updates stay FP32
                output = fast(x)
                # On a GPU, cross_entropy would round each log-probability to its input's 16 bits
                loss = cross_entropy(output.float() if args.bf16 else output, y)  # mean over this rank's part, in nats
            optimizer.zero_grad()
            # Collective: DDP averages gradients over the ranks while backward computes earlier layers. To accumulate
            # several batches, run all but the last forward and backward in `with model.no_sync():`
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                mean = loss.detach() / ranks
                dist.all_reduce(mean)  # collective: all ranks must log at the same steps, or wait forever
                mean = mean.item()  # waits for the device, or the clock would time only launches
                rate = (step - logged) * args.batch_size / (time.perf_counter() - clock)  # samples/s
                if rank == 0:
                    print(f"step {step}/{args.steps}  loss {mean:.10f}  {rate:,.0f} samples/s", flush=True)
                logged, clock = step, time.perf_counter()
            if args.save and rank == 0 and time.perf_counter() > saved + args.save_every:
                save(model.module, args.save)  # others wait in their next backward: save rarely, by minutes
                saved = time.perf_counter()
            if step == args.steps:
                break

    # Validate: each rank takes every n-th test sample. A DistributedSampler would repeat some to equalise the parts
    for buffer in model.module.buffers():  # BatchNorm's statistics have differed since the last forward
        dist.broadcast(buffer, 0)  # collective
    model.eval()  # no dropout
    mine = Subset(test, range(rank, len(test), ranks))
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    with torch.no_grad():
        for x, y in DataLoader(mine, args.batch_size // ranks):
            # not DDP, which communicates: ranks may have different numbers of batches
            output, y = model.module(x.to(device)), y.to(device)
            sums += torch.stack((cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()))
    dist.all_reduce(sums)  # collective
    loss, accuracy = (sums / len(test)).tolist()
    if rank == 0:
        print(f"test loss {loss:.10f}  accuracy {accuracy:.2%}", flush=True)

    # Save: all ranks have the same weights, so rank 0 writes them. No barrier, because no other rank reads the file
    if args.save and rank == 0:
        save(model.module, args.save)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
