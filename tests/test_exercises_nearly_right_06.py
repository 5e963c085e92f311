"""Notebooks 04 to 06: answers that are nearly right are refused and named, unusual right ones pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from mutants import nb06 as mutants06
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from labs.chapters.nb06 import solutions as solution06
from labs.kit.check import examine


def refused(exercise_id, wrong, words):
    said = examine(exercise_id, wrong)
    assert said.state == "not yet", "let through"
    assert words in said.text, said.text


# -- 05.3


def loss(
    parts=lambda pairs: pairs,
    *,
    reduction="sum",
    count=lambda y: (y != -100).sum(),
    split=torch.split,
    change=lambda loss: loss,
    labels=lambda y: y,
    dtype=torch.float32,
):
    """The right loss, except for what a keyword says; `parts` picks from the pairs of chunks."""

    def chunked_loss(hidden, weight, wanted, chunk_tokens):
        def one(h, y):
            return cross_entropy(h.to(dtype) @ weight.T.to(dtype), y, reduction=reduction)

        y = labels(wanted)
        pairs = parts(list(zip(split(hidden, chunk_tokens), split(y, chunk_tokens), strict=True)))
        return change(sum(checkpoint(one, h, y, use_reentrant=False) for h, y in pairs) / count(wanted))

    return chunked_loss


def test_a_loss_in_double_precision_passes():
    assert examine("05.3", loss(dtype=torch.float64)).state == "passed"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("the first chunk is left out", loss(lambda pairs: pairs[1:] or pairs)),
        ("the last chunk is left out", loss(lambda pairs: pairs[:-1] or pairs)),
        ("chunk 2 of 8 is left out", loss(lambda pairs: pairs[:1] + pairs[2:])),
        ("last, shorter chunk is left out", loss(lambda pairs: [p for p in pairs if len(p[1]) == len(pairs[0][1])])),
        ("every second chunk", loss(lambda pairs: pairs[::2])),
        ("only the last chunk", loss(lambda pairs: pairs[-1:])),
        ("only the first chunk", loss(lambda pairs: pairs[:1])),
        ("the first chunk counts twice", loss(lambda pairs: pairs[:1] + pairs)),
        ("the last token of each chunk", loss(lambda pairs: [(h[:-1], y[:-1]) for h, y in pairs])),
        ("the number of chunks", loss(count=lambda y: -(-len(y) // 32))),
        ("of one chunk", loss(count=lambda y: 32)),
        ("labels above 0", loss(count=lambda y: (y > 0).sum())),
        ("the sign is wrong", loss(change=lambda x: -x)),
        ("perplexity", loss(change=torch.exp)),
        ("the next one's label", loss(labels=lambda y: y.roll(-1))),
        ("-100 count as word 0", loss(labels=lambda y: y.clamp(min=0), count=len)),
        ("your chunks have 128 tokens, not 16", loss(split=torch.chunk)),
    ],
)
def test_other_losses_are_named(words, wrong):
    refused("05.3", wrong, words)


# -- 06.1


def only(keep):
    """The right order, of whose actions `keep` leaves some."""
    return lambda s, p, m, most: [a for a in solution06.order(s, p, m, most) if keep(*a, m)]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("after each backward one forward", only(lambda kind, i, m: (kind, i) != ("forward", m - 1))),
        ("before the first backward", only(lambda kind, i, m: (kind, i) != ("forward", 0))),
        ("after each backward one forward", only(lambda kind, i, m: kind == "backward")),
        ("has to be emptied", only(lambda kind, i, m: (kind, i) != ("backward", m - 1))),
        ("goes backward, from 0 on", only(lambda kind, i, m: (kind, i) != ("backward", 0))),
        ("your list is empty", lambda *a: []),
        ("a forward of micro-batch -1", lambda *a: [(k, i - 1) for k, i in solution06.order(*a)]),
        ("you return", lambda *a: [(k, i + 0.5) for k, i in solution06.order(*a)]),
        ("stage 0 begins with 2 forwards, where 3", lambda s, p, m, k: solution06.order(s, p, m, max(1, k - 1))),
        ("stage 1 begins with 3 forwards, where 2", lambda s, p, m, k: solution06.order(0, p, m, k)),
    ],
)
def test_other_orders_are_named(words, wrong):
    refused("06.1", wrong, words)


# -- 06.2


def lost(*, cut=None, messages=None, waiting=None, step=None):
    """The right dict, except for the number that a keyword makes, from what is named in Stages."""

    def lost_time(events, stages):
        has = Stages(events, stages)
        has.step = step(has) if step else has.step
        found = {
            "cut": cut(has) if cut else has.cut,
            "messages": messages(has) if messages else has.most,
        }
        return found | {"waiting": waiting(has) if waiting else has.step - has.mean - has.cut - has.most}

    return lost_time


class Stages:
    """Sums of each stage."""

    def __init__(self, events, stages):
        self.events, self.p = events, stages
        self.forward, self.backward, self.send, self.receive = (
            [sum(e[4] - e[3] for e in events if e[:2] == (s, kind)) for s in range(stages)]
            for kind in ("forward", "backward", "send", "receive")
        )
        self.work = [a + b for a, b in zip(self.forward, self.backward, strict=True)]
        self.sent = [a + b for a, b in zip(self.send, self.receive, strict=True)]
        self.step = max(e[4] for e in events) - min(e[3] for e in events)
        self.mean, self.most = sum(self.work) / stages, max(self.sent)
        self.cut = max(self.work) - self.mean
        self.busiest = self.work.index(max(self.work))
        self.idle = [self.step - a - b for a, b in zip(self.work, self.sent, strict=True)]


def test_the_table_of_sums_is_right():
    assert examine("06.2", lost()).state == "passed"


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        ("of the stage with the most work", lambda h: h.sent[h.busiest]),
        ("of the stage that waits least", lambda h: h.sent[h.idle.index(min(h.idle))]),
        ("of the first stage", lambda h: h.sent[0]),
        ("of the last stage", lambda h: h.sent[-1]),
        ("of stage 1", lambda h: h.sent[1]),
        ("of the stage in the middle", lambda h: h.sent[h.p // 2]),
        ("of the stage that spends least", lambda h: min(h.sent)),
        ("you count what is sent, not", lambda h: max(h.send)),
        ("what is received, not", lambda h: max(h.receive)),
        ("twice what is sent", lambda h: 2 * max(h.send)),
        ("twice what is received", lambda h: 2 * max(h.receive)),
        ("what one stage sends and what another receives", lambda h: max(h.send) + max(h.receive)),
        ("you take the mean over the stages off", lambda h: max(h.sent) - sum(h.sent) / h.p),
    ],
)
def test_other_messages_are_named(words, messages):
    refused("06.2", lost(messages=messages), words)


@pytest.mark.parametrize(
    ("words", "waiting"),
    [
        ("forget to take off the mean work\n", lambda h: h.step - h.cut - h.most),
        ("forget to take off the cut\n", lambda h: h.step - h.mean - h.most),
        ("forget to take off the messages\n", lambda h: h.step - h.mean - h.cut),
        ("forget to take off the mean work and the cut", lambda h: h.step - h.most),
        ("forget to take off the mean work and the messages", lambda h: h.step - h.cut),
        ("forget to take off the cut and the messages", lambda h: h.step - h.mean),
        ("this is the whole step", lambda h: h.step),
        ("you add the cut", lambda h: h.step - h.mean + h.cut - h.most),
        ("you add the messages", lambda h: h.step - h.mean - h.cut + h.most),
        ("the cut off twice", lambda h: h.step - max(h.work) - h.cut - h.most),
        ("the work of all stages, not its mean", lambda h: h.step - sum(h.work) - h.cut - h.most),
        ("the step itself is missing", lambda h: -h.mean - h.cut - h.most),
        ("you give 0 where the rest is below it", lambda h: max(0, h.step - h.mean - h.cut - h.most)),
        ("does nothing, in the mean", lambda h: sum(h.idle) / h.p),
        ("all stages together do", lambda h: sum(h.idle)),
        ("the stage that waits most does", lambda h: max(h.idle)),
        ("the stage that waits least does", lambda h: min(h.idle)),
        ("the stage with the most work does", lambda h: h.idle[h.busiest]),
        ("stage 0 does", lambda h: h.idle[0]),
    ],
)
def test_a_term_that_waiting_forgets_is_named(words, waiting):
    refused("06.2", lost(waiting=waiting), words)


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (
            "the longest of one stage",
            lambda h: max(
                max(e[4] for e in h.events if e[0] == s) - min(e[3] for e in h.events if e[0] == s) for s in range(h.p)
            ),
        ),
        ("ends with stage 0", lambda h: max(e[4] for e in h.events if e[0] == 0) - min(e[3] for e in h.events)),
        ("where its last event starts", lambda h: max(e[3] for e in h.events) - min(e[3] for e in h.events)),
        ("the sum of all events' seconds", lambda h: sum(e[4] - e[3] for e in h.events)),
    ],
)
def test_other_steps_are_named(words, step):
    refused("06.2", lost(step=step), words)


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        ("the backward passes alone", lambda h: max(h.backward) - sum(h.backward) / h.p),
        ("slowest forward of one stage", lambda h: max(h.forward) + max(h.backward) - h.mean),
        ("you return", lambda h: 3 * (max(h.forward) - sum(h.forward) / h.p)),
        ("the stage in the middle for the slowest", lambda h: h.work[h.p // 2] - h.mean),
        ("the first stage for the slowest", lambda h: h.work[0] - h.mean),
        ("wrong sign", lambda h: -h.cut),
        ("the fastest stage", lambda h: h.mean - min(h.work)),
        ("not what the slowest has", lambda h: h.mean),
        ("the sum over the stages for the mean", lambda h: max(h.work) - sum(h.work)),
        ("a share of the mean", lambda h: h.cut / h.mean),
        ("shares of the step", lambda h: h.cut / h.step),
    ],
)
def test_other_cuts_in_seconds_are_named(words, cut):
    refused("06.2", lost(cut=cut), words)


# -- 06.3


def cuts(change):
    return lambda layer_s, stages: change(solution06.cuts(layer_s, stages), layer_s, stages)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("your cuts [4, 1] fall", cuts(lambda cut, *_: cut[::-1])),
        ("your cuts [4, 1] fall", cuts(lambda cut, *_: [*cut[1:], *cut[:1]])),
        ("not a list of numbers of layers", cuts(lambda cut, c, p: (max(c), cut))),
        ("not a list of numbers of layers", cuts(lambda cut, *_: [[k] for k in cut])),
        ("you begin with 0 and end", cuts(lambda cut, c, p: [0, *cut, len(c)])),
        ("from the end:", cuts(lambda cut, c, p: [len(c) - k for k in cut])),
        ("from the end, below 0", cuts(lambda cut, c, p: [k - len(c) for k in cut])),
        ("of the last one, too", cuts(lambda cut, c, p: [*[k - 1 for k in cut], len(c) - 1])),
        ("each stage but the last has", cuts(lambda cut, c, p: [b - a for a, b in pairwise([0, *cut])])),
        ("one stage too few", lambda c, p: solution06.cuts(c, max(p - 1, 1))),
        ("one stage too many", lambda c, p: solution06.cuts(c, min(p + 1, len(c)))),
        ("whatever they cost", lambda c, p: [k * (len(c) // p) for k in range(1, p)]),
        ("there are 8 layers, 0 to 7", lambda c, p: [99] * (p - 1)),
        ("stage 0 of 2 would be empty", lambda c, p: [0] * (p - 1)),
        (
            "before the layers that cost most",
            lambda c, p: sorted(sorted(range(1, len(c)), key=lambda k: -c[k])[: p - 1]),
        ),
    ],
)
def test_other_cuts_are_named(words, wrong):
    refused("06.3", wrong, words)


# -- 06.4


def summed(t):
    dist.all_reduce(total := t.clone())
    return total


def layer(*, whole=torch.cat, scatter=None, weight=lambda g: g / dist.get_world_size()):
    """The right one, except for how the shards become a whole and what becomes of the weight's gradient."""

    def gathered(shard):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard)
        return whole(parts)

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard):
            ctx.save_for_backward(x, shard)
            return x @ gathered(shard).T

        @staticmethod
        def backward(ctx, g):
            x, shard = ctx.saved_tensors
            parts, mine = list((g.T @ x).chunk(dist.get_world_size())), torch.empty_like(shard)
            if scatter:
                mine = scatter(parts)
            else:
                dist.reduce_scatter(mine, parts)
            return g @ gathered(shard), weight(mine)

    return lambda x, shard: Layer.apply(x, shard)


