"""A small training with waits of known length: python planted.py --data 0.02 --print 0.01 ... (s per step)."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLACES = ("data", "prepare", "forward", "backward", "optimizer", "print", "save", "evaluation", "rest")


class Slow(Dataset):
    def __init__(self, seconds, batch_size, n=4096):
        self.seconds, self.batch_size = seconds, batch_size
        self.x = torch.randn(n, 64, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitems__(self, indices):
        time.sleep(self.seconds)
        return [(self.x[i], i % 10) for i in indices]


class Model(nn.Module):
    def __init__(self, forward, backward, evaluation, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 10))
        self.forward_s, self.backward_s, self.evaluation_s = forward, backward, evaluation

    def forward(self, x):
        time.sleep(self.forward_s if self.training else self.evaluation_s)
        y = self.layers(x)
        if y.requires_grad and self.backward_s:
            y.register_hook(lambda grad: time.sleep(self.backward_s))
        return y


class SlowPrint:
    """What it is printed to."""

    def __init__(self, seconds):
        self.seconds = seconds

    def write(self, text):
        if text == "\n":
            time.sleep(self.seconds)

    def flush(self):
        pass


class SlowSgd(torch.optim.SGD):
    seconds = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class SlowFile:
    """What it is saved to."""

    def __init__(self, seconds):
        self.seconds = seconds

    def write(self, data):
        return len(data)

    def flush(self):
        time.sleep(self.seconds)


def main():
    parser = argparse.ArgumentParser()
    for place in PLACES:
        parser.add_argument(f"--{place}", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--log")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(args.forward, args.backward, args.evaluation, args.width)
    optimizer = (
        SlowSgd(model.parameters(), lr=0.01, momentum=0.9) if args.optimizer else torch.optim.Adam(model.parameters())
    )
    SlowSgd.seconds = args.optimizer
    loader = DataLoader(
        Slow(args.data, args.batch_size),
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    out, file, step = SlowPrint(args.print), SlowFile(args.save), 0
    while step < args.steps:
        for x, y in loader:
            time.sleep(args.prepare)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            time.sleep(args.rest)
            if args.evaluation:
                with torch.no_grad():
                    model.eval()
                    model(x)
                    model.train()
            if args.print:
                print("loss", loss.item(), file=out)
            if args.save:
                torch.save(model.state_dict(), file)
            optimizer.step()
            step += 1
            if args.log:
                with open(args.log, "a") as log:
                    log.write(f"{step} {loss.item().hex()} {int(y[0])}\n")
            if step == args.steps:
                break


main()
