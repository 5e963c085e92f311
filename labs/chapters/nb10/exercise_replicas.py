"""Exercise 10.2: do all ranks still hold the same bits? Changes are planted on real ranks; bytes are counted."""

from __future__ import annotations

import builtins
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.chapters.nb10.solution_replicas import replica_check
from labs.common.data_parallel.wire import tcp_sent_bytes
from labs.kit.answers import on_ranks
from labs.kit.check import Exercise, Mistake
from labs.kit.errors import brief

MOST_BYTES = 20_000
"""That a rank may send for one check. The model is a hundred times as large."""
Function = Callable[..., Any]
Answer = tuple[str, list[int]] | None
NAN = "NaN == NaN is False, and so is each comparison of numbers with it: compare bits, not numbers"


class Model(nn.Module):
    """A module of 2 MB with all that a module may hold. It is never trained here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2000, 64)
        self.mixed = nn.Linear(512, 512)
        self.norm = nn.BatchNorm1d(512)
        self.low = nn.Linear(512, 256, bias=False, dtype=torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(64, 256).t())  # not contiguous
        self.scale = nn.Parameter(torch.tensor(0.0))  # no dimension
        self.register_buffer("seen", torch.arange(2**60, 2**60 + 300))
        self.register_buffer("mask", torch.ones(512, dtype=torch.bool), persistent=False)
        with torch.no_grad():
            self.mixed.bias[7] = float("nan")  # on all ranks: the same bits
            self.embedding.weight.mul_(1024).round_().div_(1024)  # sums are exact in FP32, in any order


def model() -> Model:
    """The same on every rank, with a gradient in some parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(10)
        made = Model()
        made.mixed.weight.grad = torch.randn(512, 512)
    return made


