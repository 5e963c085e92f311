"""How much faster does a model train that is split over n devices, and what do micro-batches change?

    python -m labs.pipeline_parallel                            # launches its own ranks: one stage on each
    torchrun --nproc-per-node 2 -m labs.pipeline_parallel --model my_package.module:factory --micro-batches 1 4 16

About 20 s on 2 CPU cores. A model of your own must be an nn.Sequential.

All ways to train take turns within one run, round by round, so that a slow spell of the machine hits all of them:
  single   one rank trains the whole model, the others wait
  copies   n ranks train n whole models without any communication: the machine's own ceiling
  naive    one stage per rank, the whole batch at once: a schedule with one micro-batch
  gpipe, 1f1b   one stage per rank, micro-batches: labs/common/pipelines/schedules.py in which order, engine.py how
  torch    the same by torch.distributed.pipelining, with the schedules that only it has
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from labs.common.pipelines import chain, even_cuts, schedules, split
from labs.common.pipelines.engine import Pipeline
from labs.common.precision.rounding import METRIC, beyond
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.pipeline_parallel import analysis, parity, torch_schedules
from labs.pipeline_parallel.bench import Traced, actions, in_turn, trainer, typical, whole
from labs.pipeline_parallel.memory import counting

BATCHES = {"deep_mlp": 1536}  # rows: enough that a stage computes for tens of milliseconds
SMOKE = {"micro_batches": (1, 2), "compare": 2, "batch_size": 8}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """What to train, how to cut it up, and how long to measure."""

    model: str = "char_gpt"
    """A key of labs.common.pipelines.CHAINS, such as deep_mlp, or package.module:factory."""
    batch_size: int | None = None
    """Rows per step; None: 1536 for deep_mlp, 64 for others."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    """Parts that the batch is cut into; 1 is the naive split."""
    compare: int = 8
    """Micro-batches with which GPipe and torch's schedules are compared with 1F1B, and whose timeline is kept."""
    torch_schedules: tuple[str, ...] = ("1f1b",)
    """Schedules of torch to time: see labs.pipeline_parallel.torch_schedules.SCHEDULES."""
    cuts: tuple[int, ...] | None = None
    """Layer numbers at which a new stage begins; None: equally many layers each."""
    too_big: bool = False
    """The whole model does not fit one device: leave out what needs it (gradients to compare with, single, copies)."""
    seconds: float = 16.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals.

    Where even 6 take longer, numbers of micro-batches are left out, the largest first; never 1, `compare` or the least.
    """
    rounds: int | None = None
    """Times that every way takes its turn; by default as many as fit into `seconds`, at least 6."""
    wait_s: float = 60.0
    """How long a stage waits for its neighbour before it gives up."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """A small batch and few settings, to see that it runs."""

    def __post_init__(self) -> None:
        require(1 in self.micro_batches, "micro_batches must hold 1, the naive split: speed-ups are relative to it")
        require(min(self.micro_batches) >= 1, f"micro_batches must be at least 1, not {min(self.micro_batches)}")
        require(self.compare in self.micro_batches, f"compare, {self.compare}, must be one of the micro_batches")
        measure.require_budget(self.seconds, self.rounds)
        require(self.wait_s > 0, f"wait_s must be positive, not {self.wait_s}")
        unknown = [name for name in self.torch_schedules if name not in torch_schedules.SCHEDULES]
        require(not unknown, f"torch_schedules: {unknown} is none of {', '.join(torch_schedules.SCHEDULES)}")
        for m in self.micro_batches:
            require(
                self.rows % m == 0,
                f"{m} micro-batches do not divide a batch of {self.rows} rows: take a batch_size that is a multiple of "
                f"{m}, or the mean over micro-batches is not that over the batch",
            )

    @property
    def rows(self) -> int:
        """Rows per step."""
        if self.batch_size is not None:
            return self.batch_size
        return math.lcm(*self.micro_batches) if self.smoke else BATCHES.get(self.model, 64)

    @property
    def settings(self) -> list[tuple[str, int]]:
        """(schedule, micro-batches) to time: 1F1B with all, GPipe with one."""
        counts = [m for m in self.micro_batches if not self.smoke or m in (1, self.compare)]
        return [("naive" if m == 1 else "1f1b", m) for m in counts] + [("gpipe", self.compare)] * (self.compare > 1)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be cut into that many stages."""
    model, stages = chain(config.model), world_size
    cuts = even_cuts(model, stages) if config.cuts is None else config.cuts
    split(model, cuts)
    require(len(cuts) == stages - 1, f"{stages} stages need {stages - 1} cuts, not {len(cuts)}: {list(cuts)}")


