"""Semi-supervised mean teacher with a frozen-then-thawed backbone.

The teacher is an exponential moving average of the student, never trained by gradient; the consistency weight
ramps up from zero; the backbone is frozen (and its norm layers kept in eval) for the first epoch.
"""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Subset

EPOCHS, FREEZE_EPOCHS, BATCH, LABELLED = 6, 1, 16, 160


class Blobs(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        proto = torch.randn(6, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        self.y = torch.randint(0, 6, (n,), generator=g)
        self.x = F.interpolate(proto, size=24, mode="bilinear")[self.y] + 0.5 * torch.randn(n, 3, 24, 24, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 6))
        self.frozen = False

    def freeze_backbone(self, flag):
        self.frozen = flag
        self.backbone.requires_grad_(not flag)
        self.train(self.training)

    def train(self, mode=True):
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def augment(x):
    shift = torch.randint(-2, 3, (2,)).tolist()
    return torch.roll(x, shift, (2, 3)) + 0.1 * torch.randn_like(x)


@torch.no_grad()
def ema_update(teacher, student, step, decay=0.99):
    d = min(decay, 1 - 1 / (step + 1))
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(d).add_(s, alpha=1 - d)
    for t, s in zip(teacher.buffers(), student.buffers()):
        t.copy_(s)


@torch.no_grad()
def accuracy(model, loader):
    was = model.training
    model.eval()
    hit = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train(was)
    return hit / len(loader.dataset)


def main():
    torch.manual_seed(0)
    pool = Blobs(640, seed=1)
    labelled = DataLoader(Subset(pool, range(LABELLED)), BATCH, shuffle=True, drop_last=True)
    unlabelled = DataLoader(Subset(pool, range(LABELLED, len(pool))), 2 * BATCH, shuffle=True, drop_last=True)
    test = DataLoader(Blobs(200, seed=2), 100)

    student = Classifier()
    with torch.no_grad():  # settle the norm statistics before freezing
        for x, _ in unlabelled:
            student(x)
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    student.freeze_backbone(True)
    optimizer = torch.optim.Adam([
        {"params": student.backbone.parameters(), "lr": 1e-3},
        {"params": student.head.parameters(), "lr": 5e-3},
    ])
    step, total = 0, EPOCHS * len(unlabelled)
    for epoch in range(EPOCHS):
        if epoch == FREEZE_EPOCHS:
            student.freeze_backbone(False)
        student.train()
        lab_iter = iter(labelled)
        for u, _ in unlabelled:
            try:
                x, y = next(lab_iter)
            except StopIteration:
                lab_iter = iter(labelled)
                x, y = next(lab_iter)
            with torch.no_grad():
                target = teacher(augment(u)).softmax(1)
            logits = student(torch.cat([augment(x), augment(u)]))
            supervised = F.cross_entropy(logits[: len(x)], y)
            consistency = F.mse_loss(logits[len(x):].softmax(1), target)
            weight = 2.0 * math.exp(-5 * (1 - min(1.0, 2 * step / total)) ** 2)
            loss = supervised + weight * consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema_update(teacher, student, step)
            step += 1
        print(f"epoch {epoch} loss {loss.item():.3f} w {weight:.3f} "
              f"student {accuracy(student, test):.3f} teacher {accuracy(teacher, test):.3f}")


if __name__ == "__main__":
    main()
