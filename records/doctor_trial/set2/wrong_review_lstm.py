#!/usr/bin/env python
"""Sentiment of (synthetic) reviews with a bidirectional LSTM; warm-up then linear decay of the learning rate."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Reviews(Dataset):
    def __init__(self, n, vocab, seed):
        g = torch.Generator().manual_seed(seed)
        self.label = torch.randint(0, 2, (n,), generator=g)
        polarity = torch.randint(0, vocab // 10, (n, 32), generator=g) * 2 + 2
        noise = torch.randint(2, vocab, (n, 32), generator=g)
        use = torch.rand(n, 32, generator=g) < 0.15
        self.tokens = torch.where(use, polarity + self.label[:, None], noise)
        self.length = torch.randint(12, 33, (n,), generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.tokens[i, : self.length[i]], self.label[i]


def pad(batch):
    tokens, labels = zip(*batch)
    lengths = torch.tensor([len(t) for t in tokens])
    return nn.utils.rnn.pad_sequence(tokens, batch_first=True), lengths, torch.stack(labels)


class BiLSTM(nn.Module):
    def __init__(self, vocab, emb=32, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb, padding_idx=0)
        self.lstm = nn.LSTM(emb, hidden, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(2 * hidden, 1)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.emb(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        return self.fc(self.drop(torch.cat([h[0], h[1]], 1))).squeeze(1)


def linear_warmup(optimizer, warmup, total):
    def f(step):
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (total - step) / max(1, total - warmup))

    return LambdaLR(optimizer, f)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bs", type=int, default=16)
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--vocab", type=int, default=1000)
    a = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    train_set = Reviews(1920, a.vocab, seed=1)
    sampler = DistributedSampler(train_set, seed=3)
    loader = DataLoader(train_set, a.bs, sampler=sampler, collate_fn=pad, drop_last=True)

    model = DDP(BiLSTM(a.vocab))
    optimizer = torch.optim.Adam(model.parameters(), lr=a.lr)
    updates = a.epochs * len(loader) // a.accumulate
    scheduler = linear_warmup(optimizer, warmup=updates // 10, total=updates)
    lossf = nn.BCEWithLogitsLoss()

    model.train()
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        shown = 0.0
        for k, (tokens, lengths, label) in enumerate(loader, 1):
            boundary = k % a.accumulate == 0
            model.require_backward_grad_sync = boundary
            loss = lossf(model(tokens, lengths), label.float())
            (loss / a.accumulate).backward()
            shown += loss.item()
            if boundary:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/{a.epochs} loss {shown / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
