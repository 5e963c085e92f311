import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Ratings(Dataset):
    def __init__(self, n, users=2000, items=800, seed=0):
        g = torch.Generator().manual_seed(seed)
        pu, qi = torch.randn(users, 6, generator=g), torch.randn(items, 6, generator=g)
        self.user = torch.randint(0, users, (n,), generator=g)
        self.item = torch.randint(0, items, (n,), generator=g)
        clean = (pu[self.user] * qi[self.item]).sum(1)
        self.score = 3 + 0.5 * clean + 0.3 * torch.randn(n, generator=g)

    def __len__(self):
        return len(self.score)

    def __getitem__(self, i):
        return self.user[i], self.item[i], self.score[i]


class TwoTower(nn.Module):
    def __init__(self, users=2000, items=800, dim=64):
        super().__init__()
        self.user = nn.Sequential(nn.Embedding(users, dim), nn.Linear(dim, 256), nn.ReLU(), nn.Linear(256, dim))
        self.item = nn.Sequential(nn.Embedding(items, dim), nn.Linear(dim, 256), nn.ReLU(), nn.Linear(256, dim))
        self.bias = nn.Parameter(torch.tensor(3.0))

    def forward(self, user, item):
        return (self.user(user) * self.item(item)).sum(-1) / 8 + self.bias


def run(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    dataset = Ratings(args.samples, seed=args.seed)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    model = DDP(TwoTower())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss()
    for epoch in range(args.epochs):
        model.train()
        begin = time.perf_counter()
        stats = torch.zeros(2)
        for user, item, score in loader:
            loss = criterion(model(user, item), score)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats += torch.tensor([loss.item() * len(score), len(score)])
        dist.all_reduce(stats)
        if rank == 0:
            took = time.perf_counter() - begin
            print(f"epoch {epoch + 1}: mse {stats[0] / stats[1]:.4f} ({took:.1f}s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--samples", type=int, default=12800)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=13)
    run(parser.parse_args())
