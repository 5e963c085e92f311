"""Pipeline parallel: split a model into stages, one per rank, through which micro-batches flow.

    torchrun --nproc-per-node 2 train_pipeline.py --micro-batches 8
    python train_pipeline.py                             # one rank, one stage: the same training without a pipeline

For a model that doesn't fit one GPU, over a link too slow for FSDP or tensor parallel: only activations travel. With n
equally slow stages and m micro-batches, each rank idles for (n - 1) / (m + n - 1) of a step.

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import os
import signal
import sys
import time
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, gelu
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

DATA = Path(__file__).resolve().parent.parent / "common" / "data" / "fashion_mnist_12k.npz"


class Block(nn.Module):
    """A transformer's MLP block: (batch, width) -> (batch, width)."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


def build_model(dropout):  # YOUR MODEL: an nn.Sequential, which is split between its layers
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
    parser.add_argument("--micro-batches", type=int, default=8, help="parts of a batch, at least as many as ranks")
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
    parts = args.micro_batches
    require(parts >= ranks, f"--micro-batches {parts} must be at least the number of ranks, {ranks}")
    require(
        args.batch_size % parts == 0, f"--batch-size {args.batch_size} must be a multiple of --micro-batches {parts}"
    )
    cuda = torch.cuda.is_available() and not args.cpu
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # or every rank's first allocation lands on GPU 0
    # Collective: waits for all ranks. device_id binds NCCL to this GPU now instead of at the first collective
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)

    # Data loader. For slow data, add num_workers and persistent_workers; see load_data.py
    sampler = RandomSampler(train, generator=torch.Generator())  # same order on all ranks: the first and last use it
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, pin_memory=cuda)

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout)
    require(isinstance(model, nn.Sequential), "build_model must return an nn.Sequential: its layers become the stages")
    layers = list(model.named_children())
    # A stage starts with a layer that has parameters. The slowest stage sets the pace: split where times are equal
    begin = [i for i, (_, layer) in enumerate(layers) if any(True for _ in layer.parameters())]
    require(ranks <= len(begin), f"{ranks} ranks, but {len(begin)} layers with parameters: start at most {len(begin)}")
    cuts = [0, *(begin[len(begin) * r // ranks] for r in range(1, ranks)), len(layers)]
    model = nn.Sequential(OrderedDict(layers[cuts[rank] : cuts[rank + 1]])).to(device)
    first, last = rank == 0, rank == ranks - 1
    # 1F1B: once the pipeline is full, alternate one forward and one backward. Averages the loss over micro-batches
    schedule = Schedule1F1B(PipelineStage(model, rank, ranks, device), parts, loss_fn=cross_entropy)
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # Train
    if rank == 0:
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other
    step, logged, clock = 0, 0, time.perf_counter()
    while step < args.steps:
        sampler.generator.manual_seed(args.seed + step // len(loader))  # a different order in each epoch
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            optimizer.zero_grad()
            # Sends activations to the next rank and gradients to the previous one; waits only for its neighbours
            losses = []
            schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
            optimizer.step()  # updates this stage; no rank has another's gradients
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                mean = torch.stack(losses).mean() if last else torch.zeros((), device=device)
                dist.broadcast(mean, ranks - 1)  # collective: all ranks must log at the same steps, or wait forever
                mean = mean.item()  # waits for the device, or the clock would time only launches
                rate = (step - logged) * args.batch_size / (time.perf_counter() - clock)  # samples/s
                if rank == 0:
                    print(f"step {step}/{args.steps}  loss {mean:.10f}  {rate:,.0f} samples/s", flush=True)
                logged, clock = step, time.perf_counter()
            if step == args.steps:
                break

    # Validate: a stage takes micro-batches of one shape, so pad the last batch with zeros
    model.eval()  # no dropout
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    with torch.no_grad():
        for x, y in DataLoader(test, args.batch_size):
            fill = args.batch_size - len(y)
            x, target = torch.cat((x, x.new_zeros(fill, *x.shape[1:]))), torch.cat((y, y.new_zeros(fill)))
            x, y = x.to(device), y.to(device)
            output = schedule.eval(*([x] if first else []), **({"target": target.to(device)} if last else {}))
            if last:
                output = output[: len(y)]
                sums += torch.stack((cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()))
    dist.broadcast(sums, ranks - 1)  # collective
    loss, accuracy = (sums / len(test)).tolist()
    if rank == 0:
        print(f"test loss {loss:.10f}  accuracy {accuracy:.2%}", flush=True)

    # Save: collective. Rank 0 writes all stages to one file, for build_model(). If too large for one rank: dcp.save
    if args.save:
        stages, hosts = [None] * ranks, dist.new_group(backend="gloo")  # NCCL would gather on rank 0's GPU
        weights = {name: p.cpu() for name, p in model.state_dict().items()}
        dist.gather_object(weights, stages if rank == 0 else None, group=hosts)
        if rank == 0:
            torch.save({name: p for stage in stages for name, p in stage.items()}, args.save)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
