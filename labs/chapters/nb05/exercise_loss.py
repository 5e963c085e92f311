"""Exercise 05.3: a loss over a large vocabulary whose logits are never all there; the most that is alive is watched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from labs.chapters.nb05.exercise_recompute import Allocated
from labs.chapters.nb05.exercise_states import one_thread
from labs.kit.check import Mistake

Function = Callable[..., Any]
WORDS, WIDTH = 4096, 16
IGNORED = -100
SIZES = ((256, 32), (250, 32), (20, 32), (2048, 16))
"""(tokens, tokens of a chunk): whole chunks, a shorter last one, less than one; more chunks than a chunk has tokens."""

ROOM = 10 * 4 * 32 * WORDS
"""Bytes of the logits of ten chunks of 32 tokens, or of five in FP64: the most that may be there at once."""


class Most(Allocated):
    """Notes the most bytes that were alive at once, and the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.alive())
        self.largest = max([self.largest, *(n for _, n in self.storages.values())])  # those alive, by now
        return result


def _case(tokens: int, ignored: bool) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, WIDTH, generator=draw, requires_grad=True) for n in (tokens, WORDS))
    labels = torch.randint(WORDS, (tokens,), generator=draw)
    labels[-1] = 0  # a word like any other
    if ignored:
        labels[: tokens // 3] = IGNORED  # prompts and padding: whole chunks of them
    return hidden, weight, labels


def check_chunked_loss(f: Function) -> None:
    """Whole and broken chunks, with and without ignored tokens: loss, gradients, bytes, forward and backward."""
    with one_thread():
        for tokens, chunk in SIZES:
            for ignored in (False, True):
                _check(f, tokens, chunk, ignored)


def _check(f: Function, tokens: int, chunk: int, ignored: bool) -> None:
    hidden, weight, labels = _case(tokens, ignored)
    parts = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    before = [t.detach().clone() for t in (*parts, labels)]
    with Most() as forward:
        loss = f(*parts, labels, chunk)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise Mistake(
            f"chunked_loss(...) gives {got}, not a tensor with one number", "no .item(): backward needs the graph"
        )
    kept = forward.alive()
    what = f"{tokens} tokens in chunks of {chunk}" + ", a third of them ignored" * ignored
    want = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    _judge_loss(loss, want, hidden, weight, labels, chunk, what)
    if not loss.requires_grad:
        raise Mistake(
            "the loss does not require grad: nothing would be trained",
            "no_grad, detach() and .item() cut it off; checkpoint(..., use_reentrant=False) does not",
        )
    with Most() as backward:
        (3 * loss.reshape(())).backward()
    (3 * want).backward()
    for name, got, right in zip(("hidden", "weight"), parts, (hidden, weight), strict=True):
        _judge_gradient(name, got.grad, right.grad, chunk, what)
    if any(not torch.equal(t.detach(), b) for t, b in zip((*parts, labels), before, strict=True)):
        raise Mistake("the caller's tensors have changed", "work on new ones")
    if tokens > 2 * chunk:
        _judge_bytes(tokens, chunk, kept, forward, backward)


Slip = tuple[Tensor, str, str]
"""What a mistake makes of the loss, what the mistake is, and a hint."""


def _judge_loss(
    loss: Tensor, want: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, what: str
) -> None:
    if _close(loss, want):
        return
    if not math.isfinite(loss.item()):
        raise Mistake(
            f"{what}: the loss is {loss.item()}: the mean of a chunk in which no token counts is 0 / 0",
            'reduction="sum" for each chunk',
        )
    with torch.no_grad():
        logits = hidden @ weight.T
        each = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        for wrong, why, hint in (*_other_losses(logits, labels, want), *_other_sums(each, labels, chunk)):
            if _close(loss, wrong):
                raise Mistake(f"{what}: {why}", hint)
    raise Mistake(
        f"{what}: the loss is {loss.item():.5g}, cross_entropy(hidden @ weight.T, labels) is {want.item():.5g}",
        'cross_entropy(h @ weight.T, y, reduction="sum"), added up, over the tokens that count',
    )


def _other_sums(each: Tensor, labels: Tensor, chunk: int) -> Iterator[Slip]:
    """Of the tokens' losses: other divisors, then chunks that are left out or come twice."""
    counted = (labels != IGNORED).float()
    sums, ns = (torch.stack([part.sum() for part in t.split(chunk)]) for t in (each, counted))
    means, sizes = (sums / ns).nan_to_num(), torch.tensor([float(len(part)) for part in each.split(chunk)])
    total, n, chunks = sums.sum(), ns.sum(), len(sums)
    yield total, "this is the sum over the tokens, not their mean", "divide by how many count"
    yield (
        total / len(labels),
        "you divide by all tokens, the ignored ones among them",
        "(labels != -100).sum() tokens count",
    )
    yield (
        total / (labels > 0).sum(),
        "you divide by the number of labels above 0: word 0 counts, too",
        "(labels != -100).sum() tokens count",
    )
    divide = "divide by (labels != -100).sum(), once"
    yield total / chunks, "you divide the sum by the number of chunks", divide
    yield total / chunk, "you divide the sum by the tokens of one chunk", divide
    yield total / (chunk * chunks), "you divide as if every chunk were full and every token counted", divide
    one = 'reduction="sum" for each chunk, and one division at the end'
    yield (
        means[ns > 0].mean(),
        "this is a mean of the chunks' means: tokens of a chunk in which fewer count weigh more",
        one,
    )
    yield means.mean(), "this is a mean of the chunks' means, and chunks in which no token counts are in it as 0", one
    yield means.sum(), "this is the sum of the chunks' means", one
    yield (
        means @ sizes / len(labels),
        "you weigh each chunk's mean by all its tokens, the ignored ones among them",
        one,
    )
    for times, why, hint in _other_times(chunks, len(labels) % chunk):
        for divisor in (n, times @ ns):
            yield times @ sums / divisor, why, hint
    ends = torch.arange(len(labels)) % chunk
    for left_out, name in ((ends == chunk - 1, "last"), (ends == 0, "first")):
        for divisor in (n, counted[~left_out].sum()):
            yield each[~left_out].sum() / divisor, f"the {name} token of each chunk is left out", SPLIT


SPLIT = "hidden.split(chunk_tokens) gives all chunks, also a shorter last one"


def _other_times(chunks: int, rest: int) -> Iterator[Slip]:
    """How often each chunk counts."""
    ones, numbers = torch.ones(chunks), torch.arange(chunks)
    yield (numbers == chunks - 1).float(), "only the last chunk counts: the others are overwritten", "total + ..."
    yield (numbers == 0).float(), "only the first chunk counts", "return after the loop"
    yield (numbers % 2 == 0).float(), "every second chunk is left out", SPLIT
    yield (numbers % 2 == 1).float(), "every second chunk is left out, from the first on", SPLIT
    for i in range(chunks):
        alone = (numbers == i).float()
        last = "the last, shorter chunk" if rest else "the last chunk"
        name = "the first chunk" if i == 0 else last if i == chunks - 1 else f"chunk {i + 1} of {chunks}"
        yield ones - alone, f"{name} is left out", SPLIT
        yield ones + alone, f"{name} counts twice", "begin with 0, add each chunk once"


def _other_losses(logits: Tensor, labels: Tensor, want: Tensor) -> Iterator[Slip]:
    cross_entropy = torch.nn.functional.cross_entropy
    yield -want, "the sign is wrong", "cross_entropy is above 0: it is to fall"
    yield want.exp(), "this is the perplexity, exp(loss)", "the loss itself"
    yield want / math.log(2), "this is in bits: the logarithm is the natural one", "cross_entropy gives it"
    yield (
        cross_entropy(logits, labels.clamp(min=0)),
        "labels of -100 count as word 0",
        "leave them to cross_entropy, which ignores -100",
    )
    yield (
        cross_entropy(logits.softmax(1), labels),
        "softmax comes twice: cross_entropy takes logits",
        "no softmax before it",
    )
    yield (
        cross_entropy(logits, labels.roll(-1)),
        "each token is held against the next one's label",
        "labels belong to hidden, row by row",
    )
    if len(labels) > 1:
        yield (
            cross_entropy(logits[:-1], labels[1:]),
            "each token is held against the next one's label",
            "labels belong to hidden, row by row",
        )
    used = labels != IGNORED
    right = logits.gather(1, labels.clamp(min=0)[:, None])[used].mean()
    yield -right, "the logarithm of the sum of exponentials is missing", "log_softmax, or cross_entropy"
    yield logits.logsumexp(1)[used].mean(), "the logit of the label itself is missing", "log_softmax, or cross_entropy"


def _close(a: Tensor, b: Tensor) -> bool:
    return math.isclose(a.item(), b.item(), rel_tol=1e-4)


def _judge_gradient(name: str, got: Tensor | None, want: Tensor, chunk: int, what: str) -> None:
    if got is None or not got.any():
        raise Mistake(
            f"{what}: {name} gets no gradient", "do not detach it; in an autograd.Function of your own, return it"
        )
    first, *others = got.split(chunk)
    if name == "hidden" and others and all(map(first.equal, others)):
        raise Mistake(
            f"{what}: the tokens of every chunk get the gradient of the last chunk's: a function without "
            "arguments looks its chunk up when it runs, and when it runs in backward, the loop is over",
            "give the chunk as arguments: checkpoint(function, h, y, use_reentrant=False)",
        )
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-5 * want.abs().max().item()):
        ratio = (got.flatten() @ want.flatten() / want.norm() ** 2).item()
        raise Mistake(
            f"{what}: the gradient of {name} is wrong, about {ratio:.2g} times the right one along "
            f"its direction, "
            "where 3 * loss goes backward",
            "backward has to pass on grad_output; every chunk adds its part",
        )


