# Fault: (3) shapes broadcast in a loss: TD target of shape (B, B)
# Line: 78
# Ideal first line: Shapes broadcast on the way to the loss: r (256,) with q_next (256, 1) gives a target of (256, 256) (line 78); drop keepdim.
"""Q-learning from a fixed replay buffer (offline DQN)."""
import argparse
import copy

import torch
from torch import nn


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=500)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--gamma", type=float, default=0.9)
    p.add_argument("--sync-every", type=int, default=25)
    p.add_argument("--lr", type=float, default=1e-3)
    return p.parse_args()


class PointWorld:
    """A point in the plane; four moves; a reward of 1 near the goal."""

    MOVES = torch.tensor([[0.2, 0.0], [-0.2, 0.0], [0.0, 0.2], [0.0, -0.2]])
    GOAL = torch.tensor([0.5, -0.5])

    @classmethod
    def step(cls, s, a):
        s2 = (s + cls.MOVES[a]).clamp(-1, 1)
        reward = ((s2 - cls.GOAL).norm(dim=1) < 0.25).float()
        return s2, reward, (torch.rand(len(s)) < 0.02).float()  # episodes end at random


class Replay:
    def __init__(self, n, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.s = torch.rand(n, 2, generator=g) * 2 - 1
        self.a = torch.randint(4, (n,), generator=g)
        self.s2, self.r, self.done = PointWorld.step(self.s, self.a)

    def sample(self, k):
        i = torch.randint(len(self.a), (k,))
        return self.s[i], self.a[i], self.r[i], self.s2[i], self.done[i]


class QNet(nn.Module):
    def __init__(self, hidden=256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))

    def forward(self, s):
        return self.net(s)


@torch.no_grad()
def play(q, n=256, horizon=15):
    q.eval()
    s, total = torch.rand(n, 2, generator=torch.Generator().manual_seed(5)) * 2 - 1, 0.0
    for _ in range(horizon):
        s, r, _ = PointWorld.step(s, q(s).argmax(1))
        total += r.mean().item()
    q.train()
    return total / horizon


def main():
    args = parse()
    torch.manual_seed(0)
    q = QNet()
    target_q = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=args.lr)
    buffer = Replay(20_000)
    for it in range(1, args.updates + 1):
        s, a, r, s2, done = buffer.sample(args.batch)
        with torch.no_grad():
            q_next = target_q(s2).max(dim=1, keepdim=True).values
            target = r + args.gamma * (1 - done) * q_next
        q_sa = q(s).gather(1, a.unsqueeze(1)).squeeze(1)
        loss = (q_sa - target).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(q.parameters(), 10.0)
        opt.step()
        if it % args.sync_every == 0:
            target_q.load_state_dict(q.state_dict())
        if it % 100 == 0:
            print(f"update {it} td loss {loss.item():.4f} reward per move {play(q):.3f}")


if __name__ == "__main__":
    main()
