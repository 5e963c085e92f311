"""Small GPT with one matrix for input and output, trained under bfloat16 autocast."""
import contextlib
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    def __init__(self, n, block, seed):
        g = torch.Generator().manual_seed(seed)
        self.data = torch.randint(1, 5, (n,), generator=g).cumsum(0) % 160
        self.block = block

    def __len__(self):
        return (len(self.data) - 1) // self.block

    def __getitem__(self, i):
        s = i * self.block
        return self.data[s:s + self.block], self.data[s + 1:s + self.block + 1]


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(3 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.o(y)
        return x + self.ff(self.n2(x))


class TiedGPT(nn.Module):
    def __init__(self, vocab=160, d=80, block=48, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(block, d)
        self.layers = nn.ModuleList(Layer(d, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[:idx.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@contextlib.contextmanager
def evaluating(model):
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(before)


def val_loss(model, loader):
    total, n = 0.0, 0
    with evaluating(model):
        for x, y in loader:
            total += F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
            n += y.numel()
    return total / n


def main():
    torch.manual_seed(35)
    train = DataLoader(Text(30000, 48, 1), batch_size=16, shuffle=True)
    val = DataLoader(Text(4000, 48, 2), batch_size=32)
    model = TiedGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    model.train()
    for epoch in range(2):
        for step, (x, y) in enumerate(train):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} val {val_loss(model, val):.4f}")
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "weights_for_inference.pt"))


if __name__ == "__main__":
    main()
