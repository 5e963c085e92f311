"""Train a model on one device: a GPU, or one CPU core. All other recipes start from this loop.

    python train_single.py
    python train_single.py --steps 400 --batch-size 256 --save model.pt

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
from torch import nn
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

    # Device
    require(os.environ.get("WORLD_SIZE", "1") == "1", "trains on one device: torchrun needs train_ddp.py")
    cuda = torch.cuda.is_available() and not args.cpu
    device = torch.device("cuda" if cuda else "cpu")

    # Data loader. For slow data, add num_workers and persistent_workers; see load_data.py
    sampler = RandomSampler(train, generator=torch.Generator())
    # drop_last: only full batches, so all samples weigh the same
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True, pin_memory=cuda)

    # Model
    torch.manual_seed(args.seed)
    model = build_model(args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    # Train
    step, logged, clock = 0, 0, time.perf_counter()
    while step < args.steps:
        sampler.generator.manual_seed(args.seed + step // len(loader))  # a different order in each epoch
        for x, y in loader:
            # Copies from pinned memory are asynchronous; kernels that need the data wait in the GPU's queue
            x, y = x.to(device, non_blocking=cuda), y.to(device, non_blocking=cuda)
            loss = cross_entropy(model(x), y)  # mean over the batch, in nats
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.log_every == 0 or step == args.steps:
                mean = loss.item()  # waits for the device, or the clock would time only launches
                rate = (step - logged) * args.batch_size / (time.perf_counter() - clock)  # samples/s
                print(f"step {step}/{args.steps}  loss {mean:.10f}  {rate:,.0f} samples/s", flush=True)
                logged, clock = step, time.perf_counter()
            if step == args.steps:
                break

    # Validate
    model.eval()  # no dropout
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses in nats, of correct predictions
    with torch.no_grad():
        for x, y in DataLoader(test, args.batch_size):
            output, y = model(x.to(device)), y.to(device)
            sums += torch.stack((cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum()))
    loss, accuracy = (sums / len(test)).tolist()
    print(f"test loss {loss:.10f}  accuracy {accuracy:.2%}")

    # Save
    if args.save:
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
