"""Exercises of notebook 00: who is which GPU, how many cores, how fast at most, how fast the link."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence, Sized
from operator import index
from typing import Any

from labs.chapters.nb00 import solutions as solution
from labs.kit.answers import number
from labs.kit.check import Exercise, Mistake

Function = Callable[..., Any]

# A listing as nvidia-smi -L prints it, and the same cards as torch shows them: fastest first, and one of
# them (a card in another container's hands) is known to CUDA only.
T4, T4_TOO, H100, H100_TOO = (str(uuid.UUID(int=n * 0x1B2C3D4E5F60718293A4B5C6D7E8F901)) for n in (1, 2, 3, 4))
NVML = (f"GPU-{T4}", f"GPU-{T4_TOO}", f"GPU-{H100.upper()}", f"GPU-{H100_TOO.upper()}")
CUDA = (H100, H100_TOO, T4, T4_TOO)
A, B, C, ELSEWHERE = (str(uuid.UUID(letter * 32)) for letter in "abcd")


def check_nvml_indices(f: Function) -> None:
    """UUIDs decide, in CUDA order, with an unknown card as None."""
    first = _outcome(lambda: f(list(CUDA), list(NVML)))
    if isinstance(first, Exception):
        raise Mistake(
            f"the first listing, in which NVML knows every card, ends in {type(first).__name__}: {first}",
            'NVML writes "GPU-" in front and may use capitals; torch does neither: bring both to one form first',
        )
    got = _list(first)
    if got == [0, 1, 2, 3]:
        raise Mistake("you took CUDA device i to be NVML device i", "CUDA puts the fastest card first: use the UUIDs")
    if got == [None] * 4:
        raise Mistake("no UUID was found", 'NVML writes "GPU-" in front and may use capitals; torch does neither')
    if got[:2] == [None, None] and got[2:] == [0, 1]:
        raise Mistake("UUIDs with capitals were not found", "compare lower-case copies")
    # A permutation of order 3 is not its own inverse: it tells a mapping from its reverse.
    three = [f"GPU-{known}" for known in (A, B, C)]
    shift = _list(f([C, A, B], three))
    if shift == [1, 2, 0]:
        raise Mistake("this maps NVML indices to CUDA's", "entry i must be the NVML index of CUDA device i")
    hidden = _list(f([C], three))
    if hidden != [2] and shift == [2, 0, 1]:
        raise Mistake(f"with one card visible (CUDA_VISIBLE_DEVICES=2) you return {hidden}, not [2]",
                      "the two lists need not have the same length")  # fmt: skip
    unknown = _outcome(lambda: f([A, ELSEWHERE, B], three[:2]))
    if isinstance(unknown, Exception):
        raise Mistake(f"a card that NVML does not list ends in {type(unknown).__name__}", "answer None for it")
    unknown = _list(unknown)
    if unknown == [0, -1, 1]:
        raise Mistake("an unknown card gets -1, and -1 is an index: Python takes it for the last card",
                      "answer None for it")  # fmt: skip
    if len(unknown) == 2:
        raise Mistake("an unknown card is left out, so the cards after it get the wrong place", "answer None for it")
    _same(unknown, [0, None, 1], "CUDA a, d, b and NVML a, b (short for their UUIDs)")
    _same(got, [2, 3, 0, 1], "the four cards of the listing")
    _same(shift, [2, 0, 1], "CUDA c, a, b and NVML a, b, c (short for their UUIDs)")


def check_usable_cores(f: Function) -> None:
    """Affinity and quota both count; whole threads; never none."""
    free = _outcome(lambda: f({0, 1, 2, 3}, "max 100000"))
    if isinstance(free, Exception):
        raise Mistake(f'"max 100000" ends in {type(free).__name__}', '"max" means that there is no quota')
    if isinstance(free, Sized):
        raise Mistake(f"you return {free!r:.60}, not a number", "affinity is a set of cores: its length counts them")
    _same(number(free, "4"), 4, 'four cores and "max 100000"')
    if f({5}, "max 100000") == 6:
        raise Mistake(
            "affinity {5}, one core, became 6 cores", "it holds the cores' numbers: count them, len(affinity)"
        )
    if (got := f({5}, "400000 100000")) == 4:
        raise Mistake("a quota of 4 gave 4 cores to a process that may run on one", "take the smaller of the two")
    _same(got, 1, 'affinity {5} and "400000 100000"')
    if (got := f(set(range(8)), "200000 100000")) == 8:
        raise Mistake("the quota is ignored", "200000 100000 grants 2 CPU seconds per second, whatever the affinity")
    _same(got, 2, 'eight cores and "200000 100000"')
    if (got := f(set(range(8)), "100000 50000")) == 1:
        raise Mistake("the period was taken to be 100000", "the second number is the period: 100000 / 50000 = 2 cores")
    _same(got, 2, 'eight cores and "100000 50000"')
    if (got := f(set(range(8)), "50000 100000")) == 0:
        raise Mistake("half a core became 0 cores", "something can always run: at least 1")
    if got == 8:
        raise Mistake("half a core became 8 cores, as if there were no quota",
                      "int(0.5) is 0, and `0 or other` is the other: max(1, ...)")  # fmt: skip
    if got == 0.5:
        raise Mistake("half a core gives 0.5", "whole threads, at least 1")
    _same(got, 1, 'eight cores and "50000 100000"')
    if f(set(range(8)), "220000 100000") == 3:
        raise Mistake("2.2 cores became 3", "the third thread would run a fifth of the time: round down")
    if (got := f(set(range(8)), "270000 100000")) == 3:
        raise Mistake("2.7 cores became 3", "the third thread would be stopped for part of every period: round down")
    _same(got, 2, 'eight cores and "270000 100000"')
    for answer in (free, got):
        try:
            index(answer)
        except TypeError:
            raise Mistake(f"{answer!r} is not a whole number", "a rank takes one core: answer an int") from None


def check_attainable(f: Function) -> None:
    """Left of the ridge memory limits, right of it arithmetic."""
    peak, bandwidth = 100e9, 20e9  # the ridge is at 5 FLOP per byte
    left, right = (number(f(i, peak, bandwidth), "2e10, in FLOP/s") for i in (1.0, 50.0))
    if math.isclose(left, 20) and math.isclose(right, 100):
        raise Mistake("this is in GFLOP/s", "peak_flop_s is in FLOP/s, and so must the answer be: divide by nothing")
    if left == peak and right == peak:
        raise Mistake("the memory bandwidth plays no part", "at 1 FLOP per byte, 20 GB/s feed 20 GFLOP/s")
    if left == peak and right == 50 * bandwidth:
        raise Mistake("you took the larger of the two limits", "both must be kept: the smaller one counts")
    if math.isclose(left, 20e9) and right == 50 * bandwidth:
        raise Mistake("nothing stops it at the arithmetic peak", "50 FLOP per byte would ask 1000 GFLOP/s of 100")
    if math.isclose(left, bandwidth / 1.0) and math.isclose(right, bandwidth / 50):
        raise Mistake("bandwidth / intensity falls when there is more work per byte", "FLOP/byte x byte/s = FLOP/s")
    if math.isclose(left, 1 / (1 / peak + 1 / 20e9)):
        raise Mistake(
            "you added the two times",
            "the roofline lets arithmetic and memory traffic overlap: take the smaller rate",
        )
    _close(left, 20e9, "intensity 1, peak 100 GFLOP/s, 20 GB/s")
    _close(right, 100e9, "intensity 50, peak 100 GFLOP/s, 20 GB/s")
    _close(number(f(5.0, peak, bandwidth), "1e11"), 100e9, "the ridge, intensity 5")
    _close(number(f(0.25, 67e12, 4.8e12), "1e12"), 1.2e12, "intensity 0.25, 67 TFLOP/s, 4.8 TB/s")


def check_busbw(f: Function) -> None:
    """nccl-tests' definition, in 10^9 byte/s."""
    known = {
        1.0: ("this is algbw: size / time", "multiply by 2 (n - 1) / n"),
        0.75: (
            "the factor (n - 1) / n is that of all-gather",
            "an all-reduce sends everything twice: 2 (n - 1) / n",
        ),
        6.0: (
            "2 (n - 1) is what all ranks send together",
            "divide by n: one link carries 2 (n - 1) / n of the buffer",
        ),
        4 / 6: (
            "the factor is upside down",
            "busbw is larger than algbw for n > 2: multiply by 2 (n - 1) / n",
        ),
        1.5e9 / 2**30: ("this is in GiB/s", "link speeds are in 10^9 byte/s"),
        12.0: ("this is in Gbit/s", "buffers are in bytes: do not multiply by 8"),
        1.5e9: ("this is in byte/s", "divide by 10^9 to get GB/s"),
        1e9: ("this is algbw, size / time, and in byte/s", "multiply by 2 (n - 1) / n, and divide by 10^9 to get GB/s"),
        1e9 / 2**30: ("this is algbw, size / time, and in GiB/s", "multiply by 2 (n - 1) / n; GB are 10^9 bytes"),
        2.0: ("the factor 2 holds for infinitely many ranks only", "use 2 (n - 1) / n"),
    }
    got = number(f(1_000_000_000, 1.0, 4), "1.5, in GB/s")
    for value, (what, hint) in known.items():
        if math.isclose(got, value, rel_tol=1e-6):
            raise Mistake(what, hint)
    _close(got, 1.5, "10^9 bytes, 1 s, 4 ranks")
    _close(number(f(32e6, 0.04, 2), "0.8"), 0.8, "32 MB, 40 ms, 2 ranks")
    _close(number(f(1e9, 1.0, 1), "0.0"), 0.0, "one rank, which sends nothing")


def _list(value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Mistake(f"a list is needed, you returned {type(value).__name__}", "one entry per CUDA device, in order")
    return list(value)


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (KeyError, ValueError, IndexError, TypeError, StopIteration) as e:
        return e


def _same(got: Any, want: Any, case: str) -> None:
    if got != want:
        raise Mistake(f"for {case} you return {got!r}, not {want!r}")


def _close(got: float, want: float, case: str) -> None:
    if not math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-12):
        raise Mistake(f"for {case} you return {got:.6g}, not {want:.6g}")


EXERCISES = {
    "00.1": Exercise("map CUDA devices to NVML indices by UUID", check_nvml_indices, solution.nvml_indices),
    "00.2": Exercise("count usable cores from affinity and cpu.max", check_usable_cores, solution.usable_cores),
    "00.3": Exercise("compute the attainable FLOP/s (roofline)", check_attainable, solution.attainable_flop_s),
    "00.4": Exercise("compute the bus bandwidth of an all-reduce", check_busbw, solution.busbw_gb_s),
}
