# Binary lesion segmentation with a small U-Net, BCE + soft Dice.
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(42)


class LesionSet(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed
        c = torch.linspace(-1, 1, 48)
        self.yy, self.xx = torch.meshgrid(c, c, indexing="ij")

    def __len__(self):
        return self.n

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(self.seed * 100003 + idx)
        cx, cy = (torch.rand(2, generator=g) - 0.5).tolist()
        a, b = (0.12 + 0.25 * torch.rand(2, generator=g)).tolist()
        mask = (((self.xx - cx) / a) ** 2 + ((self.yy - cy) / b) ** 2 < 1).float()
        tissue = F.interpolate(torch.randn(1, 1, 6, 6, generator=g), size=48, mode="bicubic")[0, 0]
        image = 0.6 * tissue + 0.8 * mask + 0.3 * torch.randn(48, 48, generator=g)
        return image.unsqueeze(0), mask.unsqueeze(0)


def conv_block(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down1, self.down2, self.mid = conv_block(1, c), conv_block(c, 2 * c), conv_block(2 * c, 4 * c)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, stride=2)
        self.dec2 = conv_block(4 * c, 2 * c)
        self.up1 = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.dec1 = conv_block(2 * c, c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(self.pool(d1))
        m = self.mid(self.pool(d2))
        u2 = self.dec2(torch.cat([self.up2(m), d2], 1))
        u1 = self.dec1(torch.cat([self.up1(u2), d1], 1))
        return torch.sigmoid(self.out(u1))


class BceDice(nn.Module):
    def __init__(self, dice_weight=0.5, smooth=1.0):
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss()
        self.w, self.smooth = dice_weight, smooth

    def forward(self, pred, target):
        inter = (pred * target).sum((1, 2, 3))
        total = pred.sum((1, 2, 3)) + target.sum((1, 2, 3))
        dice = 1 - ((2 * inter + self.smooth) / (total + self.smooth)).mean()
        return (1 - self.w) * self.bce(pred, target) + self.w * dice


@torch.no_grad()
def iou(model, loader):
    model.eval()
    inter = union = 0.0
    for image, mask in loader:
        p = model(image.to(device)) > 0.5
        m = mask.to(device) > 0.5
        inter += (p & m).sum().item()
        union += (p | m).sum().item()
    return inter / max(union, 1)


train_loader = DataLoader(LesionSet(320, 1), batch_size=8, shuffle=True, drop_last=True)
valid_loader = DataLoader(LesionSet(40, 2), batch_size=20)
model = UNet().to(device)
criterion = BceDice()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=2)

for epoch in range(3):
    model.train()
    total = 0.0
    for image, mask in train_loader:
        image, mask = image.to(device), mask.to(device)
        optimizer.zero_grad()
        loss = criterion(model(image), mask)
        loss.backward()
        optimizer.step()
        total += loss.item() * image.size(0)
    score = iou(model, valid_loader)
    scheduler.step(score)
    print(f"epoch {epoch}: train loss {total / len(train_loader.dataset):.4f}, valid IoU {score:.3f}")
