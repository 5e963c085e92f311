"""Secondary-structure style tagging with a small bidirectional transformer."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self, n, length=48, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 20, (n, length), generator=g)
        hydro = torch.linspace(-1, 1, 20)[self.tokens]
        padded = nn.functional.pad(hydro, (3, 3), mode="constant")
        window = padded.unfold(1, 7, 1).mean(-1)
        self.tags = torch.bucketize(window, torch.tensor([-0.15, 0.15]))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], self.tags[i]


class Tagger(nn.Module):
    def __init__(self, d=64, length=48):
        super().__init__()
        self.embed = nn.Embedding(20, d)
        self.pos = nn.Embedding(length, d)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, 3)

    def forward(self, tokens):
        pos = torch.arange(tokens.size(1), device=tokens.device)
        return self.out(self.encoder(self.embed(tokens) + self.pos(pos)))


class Runner:
    def __init__(self, train_set, val_set, batch_size=64, lr=1e-3):
        self.train_loader = DataLoader(train_set, batch_size=batch_size, shuffle=True, drop_last=True)
        self.val_loader = DataLoader(val_set, batch_size=batch_size)
        self.model = Tagger()
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.best_loss = float("inf")

    def loss(self, tokens, tags):
        logits = self.model(tokens)
        return self.criterion(logits.transpose(1, 2), tags), logits

    def train_epoch(self):
        self.model.train()
        total = 0.0
        for tokens, tags in self.train_loader:
            self.optimizer.zero_grad()
            loss, _ = self.loss(tokens, tags)
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        return total / len(self.train_loader)

    @torch.no_grad()
    def val_epoch(self):
        self.model.eval()
        total_loss, total_acc = 0.0, 0.0
        for tokens, tags in self.val_loader:
            loss, logits = self.loss(tokens, tags)
            total_loss += loss.item()
            total_acc += (logits.argmax(-1) == tags).float().mean().item()
        return total_loss / len(self.val_loader), total_acc / len(self.val_loader)

    def fit(self, epochs):
        for epoch in range(epochs):
            train_loss = self.train_epoch()
            val_loss, val_acc = self.val_epoch()
            flag = ""
            if val_loss < self.best_loss:
                self.best_loss, flag = val_loss, " *"
            print(f"{epoch:02d} train {train_loss:.4f} val {val_loss:.4f} acc {val_acc:.4f}{flag}")


if __name__ == "__main__":
    torch.manual_seed(77)
    Runner(Sequences(1600), Sequences(260, seed=1)).fit(epochs=3)
