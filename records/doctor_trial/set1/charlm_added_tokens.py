# Fault: (2) steps without effect: the optimizer holds replaced parameters
# Line: 81
# Ideal first line: emb.weight, out.weight and out.bias get gradients but never change: the optimizer was made (line 81) before resize_vocab replaced them and holds the old tensors.
"""Character model; special tokens are added to the vocabulary before training."""
import argparse
import math
import time

import torch
import torch.nn as nn


class CharLM(nn.Module):
    def __init__(self, vocab, dim=96, hidden=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.proj = nn.Linear(hidden, dim)
        self.out = nn.Linear(dim, vocab)

    def resize_vocab(self, vocab):
        """Grow the embedding and the output layer, keep the rows that exist."""
        emb, out = nn.Embedding(vocab, self.emb.embedding_dim), nn.Linear(self.out.in_features, vocab)
        with torch.no_grad():
            n = self.emb.num_embeddings
            emb.weight[:n] = self.emb.weight
            out.weight[:n] = self.out.weight
            out.bias[:n] = self.out.bias
        self.emb, self.out = emb, out

    def forward(self, idx):
        h, _ = self.rnn(self.emb(idx))
        return self.out(self.proj(h))


def synthetic_text(n, vocab, seed):
    """A Markov chain with few successors for each character."""
    g = torch.Generator().manual_seed(0)
    table = torch.randint(vocab, (vocab, vocab, 3), generator=g)
    g.manual_seed(seed)
    pick = torch.randint(3, (n,), generator=g).tolist()
    out, a, b = [], 0, 1
    table = table.tolist()
    for k in pick:
        a, b = b, table[a][b][k]
        out.append(b)
    return torch.tensor(out)


class Batches:
    def __init__(self, data, batch, block, bos):
        self.data, self.batch, self.block, self.bos = data, batch, block, bos

    def get(self):
        at = torch.randint(len(self.data) - self.block - 1, (self.batch,))
        x = torch.stack([self.data[i : i + self.block] for i in at])
        y = torch.stack([self.data[i + 1 : i + 1 + self.block] for i in at])
        x = torch.cat([torch.full((self.batch, 1), self.bos), x], 1)
        return x, torch.cat([x[:, 1:2], y], 1)


@torch.no_grad()
def evaluate(model, batches, criterion, iters=8):
    model.eval()
    losses = [criterion(model(x).flatten(0, 1), y.flatten()).item() for x, y in (batches.get() for _ in range(iters))]
    model.train()
    return sum(losses) / len(losses)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=300)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--block", type=int, default=32)
    p.add_argument("--vocab", type=int, default=24)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    torch.manual_seed(a.seed)

    model = CharLM(a.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.resize_vocab(a.vocab + 2)  # <bos>, <pad>
    criterion = nn.CrossEntropyLoss()
    train = Batches(synthetic_text(40_000, a.vocab, 1), a.batch, a.block, bos=a.vocab)
    val = Batches(synthetic_text(5_000, a.vocab, 2), a.batch, a.block, bos=a.vocab)

    t0 = time.time()
    for it in range(1, a.iters + 1):
        x, y = train.get()
        loss = criterion(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if it % 50 == 0 or it == a.iters:
            v = evaluate(model, val, criterion)
            print(f"iter {it:4d} train {loss.item():.3f} val {v:.3f} ppl {math.exp(v):.1f} ({time.time() - t0:.1f}s)")


if __name__ == "__main__":
    main()
