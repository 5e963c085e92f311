"""Train without a DataLoader: all images are in memory, and a generator of the script's own cuts them into batches.

python train_plain.py --data fashion_mnist_12k.npz
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy


def batches(x, y, size):
    """In a new order each time."""
    for rows in torch.randperm(len(x)).split(size):
        yield x[rows], y[rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(args.data) as arrays:
        x, y = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train"))
    x, y = ((x / 255 - 0.286) / 0.353).flatten(1), y.long()
    model = nn.Sequential(nn.Linear(784, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    step = 0
    while step < args.steps:
        for inputs, labels in batches(x, y, 256):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
