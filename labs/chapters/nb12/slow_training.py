"""Train a small network to tell clothes apart. Writes a log, a checkpoint, and at the end how many it gets right.

python slow_training.py
python slow_training.py --epochs 5 --seed 1 --folder run1
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

DATA = Path("fashion_mnist_12k.npz")
SIZE = 32


class Clothes(Dataset):
    """Images as the network takes them: (1, 32, 32), about mean 0 and deviation 1; and what is on them, 0 to 9."""

    def __init__(self, path, part):
        with np.load(path) as arrays:
            self.images, self.labels = arrays[f"x_{part}"], arrays[f"y_{part}"]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = ImageOps.autocontrast(Image.fromarray(self.images[i]).resize((SIZE, SIZE), Image.BICUBIC))
        pixels = (np.asarray(image) / 255.0 - 0.286) / 0.353
        return torch.from_numpy(pixels).unsqueeze(0), int(self.labels[i])


class Network(nn.Module):
    """Four convolutions and two linear layers: 92,000 parameters."""

    def __init__(self, width=8):
        super().__init__()
        layers, inputs = [], 1
        for outputs, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (4 * width, 2)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(inputs * 16, 160), nn.ReLU(), nn.Dropout(0.1), nn.Linear(160, 10))

    def forward(self, x):
        return self.head(self.features(x))


def evaluate(model, loader):
    """Share of right answers."""
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum().item()
    model.train()
    return right / len(loader.dataset)


def write_statistics(log, step, model):
    """How large weights and gradients of each layer are: whether something vanishes or explodes."""
    for name, p in model.named_parameters():
        weight, gradient = p.detach().abs(), p.grad.abs()
        row = [
            v.item() for t in (weight, gradient, gradient / (weight + 1e-9)) for v in (t.median(), t.mean(), t.max())
        ]
        log.writerow([step, name, *row])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the other cores are my colleagues'
    torch.manual_seed(args.seed)
    args.folder.mkdir(parents=True, exist_ok=True)

    train, test = Clothes(args.data, "train"), Clothes(args.data, "test")
    loader = DataLoader(train, args.batch_size, shuffle=True)
    test_loader = DataLoader(test, args.batch_size)

    model = Network().double()  # the images are float64, and the weights have to match
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=True)

    step, average = 0, 2.3
    with (args.folder / "log.csv").open("w", newline="") as file:
        log = csv.writer(file)
        for epoch in range(args.epochs):
            for x, y in loader:
                optimizer.zero_grad(set_to_none=False)
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                step += 1
                average = 0.98 * average + 0.02 * loss.item()
                write_statistics(log, step, model)
                if step % 10 == 0:
                    print(f"step {step}  loss {average:.3f}  right {evaluate(model, test_loader):.1%}", flush=True)
                # Whatever happens, not more than one step is lost
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.folder / "last.pt")
            print(f"epoch {epoch + 1}: {evaluate(model, test_loader):.1%} of the test images are right", flush=True)
    torch.save(model.state_dict(), args.folder / "model.pt")


if __name__ == "__main__":
    main()