def _judge_bytes(tokens: int, chunk_tokens: int, kept: int, forward: Most, backward: Most) -> None:
    """Of the logits of all tokens: nothing that size, and little kept from forward to backward."""
    logits, chunk = 4 * tokens * WORDS, 4 * chunk_tokens * WORDS
    if max(forward.largest, backward.largest) > 0.9 * logits:
        raise Mistake(
            f"the logits of all {tokens} tokens are there at once: {logits / 1e6:.1f} MB",
            "compute them in the loop, chunk by chunk",
        )
    if kept > ROOM // 5:
        raise Mistake(
            f"after forward {kept / 1e6:.1f} MB are kept for backward, of logits that take "
            f"{logits / 1e6:.1f} MB "
            "in all: every chunk's logits wait for backward",
            "checkpoint(function of a chunk, ..., use_reentrant=False): they come again there",
        )
    most, own = max(forward.most, backward.most), forward.largest // (4 * WORDS)
    if most > ROOM and own >= 2 * chunk_tokens:
        raise Mistake(
            f"your chunks have {own} tokens, not {chunk_tokens}",
            "hidden.split(n) makes chunks of n tokens, hidden.chunk(n) makes n chunks",
        )
    if most > ROOM:
        raise Mistake(
            f"at most {most / 1e6:.1f} MB are there at once, of chunks whose logits take {chunk / 1e6:.1f} MB",
            "let a chunk's logits go before the next are made",
        )
