"""Span tagging with ragged sentences; gradients are accumulated over a window of small batches."""
import itertools
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

IGNORE = -100


class Sentences(Dataset):
    def __init__(self, n, seed):
        rnd = random.Random(seed)
        self.items = []
        for _ in range(n):
            words = [rnd.randrange(1, 300) for _ in range(rnd.choice([4, 7, 12, 25, 50]))]
            tags = [min(2, (w + (words[i - 1] if i else 0)) % 7) for i, w in enumerate(words)]
            self.items.append((torch.tensor(words), torch.tensor(tags)))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    words, tags = zip(*items)
    lengths = torch.tensor([len(w) for w in words])
    return pad_sequence(words, True), pad_sequence(tags, True, IGNORE), lengths


class Tagger(nn.Module):
    def __init__(self, d=80):
        super().__init__()
        self.emb = nn.Embedding(300, d, padding_idx=0)
        self.rnn = nn.LSTM(d, d, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * d, 3)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.emb(words), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=words.size(1))
        return self.out(hidden)


def windows(loader, k):
    it = iter(loader)
    while chunk := list(itertools.islice(it, k)):
        yield chunk


def main():
    torch.manual_seed(29)
    loader = DataLoader(Sentences(700, 29), batch_size=8, shuffle=True, collate_fn=collate)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(3):
        model.train()
        loss_sum, count = 0.0, 0
        for chunk in windows(loader, 4):
            tokens = sum(int((tags != IGNORE).sum()) for _, tags, _ in chunk)
            optimizer.zero_grad()
            for words, tags, lengths in chunk:
                logits = model(words, lengths)
                loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=IGNORE, reduction="sum")
                (loss / tokens).backward()
                loss_sum += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            count += tokens
        print(f"epoch {epoch} loss per token {loss_sum / count:.4f}")


if __name__ == "__main__":
    main()