def _bits(t: Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- what is planted


def _flip(m: Model) -> None:
    m.mixed.weight.data.view(torch.int32)[300, 200] ^= 1  # the last bit of one number


def _shift(m: Model) -> None:
    w = m.embedding.weight.data
    w[5, 3], w[900, 60] = w[900, 60].item(), w[5, 3].item()


def _buffer(m: Model) -> None:
    m.seen[299] += 1  # 2**60 + 300: no floating-point number is so near


def _counter(m: Model) -> None:
    m.norm.num_batches_tracked += 1


def _half(m: Model) -> None:
    m.low.weight.data.view(torch.int16)[17, 4] ^= 1


def _turned(m: Model) -> None:
    m.turned.data[200, 9] *= 1.5


def _mask(m: Model) -> None:
    m.mask[3] = False


def _zero(m: Model) -> None:
    m.scale.data.fill_(-0.0)


def _mean(m: Model) -> None:
    m.norm.running_mean[8] = 0.25


@dataclass(frozen=True)
class Case:
    """Who changes what, in words, and how many ranks there are."""

    ranks: int
    plants: tuple[tuple[int, Callable[[Model], None]], ...]
    """(rank, change) in the order of the tensors that they change"""
    answer: Answer
    words: str
    hint: str = "compare the bytes of each parameter and each buffer, all of them, on all ranks"


CASES = (
    Case(2, (), None, "all ranks hold the same bits"),
    Case(2, ((1, _shift),), ("embedding.weight", [1]), "rank 1 has two numbers of embedding.weight exchanged",
         "sums, means and norms stay as they are when numbers are exchanged, or when one grows by what another one "
         "loses: use a digest of the bytes, in their order"),
    Case(2, ((1, _counter),), ("norm.num_batches_tracked", [1]), "rank 1's norm.num_batches_tracked is ahead by 1",
         "buffers are a part of the model, too: module.named_buffers()"),
    Case(2, ((1, _half),), ("low.weight", [1]), "one bit of low.weight, in BF16, differs on rank 1"),
    Case(2, ((1, _turned),), ("turned", [1]), "one number of `turned`, which is not contiguous, differs on rank 1"),
    Case(3, (), None, "all ranks hold the same bits"),
    Case(3, ((2, _flip),), ("mixed.weight", [2]), "one bit of mixed.weight differs on rank 2",
         "in a sum the last bit of one number is lost: compare bytes, or digests of them"),
    Case(3, ((2, _buffer),), ("seen", [2]), "one number of `seen`, in int64, is larger by 1 on rank 2",
         "an int64 above 2**53 does not fit into a floating-point number: compare bytes"),
    Case(3, ((1, _mask),), ("mask", [1]), "one value of `mask`, a buffer that is not saved, differs on rank 1",
         "a state_dict() leaves out what is not persistent: use named_parameters() and named_buffers()"),
    Case(3, ((0, _turned),), ("turned", [1, 2]), "rank 0 has another number in `turned` than ranks 1 and 2",
         "the ranks are those that differ from rank 0: if rank 0 drifts, all others"),
    Case(3, ((2, _zero),), ("scale", [2]), "`scale` is -0.0 on rank 2 and 0.0 on the others",
         "other bits are another replica, also where == says the numbers are equal"),
    Case(3, ((2, _flip), (1, _mean)), ("mixed.weight", [2]),
         "mixed.weight differs on rank 2 and norm.running_mean on rank 1",
         "the first tensor that differs on any rank, parameters before buffers, and the ranks that differ in that one"),
)  # fmt: skip


# -- on the ranks


@dataclass(frozen=True)
class Seen:
    """What one call did on one rank; plain data."""

    answer: Any
    changed: str
    """What is not as it was, or "" """
    sent: int | None
    """Bytes; None where the kernel does not tell"""
    salted: bool
    """Python's hash() of a text or of bytes was taken"""


def _body(f: Function, cases: list[int]) -> list[Seen]:
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for k in cases:
        m = model()
        for who, plant in CASES[k].plants:
            if who == rank:
                with torch.no_grad():
                    plant(m)
        before = _state(m)
        sent = _sent()
        with _hash_of_this_process(rank) as salted:
            answer = _plain(f(m, rank, world))
        sent = None if sent is None else tcp_sent_bytes() - sent
        found.append(Seen(answer, _difference(before, _state(m)), sent, bool(salted)))
    return found


def _sent() -> int | None:
    """Bytes sent so far, when no other rank is still at the case before."""
    dist.barrier()
    return tcp_sent_bytes()


@contextmanager
def _hash_of_this_process(rank: int) -> Iterator[list[str]]:
    """Python's hash() as it is on ranks of a cluster: salted in each process. Here they are forks of one process."""
    real, used = builtins.hash, []

    def salted(x: Any) -> int:
        if _has_text(x):
            used.append(type(x).__name__)
            return real((f"salt of rank {rank}", x))
        return real(x)

    builtins.hash = salted
    try:
        yield used
    finally:
        builtins.hash = real


def _has_text(x: Any) -> bool:
    return isinstance(x, str | bytes | memoryview) or (isinstance(x, tuple | frozenset) and any(map(_has_text, x)))


def _state(m: nn.Module) -> dict[str, Any]:
    """Everything that a check must leave as it is."""
    found: dict[str, Any] = {}
    for name, t in [*m.named_parameters(), *m.named_buffers()]:
        found[f"{name}'s bits"] = (_bits(t), t.dtype, t.shape, t.stride())
        found[f"{name}.requires_grad"] = t.requires_grad
        found[f"the gradient of {name}"] = None if t.grad is None else _bits(t.grad)
    found["the mode, train or eval,"] = m.training
    found["torch's random state"] = _bits(torch.get_rng_state())
    found["Python's random state"] = random.getstate()
    found["numpy's random state"] = str(np.random.get_state())
    return found


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    return next((name for name in before if before[name] != after.get(name)), "")


def _plain(answer: Any) -> Any:
    """None, (name, ranks), or what was returned, as text: it travels between processes."""
    if answer is None:
        return None
    try:
        name, ranks = answer
        if name is None:  # where nothing differs None alone is asked for
            return brief(answer)
        return str(name)[:100], [min(max(int(r), -1), 10**6) for r in itertools.islice(ranks, 100)]
    except Exception:  # a learner's own class may raise anything
        return brief(answer)


# -- the checks


def check_replica_check(f: Function) -> None:
    """Every case, on 2 ranks and on 3: nothing changed, few bytes, the answer right and the same on all ranks."""
    seen: dict[int, list[Seen]] = {}
    for ranks in (2, 3):
        which = [k for k, case in enumerate(CASES) if case.ranks == ranks]
        each = on_ranks(_body, ranks, f, which, when="in your check")
        seen |= {k: [one[i] for one in each] for i, k in enumerate(which)}
    for k in seen:
        _check_left_alone(CASES[k], seen[k])
    for k in seen:
        _check_bytes(seen[k])
    for k in seen:
        _check_answers(CASES[k], seen[k])
    if (missed := _only_rank_1(seen)) is not None:
        raise missed
    for k in seen:
        _check_right(CASES[k], seen[k][0])


def _check_left_alone(case: Case, seen: list[Seen]) -> None:
    for rank, one in enumerate(seen):
        if one.changed:
            planted = any(who != 0 for who, _ in case.plants) and "bits" in one.changed
            raise Mistake(
                f"{case.words}: after your check {one.changed} {'are' if 'bits' in one.changed else 'is'} no longer "
                f"what it was on rank {rank}" + (": the drift is written over, and nobody sees it" if planted else ""),
                "a check only looks: work on copies, and draw no random numbers from the default generators",
            )


def _check_bytes(seen: list[Seen]) -> None:
    worst = max(one.sent or 0 for one in seen)
    if worst > MOST_BYTES:
        size = sum(t.nbytes for t in [*model().parameters(), *model().buffers()])
        raise Mistake(
            f"a rank sends {worst:,} bytes for one check of a model of {size:,} bytes; {MOST_BYTES:,} are allowed",
            "send a digest of each tensor, 8 to 32 bytes, instead of what it holds",
        )


def _check_answers(case: Case, seen: list[Seen]) -> None:
    for rank, one in enumerate(seen):
        if isinstance(one.answer, str):
            raise Mistake(f"you return {one.answer}", 'return ("name of the tensor", [ranks that differ]), or None')
        if one.salted and case.answer is None is not one.answer:
            raise Mistake(
                f"{case.words}, and you return {_said(one.answer)}: hash() of bytes or text is salted, and gives "
                "another number in every process, unless PYTHONHASHSEED is set",
                "use hashlib, or zlib.crc32, which give the same everywhere",
            )
        if one.answer != seen[0].answer:
            raise Mistake(
                f"{case.words}: rank 0 returns {_said(seen[0].answer)} and rank {rank} {_said(one.answer)}",
                "all ranks must know it, to stop or go on together: all_gather, then the same comparison on each",
            )


def _only_rank_1(seen: dict[int, list[Seen]]) -> Mistake | None:
    """If all that is found is what differs on rank 1."""
    right = {k: one[0].answer == CASES[k].answer for k, one in seen.items()}
    beyond = [k for k in right if CASES[k].answer and 2 in CASES[k].answer[1]]
    if all(ok for k, ok in right.items() if k not in beyond) and not any(right[k] for k in beyond):
        case = CASES[beyond[0]]
        return Mistake(
            f"{case.words}, and you return {_said(seen[beyond[0]][0].answer)}; what differs on rank 1 you find",
            "compare every rank with rank 0, however many there are",
        )
    return None


def _check_right(case: Case, one: Seen) -> None:
    if one.answer == case.answer:
        return
    if case.answer is None:
        nan = one.answer and one.answer[0] == "mixed.bias"
        raise Mistake(
            f"{case.words} ({case.ranks} ranks), and you return {_said(one.answer)}"
            + (", in which one number is NaN" if nan else ""),
            NAN if nan else "the same bytes must give the same digest in every process",
        )
    if one.answer is not None and one.answer[0] == case.answer[0] and set(one.answer[1]) == set(case.answer[1]):
        raise Mistake(f"{case.words}: you return {_said(one.answer)}", "each rank once, in ascending order")
    raise Mistake(f"{case.words}: {_said(case.answer)}, and you return {_said(one.answer)}", case.hint)


def _said(answer: Answer) -> str:
    return "None" if answer is None else f"({answer[0]!r}, {answer[1]})"


def shown_model() -> str:
    """What the model holds: name, kind, dtype, shape, bytes of each tensor."""
    kinds = (("parameter", model().named_parameters()), ("buffer", model().named_buffers()))
    rows = [
        f"{name:26} {kind:10} {str(t.dtype)[6:]:9} {tuple(t.shape)!s:12} {t.nbytes:9,} bytes"
        + ("" if t.is_contiguous() else "  not contiguous")
        for kind, of in kinds
        for name, t in of
    ]
    return "\n".join(rows)


EXERCISE = Exercise("do all ranks hold the same bits?", check_replica_check, replica_check)
