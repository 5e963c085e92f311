"""Image-caption matching with a symmetric contrastive loss over the whole batch."""
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        concept = torch.randn(n, 12, generator=g)
        shared = torch.Generator().manual_seed(321)
        to_image, to_words = torch.randn(12, 3 * 64, generator=shared), torch.randn(12, 200, generator=shared)
        low = (concept @ to_image / 3.5).view(n, 3, 8, 8)
        self.image = F.interpolate(low, size=(32, 32)) + 0.5 * torch.randn(n, 3, 32, 32, generator=g)
        self.words = (concept @ to_words).topk(10, dim=1).indices

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        return self.image[i], self.words[i]


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(32, 48, 5, stride=2, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(48 * 64, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class TextTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 96, mode="mean")
        self.net = nn.Sequential(nn.ReLU(), nn.Linear(96, dim))

    def forward(self, w):
        return F.normalize(self.net(self.bag(w)), dim=-1)


class Matcher(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.image, self.text = ImageTower(dim), TextTower(dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, words):
        a, b = self.image(image), self.text(words)
        return self.log_scale.exp().clamp(max=100) * (a[:, None, :] * b[None, :, :]).sum(-1)


def symmetric_loss(scores):
    target = torch.arange(len(scores), device=scores.device)
    return 0.5 * (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target))


@torch.no_grad()
def recall_at_1(model, dataset):
    model.eval()
    scores = model(dataset.image, dataset.words)
    model.train()
    return (scores.argmax(1) == torch.arange(len(scores))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=64)
    args = ap.parse_args()
    torch.manual_seed(44)
    loader = DataLoader(Pairs(1664, 1), args.batch_size, shuffle=True, drop_last=True)
    val = Pairs(128, 2)
    model = Matcher()
    others = [p for n, p in model.named_parameters() if n != "log_scale"]
    optimizer = torch.optim.AdamW([{"params": others, "weight_decay": 0.05},
                                   {"params": [model.log_scale], "weight_decay": 0.0}], lr=1e-3)
    model.train()
    for epoch in range(args.epochs):
        total = 0.0
        for image, words in loader:
            loss = symmetric_loss(model(image, words))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} recall@1 {recall_at_1(model, val):.3f}")


if __name__ == "__main__":
    main()
