"""Fine-tune a small transformer encoder for intent classification.

A "pretrained" encoder file is produced first (normally it would come from the model hub).
"""
import os
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

VOCAB, SEQ, DIM, HEADS, LAYERS, CLASSES = 800, 24, 96, 4, 3, 12
BATCH, EPOCHS, LR = 32, 4, 3e-4

torch.manual_seed(1234)


class IntentClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.pos = nn.Parameter(torch.zeros(1, SEQ, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 4 * DIM, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, ids):
        pad = ids == 0
        h = self.encoder(self.tok(ids) + self.pos, src_key_padding_mask=pad)
        h = h.masked_fill(pad.unsqueeze(-1), 0).sum(1) / (~pad).sum(1, keepdim=True)
        return self.head(h)


def make_pretrained(path):
    donor = IntentClassifier()
    for p in donor.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, std=0.05)
    torch.save(donor.state_dict(), path)


def make_data(n=1200):
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x = torch.randint(60, VOCAB, (n, SEQ), generator=g)
    for j in range(0, SEQ, 4):  # each intent has its own few keywords
        x[:, j] = 1 + y * 4 + torch.randint(0, 4, (n,), generator=g)
    lengths = torch.randint(8, SEQ + 1, (n,), generator=g)
    x[torch.arange(SEQ)[None] >= lengths[:, None]] = 0
    return TensorDataset(x, y)


def build_optimizer(model):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (no_decay if p.dim() < 2 or "norm" in name else decay).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=LR
    )


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return hits / len(loader.dataset)


with tempfile.TemporaryDirectory() as tmp:
    ckpt = os.path.join(tmp, "encoder.pt")
    make_pretrained(ckpt)

    model = IntentClassifier()
    optimizer = build_optimizer(model)
    state = torch.load(ckpt, map_location="cpu", mmap=True, weights_only=True)
    model.load_state_dict(state, strict=True, assign=True)

    train_set, val_set = random_split(make_data(), [1000, 200])
    train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=100)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    total = EPOCHS * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=total)

    for epoch in range(EPOCHS):
        model.train()
        running = 0.0
        for ids, y in train_loader:
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(ids), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            running += loss.item()
        print(f"epoch {epoch}: loss {running / len(train_loader):.4f} val acc {accuracy(model, val_loader):.3f}")
