# Fault: (7) validation in the wrong mode: attention dropout stays on in eval()
# Line: 26
# Ideal first line: Validation isn't deterministic: scaled_dot_product_attention (line 26) applies dropout 0.2 in eval mode too; pass 0.0 unless self.training.
"""A small decoder on modular sums, with fused attention."""
import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
BASE = 10


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (u.view(b, t, self.heads, c // self.heads).transpose(1, 2) for u in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, dim=64, heads=4, layers=2, length=16, dropout=0.2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(BASE, dim), nn.Parameter(0.02 * torch.randn(length, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, BASE)

    def forward(self, idx):
        return self.head(self.ln(self.blocks(self.tok(idx) + self.pos[: idx.shape[1]])))


def sequences(n, length=17):
    """Each digit is the one before it plus the one five back, modulo 10; one in ten is random."""
    s = torch.randint(BASE, (n, length))
    for t in range(5, length):
        s[:, t] = (s[:, t - 1] + s[:, t - 5]) % BASE if t % 2 else s[:, t - 5]
    return s[:, :-1], s[:, 1:]


@torch.no_grad()
def estimate_loss(model, x, y, batch=256):
    model.eval()
    losses = [F.cross_entropy(model(a).flatten(0, 1), b.flatten()) for a, b in zip(x.split(batch), y.split(batch))]
    model.train()
    return torch.stack(losses).mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    args = p.parse_args()
    torch.manual_seed(42)
    x_val, y_val = sequences(1024)
    model = Decoder()
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    for step in range(1, args.steps + 1):
        x, y = sequences(args.batch)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 50 == 0:
            logging.info("step %d train %.3f val %.3f", step, loss.item(), estimate_loss(model, x_val, y_val))


if __name__ == "__main__":
    main()
