"""SimCLR pre-training on small images; augmentation in numpy inside the workers."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class TwoCrops:
    """Random crop, flip, brightness/contrast jitter and noise."""

    def __init__(self, size, rng):
        self.size, self.rng = size, rng

    def one(self, img):
        c, h, w = img.shape
        top, left = self.rng.integers(0, h - self.size + 1), self.rng.integers(0, w - self.size + 1)
        out = img[:, top : top + self.size, left : left + self.size]
        if self.rng.random() < 0.5:
            out = out[:, :, ::-1]
        out = out * self.rng.uniform(0.7, 1.3) + self.rng.uniform(-0.2, 0.2)
        return out + self.rng.normal(0, 0.1, out.shape)

    def __call__(self, img):
        return np.stack([self.one(img), self.one(img)]).astype(np.float32)


class Patches(Dataset):
    def __init__(self, n=1024, seed=0):
        self.rng = np.random.default_rng(seed)
        proto = torch.from_numpy(self.rng.normal(size=(64, 3, 6, 6))).float()
        proto = F.interpolate(proto, size=32, mode="bicubic").numpy()
        self.images = proto[self.rng.integers(0, 64, n)] + 0.1 * self.rng.normal(size=(n, 3, 32, 32))
        self.views = TwoCrops(24, self.rng)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return torch.from_numpy(self.views(self.images[i]))


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.proj = nn.Sequential(nn.Linear(64, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x):
        return F.normalize(self.proj(self.trunk(x)), dim=1)


def nt_xent(z, temperature=0.2):
    n = z.size(0) // 2
    sim = (z @ z.t()) / temperature
    sim.fill_diagonal_(-1e9)
    target = torch.arange(2 * n).roll(n)
    return F.cross_entropy(sim, target)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Patches(), batch_size=32, shuffle=True, num_workers=2, drop_last=True)
    model = Encoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    epochs = 4
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs * len(loader))
    for epoch in range(epochs):
        for step, views in enumerate(loader):
            x = torch.cat([views[:, 0], views[:, 1]])
            loss = nt_xent(model(x))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            if step % 16 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