def predict(stages: int, micro_batches: int) -> dict[str, float]:
    """Closed forms: share of idle time, speed-up over the naive split, and micro-batches that stage 0 keeps."""
    idle = schedules.bubble(stages, micro_batches)
    kept = {f"kept by {n}": schedules.in_flight(f(0, stages, micro_batches)) for n, f in schedules.SCHEDULES.items()}
    return {"idle_share": idle, "speedup": stages * (1 - idle), **kept}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Gradients compared with one process, then all ways timed in turn, with what each stage did meanwhile."""
    cuts = even_cuts(chain(config.model), rank.world_size) if config.cuts is None else list(config.cuts)
    if not config.too_big:
        yield from _parity(config, cuts, rank)
    yield from _speed(config, cuts, rank)


def _parity(config: Config, cuts: list[int], rank: Rank) -> Iterator[Record]:
    """Relative errors of gradients and loss by every schedule; what torch refuses."""
    model = chain(config.model, config.seed)
    floor = parity.rounding(model, rank)
    yield rank.record(METRIC, "1", floor, chain=config.model)
    for found in parity.compare(model, cuts, rank, config.wait_s):
        yield rank.record("gradient_relative_error", "1", found.gradient, chain=config.model, **found.case)
        yield rank.record("loss_relative_error", "1", found.loss, chain=config.model, **found.case)
    for schedule in torch_schedules.possible(model, rank):
        if told := torch_schedules.refusal(schedule, model, 1, rank):
            case = {"chain": config.model, "schedule": schedule, "by": "torch", "micro_batches": 1}
            yield rank.record("raised", "1", 1, error=told, **case)


def _speed(config: Config, cuts: list[int], rank: Rank) -> Iterator[Record]:
    """Step times of all ways, in turn; from the events of the same steps, idle shares and timelines; bytes."""
    model = chain(config.model, config.seed)
    x, y = (t.to(rank.device) for t in model.make_batch(config.rows))
    traced = Traced(Pipeline(model, cuts, rank, config.wait_s), x, y, rank)
    steps = {(schedule, "hand", m): traced.step(schedule, m) for schedule, m in config.settings}
    if not config.too_big:
        alone = whole(chain(config.model, config.seed), x, y, rank.device)
        steps |= {("single", "hand", 1): alone if rank.rank == 0 else _wait, ("copies", "hand", 1): alone}
    steps |= {(s, "torch", config.compare): _of_torch(s, config, x, y, rank) for s in _timed(config, rank)}
    between = [m for m in config.micro_batches if m not in (1, config.compare)]
    optional = [s for m in sorted(between, reverse=True)[:-1] if (s := ("1f1b", "hand", m)) in steps]
    seconds = in_turn(steps, measure.rounds_of(config, rank.slowest), rank, traced.clear, optional)
    for schedule, by, m in (s for s in optional if s not in seconds):
        why = f"with it, {measure.LEAST_ROUNDS} rounds would take more than {config.seconds:g} s"
        yield rank.record("left_out", "1", 1.0, chain=config.model, schedule=schedule, by=by, micro_batches=m, why=why)
    for (schedule, by, m), samples in seconds.items():
        case = {"chain": config.model, "schedule": schedule, "by": by, "micro_batches": m, "rows": config.rows}
        yield rank.record("step_s", "s", samples, **case)
    for schedule, m in (s for s in config.settings if (s[0], "hand", s[1]) in seconds):
        case = {"chain": config.model, "schedule": schedule, "micro_batches": m}
        yield from _events(traced.timelines(schedule, m), rank, config, **case)
        if m in (1, config.compare):
            yield from _kept_and_sent(traced, rank, **case)


def _wait() -> None:
    """Another rank's turn; the next barrier is the wait."""


def _timed(config: Config, rank: Rank) -> list[str]:
    """The schedules of torch to time: where they are asked for, possible, and not refused."""
    able = torch_schedules.possible(chain(config.model), rank)
    enough = config.compare >= 2 * rank.world_size
    return [s for s in config.torch_schedules if s in able and enough]


def _of_torch(schedule: str, config: Config, x: Tensor, y: Tensor, rank: Rank):
    step, stages = torch_schedules.make(schedule, chain(config.model, config.seed), config.compare, rank)
    return trainer(nn.ModuleList(stages.values()), lambda: step(x, y))


