"""Does the data loader keep up with the model? Measures the loader, the model, and both together.

    python load_data.py --workers 0 1 2
    torchrun --nproc-per-node 2 load_data.py --workers 1     # each rank has its own workers

For your own training, change the two places marked YOUR MODEL and YOUR DATA. Needs only torch and numpy.
"""

import itertools
import math
import os
import signal
import sys
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.utils.data import DataLoader, Dataset, Subset

DATA = Path(__file__).resolve().parent.parent / "common" / "data" / "fashion_mnist_12k.npz"


class Images(Dataset):  # YOUR DATA: __len__, and __getitem__ for one sample
    """Fashion-MNIST, randomly rotated by up to 20 degrees: (1, 28, 28) float32 from 0 to 255; label from 0 to 9."""

    def __init__(self, path):
        with np.load(path) as arrays:  # read and close: workers would share an open file and its position
            self.images, self.labels = arrays["x_train"], arrays["y_train"]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        # Use torch.rand, because the loader seeds torch differently in every worker. A generator made in __init__ would
        # be copied to all workers, which would then draw the same numbers.
        angle = (torch.rand(()) - 0.5) * math.radians(40)
        turn = torch.stack((angle.cos(), -angle.sin(), angle * 0, angle.sin(), angle.cos(), angle * 0)).view(1, 2, 3)
        image = torch.from_numpy(self.images[index]).float().view(1, 1, 28, 28)
        image = grid_sample(image, affine_grid(turn, image.shape, False), align_corners=False)
        return image[0], int(self.labels[index])


def collate(samples):
    """Make a batch in the worker: images (batch, 1, 28, 28) from 0 to 1, labels (batch,) int64."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images) / 255, torch.tensor(labels)  # cheaper per batch than per sample


def build_model():  # YOUR MODEL
    """Build a model: (batch, 1, 28, 28) images -> (batch, 10) logits."""
    hidden = (nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10))


def require(condition, message):
    """Exit with code 2 and one message per machine unless `condition` holds."""
    if not condition:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(__file__).name}: {message}", file=sys.stderr)
        else:
            time.sleep(10)  # torchrun ends this rank once the printing one is gone
        sys.exit(2)


def endless(loader):
    while True:
        yield from loader  # one epoch; persistent workers survive into the next


def rate(batches, step, device, budget):
    """Return samples per second of `step(x, y)` on successive `batches`, measured for `budget` s."""
    for _ in range(4):
        step(*next(batches))  # not counted: workers start, GPU libraries choose kernels
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    samples, start = 0, time.perf_counter()
    while time.perf_counter() < start + budget:
        x, y = next(batches)
        step(x, y)
        samples += len(y)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # wait for queued steps
    return samples / (time.perf_counter() - start)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process immediately, without a traceback
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.error = lambda message: require(False, message)
    parser.add_argument("--data", type=Path, default=DATA, help="npz file with x_train and y_train")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of workers per rank to try")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step and rank")
    parser.add_argument("--seconds", type=float, default=2, help="measuring time for each rate")
    parser.add_argument("--cpu", action="store_true", help="use CPU cores even if there are GPUs")
    args = parser.parse_args()
    require(min(args.workers) >= 0 and args.batch_size > 0, "--workers must be 0 or more, --batch-size 1 or more")
    require(0 < args.seconds < 1e6, "--seconds must be above 0")
    require(args.data.exists(), f"--data {args.data}: there is no such file; the course has fashion_mnist_12k.npz")
    data = Images(args.data)
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}  # without torchrun: one rank
    rank, ranks, local_rank, local_ranks = (int(os.environ.get(name, alone)) for name, alone in defaults.items())
    cuda, gpus = torch.cuda.is_available() and not args.cpu, torch.cuda.device_count()
    require(not cuda or local_ranks <= gpus, f"{local_ranks} ranks need as many GPUs, here are {gpus}: or add --cpu")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)  # otherwise pinning memory starts CUDA on GPU 0 in every rank
    torch.set_num_threads(1)  # as in the workers, which get one thread each from torch
    mine = Subset(data, range(rank, len(data), ranks))  # this rank's part; for training use DistributedSampler
    require(args.batch_size <= len(mine), f"--batch-size {args.batch_size} is more than a rank's {len(mine)} samples")

    model = build_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x, y):
        # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
        loss = cross_entropy(model(x.to(device, non_blocking=cuda)), y.to(device, non_blocking=cuda))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batch = collate([mine[i] for i in range(args.batch_size)])
    batch = tuple(t.pin_memory() for t in batch) if cuda else batch  # pinned, like the loader's batches
    model_rate = rate(itertools.repeat(batch), train, device, args.seconds)
    print(f"rank {rank}  model alone, one batch again and again: {model_rate:,.0f} samples/s", flush=True)
    for workers in args.workers:
        # generator: fixes the order and the workers' seeds. pin_memory: allows asynchronous copies; useless without a
        # GPU
        loader = DataLoader(
            mine,
            args.batch_size,
            shuffle=True,
            drop_last=True,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=cuda,
            generator=torch.Generator().manual_seed(rank),
        )
        loader_rate = rate(endless(loader), lambda x, y: None, device, args.seconds)
        both = rate(endless(loader), train, device, args.seconds)
        print(
            f"rank {rank}  {workers} workers: loader alone {loader_rate:,.0f}, with the model {both:,.0f} samples/s, "
            f"{both / model_rate:.0%} of the model alone",
            flush=True,
        )
        if workers == 1:
            needed = math.ceil(model_rate / loader_rate)
            print(f"rank {rank}  to keep up: {needed} workers, with a core for each", flush=True)


if __name__ == "__main__":
    main()
