"""Typical mistakes in notebook 06: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import torch
import torch.distributed as dist
from torch.distributed.nn import functional as nn_functional
from torch.nn.functional import linear, relu

from labs.chapters.nb06 import solutions as solution

# -- 06.1: a pipeline's stage


def share_of_rows(x, micro_batches):
    return len(x) / sum(len(x) for x, _ in micro_batches)


def step(*, weight=share_of_rows, keep=lambda y: y, take=0, before=None, order="gpipe", retain=False, sends_back=True):
    """The right step, except for what a keyword says."""

    def pipeline_step(stage, micro_batches, loss_fn, link):
        kept, total = [], 0.0

        def backward(at):
            x, output = kept.pop(at)
            if before:
                before(stage)
            output.backward(None if link.last or not sends_back else link.receive_next(), retain_graph=retain)
            if not link.first and sends_back:
                link.send_previous(x.grad)

        for x, y in micro_batches:
            if not link.first:
                x = link.receive_previous().requires_grad_()
            output = stage(x)
            if link.last:
                output = loss_fn(output, y)
                total += output.item() * share_of_rows(x, micro_batches)
                output = output * weight(x, micro_batches)
            else:
                link.send_next(output.detach())
            if link.last or sends_back:
                kept.append((x, keep(output)))
            if order == "one at a time" or (order == "last at once" and link.last):
                backward(take)
        while kept:
            backward(take if not link.last else 0)
        return total if link.last else None

    return pipeline_step


# -- 06.2: micro-batches


def _pipeline(best=solution.best_pipeline, step=None, idle=lambda m, p: (p - 1) / (m + p - 1)):
    """The right one, except for how many micro-batches are taken, the step, or the idle share."""

    def best_pipeline(work_s, stages, overhead_s, rows):
        m = best(work_s, stages, overhead_s, rows)
        m = m[0] if isinstance(m, tuple) else m
        right = (m + stages - 1) * (work_s / (stages * m) + overhead_s)
        return m, step(work_s, stages, overhead_s, m) if step else right, idle(m, stages)

    return best_pipeline


def _rounded(work_s, stages, overhead_s, rows):
    return max(1, min(rows, round(math.sqrt((stages - 1) * work_s / (stages * overhead_s)))))


# -- 06.3: cuts


def _sums(layer_s, cut):
    return [sum(layer_s[a:b]) for a, b in pairwise([0, *cut, len(layer_s)])]


def _least(objective):
    def cuts(layer_s, stages):
        ways = combinations(range(1, len(layer_s)), stages - 1)
        return list(min(ways, key=lambda cut: objective(_sums(layer_s, cut))))

    return cuts


def _equal_numbers(layer_s, stages):
    return [k * len(layer_s) // stages for k in range(1, stages)]


def _up_to_the_average(layer_s, stages):
    cut, now = [], 0.0
    for k, seconds in enumerate(layer_s):
        if now >= sum(layer_s) / stages and len(cut) < stages - 1:
            cut.append(k)
            now = 0.0
        now += seconds
    return cut


def _changed(change):
    return lambda layer_s, stages: change(solution.cuts(layer_s, stages), layer_s, stages)


def _no_memory(layer_s, stages):
    """Right, but every way is looked at."""

    def best(first, stages):
        if stages == 1:
            return sum(layer_s[first:]), []
        found = []
        for end in range(first + 1, len(layer_s) - stages + 2):
            rest, cut = best(end, stages - 1)
            found.append((max(sum(layer_s[first:end]), rest), [end, *cut]))
        return min(found)

    return best(0, stages)[1]


# -- 06.4: tensor parallelism


def summed(tensor):
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient)


class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return summed(part)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def own_share(size):
    each = size // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def mlp(*, f=F.apply, g=G.apply, bias=lambda total, b: total + b, part_bias=lambda b: None):
    """The right one, except for what a keyword says."""

    def parallel_mlp(x, up, down):
        mine = own_share(up.out_features)
        hidden = relu(linear(f(x), up.weight[mine], up.bias[mine]))
        return bias(g(linear(hidden, down.weight[:, mine], part_bias(down.bias))), down.bias)

    return parallel_mlp


def inputs_cut(x, up, down):
    mine = own_share(up.in_features)
    hidden = relu(linear(x[:, mine], up.weight[:, mine], up.bias))
    return linear(G.apply(hidden), down.weight) + down.bias


def gathered(x, up, down):
    mine = own_share(up.out_features)
    own = relu(linear(F.apply(x), up.weight[mine], up.bias[mine])).contiguous()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach())
    parts[dist.get_rank()] = own
    return down(torch.cat(parts, 1))


def only_rank_0_sums(x, up, down):
    mine = own_share(up.out_features)
    part = linear(relu(linear(F.apply(x), up.weight[mine], up.bias[mine])), down.weight[:, mine])
    return (G.apply(part) if dist.get_rank() == 0 else part) + down.bias


MUTANTS = {
    "06.1": {
        "mean of means": (step(weight=lambda x, b: 1 / len(b)), "the 1 row of the last one counts as much as 4 rows"),
        "no gradient is sent back": (step(sends_back=False), "stage 1 has no gradient after the step and never trains"),
        "kept without history": (step(keep=lambda y: y.detach()), "calls backward() on a tensor without a history"),
        "zero_grad in the loop": (step(before=lambda s: s.zero_grad()), "only the last micro-batch is in"),
        "last kept, first used": (step(take=-1), "gradient of micro-batch 1 went backward through the activations of "
                                  "micro-batch 3"),
        "last stage sends gradients at once": (step(order="last at once"), "stage 1 sends activation 2, while "
                                               "stage 2 sends gradient 1"),
        "one at a time": (step(order="one at a time"), "only one micro-batch is under way at any time"),
        "graph retained": (step(retain=True), "are still in memory"),
    },
    "06.2": {
        "one row each": (_pipeline(lambda w, p, c, rows: rows), "you take one row per micro-batch"),
        "four per stage": (_pipeline(lambda w, p, c, rows: min(rows, 4 * p)), "a rule of thumb"),
        "rounded to the nearest": (_pipeline(_rounded), "the curve is steeper on its left"),
        "step without filling": (_pipeline(step=lambda w, p, c, m: m * (w / (p * m) + c)), "your step has m turns"),
        "no overhead": (_pipeline(step=lambda w, p, c, m: (m + p - 1) * w / (p * m)), "micro-batches cost nothing"),
        "step with all work": (_pipeline(step=lambda w, p, c, m: (m + p - 1) * (w / m + c)), "the whole model in your"),
        "Megatron's bubble": (_pipeline(idle=lambda m, p: (p - 1) / m), "relative to the time in which"),
        "names and numbers": (lambda work_s, stages, overhead_s, rows: {"micro_batches": 1, "step_s": 1.0, "idle": 0.0},
                              "not three numbers"),
    },
    "06.3": {
        "equal numbers of layers": (_equal_numbers, "as many layers, whatever they cost"),
        "up to the average": (_up_to_the_average, "up to the average, and a bit over"),
        "sorted": (lambda layer_s, stages: solution.cuts(sorted(layer_s, reverse=True), stages), "you sort the layers"),
        "difference": (_least(lambda sums: max(sums) - min(sums)), "it only waits"),
        "without the last stage": (_least(lambda sums: max(sums[:-1], default=0)), "you leave the last stage out"),
        "from one": (_changed(lambda cut, *_: [c + 1 for c in cut]), "you count layers from 1"),
        "the stages themselves": (_changed(lambda cut, layer_s, _: [layer_s[a:b] for a, b in
                                                                    pairwise([0, *cut, len(layer_s)])]),
                                  "these are the stages themselves"),
        "all ways tried": (_no_memory, "25 layers in 13 stages took more than 1 s"),
    },
    "06.4": {
        "bias on every rank": (mlp(part_bias=lambda b: b, bias=lambda total, b: total), "so that it is 2 times"),
        "no sum": (mlp(g=lambda p: p), "nobody adds the 2 parts"),
        "no sum of the input's gradient": (mlp(f=lambda x: x), "each rank has a part of x's gradient"),
        "torch.distributed.nn": (mlp(g=lambda p: nn_functional.all_reduce(p)), "ranks with a loss each"),
        "only the bias has history": (mlp(g=summed), "only down.bias, which comes after it"),
        "inputs cut": (inputs_cut, "relu(a) + relu(b) is not relu(a + b)"),
        "hidden features gathered": (gathered, "you gather the hidden activations: 1536 bytes, where the sum of the "
                                     "outputs has 384"),
        "only rank 0 sums": (only_rank_0_sums, "wait for each other for ever in forward or backward: rank 0 was"),
    },
}  # fmt: skip
