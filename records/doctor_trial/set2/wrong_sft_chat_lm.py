"""Supervised fine-tuning of a tiny decoder on prompt/answer pairs (prompt tokens are masked)."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

IGNORE = -100
PAD = 0


@dataclass
class Config:
    vocab: int = 256
    dim: int = 48
    heads: int = 4
    layers: int = 2
    max_len: int = 72
    micro_batch: int = 4
    grad_accum: int = 4
    lr: float = 1e-3
    epochs: int = 2
    samples: int = 720
    seed: int = 11


class ChatPairs(Dataset):
    """Answers are between one word and a whole page long, as in any instruction data set."""

    def __init__(self, cfg):
        g = torch.Generator().manual_seed(cfg.seed)
        self.items = []
        for _ in range(cfg.samples):
            n_prompt = int(torch.randint(4, 16, (1,), generator=g))
            short = torch.rand(1, generator=g).item() < 0.6
            n_answer = int(torch.randint(1, 5, (1,), generator=g)) if short else int(
                torch.randint(30, 56, (1,), generator=g))
            prompt = torch.randint(3, cfg.vocab, (n_prompt,), generator=g)
            start = int(prompt[-1])
            answer = (start + torch.arange(1, n_answer + 1) * 3) % (cfg.vocab - 3) + 3
            self.items.append((prompt, answer))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        prompt, answer = self.items[i]
        ids = torch.cat([prompt, answer])
        labels = ids.clone()
        labels[: len(prompt)] = IGNORE
        return ids, labels


def collate(batch):
    ids = nn.utils.rnn.pad_sequence([b[0] for b in batch], batch_first=True, padding_value=PAD)
    labels = nn.utils.rnn.pad_sequence([b[1] for b in batch], batch_first=True, padding_value=IGNORE)
    return {"input_ids": ids, "labels": labels}


class Decoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.wte = nn.Embedding(cfg.vocab, cfg.dim)
        self.wpe = nn.Embedding(cfg.max_len, cfg.dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(cfg.dim, cfg.heads, 4 * cfg.dim, 0.0, "gelu",
                                       batch_first=True, norm_first=True)
            for _ in range(cfg.layers)
        )
        self.ln = nn.LayerNorm(cfg.dim)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, input_ids, labels):
        T = input_ids.size(1)
        h = self.wte(input_ids) + self.wpe(torch.arange(T))
        mask = torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
        for b in self.blocks:
            h = b(h, src_mask=mask, is_causal=True)
        logits = self.ln(h) @ self.wte.weight.t()
        return F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.size(-1)),
            labels[:, 1:].reshape(-1),
            ignore_index=IGNORE,
        )


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.model = Decoder(cfg)
        self.loader = DataLoader(ChatPairs(cfg), batch_size=cfg.micro_batch, shuffle=True,
                                 drop_last=True, collate_fn=collate)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
        updates = cfg.epochs * (len(self.loader) // cfg.grad_accum)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, updates)

    def fit(self):
        step = 0
        self.model.train()
        for epoch in range(self.cfg.epochs):
            acc = 0.0
            for i, batch in enumerate(self.loader):
                loss = self.model(**batch) / self.cfg.grad_accum
                loss.backward()
                acc += loss.item()
                if (i + 1) % self.cfg.grad_accum == 0:
                    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.opt.step()
                    self.sched.step()
                    self.opt.zero_grad(set_to_none=True)
                    step += 1
                    if step % 10 == 0:
                        print(f"step {step} loss {acc:.4f} lr {self.sched.get_last_lr()[0]:.2e}")
                    acc = 0.0


if __name__ == "__main__":
    Trainer(Config()).fit()
