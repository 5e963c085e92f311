# Fault: (5) a "best" state that aliases live weights: a list of p.data
# Line: 25
# Ideal first line: The best state kept at line 25 shares memory with the live weights and changes at every step; clone the tensors.
"""Small noisy data set, early stopping that puts the best weights back."""
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MAX_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 600
EVAL_EVERY = 20
PATIENCE = 12


class EarlyStopping:
    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.best_loss, self.best_params, self.bad = float("inf"), None, 0

    def update(self, val_loss):
        """True when it's time to stop."""
        if val_loss < self.best_loss:
            self.best_loss, self.bad = val_loss, 0
            self.best_params = [p.data for p in self.model.parameters()]
        else:
            self.bad += 1
        return self.bad >= self.patience

    def restore(self):
        with torch.no_grad():
            for p, best in zip(self.model.parameters(), self.best_params):
                p.copy_(best)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)
        )

    def forward(self, x):
        return self.layers(x)


def make_split(n, seed):
    w = torch.randn(32, 4, generator=torch.Generator().manual_seed(21))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 32, generator=g)
    y = (x @ w + 4.0 * torch.randn(n, 4, generator=g)).argmax(1)
    return TensorDataset(x, y)


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    total = sum(criterion(model(x), y).item() * len(y) for x, y in loader)
    model.train()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(0)
    train = DataLoader(make_split(1500, 1), batch_size=150, shuffle=True)
    val = DataLoader(make_split(1000, 2), batch_size=500)
    model, criterion = Net(), nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    stopper = EarlyStopping(model, PATIENCE)
    step, stop = 0, False
    while not stop and step < MAX_STEPS:
        for x, y in train:
            loss = criterion(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % EVAL_EVERY == 0:
                val_loss = validate(model, val, criterion)
                print(f"step {step} train {loss.item():.3f} val {val_loss:.3f}")
                stop = stopper.update(val_loss)
            if stop or step >= MAX_STEPS:
                break
    stopper.restore()
    print(f"best val loss {stopper.best_loss:.3f}; the restored model has {validate(model, val, criterion):.3f}")


if __name__ == "__main__":
    main()
