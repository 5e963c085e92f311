"""What notebook 06's records say of two devices against one: their speed, what each holds, and who is idle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from labs import data_parallel
from labs.common.sources import published
from labs.kit.claims import last, model_of, pairs, runs
from labs.kit.measure import Estimate, estimate
from labs.kit.record import Record, Records
from labs.pipeline_parallel import analysis

PIPELINE, TENSOR, SHARDED = "pipeline_parallel", "tensor_parallel", "fully_sharded"
NAIVE = "naive split"
WHOLE = ("single", "copies")
NAMES = {"1f1b": "1F1B", "gpipe": "GPipe"}


class Scheme(NamedTuple):
    """A way to train on two devices, against one device."""

    name: str
    case: str
    """Model or setting"""
    speed: Estimate
    """Samples per second over those of one device"""
    share: float = 1.0
    """Of what one device would hold: what the one of the two holds that has more"""

    @property
    def timed(self) -> str:
        """For example "DDP 1.80 x [1.70, 1.90] (cnn)"."""
        return f"{self.name} {self.speed} ({self.case})"

    def __str__(self) -> str:
        return f"{self.name} {self.speed}, {100 * self.share:.0f} % of the memory ({self.case})"


# -- labs.pipeline_parallel


def chains(evidence: Records, metric: str, **case: object) -> dict[str, Records]:
    """{model: records of the last launch on two devices with such a record of it}. LookupError if there is none."""
    found = {}
    for run in runs(evidence, PIPELINE, metric, **case):
        for r in run.where(metric, **case):
            if run[0].layout.get("world_size") == 2:
                found[r.case["chain"]] = Records(x for x in run if x.case.get("chain") == r.case["chain"])
    if not found:
        raise LookupError(f"launch({PIPELINE!r}, nproc=2) with {metric!r} is needed")
    return found


def devices(evidence: Records) -> str:
    """Where the pipelines ran: "two GPUs", or "two CPU cores"."""
    kinds = {r.layout.get("device") for run in chains(evidence, "step_s").values() for r in run}
    return "two GPUs" if kinds == {"cuda"} else "two CPU cores" if kinds == {"cpu"} else "two devices"


def split_speeds(evidence: Records) -> dict[str, tuple[Scheme, Scheme]]:
    """{model: (naive split, the fastest with micro-batches)}. LookupError if one device was not timed, too."""
    found = {}
    for chain, run in chains(evidence, "step_s", schedule="single").items():
        single = run.one("step_s", schedule="single")
        split = [r for r in run.where("step_s") if r.case["schedule"] not in WHOLE]
        naive = [r for r in split if r.case["micro_batches"] == 1]
        cut = sorted((r for r in split if r.case["micro_batches"] > 1), key=lambda r: r.value)
        if not naive or not cut:
            raise LookupError(f"launch({PIPELINE!r}) with 1 and with more micro_batches is needed for {chain!r}")
        share = kept(evidence, chain)
        best = f"{_name(cut[0])} with {cut[0].case['micro_batches']} micro-batches"
        found[chain] = (
            Scheme(NAIVE, chain, pairs(single, naive[0]), share),
            Scheme(best, chain, pairs(single, cut[0]), share),
        )
    return found


def _name(r: Record) -> str:
    schedule = r.case["schedule"]
    return NAMES.get(schedule, schedule) + (" of torch" if r.case["by"] == "torch" else "")


def kept(evidence: Records, chain: str) -> float:
    """Of the activations that the whole model keeps for backward: the larger stage's part. LookupError without."""
    run = chains(evidence, "saved_bytes", schedule="naive", chain=chain)[chain]
    stages = [r.value for r in run.where("saved_bytes", schedule="naive")]
    return max(stages) / sum(stages)


def ceilings(evidence: Records) -> dict[str, Estimate]:
    """{model: speed of two copies that never talk, over one device}: a network that costs nothing at all."""
    found = {}
    with contextlib.suppress(LookupError):
        for chain, run in chains(evidence, "step_s", schedule="copies").items():
            found[chain] = pairs(*(run.one("step_s", schedule=s) for s in WHOLE)).scaled(2)
    return found


class Idle(NamedTuple):
    """How busy two stages are."""

    chain: str
    naive: Estimate
    """Share of the time in which a stage of the naive split does nothing, mean over stages"""
    both: dict[int, float]
    """{micro-batches: share of a step in which both stages compute}"""

    def __str__(self) -> str:
        both = [f"{100 * s:.0f} % with {m}" for m, s in self.both.items()]
        idle = self.naive.scaled(100, "%")
        return (
            f"a stage of the {NAIVE} is idle for {idle} of a step ({self.chain}); both compute during "
            f"{', '.join(both)} micro-batch{'es' * (max(self.both, default=0) > 1)}"
        )


