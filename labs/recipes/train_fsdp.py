"""Fully sharded data parallel (FSDP2): like DDP, but each rank keeps 1/n of weights, gradients and optimizer state.

    python train_fsdp.py --save weights                          # weights/ is a folder: each rank writes its part
    torchrun --nproc-per-node 2 train_fsdp.py --load weights     # on any number of ranks
    python -m torch.distributed.checkpoint.format_utils dcp_to_torch weights model.pt    # all in one file

For models whose states don't fit one GPU. Also known as ZeRO-3.

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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, gelu
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


def build_model(dropout):  # YOUR MODEL: any nn.Module; replace Block below by the class of its repeated layer
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
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of forward and backward")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of a block's output that is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of the data and the dropout")
    parser.add_argument("--log-every", type=int, default=20, help="steps from one line of progress to the next")
    parser.add_argument("--save", type=Path, help="folder for the trained weights and the optimizer's state")
    parser.add_argument("--load", type=Path, help="such a folder to begin with, from any number of ranks")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    parser.add_argument("--float64", action="store_true", help=SUPPRESS)  # to compare recipes without rounding
    args = parser.parse_args()
    require(min(args.steps, args.batch_size, args.log_every) > 0, "--steps, --batch-size, --log-every: 1 or more")
    require(0 < args.lr < float("inf") and 0 <= args.dropout < 1, "--lr must be above 0, --dropout from 0 to below 1")
    require(0 <= args.seed < 2**32, "--seed must be from 0 to 4294967295")
    require(not args.save or not args.save.exists(), f"--save {args.save} exists: choose another folder")  # don't mix
    require(not args.load or (args.load / ".metadata").is_file(), f"--load {args.load} is no folder that --save made")
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
    # The same seed gives all ranks the same weights. If the model is too large for that, build it on device="meta",
    # shard it, call to_empty(device=device), then initialise or load it
    model = build_model(args.dropout).to(device)
    # BF16 for gathered weights and arithmetic, FP32 for averaging gradients and updating weights. A block's output
    # stays in BF16, because the next layer might not cast its inputs; the model's output is FP32, for the loss
    bf16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if args.precision == "bf16" else {}
    policy, last = MixedPrecisionPolicy(**bf16), {**bf16, "output_dtype": torch.float32} if bf16 else {}
    mesh = init_device_mesh(device.type, (ranks,))
    blocks = [layer for layer in model.modules() if isinstance(layer, Block)]
    require(blocks, "the model has no Block: name the class of its layer that repeats, or all is gathered at once")
    for layer in blocks:
        fully_shard(layer, mesh=mesh, mp_policy=policy)  # gathers one block at a time
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**last))  # shards the remaining parameters
    torch.manual_seed(args.seed + rank)  # ranks drop different activations
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding, so that it holds the shards
    if args.load:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=args.load)  # collective: each rank reads its part, whatever the old sharding
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.lr  # this command's --lr, not the file's

    # Train
    if rank == 0:
        print(f"{ranks} ranks on {device.type}", flush=True)  # fewer than you started? They didn't find each other
    step, logged, clock = 0, 0, time.perf_counter()
    while step < args.steps:
        sampler.set_epoch(step // len(loader))  # or every epoch has the same order
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            # Collectives: forward gathers each block's weights just before use and frees them afterwards
            loss = cross_entropy(model(x), y)  # mean over this rank's part of the batch, in nats
            optimizer.zero_grad()
            # Collectives: gathers weights again, then averages gradients and gives each rank its part. To accumulate
            # several batches, call model.set_requires_gradient_sync(False), and (True) before the last one; until then
            # each rank holds the whole model's gradients
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
    model.eval()  # no dropout
    mine = Subset(test, range(rank, len(test), ranks))
    most = len(range(0, len(test), ranks))  # rank 0's samples; others may have one less
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    with torch.no_grad():
        for x, y in DataLoader(mine, args.batch_size // ranks):
            output, y = model(x.to(device)), y.to(device)
            sums += torch.stack((cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()))
        if -(-most // loader.batch_size) > -(-len(mine) // loader.batch_size):
            model(x.to(device))  # forward is a collective, so all ranks need equally many
    dist.all_reduce(sums)  # collective
    loss, accuracy = (sums / len(test)).tolist()
    if rank == 0:
        print(f"test loss {loss:.10f}  accuracy {accuracy:.2%}", flush=True)

    # Save: collective. Each rank writes its part; the file .metadata, written last, completes it
    if args.save:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=args.save)
    dist.destroy_process_group()  # frees NCCL's memory and threads
    if not cuda:
        os._exit(0)  # gloo's threads could abort a normal exit. This skips atexit functions, so close your logger first


if __name__ == "__main__":
    main()
