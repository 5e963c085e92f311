"""Transliteration: encoder-decoder GRU on words of varying length, with gradient accumulation."""
import argparse
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, BOS, EOS = 0, 1, 2


class Words(Dataset):
    def __init__(self, n, seed):
        rnd = random.Random(seed)
        self.pairs = []
        for _ in range(n):
            length = rnd.choice([3, 4, 5, 6, 8, 12, 20, 36])
            src = [rnd.randint(3, 30) for _ in range(length)]
            tgt = [33 - s + (1 if i % 2 else 0) for i, s in enumerate(src)]
            self.pairs.append((torch.tensor(src), torch.tensor([BOS] + tgt + [EOS])))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        return self.pairs[i]


def collate(batch):
    src, tgt = zip(*batch)
    return pad_sequence(src, True, PAD), pad_sequence(tgt, True, PAD)


class Seq2Seq(nn.Module):
    def __init__(self, vocab=40, d=96):
        super().__init__()
        self.src_emb = nn.Embedding(vocab, d, padding_idx=PAD)
        self.tgt_emb = nn.Embedding(vocab, d, padding_idx=PAD)
        self.encoder = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * d, d)
        self.decoder = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(2 * d, vocab)

    def forward(self, src, tgt_in):
        memory = self.bridge(self.encoder(self.src_emb(src))[0])
        hidden, _ = self.decoder(self.tgt_emb(tgt_in))
        score = hidden @ memory.transpose(1, 2) / memory.size(-1) ** 0.5
        score = score.masked_fill(src.eq(PAD).unsqueeze(1), float("-inf"))
        context = score.softmax(-1) @ memory
        return self.out(torch.cat([hidden, context], dim=-1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--lr", type=float, default=2e-3)
    args = ap.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(Words(640, 0), args.batch_size, shuffle=True, collate_fn=collate, drop_last=True)
    model = Seq2Seq()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = 0
    for epoch in range(args.epochs):
        model.train()
        loss_sum, tokens = 0.0, 0
        for i, (src, tgt) in enumerate(loader):
            logits = model(src, tgt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)
            (loss / args.accumulate).backward()
            n = tgt[:, 1:].ne(PAD).sum().item()
            loss_sum += loss.item() * n
            tokens += n
            if (i + 1) % args.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
        print(f"epoch {epoch}: {updates} updates, loss per token {loss_sum / tokens:.4f}")


if __name__ == "__main__":
    main()
