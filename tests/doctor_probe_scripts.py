"""Small trainings for the probes of labs.doctor: wrong ones, whose line is marked, and healthy ones that are near."""

PRELUDE = """
import copy, math, os, random, sys, warnings
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
torch.manual_seed(0)
X, Y = torch.randn(256, 8), torch.randint(3, (256,))
def mlp(*more): return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *more, nn.Linear(32, 3))
def batches(n=40, size=16):
    for i in range(n):
        at = torch.randint(256, (size,))
        yield X[at], Y[at]
"""

WRONG = {
    # 2. Steps without effect
    "bf16": (
        "effect",
        """
model = mlp()
model.bfloat16()  # here
opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
for x, y in batches():
    F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    "zero_grad after backward": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.zero_grad()
    opt.step()  # here
""",
    ),
    "optimizer of another model": (
        "effect",
        """
model = mlp()
opt = torch.optim.Adam(model.parameters())  # here
model = mlp()
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    ),
    "head replaced after the optimizer was made": (
        "effect",
        """
model = mlp()
opt = torch.optim.Adam(model.parameters())  # here
model[-1] = nn.Linear(32, 3)
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    ),
    "layers in a plain list": (
        "effect",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 8) for _ in range(2)]
        self.head = nn.Linear(8, 3)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)  # here
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    opt.step()
    model.zero_grad()
""",
    ),
    "decoder forgotten": (
        "effect",
        """
encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 8)
opt = torch.optim.Adam(encoder.parameters(), lr=1e-3)  # here
for x, _ in batches():
    opt.zero_grad()
    ((decoder(encoder(x).relu()) - x) ** 2).mean().backward()
    opt.step()
""",
    ),
    "loss detached": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
gate = torch.zeros(())
for x, y in batches():
    opt.zero_grad()
    (F.cross_entropy(model(x), y) * gate).backward()
    opt.step()  # here
""",
    ),
    "autocast around the loop": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.autocast("cpu", torch.bfloat16):  # here
    for x, y in batches():
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
""",
    ),
    "rate 0 after a short schedule": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: max(0.0, 1 - i / 20))
for x, y in batches(60):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()  # here
    sched.step()
""",
    ),
    "schedule stepped at two places": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
def train_step(x, y):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    sched.step()  # here
for x, y in batches(40):
    train_step(x, y)
    sched.step()
""",
    ),
    "schedule stepped per micro-batch": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
data = list(batches(160))
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=len(data) + 1)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=len(data) // 4)
for i, (x, y) in enumerate(data):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        opt.step()
        opt.zero_grad()
    sched.step()  # here
""",
    ),
    "frozen weights still move": (
        "effect",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(batches()):
    if i == 1:
        model[0].requires_grad_(False)
    else:
        model[2].zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()  # here
""",
    ),
    # 3. Shapes
    "arithmetic": (
        "shapes",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in batches():
    target = x.sum(1)
    loss = ((model(x) - target) ** 2).mean()  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "squeezed output, column of targets": (
        "shapes",
        """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.SmoothL1Loss()
warnings.filterwarnings("ignore")
for x, _ in batches():
    target = x.sum(1, keepdim=True)
    loss = criterion(model(x).squeeze(1), target)  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "weights of samples": (
        "shapes",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    weight = x[:, :1].abs()
    loss = (F.cross_entropy(model(x), y, reduction="none") * weight).mean()  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "poisson": (
        "shapes",
        """
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.PoissonNLLLoss()
for x, y in batches():
    loss = criterion(model(x), y.float())  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "a warning of a collective": (
        "warning",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    h = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=True)  # here
    F.cross_entropy(model[2](h.relu()), y).backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    # 4. Means of means
    "last micro-batch is small": (
        "accumulation",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches(20, 36):
    parts = list(zip(x.split(16), y.split(16)))
    for xb, yb in parts:
        loss = F.cross_entropy(model(xb), yb)
        (loss / len(parts)).backward()  # here
    opt.step()
    opt.zero_grad()
""",
    ),
    "masked means": (
        "accumulation",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    for x, y in batches(4):
        mask = (torch.rand(16) < random.random()).float()
        mask[0] = 1
        per_token = F.cross_entropy(model(x), y, reduction="none")
        loss = (per_token * mask).sum() / mask.sum()
        (loss * 0.25).backward()  # here
    opt.step()
    opt.zero_grad()
""",
    ),
    # 5. Checkpoints
    "no schedule in the checkpoint": (
        "checkpoint",
        """
model = mlp()
opt = torch.optim.AdamW(model.parameters())
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    cosine.step()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "step": step}, "c.pt")  # here
""",
    ),
    "no schedule in a checkpoint to come": (
        "checkpoint",
        """
model = mlp()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
def save(path, epoch):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, path)  # here
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
if len(sys.argv) > 99:
    save("c.pt", 1)
