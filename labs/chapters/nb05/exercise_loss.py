"""Exercise 05.3: a loss over a large vocabulary whose logits are never all there; the most that is alive is watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labs.chapters.nb05.exercise_recompute import Allocated
from labs.chapters.nb05.exercise_states import one_thread
from labs.kit.check import Mistake

Function = Callable[..., Any]
WORDS, WIDTH, CHUNK = 4096, 16, 32
IGNORED = -100
TOKENS = (256, 250, 20)  # whole chunks, a shorter last one, less than one


class Most(Allocated):
    """Notes the most bytes that were alive at once, and the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Called in place of each operation, with this mode switched off."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.alive())
        self.largest = max([self.largest, *(n for ref, n in self.storages.values() if not ref.expired())])
        return result


def _case(tokens: int, ignored: bool) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, WIDTH, generator=draw, requires_grad=True) for n in (tokens, WORDS))
    labels = torch.randint(WORDS, (tokens,), generator=draw)
    if ignored:
        labels[: tokens // 3] = IGNORED  # prompts and padding: whole chunks of them
    return hidden, weight, labels


def check_chunked_loss(f: Function) -> None:
    """Whole and broken chunks, with and without ignored tokens: loss, gradients, bytes, forward and backward."""
    with one_thread():
        for tokens in TOKENS:
            for ignored in (False, True):
                _check(f, tokens, ignored)


def _check(f: Function, tokens: int, ignored: bool) -> None:
    hidden, weight, labels = _case(tokens, ignored)
    parts = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    before = [t.detach().clone() for t in (*parts, labels)]
    with Most() as forward:
        loss = f(*parts, labels, CHUNK)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise Mistake(f"chunked_loss(...) gives {got}, not a tensor with one number",
                      "no .item(): backward needs the graph")  # fmt: skip
    kept = forward.alive()
    what = f"{tokens} tokens in chunks of {CHUNK}" + ", a third of them ignored" * ignored
    want = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
    _judge_loss(loss, want, hidden, weight, labels, what)
    if not loss.requires_grad:
        raise Mistake("the loss does not require grad: nothing would be trained",
                      "no_grad, detach() and .item() cut it off; checkpoint(..., use_reentrant=False) does "
                      "not")  # fmt: skip
    with Most() as backward:
        (3 * loss.reshape(())).backward()
    (3 * want).backward()
    for name, got, right in zip(("hidden", "weight"), parts, (hidden, weight), strict=True):
        _judge_gradient(name, got.grad, right.grad, what)
    if any(not torch.equal(t.detach(), b) for t, b in zip((*parts, labels), before, strict=True)):
        raise Mistake("the caller's tensors have changed", "work on new ones")
    if tokens > 2 * CHUNK:
        _judge_bytes(tokens, kept, forward, backward)


def _judge_loss(loss: Tensor, want: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor, what: str) -> None:
    if _close(loss, want):
        return
    with torch.no_grad():
        each = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
        counted = (labels != IGNORED).float()
        sums = [(part.sum(), n.sum()) for part, n in zip(each.split(CHUNK), counted.split(CHUNK), strict=True)]
        means = torch.stack([s / n for s, n in sums if n > 0])
        whole = len(labels) // CHUNK * CHUNK
        slips = (
            (each.sum(), "this is the sum over the tokens, not their mean", "divide by how many count"),
            (each.sum() / len(labels), "you divide by all tokens, the ignored ones among them",
             "(labels != -100).sum() tokens count"),
            (each[:whole].sum() / counted[:whole].sum().clamp(min=1), "the last, shorter chunk is left out",
             "hidden.split(chunk_tokens) gives it, too"),
            (means.mean(), "this is a mean of the chunks' means: tokens of a chunk in which fewer count weigh more",
             'reduction="sum" for each chunk, and one division at the end'),
        )  # fmt: skip
    if not math.isfinite(loss.item()):
        raise Mistake(f"{what}: the loss is {loss.item()}: the mean of a chunk in which no token counts is 0 / 0",
                      'reduction="sum" for each chunk')  # fmt: skip
    for wrong, why, hint in slips:
        if _close(loss, wrong):
            raise Mistake(f"{what}: {why}", hint)
    raise Mistake(f"{what}: the loss is {loss.item():.5g}, cross_entropy(hidden @ weight.T, labels) is "
                  f"{want.item():.5g}",
                  'cross_entropy(h @ weight.T, y, reduction="sum"), added up, over the tokens that count')  # fmt: skip


def _close(a: Tensor, b: Tensor) -> bool:
    return math.isclose(a.item(), b.item(), rel_tol=1e-4)


def _judge_gradient(name: str, got: Tensor | None, want: Tensor, what: str) -> None:
    if got is None or not got.any():
        raise Mistake(
            f"{what}: {name} gets no gradient", "do not detach it; in an autograd.Function of your own, return it"
        )
    first, *others = got.split(CHUNK)
    if name == "hidden" and others and all(map(first.equal, others)):
        raise Mistake(f"{what}: the tokens of every chunk get the gradient of the last chunk's: a function without "
                      "arguments looks its chunk up when it runs, and when it runs in backward, the loop is over",
                      "give the chunk as arguments: checkpoint(function, h, y, use_reentrant=False)")  # fmt: skip
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-5 * want.abs().max().item()):
        ratio = (got.flatten() @ want.flatten() / want.norm() ** 2).item()
        raise Mistake(f"{what}: the gradient of {name} is wrong, about {ratio:.2g} times the right one along "
                      f"its direction, "
                      "where 3 * loss goes backward", "backward has to pass on grad_output; every chunk adds "
                                                      "its part")  # fmt: skip


def _judge_bytes(tokens: int, kept: int, forward: Most, backward: Most) -> None:
    """Of the logits of all tokens: nothing that size, and little kept from forward to backward."""
    logits, chunk = 4 * tokens * WORDS, 4 * CHUNK * WORDS
    if max(forward.largest, backward.largest) > 0.9 * logits:
        raise Mistake(f"the logits of all {tokens} tokens are there at once: {logits / 1e6:.1f} MB",
                      "compute them in the loop, chunk by chunk")  # fmt: skip
    if kept > 2 * chunk:
        raise Mistake(f"after forward {kept / 1e6:.1f} MB are kept for backward, of logits that take "
                      f"{logits / 1e6:.1f} MB "
                      "in all: every chunk's logits wait for backward",
                      "checkpoint(function of a chunk, ..., use_reentrant=False): they come again there")  # fmt: skip
    most = max(forward.most, backward.most)
    if most > 8 * chunk:
        raise Mistake(f"at most {most / 1e6:.1f} MB are there at once, of chunks whose logits take "
                      f"{chunk / 1e6:.1f} MB",
                      "let a chunk's logits go before the next are made")  # fmt: skip
