"""Fine-tune a small encoder on intent classification in half the memory."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

VOCAB, MAXLEN, CLASSES = 800, 24, 6


class Encoder(nn.Module):
    def __init__(self, d=64, heads=4, layers=1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d, padding_idx=0)
        self.position = nn.Parameter(torch.randn(1, MAXLEN, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(d, CLASSES)

    def forward(self, ids):
        pad = ids.eq(0)
        h = self.encoder(self.embed(ids) + self.position, src_key_padding_mask=pad)
        keep = (~pad).unsqueeze(-1).to(h.dtype)
        return self.classifier((h * keep).sum(1) / keep.sum(1))


def make_intents(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    ids = torch.randint(1, VOCAB, (n, MAXLEN), generator=g)
    topical = torch.rand(n, MAXLEN, generator=g) < 0.25
    topic_words = 1 + y[:, None] * 20 + torch.randint(0, 20, (n, MAXLEN), generator=g)
    ids = torch.where(topical, topic_words, ids)
    length = torch.randint(8, MAXLEN + 1, (n, 1), generator=g)
    ids[torch.arange(MAXLEN)[None] >= length] = 0
    return TensorDataset(ids, y)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = total = 0
    for ids, y in loader:
        correct += (model(ids).float().argmax(-1) == y).sum().item()
        total += y.numel()
    return correct / total


def main():
    torch.manual_seed(11)
    train_loader = DataLoader(make_intents(768, 0), batch_size=32, shuffle=True)
    val_loader = DataLoader(make_intents(192, 1), batch_size=64)

    model = Encoder().to(torch.bfloat16)
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-5)

    for epoch in range(3):
        model.train()
        for step, (ids, y) in enumerate(train_loader):
            loss = F.cross_entropy(model(ids).float(), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 16 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
        print(f"epoch {epoch} val acc {evaluate(model, val_loader):.3f}")


if __name__ == "__main__":
    main()
