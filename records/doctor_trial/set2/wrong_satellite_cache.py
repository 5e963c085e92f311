"""Land-cover classification from tiles stored on disk as .npy (16-bit, four bands)."""
import functools
import os
import shutil
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SCENES, SIDE, TILE, CLASSES = 64, 128, 32, 5


def make_scenes(folder):
    rng = np.random.default_rng(8)
    colour = rng.uniform(1000, 9000, (CLASSES, 4))
    for s in range(SCENES):
        cover = rng.integers(0, CLASSES, (SIDE // TILE, SIDE // TILE))
        full = np.kron(cover, np.ones((TILE, TILE), int))
        img = colour[full] + rng.normal(0, 1800, (SIDE, SIDE, 4))
        np.save(os.path.join(folder, f"scene{s:03d}.npy"), img.clip(0, 65535).astype(np.uint16))
        np.save(os.path.join(folder, f"cover{s:03d}.npy"), cover)


class TileDataset(Dataset):
    def __init__(self, folder, augment=True):
        self.folder = folder
        self.augment = augment
        self.covers = [np.load(os.path.join(folder, f"cover{s:03d}.npy")) for s in range(SCENES)]
        self.per_scene = (SIDE // TILE) ** 2

    def __len__(self):
        return SCENES * self.per_scene

    @functools.lru_cache(maxsize=None)
    def read(self, scene, flip, gain):
        img = np.load(os.path.join(self.folder, f"scene{scene:03d}.npy")).astype(np.float32)
        img = np.sqrt(img / 10000.0) * gain
        return np.ascontiguousarray(img[:, ::-1] if flip else img)

    def __getitem__(self, index):
        scene, tile = divmod(index, self.per_scene)
        r, c = divmod(tile, SIDE // TILE)
        flip = self.augment and torch.rand(()).item() < 0.5
        gain = round(0.8 + 0.4 * torch.rand(()).item(), 2) if self.augment else 1.0
        img = self.read(scene, flip, gain)
        col = SIDE // TILE - 1 - c if flip else c
        patch = img[r * TILE : (r + 1) * TILE, col * TILE : (col + 1) * TILE]
        return torch.from_numpy(patch.copy()).permute(2, 0, 1), int(self.covers[scene][r, c])


class CoverNet(nn.Module):
    def __init__(self):
        super().__init__()
        chans = [4, 16, 32, 48]
        blocks = []
        for a, b in zip(chans, chans[1:]):
            blocks += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*blocks)
        self.fc = nn.Linear(chans[-1], CLASSES)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


def main():
    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="scenes_")
    try:
        make_scenes(folder)
        loader = DataLoader(TileDataset(folder), batch_size=16, shuffle=True, num_workers=1,
                            persistent_workers=True, drop_last=True)
        net = CoverNet()
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        for epoch in range(2):
            seen = good = 0
            for x, y in loader:
                out = net(x)
                loss = nn.functional.cross_entropy(out, y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                seen += len(y)
                good += (out.argmax(1) == y).sum().item()
            print(f"epoch {epoch}: loss {loss.item():.3f} accuracy {good / seen:.3f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
