"""Traces of several ranks made by hand in the form that torch.profiler gives them, with what is true of them known."""

from __future__ import annotations

import json
import random
from pathlib import Path

BASE_NS = 1_790_857_026_000_000_000
TRANSFER_S = 4e-4  # of an all-reduce, once the last rank has come


def made(
    ranks: int = 2,
    steps: int = 6,
    *,
    backend: str = "gloo",
    late: dict[int, float] | None = None,
    clocks: dict[int, float] | None = None,
    hosts: list[str] | None = None,
    buckets: int = 3,
    jitter_s: float = 1e-4,
    seed: int = 0,
) -> list[dict]:
    """A trace for each rank of the same steps. `late`: s of sleep in backward; `clocks`: s that a clock is ahead.

    A step is 1 ms of data, 5 of forward, 12 of backward in which the buckets become ready, 1 of optimizer; the gloo
    thread notes an end up to `jitter_s` late.
    """
    draw = random.Random(seed)
    found = [[] for _ in range(ranks)]
    now = 0.01
    for step in range(steps):
        begin = [now + draw.uniform(0, jitter_s) for _ in range(ranks)]
        backward = [t + 0.006 for t in begin]
        ready = [
            [backward[r] + 0.012 * (k + 1) / buckets + ((late or {}).get(r, 0.0) if k else 0.0) for k in range(buckets)]
            for r in range(ranks)
        ]
        free, ends = 0.0, []
        for k in range(buckets):
            free = max(free, *(ready[r][k] for r in range(ranks))) + TRANSFER_S
            ends.append(free)
        for r in range(ranks):
            rows = found[r]
            rows += _phase(step, begin[r], backward[r], ready[r][-1], free, backend)
            for k in range(buckets):
                end = ends[k] + draw.uniform(0, jitter_s)
                rows += _collective(ready[r][k], end, k, backend)
        now = free + 0.002
    return [
        _trace(rows, r, ranks, backend, (clocks or {}).get(r, 0.0), (hosts or ["one"] * ranks)[r])
        for r, rows in enumerate(found)
    ]


def _phase(step: int, begin: float, backward: float, ready: float, end: float, backend: str) -> list[dict]:
    ranges = [
        ("data", begin, begin + 0.001),
        ("forward", begin + 0.001, backward),
        ("backward", backward, end + 1e-4),
        ("optimizer", end + 1e-4, end + 0.0011),
    ]
    rows = [_bar(name, "user_annotation", a, b) for name, a, b in ranges]
    rows.append(_bar(f"ProfilerStep#{step}", "user_annotation", begin, end + 0.0012))
    op = "aten::addmm" if backend == "gloo" else "ampere_sgemm_128x64_nn"
    kind = "cpu_op" if backend == "gloo" else "kernel"
    rows += [_bar(op, kind, begin + 0.001, backward), _bar(op, kind, backward, ready, tid=7)]
    rows.append(_bar("Optimizer.step#SGD.step", kind if backend != "gloo" else "cpu_op", end + 1e-4, end + 0.0011))
    if backend == "nccl":
        rows += [_bar(name, "gpu_user_annotation", a, b, tid=7) for name, a, b in ranges]
    return rows


def _collective(ready: float, end: float, k: int, backend: str) -> list[dict]:
    if backend == "gloo":
        return [
            _bar("c10d::allreduce_", "cpu_op", ready - 2e-5, ready),
            _bar("gloo:all_reduce", "user_annotation", ready, end, tid=100 + k % 2),
        ]
    args = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1000, "dtype": "Float"}
    return [
        _bar("record_param_comms", "cpu_op", ready - 0.003, ready - 0.0029),
        _bar(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "kernel",
            ready,
            end,
            tid=20,
            args=args,
        ),
    ]


def _bar(name: str, kind: str, start: float, end: float, tid: int = 1, args: dict | None = None) -> dict:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "pid": 5,
        "tid": tid,
        "ts": round(1e6 * start, 3),
        "dur": round(1e6 * (end - start), 3),
        "args": args or {},
    }


def _trace(rows: list[dict], rank: int, ranks: int, backend: str, ahead_s: float, host: str) -> dict:
    return {
        "schemaVersion": 1,
        "deviceProperties": [],
        "distributedInfo": {"backend": backend, "rank": rank, "world_size": ranks, "pg_count": 1},
        "host_name": host,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS + round(1e9 * ahead_s),
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "ts": 0.0, "args": {"name": "python"}},
            *rows,
        ],
        "traceName": "trace.json",
    }


def written(folder: Path, traces: list[dict]) -> list[Path]:
    """rank0.json, rank1.json, ... in `folder`."""
    paths = [folder / f"rank{r}.json" for r in range(len(traces))]
    for path, trace in zip(paths, traces, strict=True):
        path.write_text(json.dumps(trace, indent=1), "utf-8")
    return paths
