"""Keyword spotting on synthetic one-second clips: log-mel-like features and a depthwise-separable CNN."""
import argparse
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

RATE = 4000
CLASSES = 8


class Keywords(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed
        self.t = torch.arange(RATE) / RATE

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 65537 + i)
        y = i % CLASSES
        f0 = 200 + 120 * y + 30 * torch.randn(1, generator=g)
        sweep = 150 * (y % 3 - 1)
        phase = 2 * math.pi * (f0 * self.t + 0.5 * sweep * self.t ** 2)
        wave = torch.sin(phase) + 0.5 * torch.sin(2 * phase)
        return wave + 1.2 * torch.randn(RATE, generator=g), y


class LogSpectrogram(nn.Module):
    def __init__(self, n_fft=128, hop=64):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        s = torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True)
        return torch.log1p(s.abs()).unsqueeze(1)


class DSConv(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.f = nn.Sequential(
            nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False), nn.BatchNorm2d(cin), nn.ReLU(),
            nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(),
        )

    def forward(self, x):
        return self.f(x)


def build():
    return nn.Sequential(
        LogSpectrogram(),
        nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        DSConv(16, 32, 2), DSConv(32, 48, 2), DSConv(48, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, CLASSES),
    )


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    loss = hits = count = 0
    for wave, y in loader:
        out = model(wave)
        loss += criterion(out, y).item() * len(y)
        hits += (out.argmax(1) == y).sum().item()
        count += len(y)
    return loss / count, hits / count


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--eval-every", type=int, default=10, help="optimizer steps between validations")
    p.add_argument("--batch", type=int, default=32)
    args = p.parse_args()
    torch.manual_seed(1)

    train = DataLoader(Keywords(960, 1), args.batch, shuffle=True, drop_last=True)
    valid = DataLoader(Keywords(128, 2), 64)
    model = build()
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    for epoch in range(args.epochs):
        model.train()
        for wave, y in train:
            opt.zero_grad()
            loss = criterion(model(wave), y)
            loss.backward()
            opt.step()
            step += 1
            if step % args.eval_every == 0:
                v, acc = validate(model, valid, criterion)
                print(f"[{epoch}] step {step} train {loss.item():.3f} valid {v:.3f} acc {acc:.3f}")


if __name__ == "__main__":
    main()
