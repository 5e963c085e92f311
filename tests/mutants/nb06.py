"""Typical mistakes in notebook 06: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math
from itertools import accumulate, combinations, pairwise

import torch.distributed as dist
from torch.distributed.nn import functional as nn_functional
from torch.nn.functional import relu

from labs.chapters.nb06 import solutions as solution
from mutants.nb06_shares import (
    F,
    FBoth,
    FMean,
    G,
    GBoth,
    bias_of_rank_0,
    copied,
    first_half,
    gathered,
    gradients_of_shares_summed,
    hook_on_x,
    in_place,
    inputs_cut,
    inputs_cut_and_summed,
    inputs_cut_with_all_weights,
    mlp,
    not_split,
    only_rank_0_sums,
    reduced_to_rank_0,
    summed,
    two_ranks_only,
)
from mutants.nb06_stages import (
    all_at_once,
    gradient_first,
    in_phases,
    never_backward,
    nothing_sent_back,
    only_the_first_listens,
    receives_everywhere,
    sends_everywhere,
    step,
)

# -- 06.2: micro-batches


def _pipeline(*, turns=lambda m, p: m + p - 1, share=lambda m, p: m * p, pays=1.0, best=None, rounds=None, lowest=1,
              most=lambda rows: rows, step=None, idle=lambda m, p, rows, busy: (p - 1) / (m + p - 1)):  # fmt: skip
    def best_pipeline(work_s, stages, overhead_s, rows):
        def step_s(m):
            return turns(m, stages) * (work_s / share(m, stages) + pays * overhead_s)

        m = min(range(1, most(rows) + 1), key=step_s)
        if rounds:
            m = max(lowest, min(rows, rounds(math.sqrt((stages - 1) * work_s / (stages * overhead_s)))))
        if best:
            m = best(work_s, stages, overhead_s, rows)
        seconds = step(work_s, stages, overhead_s, m) if step else step_s(m)
        return m, seconds, idle(m, stages, rows, work_s / stages / step_s(m))

    return best_pipeline


def _right(work_s, stages, overhead_s, rows):
    return solution.best_pipeline(work_s, stages, overhead_s, rows)[0]


def _none_for_one_stage(work_s, stages, overhead_s, rows):
    m = min(rows, round(math.sqrt((stages - 1) * work_s / (stages * overhead_s))))
    return m, (m + stages - 1) * (work_s / (stages * max(1, m)) + overhead_s), 0.0


def _told_of_step(step):
    return _pipeline(best=_right, step=step)


def _told_of_idle(idle):
    return _pipeline(idle=idle)


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


def _below_the_average(layer_s, stages):
    cut, now = [], 0.0
    for k, seconds in enumerate(layer_s):
        if now and now + seconds > sum(layer_s) / stages and len(cut) < stages - 1:
            cut.append(k)
            now = 0.0
        now += seconds
    return cut


def _nearest(layer_s, stages):
    until = list(accumulate(layer_s, initial=0.0))
    return [min(range(len(until)), key=lambda c: abs(until[c] - k * until[-1] / stages)) for k in range(1, stages)]


def _halves(layer_s, stages):
    """Cut in two, then the slower part again, and so on."""
    cut = []
    while len(cut) < stages - 1:
        edges = [0, *cut, len(layer_s)]
        parts = [(a, b) for a, b in pairwise(edges) if b - a > 1]
        a, b = max(parts, key=lambda part: sum(layer_s[part[0] : part[1]]))
        inside = min(range(a + 1, b), key=lambda c: max(sum(layer_s[a:c]), sum(layer_s[c:b])))
        cut = sorted([*cut, inside])
    return cut


def _one_empty(layer_s, stages):
    return [0] * (stages > 1) + solution.cuts(layer_s, stages)[: max(0, stages - 2)]


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


MUTANTS = {
    "06.1": {
        "losses added": (step(weight=lambda x, b: 1.0), "sum of 3 losses"),
        "mean of means": (step(weight=lambda x, b: 1 / len(b)), "the 1 row of the last one counts as much as 4 rows"),
        "divided by the rows": (step(weight=lambda x, b: 1 / sum(len(x) for x, _ in b)), "0.25 times that of one"),
        "divided on every stage": (step(scale=lambda g, b: g / len(b)), "0.333 times that of one process, while that "
                                   "of stage 1 is right"),
        "no gradient is sent back": (nothing_sent_back, "stage 0 has no gradient after the step and never trains"),
        "no backward": (never_backward, "no stage has a gradient: backward() was never called"),
        "the others wait for gradients": (only_the_first_listens, "stage 1 has ended without sending it"),
        "received without requires_grad": (step(receive=lambda x: x), "sends back None in place of a gradient"),
        "kept without history": (step(keep=lambda y: y.detach()), "calls backward() on a tensor without a history"),
        "forward without gradients": (step(grad=False), "stage 0 of 2 runs forward without gradients"),
        "zero_grad in the loop": (step(before=lambda s: s.zero_grad()), "only the last micro-batch is in"),
        "last kept, first used": (step(take=-1), "gradient of micro-batch 1 went backward through the activations of "
                                  "micro-batch 3"),
        "only the last output kept": (in_phases(last_output=True), "goes backward through the same graph twice"),
        "targets of another": (in_phases(shift=1), "micro-batch 1 is compared with the targets of micro-batch 2"),
        "last stage sends gradients at once": (step(order="last at once"), "stage 0 sends activation 2 of 3, while "
                                               "stage 1 sends gradient 1 of 3"),
        "waits for the gradient first": (gradient_first, "stage 0 waits for gradient 1 of 3, while stage 1 waits for "
                                         "activation 1 of 3; neither sends"),
        "receives on the first stage": (receives_everywhere, "but it is the first: no stage is before it"),
        "sends on the last stage": (sends_everywhere, "but it is the last: no stage is after it"),
        "one at a time": (step(order="one at a time"), "only one micro-batch is under way at any time"),
        "the whole batch at once": (all_at_once, "computes all 12 rows in one forward pass"),
        "one backward for all": (in_phases(one_backward=True), "goes backward through all 3 micro-batches before"),
        "sends after all forwards": (in_phases(late_sends=True), "computes all 3 micro-batches before it sends the"),
        "forward twice": (in_phases(twice=True), "ran forward 6 times for 3"),
        "graph retained": (step(retain=True), "are still in memory"),
        "one micro-batch left out": (step(count=lambda m: m - 1), "ran forward 2 times for 3"),
        "gradient of the output": (step(back=lambda x, y: y.detach()), "sends back a gradient of shape ()"),
        "two stages only": (step(middle=False), "stage 1 of 3 computes a loss: only the last one"),
        "x of the batch everywhere": (step(own_x=True), "computes with x of micro_batches"),
        "last loss returned": (step(answer=lambda losses, x: losses[-1] * 3), "the loss of the last micro-batch"),
        "losses' sum returned": (step(answer=lambda losses, x: sum(losses) * 3), "the sum of the micro-batches' "),
        "no loss returned": (step(answer=lambda losses, x: None), "returns None, not the loss"),
    },
    "06.2": {
        "one row each": (_pipeline(best=lambda w, p, c, rows: rows), "you take one row per micro-batch"),
        "as many as stages": (_pipeline(best=lambda w, p, c, rows: p), "as many micro-batches as stages"),
        "four per stage": (_pipeline(best=lambda w, p, c, rows: min(rows, 4 * p)), "a rule of thumb"),
        "not rounded": (_pipeline(rounds=lambda r: r), "this is the root, not a whole number"),
        "rounded to the nearest": (_pipeline(rounds=round), "the curve is steeper on its left"),
        "rounded down": (_pipeline(rounds=math.floor), "you round the root down"),
        "rounded up": (_pipeline(rounds=math.ceil), "you round the root up"),
        "none at all": (_none_for_one_stage, "0 micro-batches"),
        "more than rows": (_pipeline(most=lambda rows: 10000), "more micro-batches than rows"),
        "all work on every stage": (_pipeline(share=lambda m, p: m), "every stage computes the whole model"),
        "p in the root": (_pipeline(best=lambda w, p, c, rows: max(1, min(rows, round(math.sqrt(w / c))))),
                          "you have p where p - 1 belongs"),
        "step of m + p turns": (_told_of_step(lambda w, p, c, m: (m + p) * (w / (p * m) + c)), "your step has m + p"),
        "no filling": (_pipeline(turns=lambda m, p: m), "the naive split: only one stage works"),
        "step without filling": (_told_of_step(lambda w, p, c, m: m * (w / (p * m) + c)), "your step has m turns"),
        "no overhead": (_told_of_step(lambda w, p, c, m: (m + p - 1) * w / (p * m)), "micro-batches cost nothing"),
        "overhead once": (_told_of_step(lambda w, p, c, m: (m + p - 1) * w / (p * m) + c), "once per step"),
        "overhead m times": (_told_of_step(lambda w, p, c, m: (m + p - 1) * w / (p * m) + m * c), "in m turns"),
        "step with all work": (_told_of_step(lambda w, p, c, m: (m + p - 1) * (w / m + c)), "the whole model in your"),
        "step with the whole batch": (_told_of_step(lambda w, p, c, m: (m + p - 1) * (w / p + c)), "the whole batch"),
        "ideal": (_told_of_step(lambda w, p, c, m: w / p), "this is the ideal"),
        "one turn": (_told_of_step(lambda w, p, c, m: w / (p * m) + c), "this is one turn"),
        "speed-up": (_told_of_step(lambda w, p, c, m: w / ((m + p - 1) * (w / (p * m) + c))), "this is the speed-up"),
        "Megatron's bubble": (_told_of_idle(lambda m, p, rows, busy: (p - 1) / m), "relative to the time in which"),
        "share at work": (_told_of_idle(lambda m, p, rows, busy: m / (m + p - 1)), "share in which a stage works"),
        "naive bubble": (_told_of_idle(lambda m, p, rows, busy: (p - 1) / p), "this is the naive split's"),
        "overhead is idle": (_told_of_idle(lambda m, p, rows, busy: 1 - busy), "you count overhead as idle"),
        "percent": (_told_of_idle(lambda m, p, rows, busy: 100 * (p - 1) / (m + p - 1)), "this is in percent"),
        "idle with all rows": (_told_of_idle(lambda m, p, rows, busy: (p - 1) / (rows + p - 1)), "one row per micro"),
        "one number": (lambda work_s, stages, overhead_s, rows: 3, "not three numbers"),
        "far off": (_told_of_step(lambda w, p, c, m: 1.0), "step_s is 0."),
    },
    "06.3": {
        "equal numbers of layers": (_equal_numbers, "as many layers, whatever they cost"),
        "up to the average": (_up_to_the_average, "up to the average, and a bit over"),
        "below the average": (_below_the_average, "what never fitted ends up in the last"),
        "nearest to the shares": (_nearest, "where the running sum is at its share of the total"),
        "in halves again and again": (_halves, "your cuts [4, 5] make stages of 6 + 8 + 12 s"),
        "sorted": (lambda layer_s, stages: solution.cuts(sorted(layer_s, reverse=True), stages), "you sort the layers"),
        "sum of squares": (_least(lambda sums: sum(s * s for s in sums)), "you minimise the sum of squares"),
        "difference": (_least(lambda sums: max(sums) - min(sums)), "it only waits"),
        "fastest stage": (_least(lambda sums: -min(sums)), "you make the fastest stage as slow as can be"),
        "slowest stage slowest": (_least(lambda sums: -max(sums)), "you make the slowest stage as slow as can be"),
        "always two": (lambda layer_s, stages: solution.cuts(layer_s, 2), "you always cut in two"),
        "last layer of each": (_changed(lambda cut, *_: [c - 1 for c in cut]), "you return the last layer"),
        "from one": (_changed(lambda cut, *_: [c + 1 for c in cut]), "you count layers from 1"),
        "0 first": (_changed(lambda cut, *_: [0, *cut]), "you begin with 0:"),
        "end last": (_changed(lambda cut, layer_s, _: [*cut, len(layer_s)]), "you end with the number of layers"),
        "sizes": (_changed(lambda cut, layer_s, _: [b - a for a, b in pairwise([0, *cut, len(layer_s)])]),
                  "how many layers each stage has"),
        "the stages themselves": (_changed(lambda cut, layer_s, _: [layer_s[a:b] for a, b in
                                                                    pairwise([0, *cut, len(layer_s)])]),
                                  "these are the stages themselves"),
        "an empty stage": (_one_empty, "stage 0 of 2 would be empty"),
        "all ways tried": (_no_memory, "25 layers in 13 stages took more than 1 s"),
        "a number": (lambda layer_s, stages: len(layer_s) // stages, "not a list of cuts"),
        "fractions": (_changed(lambda cut, *_: [c + 0.5 for c in cut]), "are no numbers of layers"),
    },
    "06.4": {
        "bias on every rank": (mlp(part_bias=lambda b: b, bias=lambda total, b: total), "so that it is 2 times"),
        "no bias": (mlp(bias=lambda total, b: total), "down.bias is missing"),
        "bias on rank 0": (mlp(bias=bias_of_rank_0), "rank 0 adds down.bias to the sum, and rank 1 does not"),
        "bias of rank 0 in the sum": (
            mlp(part=lambda p: p, part_bias=lambda b: b if dist.get_rank() == 0 else None, bias=lambda t, b: t),
            "down.bias gets no gradient on rank 1"),
        "bias divided": (mlp(part_bias=lambda b: b / dist.get_world_size(), bias=lambda t, b: t),
                         "the gradient of down.bias is 0.5 times"),
        "no sum": (mlp(g=lambda p: p), "nobody adds the 2 parts"),
        "no sum of the input's gradient": (mlp(f=lambda x: x), "each rank has a part of x's gradient"),
        "sums both ways": (mlp(g=GBoth.apply), "2 times too large: your sum sums in backward"),
        "torch.distributed.nn": (mlp(g=lambda p: nn_functional.all_reduce(p)), "ranks with a loss each"),
        "input summed forward": (mlp(f=FBoth.apply), "the ranks add up x"),
        "mean of the output": (mlp(g=lambda p: G.apply(p) / dist.get_world_size()), "as for DDP's gradients"),
        "mean of the input's gradient": (mlp(f=FMean.apply), "x's gradient on rank 0 is 0.5 times"),
        "sum without history": (mlp(g=summed, bias=lambda t, b: t + b.detach()), "it has no history"),
        "only the bias has history": (mlp(g=summed), "only down.bias, which comes after it"),
        "inputs cut": (inputs_cut, "relu(a) + relu(b) is not relu(a + b)"),
        "inputs cut, whole weights": (inputs_cut_with_all_weights, "you cut the features of x"),
        "inputs cut, summed before the ReLU": (inputs_cut_and_summed, "forward has 2 collectives"),
        "hidden features gathered": (gathered, "you gather the hidden activations: 1536 bytes, where the sum of the "
                                     "outputs has 384"),
        "not split": (not_split, "nothing is split"),
        "all the first half": (mlp(own=first_half), "all ranks compute the same hidden features, 0 to 11"),
        "reduced to rank 0": (reduced_to_rank_0, "rank 0 has the whole output, other ranks have not"),
        "only rank 0 sums": (only_rank_0_sums, "wait for each other for ever in forward or backward: rank 0 was"),
        "copies": (copied, "up.weight gets no gradient on rank 0"),
        "hook on x": (hook_on_x, "takes in what came around the layers"),
        "gradient of the hidden features summed": (mlp(f=lambda x: x, hidden_f=F.apply),
                                                   "the ranks sum the gradient of hidden features"),
        "two ranks only": (two_ranks_only, "right on 2 ranks; on 3"),
        "gradients of the shares summed": (gradients_of_shares_summed, "summed over the ranks, as in DDP"),
        "x changed": (mlp(f=in_place), "your code changed x or a parameter"),
        "no ReLU": (mlp(between=lambda h: h), "there is no ReLU"),
        "no first bias": (mlp(first_bias=lambda b: None), "up.bias is missing"),
        "ReLU of the parts": (mlp(part=relu), "a second ReLU comes before the sum"),
        "no f and no g": (mlp(f=lambda x: x, g=lambda p: p, bias=lambda t, b: t), "down.bias is missing"),
    },
}  # fmt: skip
