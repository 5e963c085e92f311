import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

CFG = {
    "image_size": 64,
    "n_train": 480,
    "batch_size": 4,
    "effective_batch_size": 16,
    "epochs": 2,
    "lr": 0.05,
    "momentum": 0.9,
}


class CellImages(Dataset):
    def __init__(self, n, size, seed=0):
        self.n, self.size, self.seed = n, size, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 100003 + i)
        axis = torch.arange(self.size, dtype=torch.float32)
        count = int(torch.randint(3, 8, (1,), generator=g))
        cy, cx = self.size * torch.rand(2, count, 1, 1, generator=g)
        rad = 3 + 5 * torch.rand(count, 1, 1, generator=g)
        mask = (((axis[None, :, None] - cy) ** 2 + (axis[None, None, :] - cx) ** 2) < rad ** 2).any(0).float()
        image = 0.6 * mask + 0.3 * torch.randn(self.size, self.size, generator=g)
        return image[None], mask[None]


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(),
        nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.d1, self.d2, self.d3 = double_conv(1, c), double_conv(c, 2 * c), double_conv(2 * c, 4 * c)
        self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2)
        self.u2 = double_conv(4 * c, 2 * c)
        self.up1 = nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.u1 = double_conv(2 * c, c)
        self.final = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        z = self.d3(F.max_pool2d(b, 2))
        z = self.u2(torch.cat([self.up2(z), b], 1))
        z = self.u1(torch.cat([self.up1(z), a], 1))
        return self.final(z)


def dice_loss(logits, target, eps=1.0):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    return (1 - (2 * inter + eps) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()


def train(cfg):
    torch.manual_seed(0)
    accum_steps = cfg["effective_batch_size"] // cfg["batch_size"]
    loader = DataLoader(CellImages(cfg["n_train"], cfg["image_size"]), cfg["batch_size"], shuffle=True)
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=cfg["momentum"])
    for epoch in range(cfg["epochs"]):
        model.train()
        optimizer.zero_grad()
        running = 0.0
        for step, (image, mask) in enumerate(loader, start=1):
            logits = model(image)
            loss = F.binary_cross_entropy_with_logits(logits, mask) + dice_loss(logits, mask)
            loss.backward()
            running += loss.detach()
            if step % accum_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step % 40 == 0:
                print(f"epoch {epoch} step {step}/{len(loader)} loss {running.item() / step:.4f}")
    return model


if __name__ == "__main__":
    train(CFG)
