"""Each rank owns its own files, and not the same number of rows: the rank that ends first waits in Join."""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

ROWS = [2400, 2144]


def shard(rank, features=48):
    g = torch.Generator().manual_seed(500 + rank)
    x = torch.randn(ROWS[rank], features, generator=g)
    w = torch.randn(features, generator=torch.Generator().manual_seed(9))
    y = (x @ w / 7).tanh() + 0.1 * torch.randn(ROWS[rank], generator=g)
    return TensorDataset(x, y.unsqueeze(1))


class Regressor(nn.Module):
    def __init__(self, features=48, width=512):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def evaluate(module, dataset, rank, world):
    """Every validation row is counted once: rank r takes rows r, r + world, ..."""
    mode = module.training
    module.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    for x, y in DataLoader(Subset(dataset, range(rank, len(dataset), world)), batch_size=100):
        sums[0] += (module(x) - y).square().sum()
        sums[1] += y.numel()
    dist.all_reduce(sums)
    module.train(mode)
    return (sums[0] / sums[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)
    rows = shard(rank)
    g = torch.Generator().manual_seed(1)
    xv = torch.randn(355, 48, generator=g)
    w = torch.randn(48, generator=torch.Generator().manual_seed(9))
    val = TensorDataset(xv, (xv @ w / 7).tanh().unsqueeze(1))
    loader = DataLoader(rows, batch_size=64, shuffle=True, drop_last=True)
    model = DDP(Regressor())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(3):
        model.train()
        with Join([model], throw_on_early_termination=False):
            for x, y in loader:
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        mse = evaluate(model.module, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} val mse {mse:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