def own(whole):
    """This rank's rows of the weight, and zeros for those of the others."""
    rows = whole.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.cat([rows if r == dist.get_rank() else 0 * rows for r in range(dist.get_world_size())])


def reversed_shards(whole):
    return torch.cat(whole.chunk(dist.get_world_size())[::-1])


def in_turns(whole):
    return torch.stack(whole.chunk(dist.get_world_size()), 1).flatten(0, 1)


def from_rank_0(t):
    dist.broadcast(t := t.clone(), 0)
    return t


def of_the_next_rank(t):
    """Each rank's gradient goes to the rank before."""
    n, every = dist.get_world_size(), [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(every, t)
    return every[(dist.get_rank() + 1) % n]


def other_order(parts):
    dist.reduce_scatter(mine := torch.empty_like(parts[0]), parts[::-1])
    return mine


def all_gradients(parts):
    """Each rank's whole gradient, on every rank."""
    every = [torch.empty_like(torch.cat(parts)) for _ in parts]
    dist.all_gather(every, torch.cat(parts))
    return sum(every).chunk(len(parts))[dist.get_rank()]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("x is divided by the number of ranks", mutants06.layer(x_gradient=lambda g, w: g @ w / dist.get_world_size())),
        ("x is multiplied by the number", mutants06.layer(x_gradient=lambda g, w: g @ w * dist.get_world_size())),
        ("x is the sum over the ranks", mutants06.layer(x_gradient=lambda g, w: summed(g @ w))),
        (
            "x is the mean over the ranks",
            mutants06.layer(x_gradient=lambda g, w: summed(g @ w) / dist.get_world_size()),
        ),
        ("x is zero", mutants06.layer(x_gradient=lambda g, w: 0 * g @ w)),
        ("x has the wrong sign", mutants06.layer(x_gradient=lambda g, w: -g @ w)),
        ("x is 0.2 times", mutants06.layer(x_gradient=lambda g, w: g @ w / len(g))),
        (
            "x is divided twice by the number of ranks",
            mutants06.layer(x_gradient=lambda g, w: g @ w / dist.get_world_size() ** 2),
        ),
        (
            "x is multiplied twice by the number of ranks",
            mutants06.layer(x_gradient=lambda g, w: g @ w * dist.get_world_size() ** 2),
        ),
        ("x comes from this rank's own shard alone", mutants06.layer(x_gradient=lambda g, w: g @ own(w))),
        (
            "x comes from this rank's own shard alone: the other ranks' rows of the weight have a part in it, "
            "divided by",
            mutants06.layer(x_gradient=lambda g, w: g @ own(w) / dist.get_world_size()),
        ),
        (
            "x is a sum over the ranks of what each makes with its own shard",
            mutants06.layer(x_gradient=lambda g, w: summed(g @ own(w))),
        ),
        (
            "x is made with the shards in the order [1, 0]",
            mutants06.layer(x_gradient=lambda g, w: g @ reversed_shards(w)),
        ),
        (
            "x is made with a weight in which the ranks' rows take turns",
            mutants06.layer(x_gradient=lambda g, w: g @ in_turns(w)),
        ),
        (
            "x is made with the shards added up",
            mutants06.layer(
                x_gradient=lambda g, w: g @ torch.cat([sum(w.chunk(dist.get_world_size()))] * dist.get_world_size())
            ),
        ),
        ("x is that of rank 0 on every rank", mutants06.layer(x_gradient=lambda g, w: from_rank_0(g @ w))),
        ("x is that of another rank's rows", mutants06.layer(x_gradient=lambda g, w: of_the_next_rank(g @ w))),
        ("x is the same in all rows", mutants06.layer(x_gradient=lambda g, w: (g @ w).mean(0).expand(len(g), -1))),
        ("the number of ranks twice", layer(weight=lambda g: g / dist.get_world_size() ** 2)),
        ("the second shard has the wrong sign", layer(weight=lambda g: -g / dist.get_world_size())),
        ("the second shard is zero", layer(weight=lambda g: 0 * g)),
        ("that of another rank's rows", layer(scatter=other_order)),
        ("of this rank's own rows of the batch alone", mutants06.layer(reduce="none")),
        ("backward gathers more than the weights", layer(scatter=all_gradients)),
        ("in the order [1, 0]", layer(whole=lambda parts: torch.cat(parts[::-1]))),
        ("the ranks' rows take turns", layer(whole=lambda parts: torch.stack(parts, 1).flatten(0, 1))),
        ("added up, not put", layer(whole=lambda parts: torch.cat([sum(parts)] * len(parts)))),
        ("divided by the number of ranks: a mean", layer(whole=lambda parts: torch.cat(parts) / len(parts))),
    ],
)
def test_other_layers_of_fsdp_are_named(words, wrong):
    refused("06.4", wrong, words)
