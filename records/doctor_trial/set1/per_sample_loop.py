# Fault: slow: small batches, the model is called once per sample
# Line: 59
# Ideal first line: The model is called 16 times per step with a batch of 1 (line 59); stack the sequences and call it once.
"""Sequence labelling where the training step goes through its batch one sequence at a time."""
import argparse
import random

import torch
from torch import nn

WORDS, TAGS, DIM = 200, 7, 64


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(WORDS, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * DIM, TAGS)

    def forward(self, tokens):
        h, _ = self.gru(self.emb(tokens))
        return self.out(h)


def corpus(n, seed, length=12):
    """The tag of a word hangs on the word and on its left neighbour."""
    g = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (n, length), generator=g)
    left = torch.cat([torch.zeros(n, 1, dtype=torch.long), words[:, :-1]], 1)
    tags = (words % TAGS + (left > WORDS // 2).long()) % TAGS
    return list(zip(words, tags))


def accuracy(model, data):
    model.eval()
    words, tags = (torch.stack(t) for t in zip(*data))
    with torch.no_grad():
        acc = (model(words).argmax(-1) == tags).float().mean().item()
    model.train()
    return acc


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--batch-size", type=int, default=16)
    args = ap.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    train, test = corpus(4000, 0), corpus(400, 1)
    model, criterion = Tagger(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        batch = random.sample(train, args.batch_size)
        optimizer.zero_grad()
        loss = 0.0
        for words, tags in batch:
            logits = model(words.unsqueeze(0)).squeeze(0)
            loss = loss + criterion(logits, tags) / len(batch)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f} test acc {accuracy(model, test):.3f}", flush=True)


if __name__ == "__main__":
    main()
