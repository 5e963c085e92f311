"""Stateful LSTM language model: truncated back-propagation with a carried state, BF16 autocast, tied and frozen
parts, curriculum over the sequence length, and a straight-through custom autograd function in the embedding."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, STREAMS, STEPS = 64, 64, 16, 160


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.register_buffer("position_code", torch.randn(DIM) * 0.02)   # fixed on purpose
        self.scale = nn.Parameter(torch.tensor(0.1))
        self.rnn = nn.LSTM(DIM, DIM, 2)
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB)
        self.out.weight = self.embed.weight                              # tied
        self.out.bias.requires_grad_(False)                              # a frozen zero bias
        nn.init.zeros_(self.out.bias)

    def forward(self, ids, state):
        w = self.embed(ids)
        h = w + self.scale * SignSTE.apply(w) + self.position_code
        with torch.autocast("cpu", enabled=False):                         # the CPU has no BF16 LSTM kernel here
            h, state = self.rnn(h.float(), state)
        return self.out(self.norm(h)), state


def corpus(n=40000):
    g = torch.Generator().manual_seed(0)
    a = torch.randint(0, VOCAB, (VOCAB, 3), generator=g)
    seq, prev = torch.empty(n, dtype=torch.long), 0
    pick = torch.randint(0, 3, (n,), generator=g)
    for i in range(n):
        prev = int(a[prev, pick[i]])
        seq[i] = prev
    return seq.view(STREAMS, -1).t().contiguous()


def detach(state):
    return None if state is None else tuple(s.detach() for s in state)


def main():
    torch.manual_seed(0)
    data = corpus()
    model = Model()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=4e-3, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.SequentialLR(
        opt,
        [torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 10),
         torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS - 10, eta_min=4e-4)],
        milestones=[10],
    )
    state, pos, recent = None, 0, []
    for step in range(STEPS):
        length = 12 if step < 60 else 24                                  # curriculum
        if pos + length + 1 > len(data):
            pos, state = 0, None
        x, y = data[pos : pos + length], data[pos + 1 : pos + length + 1]
        pos += length
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, state = model(x, detach(state))
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()
        sched.step()
        recent = (recent + [loss.item()])[-20:]
        if (step + 1) % 40 == 0:
            print(f"step {step + 1} len {length} loss {sum(recent) / len(recent):.3f} lr {sched.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    main()
