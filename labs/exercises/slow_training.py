"""A colleague's training script for exercise 12.1: two faults make it wrong, and three make it slow.

python slow_training.py --epochs 20
"""

import argparse

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from labs.common.data import fashion_mnist

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Clothes(Dataset):
    """Images (1, 32, 32) with their class. Training images are cut out at a random place and mirrored at random."""

    def __init__(self, images, labels, train):
        self.images, self.labels, self.train = images, labels, train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        large = Image.fromarray(self.images[i]).resize((36, 36), Image.BICUBIC)
        pixels = np.asarray(ImageOps.autocontrast(large)) / 255.0
        x, y = torch.randint(5, (2,)).tolist() if self.train else (2, 2)
        pixels = pixels[y : y + 32, x : x + 32]
        if self.train and torch.rand(()) < 0.5:
            pixels = pixels[:, ::-1]
        return torch.tensor((pixels - 0.3) / 0.35).unsqueeze(0), int(self.labels[i])


def build_model():
    layers, channels = [], 1
    for width in (8, 16, 32):
        layers += [nn.Conv2d(channels, width, 3, 2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def validate(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum().item() for x, y in loader)
    return right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the other cores are taken
    torch.manual_seed(0)
    data = fashion_mnist()
    loader = DataLoader(Clothes(data.x_train[:3000], data.y_train, train=True), batch_size=100, shuffle=True)
    test_loader = DataLoader(Clothes(data.x_test[:500], data.y_test, train=False), batch_size=100)

    model = build_model().double().to(device)  # float64, as the images are
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    step = 0
    for epoch in range(args.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            if step % 2 == 0:
                print(f"step {step}  loss {loss.item():.3f}  right {validate(model, test_loader):.1%}", flush=True)
            if step % 15 == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        print(f"epoch {epoch + 1}: {validate(model, test_loader):.1%} of the test images are right", flush=True)


if __name__ == "__main__":
    main()