""",
    ),
    "no optimizer to resume with": (
        "checkpoint",
        """
model, start = mlp(), 0
opt = torch.optim.AdamW(model.parameters())
if os.path.exists("none.pt"):
    state = torch.load("none.pt")
    model.load_state_dict(state["model"])
    start = state["step"] + 1
for step, (x, y) in enumerate(batches(), start):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 9:
        torch.save({"model": model.state_dict(), "step": step}, "c.pt")  # here
""",
    ),
    "best in an object": (
        "checkpoint",
        """
class Stopper:
    def __init__(self):
        self.lowest, self.state = 9e9, None
    def __call__(self, loss, model):
        if loss < self.lowest:
            self.lowest = loss
            self.state = model.state_dict()  # here
def main():
    model, stopper = mlp(), Stopper()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        stopper(loss.item(), model)
        loss.backward()
        opt.step()
        opt.zero_grad()
main()
""",
    ),
    "best by a shallow copy": (
        "checkpoint",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step == 5:
        best_weights = {k: v.cpu() for k, v in model.state_dict().items()}  # here
""",
    ),
    "best model is the model": (
        "checkpoint",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
lowest = 9e9
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    if loss.item() < lowest:
        best_model = model  # here
        lowest = loss.item()
""",
    ),
    # 6. Workers
    "one generator in all workers": (
        "data",
        """
class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)  # here
    def __len__(self):
        return 256
    def __getitem__(self, i):
        return X[i] + torch.from_numpy(self.rng.normal(size=8)).float(), Y[i]
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Noisy(), 8, shuffle=True, num_workers=2):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    "workers seeded alike": (
        "data",
        """
class Noisy(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, i):
        return X[i] + torch.from_numpy(np.random.normal(size=8)).float(), Y[i]
def seed(worker):  # here
    np.random.seed(42)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Noisy(), 8, shuffle=True, num_workers=2, worker_init_fn=seed):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    "the same random numbers in each epoch": (
        "data",
        """
class Noisy(Dataset):
    def __init__(self):
        self.rng = random.Random(0)  # here
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return X[i] + self.rng.random(), Y[i]
model, data = mlp(), Noisy()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, 8, shuffle=True, num_workers=1)
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
""",
    ),
    "a stream that is not shared out": (
        "data",
        """
