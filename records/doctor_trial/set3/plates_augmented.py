"""Character reader with elastic jitter and salt-and-pepper noise as augmentation."""
import math
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def jitter(img, amplitude, wavelength, phase):
    """Shift every pixel along a wave, nearest neighbour."""
    h, w = len(img), len(img[0])
    out = [[0.0] * w for _ in range(h)]
    for r in range(h):
        for c in range(w):
            rr = r + int(round(amplitude * math.sin(c / wavelength + phase)))
            cc = c + int(round(amplitude * math.cos(r / wavelength + phase)))
            if 0 <= rr < h and 0 <= cc < w:
                out[r][c] = img[rr][cc]
    return out


def salt_and_pepper(img, prob):
    for row in img:
        for c in range(len(row)):
            u = random.random()
            if u < prob:
                row[c] = 0.0 if u < prob / 2 else 1.0
    return img


class Characters(Dataset):
    def __init__(self, n, size=28, classes=10, seed=0):
        g = torch.Generator().manual_seed(seed)
        shapes = (torch.rand(classes, 1, 7, 7, generator=g) > 0.5).float()
        shapes = nn.functional.interpolate(shapes, size=(size, size)).squeeze(1)
        self.labels = torch.randint(0, classes, (n,), generator=g).tolist()
        self.images = [shapes[k].tolist() for k in self.labels]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        img = jitter(self.images[i], random.uniform(0, 2.5), random.uniform(3, 6), random.uniform(0, 6.28))
        img = salt_and_pepper(img, 0.1)
        return torch.tensor(img).unsqueeze(0), self.labels[i]


class Reader(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, classes))

    def forward(self, x):
        return self.fc(self.features(x))


def main():
    random.seed(10)
    torch.manual_seed(10)
    loader = DataLoader(Characters(1600), batch_size=40, shuffle=True)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        correct = seen = 0
        for step, (x, y) in enumerate(loader):
            out = model(x)
            loss = criterion(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (out.argmax(1) == y).sum().item()
            seen += len(y)
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} acc {correct / seen:.3f}")


if __name__ == "__main__":
    main()
