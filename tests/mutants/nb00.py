"""Typical mistakes in notebook 00: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math


def _by_position(cuda, nvml):
    return list(range(len(cuda)))


def _prefix_kept(cuda, nvml):
    return [nvml.index(u) if u in nvml else None for u in cuda]


def _case_kept(cuda, nvml):
    known = {u.removeprefix("GPU-"): i for i, u in enumerate(nvml)}
    return [known.get(u) for u in cuda]


def _inverse(cuda, nvml):
    known = {u.lower(): i for i, u in enumerate(cuda)}
    return [known.get(u.lower().removeprefix("gpu-")) for u in nvml]


def _raises_on_unknown(cuda, nvml):
    bare = [u.lower().removeprefix("gpu-") for u in nvml]
    return [bare.index(u.lower()) for u in cuda]


def _drops_unknown(cuda, nvml):
    known = {u.lower().removeprefix("gpu-"): i for i, u in enumerate(nvml)}
    return [known[u.lower()] for u in cuda if u.lower() in known]


def _minus_one(cuda, nvml):
    known = {u.lower().removeprefix("gpu-"): i for i, u in enumerate(nvml)}
    return [known.get(u.lower(), -1) for u in cuda]


def _crashes_on_max(affinity, cpu_max):
    quota, period = map(int, cpu_max.split())
    return max(1, min(len(affinity), quota // period))


def _quota_only(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else max(1, int(quota) // int(period))


def _affinity_only(affinity, cpu_max):
    return len(affinity)


def _fixed_period(affinity, cpu_max):
    quota = cpu_max.split()[0]
    return len(affinity) if quota == "max" else max(1, min(len(affinity), int(quota) // 100_000))


def _zero_cores(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), int(quota) // int(period))


def _rounds_up(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), math.ceil(int(quota) / int(period)))


MUTANTS = {
    "00.1": {
        "by position": (_by_position, "CUDA device i to be NVML device i"),
        "prefix kept": (_prefix_kept, "no UUID was found"),
        "capitals kept": (_case_kept, "capitals"),
        "inverse mapping": (_inverse, "maps NVML indices to CUDA"),
        "raises on an unknown card": (_raises_on_unknown, "does not list"),
        "drops an unknown card": (_drops_unknown, "left out"),
        "-1 for an unknown card": (_minus_one, "gets -1"),
    },
    "00.2": {
        "max not handled": (_crashes_on_max, "no quota"),
        "quota only": (_quota_only, "may run on one"),
        "affinity only": (_affinity_only, "quota is ignored"),
        "period assumed": (_fixed_period, "period"),
        "half a core is none": (_zero_cores, "0 cores"),
        "rounded up": (_rounds_up, "2.2 cores became 3"),
    },
    "00.3": {
        "peak only": (lambda i, p, b: p, "bandwidth plays no part"),
        "larger limit": (lambda i, p, b: max(p, i * b), "larger of the two"),
        "no roof": (lambda i, p, b: i * b, "nothing stops it"),
        "divided": (lambda i, p, b: min(p, b / i), "falls when there is more work"),
        "in GFLOP/s": (lambda i, p, b: min(p, i * b) / 1e9, "this is in GFLOP/s"),
        "times added": (lambda i, p, b: 1 / (1 / p + 1 / (i * b)), "added the two times"),
    },
    "00.4": {
        "algbw": (lambda s, t, n: s / t / 1e9, "algbw"),
        "all-gather's factor": (lambda s, t, n: s / t * (n - 1) / n / 1e9, "all-gather"),
        "all ranks together": (lambda s, t, n: s / t * 2 * (n - 1) / 1e9, "all ranks send together"),
        "upside down": (lambda s, t, n: s / t * n / (2 * (n - 1)) / 1e9, "upside down"),
        "GiB": (lambda s, t, n: s / t * 2 * (n - 1) / n / 2**30, "GiB/s"),
        "bits": (lambda s, t, n: 8 * s / t * 2 * (n - 1) / n / 1e9, "Gbit/s"),
        "factor 2": (lambda s, t, n: 2 * s / t / 1e9, "infinitely many"),
    },
}