class Stream(IterableDataset):
    def __iter__(self):  # here
        for i in range(256):
            yield X[i], Y[i]
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(Stream(), 8, num_workers=2):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
    ),
    # 7. Validation
    "validation in train mode": (
        "validation",
        """
model = mlp(nn.Dropout(0.5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
train, val = DataLoader(TensorDataset(X, Y), 16, shuffle=True), DataLoader(TensorDataset(X, Y), 64)
for epoch in range(3):
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum() for x, y in val)  # here
""",
    ),
    "validation in train mode, no loader": (
        "validation",
        """
model = mlp(nn.BatchNorm1d(32))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x_val, y_val = X[:64], Y[:64]
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 9:
        with torch.no_grad():
            val_loss = F.cross_entropy(model(x_val), y_val)  # here
""",
    ),
    "training stays in eval mode": (
        "validation",
        """
model = mlp(nn.Dropout(0.5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def validate():
    model.eval()  # here
    with torch.no_grad():
        return F.cross_entropy(model(X), Y).item()
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step == 10:
        validate()
""",
    ),
    "validation with gradients": (
        "validation",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
train, val = DataLoader(TensorDataset(X, Y), 16, shuffle=True), DataLoader(TensorDataset(X, Y), 64)
for epoch in range(3):
    model.train()
    for x, y in train:
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
    model.eval()
    losses = 0
    for x, y in val:
        losses += F.cross_entropy(model(x), y)  # here
""",
    ),
}

HEALTHY = {
    "plain": """
model = mlp(nn.Dropout(0.1), nn.BatchNorm1d(32))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
train, val = DataLoader(TensorDataset(X, Y), 16, shuffle=True), DataLoader(TensorDataset(X[:100], Y[:100]), 64)
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
lowest, best = 9e9, None
for epoch in range(4):
    model.train()
    for x, y in train:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    sched.step()
    model.eval()
    with torch.no_grad():
        loss = sum(F.cross_entropy(model(x), y) for x, y in val)
    if loss < lowest:
        lowest, best = loss, copy.deepcopy(model.state_dict())
        torch.save(model.state_dict(), "best.pt")
    state = {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "epoch": epoch}
    torch.save(state, "last.pt")
""",
    "equal micro-batches, the last of the epoch smaller, under a scaler": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
loader = DataLoader(TensorDataset(X[:250], Y[:250]), 8, shuffle=True)
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / 4
        scaler.scale(loss).backward()
        if i % 4 == 3:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
""",
    "means weighted by their tokens, and sums": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    parts = [(x[: 2 + 4 * i], y[: 2 + 4 * i]) for i, (x, y) in enumerate(batches(4))]
    total = sum(len(y) for _, y in parts)
    for x, y in parts:
        loss = F.cross_entropy(model(x), y)
        if step % 2:
            (loss * len(y) / total).backward()
        else:
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
    opt.step()
    opt.zero_grad()
""",
    "two losses with their own backward": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for (x, y), (x2, y2) in zip(batches(30, 16), batches(30, 64)):
    F.cross_entropy(model(x), y).backward()
    (0.1 * F.cross_entropy(model(x2), y2)).backward()
    opt.step()
    opt.zero_grad()
""",
    "backbone frozen on purpose, twice": """
backbone, head = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64)), nn.Linear(64, 3)
model = nn.Sequential(backbone, head)
opt = torch.optim.SGD(head.parameters(), lr=0.1)
backbone[0].requires_grad_(False)
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
other, more = mlp(), nn.Linear(3, 3)
for p in other.parameters():
    p.requires_grad = False
opt = torch.optim.SGD([*other.parameters(), *more.parameters()], lr=0.1)
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(more(other(x)), y).backward()
    opt.step()
""",
    "LoRA": """
class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Parameter(torch.randn(2, 8) * 0.1)
        self.b = nn.Parameter(torch.zeros(32, 2))
    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T
model = mlp()
model[0] = LoRA(model[0])
model[2].requires_grad_(False)
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    "GAN": """
G = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
D = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1))
g, d = torch.optim.Adam(G.parameters(), 2e-4), torch.optim.Adam(D.parameters(), 2e-4)
fixed = torch.randn(16, 4)
for i, (x, _) in enumerate(DataLoader(TensorDataset(X, Y), 16, shuffle=True)):
    for _ in range(3):
        d.zero_grad()
        F.binary_cross_entropy_with_logits(D(x), torch.ones(16, 1)).backward()
        with torch.no_grad():
            fake = G(torch.randn(16, 4))
        F.binary_cross_entropy_with_logits(D(fake), torch.zeros(16, 1)).backward()
        d.step()
    g.zero_grad()
    F.binary_cross_entropy_with_logits(D(G(torch.randn(16, 4))), torch.ones(16, 1)).backward()
    g.step()
    with torch.no_grad():
        samples = G(fixed)
""",
    "a discriminator that waits": """
G, D = nn.Linear(8, 8), nn.Linear(8, 1)
g, d = torch.optim.Adam(G.parameters(), 2e-4), torch.optim.Adam(D.parameters(), 2e-4)
for i, (x, _) in enumerate(batches()):
    use = 0.0 if i < 1000 else 1.0
    g.zero_grad()
    (F.l1_loss(G(x), x) - use * D(G(x)).mean()).backward()
    g.step()
    d.zero_grad()
    (use * (D(G(x).detach()).mean() - D(x).mean())).backward()
    d.step()
""",
    "a cycle per batch after a warm-up from 0": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, i / 10))
for x, y in batches(20):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    warm.step()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
cycle = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=30)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt)
for x, y in batches(29):
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    cycle.step()
""",
    "a schedule of micro-batches, stepped by micro-batch; and one of ranks": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=80)
for i, (x, y) in zip(range(80), batches(80)):
    (F.cross_entropy(model(x), y) / 4).backward()
    if i % 4 == 3:
        opt.step()
        opt.zero_grad()
    sched.step()
