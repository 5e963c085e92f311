"""Texture classification with random crops, flips and colour jitter made in loader workers."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class RandomAugment:
    def __init__(self, crop, seed):
        self.crop = crop
        self.rng = np.random.default_rng(seed)

    def __call__(self, img):
        h, w = img.shape[1:]
        top = self.rng.integers(0, h - self.crop + 1)
        left = self.rng.integers(0, w - self.crop + 1)
        out = img[:, top:top + self.crop, left:left + self.crop]
        if self.rng.random() < 0.5:
            out = out[:, :, ::-1]
        gain = self.rng.uniform(0.8, 1.2, size=(3, 1, 1))
        shift = self.rng.normal(0, 0.1, size=(3, 1, 1))
        return (out * gain + shift).astype(np.float32)


class Textures(Dataset):
    def __init__(self, n, transform, seed=0):
        rng = np.random.default_rng(1000 + seed)
        grid = np.arange(48)
        self.labels = rng.integers(0, 6, size=n)
        angle = self.labels * np.pi / 6
        wave = np.cos(angle)[:, None, None] * grid[None, :, None] + np.sin(angle)[:, None, None] * grid[None, None, :]
        base = np.sin(0.6 * wave + rng.uniform(0, 6.28, size=(n, 1, 1)))
        self.images = base[:, None] + 0.6 * rng.standard_normal((n, 3, 48, 48))
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return torch.from_numpy(self.transform(self.images[i])), int(self.labels[i])


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(3, 24, 5, padding=2)
        self.c2 = nn.Conv2d(24, 48, 3, padding=1)
        self.c3 = nn.Conv2d(48, 64, 3, padding=1)
        self.fc = nn.Linear(64, 6)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc(F.relu(self.c3(x)).amax((2, 3)))


def main():
    torch.manual_seed(0)
    dataset = Textures(1280, RandomAugment(crop=40, seed=0))
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=2, drop_last=True)
    model = SmallCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(3):
        model.train()
        hits = count = 0
        for step, (images, labels) in enumerate(loader):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            hits += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
            if step % 20 == 0:
                print(f"[{epoch}:{step}] loss {loss.item():.4f}")
        print(f"epoch {epoch} train accuracy {hits / count:.3f}")


if __name__ == "__main__":
    main()
