"""Surface-defect detector, trained and evaluated on 2 ranks."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Plates(Dataset):
    def __init__(self, n, seed, size=32):
        g = torch.Generator().manual_seed(seed)
        self.label = (torch.rand(n, generator=g) < 0.35).float()
        self.image = 0.5 * torch.randn(n, 1, size, size, generator=g)
        spot = torch.randint(4, size - 4, (n, 2), generator=g).tolist()
        for i, (r, c) in enumerate(spot):
            if self.label[i]:
                self.image[i, 0, r - 2:r + 2, c - 3:c + 3] += 1.2

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.image[i], self.label[i]


class DefectNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, c, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(2 * c, 1)

    def forward(self, x):
        return self.out(self.drop(self.net(x).amax((2, 3)))).squeeze(1)


def make_loader(dataset, batch_size, train):
    sampler = DistributedSampler(dataset, shuffle=train, drop_last=train)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=train), sampler


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    tally = torch.zeros(5, dtype=torch.float64)
    for x, y in loader:
        logit = model(x)
        pred = (logit > 0).float()
        tally[0] += F.binary_cross_entropy_with_logits(logit, y, reduction="sum")
        tally[1] += (pred * y).sum()
        tally[2] += (pred * (1 - y)).sum()
        tally[3] += ((1 - pred) * y).sum()
        tally[4] += len(y)
    dist.all_reduce(tally)
    loss, tp, fp, fn, n = tally.tolist()
    return loss / n, 2 * tp / max(1.0, 2 * tp + fp + fn), int(n)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    train_loader, train_sampler = make_loader(Plates(1536, 0), 32, train=True)
    val_loader, _ = make_loader(Plates(33, 1), 16, train=False)
    model = DDP(DefectNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        train_sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val_loss, f1, n = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: val loss {val_loss:.4f} f1 {f1:.3f} on {n} plates", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