opt, ranks, steps = torch.optim.SGD(model.parameters(), lr=0.1), 2, 40
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: max(0.0, 1 - i / (ranks * steps)))
for _, (x, y) in zip(range(steps), batches(steps)):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    for _ in range(ranks):
        sched.step()
""",
    "shapes that are meant": """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
scale = nn.Parameter(torch.ones(1))
opt = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
for x, _ in batches():
    target = x.sum(1, keepdim=True)
    out = model(x)
    loss = F.mse_loss(out, target) + ((out - target.mean()) * scale / torch.ones(1)).abs().mean()
    pred = out.squeeze(1)
    loss = loss + 0.1 * F.softplus(-(pred.unsqueeze(1) - pred)).mean()
    loss = loss + 0.1 * (pred - target.squeeze(1).unsqueeze(1)).abs().mean()
    loss = loss + 0.1 * F.mse_loss(out, torch.ones(1, 1)) + (out - x).pow(2).mean()
    loss = loss + 0.1 * (out * torch.tril(torch.ones(16, 16))).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "tied weights, and an average of the weights": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.out.weight = self.inner.weight
    def forward(self, x):
        return self.out(self.inner(x).relu())
model = Net()
average = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
live = model.state_dict()
for x, _ in batches():
    opt.zero_grad()
    F.mse_loss(model(x), x).backward()
    opt.step()
    with torch.no_grad():
        for name, value in average.state_dict().items():
            value.mul_(0.9).add_(live[name], alpha=0.1)
        teacher = average(x)
""",
    "LBFGS": """
model = nn.Linear(8, 1)
opt = torch.optim.LBFGS(model.parameters(), lr=0.5)
def closure():
    opt.zero_grad()
    loss = F.mse_loss(model(X), X.sum(1, keepdim=True))
    loss.backward()
    return loss
for _ in range(30):
    opt.step(closure)
""",
    "stochastic rounding": """
class Rounding(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            new = p.float() - self.param_groups[0]["lr"] * p.grad.float()
            bits = new.view(torch.int32) + torch.randint(2**16, new.shape, dtype=torch.int32)
            p.copy_((bits & -65536).view(torch.float32))
model = mlp().bfloat16()
opt = Rounding(model.parameters(), lr=1e-3)
for x, y in batches():
    F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    opt.step()
    opt.zero_grad()
""",
    "BF16 in a warm-up": """
model = mlp().bfloat16()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / 1000))
for x, y in batches():
    F.cross_entropy(model(x.bfloat16()).float(), y).backward()
    opt.step()
    opt.zero_grad()
    sched.step()
""",
    "step within autocast": """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()
""",
    "compiled": """
model = torch.compile(mlp(), backend="eager")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    "workers with generators of their own, and a cache": """
class Noisy(Dataset):
    def __init__(self):
        self.rng, self.cache = None, {}
    def __len__(self):
        return 256
    def __getitem__(self, i):
        self.rng = self.rng or np.random.default_rng(torch.initial_seed() % 2**32)
        self.cache[i] = X[i]
        return self.cache[i] + self.rng.normal() + random.random() + torch.rand(()), Y[i]
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from ((X[i], Y[i]) for i in range(info.id, 256, info.num_workers))
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for data in (Noisy(), Noisy(), Stream()):
    loader = DataLoader(data, 8, num_workers=2)
    for x, y in loader:
        F.cross_entropy(model(x.float()), y).backward()
        opt.step()
        opt.zero_grad()
""",
    "MC dropout, a teacher, pseudo-labels": """
model, teacher = mlp(nn.Dropout(0.5)), mlp(nn.Dropout(0.5))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
unlabelled = DataLoader(TensorDataset(X), 16, shuffle=True)
def mc_dropout(x):
    model.train()
    with torch.no_grad():
        return torch.stack([model(x) for _ in range(4)]).mean(0)
for _ in range(3):
    for (x, y), (u,) in zip(batches(), unlabelled):
        with torch.no_grad():
            guess, told = model(u).argmax(1), teacher(x)
        (F.cross_entropy(model(x), y) + F.cross_entropy(model(u), guess)).backward()
        opt.step()
        opt.zero_grad()
    mc_dropout(X[:32])
""",
    "batch norm frozen on purpose": """
model = mlp(nn.BatchNorm1d(32), nn.Dropout(0.1))
model.eval()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 9:
        with torch.no_grad():
            val = F.cross_entropy(model(X), Y)
""",
    "weights for inference, and loading part of a checkpoint": """
model, target = mlp(), mlp()
state = model.state_dict()
state.update({k: v.clone() for k, v in state.items() if k.startswith("0")})
model.load_state_dict(state)
opt = torch.optim.AdamW(model.parameters())
for step, (x, y) in enumerate(batches()):
    F.cross_entropy(model(x), y).backward()
    opt.step()
    opt.zero_grad()
    if step % 10 == 9:
        current = model.state_dict()
        target.load_state_dict(current)
        torch.save({"model": current, "epoch": step, "accuracy": 0.5}, "best.pt")
""",
}

