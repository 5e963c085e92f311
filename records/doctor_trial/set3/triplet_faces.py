"""Metric learning with hard triplets inside each batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler


class Faces(Dataset):
    def __init__(self, people=60, per_person=16, dim=256, seed=0):
        g = torch.Generator().manual_seed(seed)
        centre = torch.randn(people, dim, generator=g)
        self.person = torch.arange(people).repeat_interleave(per_person)
        self.x = centre[self.person] + 1.5 * torch.randn(len(self.person), dim, generator=g)

    def __len__(self):
        return len(self.person)

    def __getitem__(self, i):
        return self.x[i], self.person[i]


class PKSampler(Sampler):
    """P people, K pictures of each."""

    def __init__(self, labels, p, k, batches, seed):
        self.groups = [torch.nonzero(labels == c).flatten() for c in labels.unique()]
        self.p, self.k, self.batches = p, k, batches
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            batch = []
            for c in torch.randperm(len(self.groups), generator=self.gen)[:self.p].tolist():
                group = self.groups[c]
                batch += group[torch.randperm(len(group), generator=self.gen)[:self.k]].tolist()
            yield batch


class Embedder(nn.Module):
    def __init__(self, dim=256, out=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, out))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def batch_hard(emb, labels, margin=0.3):
    losses = []
    for i in range(len(emb)):
        hardest_pos = emb.new_zeros(())
        hardest_neg = emb.new_full((), 10.0)
        for j in range(len(emb)):
            if i == j:
                continue
            d = (emb[i] - emb[j]).pow(2).sum()
            if labels[i] == labels[j]:
                hardest_pos = torch.maximum(hardest_pos, d)
            else:
                hardest_neg = torch.minimum(hardest_neg, d)
        losses.append(F.relu(hardest_pos - hardest_neg + margin))
    return torch.stack(losses).mean()


def main():
    torch.manual_seed(12)
    faces = Faces()
    loader = DataLoader(faces, batch_sampler=PKSampler(faces.person, p=5, k=4, batches=40, seed=12))
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for epoch in range(2):
        model.train()
        total = torch.zeros(())
        for x, person in loader:
            loss = batch_hard(model(x), person)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        print(f"epoch {epoch} triplet loss {total.item() / len(loader):.4f}")


if __name__ == "__main__":
    main()
