"""Train a small ResNet-like model and report how sparse its activations are after every epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Bottleneck(nn.Module):
    def __init__(self, c, mid):
        super().__init__()
        self.reduce = nn.Conv2d(c, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid)
        self.conv = nn.Conv2d(mid, mid, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(mid)
        self.expand = nn.Conv2d(mid, c, 1)
        self.act = nn.ReLU()

    def forward(self, x):
        z = F.relu(self.bn1(self.reduce(x)))
        z = F.relu(self.bn2(self.conv(z)))
        return self.act(x + self.expand(z))


class Net(nn.Module):
    def __init__(self, c=32, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.block1, self.block2 = Bottleneck(c, 16), Bottleneck(c, 16)
        self.fc = nn.Linear(c, classes)

    def forward(self, x):
        x = self.block2(self.block1(self.stem(x)))
        return self.fc(x.mean((2, 3)))


class ActivationRecorder:
    def __init__(self, model, kind=nn.ReLU):
        self.records = {}
        self.handles = [m.register_forward_hook(self._hook(name))
                        for name, m in model.named_modules() if isinstance(m, kind)]

    def _hook(self, name):
        def hook(module, inputs, output):
            self.records.setdefault(name, []).append(output.detach())
        return hook

    def report(self, batches):
        for name, outs in self.records.items():
            recent = outs[-batches:]
            zeros = sum((o == 0).sum().item() for o in recent)
            print(f"    {name}: {100 * zeros / sum(o.numel() for o in recent):.1f}% zero")


def dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 6, (n,), generator=g)
    proto = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(50))
    x = F.interpolate(proto[y], size=(32, 32), mode="bilinear", align_corners=False)
    return TensorDataset(x + torch.randn(n, 3, 32, 32, generator=g), y)


def main():
    torch.manual_seed(14)
    loader = DataLoader(dataset(1536, 14), batch_size=48, shuffle=True)
    model = Net()
    recorder = ActivationRecorder(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for epoch in range(3):
        model.train()
        correct, loss_sum, n = 0, 0.0, 0
        for x, y in loader:
            out = model(x)
            loss = F.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (out.argmax(1) == y).sum().item()
            loss_sum += loss.item() * len(y)
            n += len(y)
        print(f"epoch {epoch} loss {loss_sum / n:.4f} acc {correct / n:.3f}")
        recorder.report(len(loader))


if __name__ == "__main__":
    main()
