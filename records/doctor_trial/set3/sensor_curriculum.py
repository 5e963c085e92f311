"""Two-stage training of a sensor classifier on 2 processes (torchrun)."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SensorWindows(Dataset):
    def __init__(self, n, noise, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 5, (n,), generator=g)
        t = torch.linspace(0, 1, 128)
        freq = (self.y + 2).float()[:, None, None]
        phase = torch.rand(n, 6, 1, generator=g) * 6.28
        self.x = torch.sin(6.28 * freq * t + phase) + noise * torch.randn(n, 6, 128, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"signal": self.x[i], "label": self.y[i]}


class SensorNet(nn.Module):
    def __init__(self, channels=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(6, channels, 7, padding=3), nn.GELU(),
            nn.Conv1d(channels, channels, 7, padding=3), nn.GELU(), nn.AvgPool1d(4),
            nn.Conv1d(channels, channels, 5, padding=2), nn.GELU())
        self.norm = nn.LayerNorm(channels)
        self.classifier = nn.Linear(channels, 5)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.05)

    def forward(self, signal):
        return self.classifier(self.norm(self.body(signal).mean(-1)))

    def compute_loss(self, batch):
        return self.criterion(self(batch["signal"]), batch["label"])


class Trainer:
    def __init__(self, lr=1e-3, batch_size=32):
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.batch_size = batch_size
        self.model = DistributedDataParallel(SensorNet())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def _get_model(self):
        if isinstance(self.model, DistributedDataParallel):
            return self.model.module
        return self.model

    def train_stage(self, name, dataset, epochs):
        sampler = DistributedSampler(dataset, shuffle=True, seed=3)
        loader = DataLoader(dataset, batch_size=self.batch_size, sampler=sampler, drop_last=True)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            self.model.train()
            running, count = torch.zeros(()), 0
            for batch in loader:
                self.optimizer.zero_grad()
                loss = self._get_model().compute_loss(batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                running += loss.detach()
                count += 1
            mean = running / count
            dist.all_reduce(mean)
            if self.rank == 0:
                print(f"[{name}] epoch {epoch} loss {mean.item() / self.world_size:.4f}", flush=True)


def main():
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    trainer = Trainer()
    trainer.train_stage("easy", SensorWindows(1280, 0.2, seed=1), epochs=2)
    trainer.train_stage("hard", SensorWindows(1280, 0.8, seed=2), epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
