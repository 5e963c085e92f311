"""Typical mistakes in notebook 06: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import torch
import torch.distributed as dist

# -- 06.1: the order of a stage


def order(warm_up):
    """One forward, one backward after `warm_up` forwards."""

    def actions(stage, stages, micro_batches, most):
        first = warm_up(stage, stages, micro_batches, most)
        found = [("forward", i) for i in range(first)]
        for i in range(micro_batches):
            found.append(("backward", i))
            if first + i < micro_batches:
                found.append(("forward", first + i))
        return found

    return actions


def gpipe(stage, stages, micro_batches, most):
    return [(kind, i) for kind in ("forward", "backward") for i in range(micro_batches)]


# -- 06.2: a timeline


def lost(*, work=("forward", "backward"), message=max, clock=False, unit=1):
    """The right one, except for what a keyword says."""

    def lost_time(events, stages):
        spent = {"work": [0.0] * stages, "messages": [0.0] * stages}
        for stage, what, _, start, end in events:
            if what in work:
                spent["work"][stage] += end - start
            if what in ("send", "receive"):
                spent["messages"][stage] += end - start
        step = max(e[4] for e in events) - (0 if clock else min(e[3] for e in events))
        cut, messages = max(spent["work"]) - sum(spent["work"]) / stages, message(spent["messages"])
        found = {"cut": cut, "messages": messages, "waiting": step - max(spent["work"]) - messages}
        return {k: unit * v for k, v in found.items()}

    return lost_time


# -- 06.4: a layer of FSDP


def layer(*, keep=False, mean=True, reduce="scatter", order=1, x_gradient=lambda g, w: g @ w):
    """The right one, except for what a keyword says."""

    def sharded_linear(x, shard):
        n = dist.get_world_size()

        def gathered(shard):
            parts = [torch.empty_like(shard) for _ in range(n)]
            dist.all_gather(parts, shard)
            return torch.cat(parts[::order])

        class Layer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, shard):
                whole = gathered(shard)
                ctx.save_for_backward(x, whole if keep else shard)
                return x @ whole.T

            @staticmethod
            def backward(ctx, gradient):
                x, saved = ctx.saved_tensors
                whole, found = saved if keep else gathered(saved), gradient.T @ x
                mine = found.chunk(n)[dist.get_rank()].clone()
                if reduce == "scatter":
                    dist.reduce_scatter(mine, list(found.chunk(n)))
                elif reduce == "all":
                    dist.all_reduce(found)
                    mine = found.chunk(n)[dist.get_rank()].clone()
                return x_gradient(gradient, whole), mine / n if mean else mine

        return Layer.apply(x, shard)

    return sharded_linear


def plain_gather(x, shard):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.detach())
    return x @ torch.cat(parts).T


MUTANTS = {
    "06.1": {
        "all forwards first": (gpipe, "you keep the activations of 6 at once"),
        "1F1B without the limit": (order(lambda s, p, m, most: min(p - s, m)), "you keep the activations of 4 at once"),
        "as many ahead as may be kept": (order(lambda s, p, m, most: min(most, m)), "right, but slow"),
        "stages from one": (order(lambda s, p, m, most: min(p - s - 1, most, m)), "backward before it went forward"),
    },
    "06.2": {
        "messages are work": (lost(work=("forward", "backward", "send", "receive")), "work has the messages in it"),
        "messages of all": (lost(message=sum), "which pass them at the same time"),
        "from zero": (lost(clock=True), "your step lasts from 0 on the clock"),
        "milliseconds": (lost(unit=1000), "these are milliseconds"),
    },
    "06.4": {
        "gathered without history": (plain_gather, "the shards get no gradient"),
        "whole weight kept": (layer(keep=True), "the whole weight is kept from forward to backward"),
        "sum, not mean": (layer(mean=False), "2 times that of the mean over the ranks"),
        "whole gradients summed": (layer(reduce="all"), "backward sums whole gradients on all ranks"),
    },
}
