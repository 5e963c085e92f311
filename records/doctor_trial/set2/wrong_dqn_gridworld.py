# DQN on a tiny vectorised grid world (no gym needed).
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn

Transition = namedtuple("Transition", "obs action reward next_obs done")

SIZE = 8
GAMMA = 0.97
BATCH = 64
WARMUP = 500
STEPS = 300
TARGET_SYNC = 50
ENV_STEPS_PER_UPDATE = 4


class GridWorld:
    MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def reset(self):
        self.pos = self.rng.integers(0, SIZE, 2)
        self.goal = self.rng.integers(0, SIZE, 2)
        self.t = 0
        return self._obs()

    def _obs(self):
        planes = np.zeros((2, SIZE, SIZE), dtype=np.float32)
        planes[0, self.pos[0], self.pos[1]] = 1
        planes[1, self.goal[0], self.goal[1]] = 1
        return planes

    def step(self, action):
        before = np.abs(self.pos - self.goal).sum()
        self.pos = np.clip(self.pos + self.MOVES[action], 0, SIZE - 1)
        self.t += 1
        after = np.abs(self.pos - self.goal).sum()
        done = bool(after == 0) or self.t >= 40
        reward = 1.0 if after == 0 else 0.05 * float(before - after) - 0.02
        return self._obs(), reward, done


class QNet(nn.Module):
    def __init__(self, n_actions=4):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        )
        self.value = nn.Sequential(nn.Linear(16 * SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 1))
        self.adv = nn.Sequential(nn.Linear(16 * SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, n_actions))

    def forward(self, x):
        h = self.conv(x).flatten(1)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class Agent:
    def __init__(self):
        self.q = QNet()
        self.target = QNet()
        self.target.load_state_dict(self.q.state_dict())
        self.target.requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=5e-4)
        self.memory = deque(maxlen=10_000)

    def act(self, obs, eps):
        if random.random() < eps:
            return random.randrange(4)
        with torch.no_grad():
            return int(self.q(torch.from_numpy(obs)[None]).argmax())

    def learn(self):
        batch = Transition(*zip(*random.sample(self.memory, BATCH)))
        obs = torch.from_numpy(np.stack(batch.obs))
        next_obs = torch.from_numpy(np.stack(batch.next_obs))
        action = torch.tensor(batch.action).unsqueeze(1)
        reward = torch.tensor(batch.reward, dtype=torch.float32)
        alive = 1.0 - torch.tensor(batch.done, dtype=torch.float32)

        q = self.q(obs).gather(1, action)
        with torch.no_grad():
            best = self.q(next_obs).argmax(1, keepdim=True)
            q_next = self.target(next_obs).gather(1, best).squeeze(1)
            y = reward + GAMMA * alive * q_next
        td = q - y
        loss = torch.where(td.abs() < 1.0, 0.5 * td ** 2, td.abs() - 0.5).mean()

        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.opt.step()
        return loss.item()


def main():
    random.seed(0)
    torch.manual_seed(0)
    env = GridWorld(np.random.default_rng(0))
    agent = Agent()
    obs, ret, returns = env.reset(), 0.0, deque(maxlen=50)
    updates, t = 0, 0
    while updates < STEPS:
        eps = max(0.05, 1.0 - updates / 200)
        action = agent.act(obs, eps)
        nxt, reward, done = env.step(action)
        agent.memory.append(Transition(obs, action, reward, nxt, done))
        ret += reward
        obs = nxt
        if done:
            returns.append(ret)
            obs, ret = env.reset(), 0.0
        t += 1
        if t >= WARMUP and t % ENV_STEPS_PER_UPDATE == 0:
            loss = agent.learn()
            updates += 1
            if updates % TARGET_SYNC == 0:
                agent.target.load_state_dict(agent.q.state_dict())
                print(f"update {updates} loss {loss:.4f} eps {eps:.2f} return {np.mean(returns):.3f}")


if __name__ == "__main__":
    main()
