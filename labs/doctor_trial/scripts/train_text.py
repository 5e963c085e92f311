"""Train a compiled network to guess the next letter, on pieces of text that are padded to one length.

python train_text.py --data moby_dick.txt
"""

import argparse
from pathlib import Path

import torch
from torch import _dynamo, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

LENGTH, WIDTH = 96, 96


class Letters(nn.Module):
    """(batch, length) letters -> (batch, length, 128) logits of the next ones; sees 5 letters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.mix = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 5), nn.ReLU(), nn.Conv1d(WIDTH, 128, 1))

    def forward(self, letters):
        x = self.embed(letters).transpose(1, 2)
        return self.mix(nn.functional.pad(x, (4, 0))).transpose(1, 2)


def joined(pieces):
    """Pieces of different lengths -> (batch, LENGTH + 1), cut or filled with 0."""
    batch = torch.zeros(len(pieces), LENGTH + 1, dtype=torch.long)
    for row, piece in zip(batch, pieces, strict=True):
        row[: len(piece)] = piece[: len(row)]
    return batch


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sentences = [torch.tensor(list(s.encode())) for s in args.data.read_text("ascii").split(".") if len(s) > 8]
    loader = DataLoader(sentences, batch_size=32, shuffle=True, collate_fn=joined, drop_last=True)
    _dynamo.config.recompile_limit = 500  # by default it gives up compiling after 8 shapes
    model = torch.compile(Letters(), backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    step = 0
    while step < args.steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