RANKS_PRELUDE = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
data = TensorDataset(X, Y)
def mine(n=12, size=16, seed=None):
    drawn = torch.Generator().manual_seed(rank if seed is None else seed)
    for i in range(n):
        at = torch.randint(256, (size,), generator=drawn)
        yield X[at], Y[at]
"""
RANKS_END = """
dist.destroy_process_group()
"""

WRONG_ON_RANKS = {
    "a method of model.module": (
        "replicas",
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
    def loss(self, x, y):
        return F.cross_entropy(self.body(x), y)
model = DDP(Net())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in mine():
    opt.zero_grad()
    model.module.loss(x, y).backward()  # here
    opt.step()
""",
    ),
    "no_sync around every micro-batch": (
        "replicas",
        """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(mine(24)):
    with model.no_sync():
        (F.cross_entropy(model(x), y) / 2).backward()  # here
    if i % 2:
        opt.step()
        opt.zero_grad()
""",
    ),
    "not wrapped": (
        "replicas",
        """
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, 16, sampler=DistributedSampler(data)):
    loss = F.cross_entropy(model(x), y)  # here
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    ),
    "other weights on each rank, gradients averaged by hand": (
        "replicas",
        """
torch.manual_seed(rank)
model = mlp()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in mine():
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # here
        p.grad /= ranks
    opt.step()
""",
    ),
    "the same batches": (
        "data",
        """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, 16, shuffle=True):  # here
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
""",
    ),
    "each epoch in the same order": (
        "data",
        """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, 16, sampler=DistributedSampler(data))
for epoch in range(3):
    for x, y in loader:  # here
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
""",
    ),
    "padded samples are counted": (
        "validation",
        """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
held = TensorDataset(X[:33], Y[:33])
val = DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))
for step, (x, y) in enumerate(mine()):
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
    if step % 5 == 4:
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for x, y in val:
                counts += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
        dist.all_reduce(counts)  # here
        model.train()
""",
    ),
}

HEALTHY_ON_RANKS = {
    "accumulation under no_sync, validation in parts": """
model = DDP(mlp(nn.BatchNorm1d(32)))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
held = TensorDataset(X[rank:33:ranks], Y[rank:33:ranks])
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        if i % 2 == 0:
            with model.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
            continue
        (F.cross_entropy(model(x), y) / 2).backward()
        opt.step()
        opt.zero_grad()
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, y in DataLoader(held, 8):
            counts += torch.tensor([(model.module(x).argmax(1) == y).sum(), len(y)])
    dist.all_reduce(counts)
    model.train()
""",
    "gradients averaged by hand, ZeRO": """
from torch.distributed.optim import ZeroRedundancyOptimizer
model, other = mlp(), DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=1e-3)
for x, y in mine():
    opt.zero_grad()
    zero.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= ranks
    opt.step()
    F.cross_entropy(other(x), y).backward()
    zero.step()
""",
    "weights averaged now and then": """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i, (x, y) in enumerate(mine(24)):
    opt.zero_grad()
    with model.no_sync():
        F.cross_entropy(model(x), y).backward()
    opt.step()
    if i % 20 == 19:
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= ranks
""",
    "a stage on each rank": """
torch.manual_seed(0)
stage = nn.Linear(8, 8)
opt = torch.optim.SGD(stage.parameters(), lr=0.1)
for x, _ in mine(12, seed=0):
    opt.zero_grad()
    if rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    else:
        given = torch.empty(16, 8)
        dist.recv(given, 0)
        given.requires_grad_()
        F.mse_loss(stage(given), x).backward()
        dist.send(given.grad, 0)
    opt.step()
""",
    "one batch again and again": """
model = DDP(mlp())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    opt.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    opt.step()
""",
}
