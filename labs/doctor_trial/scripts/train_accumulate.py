"""Train with gradients of several batches added up before each step, on 1 to n ranks.

torchrun --nproc-per-node 2 train_accumulate.py --data fashion_mnist_12k.npz
"""

import argparse
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(args.data) as arrays:
        x, y = (torch.from_numpy(arrays[name]) for name in ("x_train", "y_train"))
    dataset = TensorDataset(((x / 255 - 0.286) / 0.353).flatten(1), y.long())
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for part, (x, y) in enumerate(loader, 1):
            last = part % PARTS == 0
            # Gradients are averaged over the ranks once for each step: with its last part
            with nullcontext() if last else model.no_sync():
                loss = cross_entropy(model(x), y) / PARTS
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % 10 == 0 and dist.get_rank() == 0:
                    print(f"step {step}  loss {PARTS * loss.item():.6f}", flush=True)
            if step == args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
