"""Fraud scores from transactions kept in a SQLite table."""
import argparse
import json
import os
import random
import sqlite3
import tempfile

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def create_database(path, rows, features, seed):
    rnd = random.Random(seed)
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE tx (ref TEXT, features TEXT, fraud INTEGER)")
        for i in range(rows):
            v = [rnd.gauss(0, 1) for _ in range(features)]
            fraud = int(v[0] * v[1] + v[2] + rnd.gauss(0, 0.5) > 1.5)
            db.execute("INSERT INTO tx VALUES (?, ?, ?)", (f"tx{i:06d}", json.dumps(v), fraud))
        db.execute("CREATE INDEX by_ref ON tx (ref)")


class Transactions(Dataset):
    def __init__(self, path):
        self.path = path
        with sqlite3.connect(path) as db:
            self.refs = [r for (r,) in db.execute("SELECT ref FROM tx ORDER BY ref")]

    def __len__(self):
        return len(self.refs)

    def __getitem__(self, i):
        db = sqlite3.connect(self.path)
        query = "SELECT features, fraud FROM tx WHERE ref = ?"
        features, fraud = db.execute(query, (self.refs[i],)).fetchone()
        db.close()
        return torch.tensor(json.loads(features)), torch.tensor(float(fraud))


class FraudNet(nn.Module):
    def __init__(self, features, hidden=128):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                                    nn.Linear(hidden, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=9600)
    parser.add_argument("--features", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(4)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tx.db")
        create_database(path, args.rows, args.features, seed=4)
        loader = DataLoader(Transactions(path), args.batch_size, shuffle=True, drop_last=True)
        model = FraudNet(args.features)
        criterion = nn.BCEWithLogitsLoss()
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        for epoch in range(args.epochs):
            model.train()
            for step, (x, y) in enumerate(loader):
                loss = criterion(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % 10 == 0:
                    print(f"epoch {epoch} step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
