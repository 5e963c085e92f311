"""PointNet on synthetic shapes.  torchrun --nproc-per-node 2 wrong_pointcloud_val.py"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

POINTS = 96


class Shapes(Dataset):
    """0 sphere, 1 cube, 2 cylinder, 3 torus"""

    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed + i)
        kind = int(torch.randint(0, 4, (1,), generator=g))
        u = torch.randn(POINTS, 3, generator=g)
        a = torch.rand(POINTS, generator=g) * 6.2832
        b = torch.rand(POINTS, generator=g) * 6.2832
        if kind == 0:
            p = F.normalize(u, dim=1)
        elif kind == 1:
            p = u / u.abs().amax(1, keepdim=True)
        elif kind == 2:
            p = torch.stack([a.cos(), a.sin(), b / 3.1416 - 1], 1)
        else:
            r = 1 + 0.4 * b.cos()
            p = torch.stack([r * a.cos(), r * a.sin(), 0.4 * b.sin()], 1)
        q, _ = torch.linalg.qr(torch.randn(3, 3, generator=g))
        return p @ q + 0.05 * torch.randn(POINTS, 3, generator=g), kind


class PointNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(),
            nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128),
        )
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes))

    def forward(self, pts):
        return self.head(self.local(pts.transpose(1, 2)).amax(2))


def train_one_epoch(model, loader, opt):
    model.train()
    for pts, y in loader:
        loss = F.cross_entropy(model(pts), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
    return loss.item()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    totals = torch.zeros(3)
    for pts, y in loader:
        out = model(pts)
        totals[0] += F.cross_entropy(out, y, reduction="sum")
        totals[1] += (out.argmax(1) == y).sum()
        totals[2] += len(y)
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (100 * totals[1] / totals[2]).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(10 + rank)

    train_set, val_set = Shapes(1280, seed=0), Shapes(51, seed=10_000_000)
    train_sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    val_sampler = DistributedSampler(val_set, shuffle=False)
    train_loader = DataLoader(train_set, batch_size=32, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=8, sampler=val_sampler)

    model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(PointNet())
                                                if torch.cuda.is_available() else PointNet())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    best = 0.0
    for epoch in range(4):
        train_sampler.set_epoch(epoch)
        loss = train_one_epoch(model, train_loader, opt)
        val_loss, acc = validate(model, val_loader)
        sched.step()
        best = max(best, acc)
        if rank == 0:
            print(f"epoch {epoch}: train {loss:.3f} val {val_loss:.3f} acc {acc:.2f}% best {best:.2f}%")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
