"""Train copies of a model on n devices, each on its part of the batch: distributed data parallel (DDP).

    python train_ddp.py                                  # one rank
    torchrun --nproc-per-node 2 train_ddp.py             # two ranks: one per GPU or CPU core

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import os
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
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


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback

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
    parser.add_argument("--save", type=Path, help="file for the trained weights")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    parser.add_argument("--float64", action="store_true", help=SUPPRESS)  # to compare recipes without rounding
    args = parser.parse_args()
    require(min(args.steps, args.batch_size, args.log_every) > 0, "--steps, --batch-size, --log-every: 1 or more")
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
    if cuda:
        torch.cuda.set_device(device)  # or every rank's first allocation lands on GPU 0
    # Collective: waits for all ranks. device_id binds NCCL to this GPU now instead of at the first collective
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    # Data loader. For slow data, add num_workers and persistent_workers; see load_data.py
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)  # each rank draws a different n-th of the data
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(train, args.batch_size // ranks, sampler=sampler, drop_last=True, pin_memory=cuda)

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout).to(device)
    # Collective: copies rank 0's weights and buffers to all ranks. BatchNorm would see only this rank's samples: see
    # nn.SyncBatchNorm.convert_sync_batchnorm
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # Train
    if rank == 0:
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other
    step, logged, clock = 0, 0, time.perf_counter()
    while step < args.steps:
        sampler.set_epoch(step // len(loader))  # or every epoch has the same order
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            loss = cross_entropy(model(x), y)  # mean over this rank's part of the batch, in nats
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
        torch.save(model.module.state_dict(), args.save)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
