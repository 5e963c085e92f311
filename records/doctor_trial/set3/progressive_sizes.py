"""Many short epochs; the image size changes from time to time (progressive resizing)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

SETTINGS = {
    "schedule": [(0, 24), (8, 32)],
    "epochs": 16,
    "batch_size": 32,
    "workers": 2,
    "lr": 1e-3,
}


class Gratings(Dataset):
    def __init__(self, n, size, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 5, (n,), generator=g)
        self.phase = 6.28 * torch.rand(n, generator=g)
        self.size = size

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        axis = torch.linspace(0, 1, self.size)
        wave = torch.sin(6.28 * (self.label[i] + 2) * axis + self.phase[i])
        return wave.expand(1, self.size, self.size) + 0.7 * torch.randn(1, self.size, self.size), self.label[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 48, 5, padding=2)
        self.fc = nn.Linear(48, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.fc(F.relu(self.conv2(x)).mean((2, 3)))


def size_for(epoch, schedule):
    return [s for start, s in schedule if epoch >= start][-1]


def train_loader(size):
    dataset = Gratings(192, size)
    return DataLoader(dataset, batch_size=SETTINGS["batch_size"], shuffle=True,
                      num_workers=SETTINGS["workers"], drop_last=True)


def main():
    torch.manual_seed(2)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=SETTINGS["lr"])
    for epoch in range(SETTINGS["epochs"]):
        loader = train_loader(size_for(epoch, SETTINGS["schedule"]))
        model.train()
        total = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch} loss {total.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