def _events(steps: Sequence, rank: Rank, config: Config, **case: object) -> Iterator[Record]:
    """Idle share, predicted and measured; seconds of each kind of event per stage; the timeline of a typical step."""
    stages = rank.world_size
    shares = [schedules.idle_share(events, stages) for events in steps]
    yield rank.record("idle_share", "1", shares, **case)
    yield rank.record("idle_share", "1", predict(stages, case["micro_batches"])["idle_share"], kind="modelled", **case)
    for stage in range(stages):
        for kind in schedules.KINDS:
            spent = [sum(e.end_s - e.start_s for e in s if (e.stage, e.kind) == (stage, kind)) for s in steps]
            yield rank.record("spent_s", "s", spent, stage=stage, action=kind, **case)
    if case["micro_batches"] not in (1, config.compare):
        return
    drawn = typical(steps)
    start = min(e.start_s for e in drawn)
    for stage in range(stages):
        for kind in schedules.KINDS:
            own = [e for e in drawn if (e.stage, e.kind) == (stage, kind)]
            times = [t - start for e in own for t in (e.start_s, e.end_s)]
            numbers = [e.micro_batch for e in own]
            if own:
                yield rank.record("timeline_s", "s", times, stage=stage, action=kind, numbers=numbers, **case)


def _kept_and_sent(traced: Traced, rank: Rank, **case: object) -> Iterator[Record]:
    """Of one more step, per stage: most bytes saved for backward at a time, bytes and messages sent; and predicted."""
    pipeline, m = traced.pipeline, case["micro_batches"]
    boxes = pipeline.activations, pipeline.gradients
    before = [(box.bytes_sent, box.messages_sent) for box in boxes]
    there_anyway = [*pipeline.module.parameters(), *pipeline.module.buffers(), traced.x, traced.y]
    with counting(there_anyway) as kept:
        traced.step(case["schedule"], m)()
    flying = schedules.in_flight(actions(case["schedule"], m, rank))
    sent = [(box.bytes_sent - b, box.messages_sent - n) for box, (b, n) in zip(boxes, before, strict=True)]
    for stage, (peak, most, own) in enumerate(rank.gather((kept.peak, flying, sent))):
        yield rank.record("saved_bytes", "B", peak, stage=stage, **case)
        yield rank.record("kept_micro_batches", "1", most, kind="modelled", stage=stage, **case)
        for message, (size, count), to in zip(("activation", "gradient"), own, (stage + 1, stage - 1), strict=True):
            form = pipeline.message_bytes(stage, to, len(traced.x))
            yield rank.record("sent_messages", "1", count, stage=stage, message=message, **case)
            yield rank.record("sent_bytes", "B", size, stage=stage, message=message, **case)
            yield rank.record("sent_bytes", "B", form, kind="modelled", stage=stage, message=message, **case)


def answer(run: Records) -> Iterator[str]:
    """The best schedule against one device, against its ceiling and against the bubble; whether gradients are right."""
    steps = run.where("step_s")
    name, n = steps[0].case["chain"], run[0].layout["world_size"]
    wrong, compared = beyond(run), run.where("gradient_relative_error")
    if compared:
        yield (
            f"Gradients of {len(compared)} schedules: "
            + (f"{len(wrong)} are WRONG." if wrong else "equal to one process's up to rounding.")
        )
    found = analysis.speedups(run, name)
    schedule, by, m = best = min(found, key=lambda k: next(r.value for r in steps if _key(r) == k))
    word = f"{schedule} with {m} micro-batch{'es' * (m > 1)}" + f" by {by}" * (by == "torch")
    yield f"{name} on {n} rank{'s' * (n > 1)}: {word} is the fastest, {found[best]} as fast as the naive split."
    if any(r.case["schedule"] == "single" for r in steps):
        yield f"Over one device alone: {analysis.speedups(run, name, 'single')[best]}."
    if n > 1 and any(r.case["schedule"] == "copies" for r in steps):
        share = analysis.shares_of_ceiling(run, name)[best].scaled(100, "%")
        lost = "no other cost can be shown" if share.high >= 100 else "the rest is not the bubble's"
        yield f"It reaches {share} of what {n} copies that never talk leave after the bubble: {lost}."
    if n > 1 and len({k[2] for k in found if k[0] in ("naive", "1f1b") and k[1] == "hand"}) > 1:
        fitted = analysis.fit(run, name)
        most = fitted.best_micro_batches
        told = f"{most:.0f} of them are best by the fit" if math.isfinite(most) else "this run cannot tell how many"
        yield f"A micro-batch costs {1e3 * fitted.per_micro_batch_s:.2g} ms beside its work: {told}."


def _key(r: Record) -> tuple[str, str, int]:
    return r.case["schedule"], r.case["by"], r.case["micro_batches"]
