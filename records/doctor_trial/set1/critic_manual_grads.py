# Fault: (1) ranks that train different models: autograd.grad does not fire DDP's hooks
# Line: 54
# Ideal first line: The ranks' parameters differ after a step: gradients come from torch.autograd.grad (line 54), which DDP doesn't exchange; call loss.backward().
"""Train a value network on logged returns with DDP.

    torchrun --nproc-per-node 2 critic_manual_grads.py [--max-steps 200]
"""
import argparse
import logging
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("critic")


class Critic(nn.Module):
    def __init__(self, obs_dim, hidden=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        return self.value(self.body(obs)).squeeze(-1)


def make_rollouts(n, obs_dim, seed):
    g = torch.Generator().manual_seed(seed)
    obs = torch.randn(n, obs_dim, generator=g)
    returns = (obs[:, 0] * obs[:, 1]).tanh() + obs[:, 2:8].sum(1).cos() + 0.1 * torch.randn(n, generator=g)
    return TensorDataset(obs, returns)


class Trainer:
    def __init__(self, args, rank):
        self.args, self.rank = args, rank
        self.critic = DDP(Critic(args.obs_dim))
        self.params = [p for p in self.critic.parameters() if p.requires_grad]
        self.opt = torch.optim.Adam(self.params, lr=args.lr)
        train = make_rollouts(8192, args.obs_dim, seed=1)
        self.sampler = DistributedSampler(train, shuffle=True)
        self.loader = DataLoader(train, batch_size=args.batch_size, sampler=self.sampler, drop_last=True)
        self.val = make_rollouts(1024, args.obs_dim, seed=2).tensors
        self.step = 0

    def update(self, obs, returns):
        loss = F.smooth_l1_loss(self.critic(obs), returns)
        # grads as a list, so that the norm can be logged before they are assigned
        grads = torch.autograd.grad(loss, self.params)
        norm = torch.stack([g.norm() for g in grads]).norm()
        for p, g in zip(self.params, grads):
            p.grad = g
        self.opt.step()
        return loss.item(), norm.item()

    @torch.no_grad()
    def validate(self):
        self.critic.eval()
        obs, returns = self.val
        v = F.mse_loss(self.critic.module(obs), returns)
        self.critic.train()
        return v.item()

    def fit(self):
        epoch = 0
        while self.step < self.args.max_steps:
            self.sampler.set_epoch(epoch)
            for obs, returns in self.loader:
                loss, norm = self.update(obs, returns)
                self.step += 1
                if self.step % 50 == 0 and self.rank == 0:
                    log.info("step %d loss %.4f grad norm %.3f val %.4f", self.step, loss, norm, self.validate())
                if self.step >= self.args.max_steps:
                    break
            epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=300)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--obs-dim", type=int, default=24)
    ap.add_argument("--lr", type=float, default=1e-3)
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(args, int(os.environ["RANK"])).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