def idle(evidence: Records) -> list[Idle]:
    """One per model. LookupError if no naive split was followed event by event."""
    found = []
    for chain, run in chains(evidence, "idle_share", schedule="naive").items():
        measured = [r for r in run.where("idle_share", schedule="naive") if r.kind != "modelled"]
        drawn = {(r.case["schedule"], r.case["micro_batches"]) for r in run.where("timeline_s")}
        both = {
            m: together(run, chain, schedule, m)
            for schedule, m in sorted(drawn, key=lambda d: d[1])
            if schedule != "gpipe"
        }
        found.append(Idle(chain, estimate(measured[0].samples), both))
    return found


def together(run: Records, chain: str, schedule: str, micro_batches: int) -> float:
    """Share of a typical step in which the stages of two devices compute at the same time."""
    events = analysis.timeline(run, chain, schedule, micro_batches)
    work = [[e for e in events if e.stage == stage and e.kind in ("forward", "backward")] for stage in (0, 1)]
    shared = sum(max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s)) for a, b in product(*work))
    return shared / (max(e.end_s for e in events) - min(e.start_s for e in events))


# -- data and tensor parallelism


def replicated(evidence: Records) -> list[Scheme]:
    """DDP on two devices: labs.data_parallel by model, else the best cell of labs.tensor_parallel's perceptrons."""
    found = []
    with contextlib.suppress(LookupError):
        for run in runs(evidence, "data_parallel", "samples_per_s", way="ddp"):
            if run[0].layout.get("world_size") == 2:
                found.append(Scheme("DDP", f"{model_of(run)}, weak scaling", data_parallel.speedup(run)))
    return found or [perceptrons(evidence, "ddp", "DDP")]


def perceptrons(evidence: Records, mode: str, name: str) -> Scheme:
    """The cell of labs.tensor_parallel's map in which this mode gains most over one device."""
    run = last(evidence, TENSOR, "step_s", mode=mode)
    cells = {}
    for r in run.where("step_s", mode=mode):
        if r.kind != "modelled" and r.layout.get("world_size") == 2:
            cell = {k: r.case[k] for k in ("width", "rows")}
            cells[f"width {cell['width']}, {cell['rows']} rows"] = pairs(run.one("step_s", mode="single", **cell), r)
    if not cells:
        raise LookupError(f"launch({TENSOR!r}, nproc=2) is needed")
    best = max(cells, key=lambda c: cells[c].value)
    return Scheme(name, f"{best}: the best of {len(cells)}", cells[best])


def shared_layers(evidence: Records) -> Scheme:
    """Tensor parallelism: speed of the perceptrons, memory of the largest model that was weighed."""
    run = last(evidence, TENSOR, "bytes_per_rank", mode="tensor")
    single, tensor = (
        _by_model(r for r in run.where("bytes_per_rank", mode=mode) if r.kind != "modelled")
        for mode in ("single", "tensor")
    )
    model = max(tensor, key=lambda m: tensor[m])
    if model not in single:
        raise LookupError(f"launch({TENSOR!r}) did not weigh {model!r} on a single rank")
    return perceptrons(evidence, "tensor", "tensor parallel")._replace(share=tensor[model] / single[model])


def states(evidence: Records, way: str) -> float:
    """Of a model's parameters, gradients and optimizer state: what a rank has with "ddp" or "fsdp"."""
    run = last(evidence, SHARDED, "bytes_per_rank", way=way)
    held = _by_model(r for r in run.where("bytes_per_rank", way=way) if r.kind != "modelled")
    whole = _by_model(r for r in run.where("bytes_per_rank", way="ddp") if r.kind == "modelled")
    model = max(held, key=lambda m: held[m])
    if model not in whole:
        raise LookupError(f"launch({SHARDED!r}) with DDP is needed: its closed form is the whole model")
    return held[model] / whole[model]


def _by_model(records: Iterable[Record]) -> dict[str, float]:
    found: dict[str, float] = {}
    for r in records:
        found[r.case["model"]] = found.get(r.case["model"], 0.0) + r.value
    return found


def schemes(evidence: Records) -> list[Scheme]:
    """All that were tried on two devices, with their speed and the larger device's part of the memory."""
    share = states(evidence, "ddp")
    found = [s._replace(share=share) for s in replicated(evidence)]
    found += [s for both in split_speeds(evidence).values() for s in both]
    with contextlib.suppress(LookupError):
        found.append(shared_layers(evidence))
    return found


# -- published


def published_speeds() -> dict[str, float]:
    """{model: images per second on two V100 with DDP over those on one}."""
    steps = published.ddp_on_v100()
    models = dict.fromkeys(r.case["model"] for r in steps)
    one, two = ({m: steps.one("step_s", model=m, gpus=g).value for m in models} for g in (1, 2))
    return {m: 2 * one[m] / two[m] for m in models}


def published_split() -> str:
    """What PyTorch's tutorial says of ResNet-50 split over two GPUs."""
    runs_s = published.resnet50_split()
    one = runs_s.one("run_s", schedule="one GPU").value
    naive = runs_s.one("run_s", schedule="naive").value
    return f"Published: ResNet-50 split over two GPUs takes {100 * (naive / one - 1):.0f} % longer than on one"
