# Fault: (8) worker memory that grows: lru_cache without a bound on keys that never repeat
# Line: 38
# Ideal first line: The workers' memory grows at every batch: lru_cache(maxsize=None) on read_tile (line 38) keeps every random tile and hardly ever hits.
"""Tiles cut out of large scenes at random places; workers cut and standardise."""
import argparse
from functools import lru_cache

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SCENES, SIDE, TILE = 24, 256, 48


def make_scenes(seed=0):
    """Smooth random fields; the class of a scene is its dominant wavelength."""
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:SIDE, :SIDE]
    scenes, labels = [], []
    for k in range(SCENES):
        label = k % 4
        angle, phase = rng.uniform(0, np.pi), rng.uniform(0, 6.28)
        wave = np.sin((xx * np.cos(angle) + yy * np.sin(angle)) * 6.28 / (6 + 5 * label) + phase)
        scenes.append((wave + 1.5 * rng.normal(size=(SIDE, SIDE))).astype(np.float32))
        labels.append(label)
    return np.stack(scenes), labels


class RandomTiles(Dataset):
    def __init__(self, scenes, labels, length):
        self.scenes, self.labels, self.length = scenes, labels, length

    def __len__(self):
        return self.length

    @lru_cache(maxsize=None)
    def read_tile(self, scene, top, left):
        tile = self.scenes[scene, top : top + TILE, left : left + TILE]
        return (tile - tile.mean()) / tile.std()

    def __getitem__(self, index):
        top, left = torch.randint(SIDE - TILE, (2,)).tolist()
        scene = index % SCENES
        return torch.from_numpy(self.read_tile(scene, top, left)).unsqueeze(0), self.labels[scene]


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 5, stride=2)
        self.c2 = nn.Conv2d(16, 32, 5, stride=2)
        self.fc = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x))))
        return self.fc(x.amax((2, 3)))


def run(args):
    torch.manual_seed(args.seed)
    scenes, labels = make_scenes()
    loader = DataLoader(RandomTiles(scenes, labels, 9600), batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    held_out = DataLoader(RandomTiles(*make_scenes(seed=1), 480), batch_size=240)
    model = WaveNet()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    seen = 0
    for epoch in range(100):
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += 1
            if seen == args.steps:
                break
        model.eval()
        with torch.no_grad():
            acc = np.mean([(model(x).argmax(1) == y).float().mean().item() for x, y in held_out])
        print(f"epoch {epoch}: {seen} steps, loss {loss.item():.3f}, held-out acc {acc:.3f}", flush=True)
        if seen == args.steps:
            return


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=450)
    ap.add_argument("--seed", type=int, default=0)
    run(ap.parse_args())
