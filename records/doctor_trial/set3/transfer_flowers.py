# Transfer learning: load the "pretrained" trunk, swap the head for our number of classes, train all of it.
import os
import tempfile

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, random_split


class ResBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.short = nn.Conv2d(cin, cout, 1, stride, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.short(x))


class MiniResNet(nn.Module):
    def __init__(self, num_classes=100):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.layers = nn.Sequential(ResBlock(16, 24, 2), ResBlock(24, 48, 2), ResBlock(48, 64, 2))
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


class Flowers(Dataset):
    def __init__(self, n=1100, classes=5, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, classes, (n,), generator=g)
        colour = torch.rand(classes, 3, 1, 1, generator=g)
        self.images = colour[self.labels] + 0.4 * torch.randn(n, 3, 32, 32, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], int(self.labels[i])


def pretrained_weights(folder):
    path = os.path.join(folder, "miniresnet.pt")
    torch.save(MiniResNet(100).state_dict(), path)
    return path


def build(num_classes, weights, lr):
    model = MiniResNet(100)
    model.load_state_dict(torch.load(weights, weights_only=True))
    optimizer = optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    model.fc = nn.Linear(model.fc.in_features, num_classes)
    return model, optimizer


def run_epoch(model, loader, criterion, optimizer=None):
    training = optimizer is not None
    model.train(training)
    total, correct, loss_sum = 0, 0, 0.0
    with torch.set_grad_enabled(training):
        for images, labels in loader:
            logits = model(images)
            loss = criterion(logits, labels)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            total += labels.size(0)
            loss_sum += loss.item() * labels.size(0)
            correct += (logits.argmax(1) == labels).sum().item()
    return loss_sum / total, correct / total


if __name__ == "__main__":
    torch.manual_seed(5)
    train_set, val_set = random_split(Flowers(), [900, 200])
    train_loader = DataLoader(train_set, batch_size=36, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=50)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = build(5, pretrained_weights(folder), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        tl, ta = run_epoch(model, train_loader, criterion, optimizer)
        vl, va = run_epoch(model, val_loader, criterion)
        print(f"epoch {epoch}  train {tl:.3f}/{ta:.3f}  val {vl:.3f}/{va:.3f}")
