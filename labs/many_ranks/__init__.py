"""Who would send how many bytes if there were thousands of ranks?

    python -m labs.many_ranks                                   # two real ranks, then fake ones: 8, 64, 512, 4,096
    python -m labs.many_ranks --nproc 1 --ranks 64 1024 --ways fsdp hsdp --layers 12 --width 768
    python -m labs.many_ranks --nproc 1 --ranks 512 --width 12288 --heads 96 --places 2048 --vocabulary 50257

About 4 s on 2 CPU cores, beside torch's start. One process plays one rank of a large job: the same torch code that
  trains, over process groups whose messages go nowhere. What it calls is counted, and held against closed forms from
  the sizes of model and mesh: DDP, FSDP2, HSDP, tensor and pipeline parallelism of a GPT. On two ranks the five ways
  first train for real: the calls of two fake ranks must be theirs, and the kernel's count of bytes that of the closed
  form.
Large models take no memory: from 256 MiB of parameters on, tensors are fake as well, and DDP, which needs memory, is
left out.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from labs.common.oracle.gpt import GptShape
from labs.common.oracle.internals import FakeTensorMode
from labs.common.sharding.traffic import Call, Traffic, sent_bytes, traffic_of
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.many_ranks import five_ways
from labs.many_ranks.fake_ranks import CANNOT_SHOW, fake_job, out_of_job
from labs.many_ranks.five_ways import LEVELS, Job

WARM_UP = {"ddp": 2}  # steps before the one that counts: DDP tells its ranks of new buckets at the start of its second
NEEDS_MEMORY = ("ddp",)  # its reducer, in C++, reads the addresses of tensors
REAL_BYTES = 2**28  # of parameters, above which tensors are fake
SMOKE = {"ranks": (8,)}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """The model, the mesh, the numbers of ranks."""

    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    """Sizes of the jobs of which one rank is played."""
    ways: tuple[str, ...] = tuple(five_ways.WAYS)
    """ddp, fsdp, hsdp, tensor, pipeline: all, or some."""
    per_node: int = 8
    """Ranks of a node."""
    layers: int = 4
    """Blocks of the GPT."""
    width: int = 256
    """Its hidden size."""
    heads: int = 8
    """Its attention heads: tensor parallelism shares them out."""
    vocabulary: int = 1024
    """Its tokens."""
    places: int = 64
    """Tokens of a sequence."""
    rows: int = 1
    """Sequences per step of each rank; of a pipeline, per micro-batch."""
    micro_batches: int = 4
    """Parts of a step that follow each other through a pipeline."""
    stages: int = 4
    """Stages of a pipeline."""
    smoke: bool = False
    """No more than 64 ranks."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.ways) - set(five_ways.WAYS))
        require(not unknown and len(self.ways) > 0, f"ways may hold {', '.join(five_ways.WAYS)}, not {unknown}")
        for name in ("per_node", "layers", "width", "heads", "vocabulary", "places", "rows", "micro_batches", "stages"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        require(self.width % self.heads == 0, f"width {self.width} cannot be cut into {self.heads} heads")
        require(len(self.ranks) > 0, "ranks must hold a number of ranks")
        require(len({*self.ranks}) == len(self.ranks), f"ranks must be different, not {self.ranks}")
        require(
            len(ways_here(self)) > 0,
            f"ddp needs memory and is left out from {REAL_BYTES / 2**20:.0f} MiB of "
            "parameters on: add another of the ways, or make the model smaller",
        )
        for n in self.ranks:
            job(self, n)

    @property
    def shape(self) -> GptShape:
        """The sizes of the GPT."""
        return GptShape(self.layers, self.width, self.vocabulary, self.heads, self.places)


def job(config: Config, ranks: int) -> Job:
    """One job of `ranks` ranks. BadInput if the model or the nodes cannot be shared so."""
    return Job(config.shape, ranks, config.per_node, config.rows, config.micro_batches, config.stages)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for more real ranks than the comparison takes."""
    require(world_size <= 2, f"two real ranks are compared with two fake ones: use nproc=2 or 1, not {world_size}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Real ranks, where there are two; then rank 0 plays a rank of every job."""
    require(rank.device.type == "cpu", 'this lab counts calls and needs no GPU: use device="cpu"')
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nobody here writes into an output
    real = {}
    if rank.world_size == 2:
        for way in ways_here(config):
            real[way] = calls_of(job(config, 2), way)
            yield from on_the_wire(job(config, 2), way, rank)
    with out_of_job():
        if rank.rank == 0:  # the other one waits for it
            yield from fake(config, real, rank)


def fake(config: Config, real: dict[str, list[Call]], rank: Rank) -> Iterator[Record]:
    """Two fake ranks against the real ones' calls, then every number of ranks."""
    for way, calls in real.items():
        same = comparable(calls) == comparable(audit(job(config, 2), way, rank=0)[0])
        yield rank.record("same_calls", "1", float(same), way=way, ranks=2)
    sizes = [n for n in config.ranks if n <= 64 or not config.smoke] or [min(config.ranks)]
    for done, n in enumerate(sizes, start=1):
        yield from told(config, n, rank)
        rank.progress(done, len(sizes), f"{n:,} ranks")


def ways_here(config: Config) -> list[str]:
    """The ways that this model's size allows."""
    large = 4 * config.shape.parameters > REAL_BYTES
    return [way for way in config.ways if not (large and way in NEEDS_MEMORY)]


def calls_of(job: Job, way: str) -> list[Call]:
    """What this rank calls in one step, whether its group is real or fake; nothing that it sends to itself."""
    large = 4 * job.shape.parameters > REAL_BYTES
    build = five_ways.WAYS[way](job, FakeTensorMode(allow_non_fake_inputs=True) if large else nullcontext())
    for _ in range(WARM_UP.get(way, 0)):
        build()
    with Traffic() as traffic:
        build()
    return [call for call in traffic.calls if call.sent_bytes]


def comparable(calls: list[Call]) -> list[tuple]:
    """Calls without the names of groups, which every process counts anew."""
    return [(c.kind, c.bytes, c.ranks, c.peer) for c in calls]


def audit(job: Job, way: str, rank: int | None = None) -> tuple[list[Call], dict[str, float]]:
    """(calls, bytes by level) of one step of `rank`, or of the rank asked, among `job.ranks` fake ones."""
    with fake_job(job.ranks, job.rank_asked(way) if rank is None else rank):
        calls = calls_of(job, way)
        return calls, five_ways.by_level(calls, job.per_node)


def told(config: Config, n: int, rank: Rank) -> Iterator[Record]:
    """Bytes by level of every way, counted and by closed form, and the seconds that the whole audit took."""
    begun = time.perf_counter()
    for way in ways_here(config):
        calls, found = audit(job(config, n), way)
        exact = five_ways.alike(five_ways.counted(calls), five_ways.summed(five_ways.predict(job(config, n), way)))
        yield rank.record("equal", "1", float(exact), way=way, ranks=n)
        yield rank.record("calls", "1", len(calls), way=way, ranks=n)
        form = five_ways.predict_levels(job(config, n), way)
        for level in LEVELS:
            case = {"way": way, "level": level, "ranks": n}
            yield rank.record("sent_bytes", "B", found[level], kind="modelled", source="fake ranks", **case)
            yield rank.record("sent_bytes", "B", form[level], kind="modelled", source="closed form", **case)
    yield rank.record("audit_s", "s", time.perf_counter() - begun, ranks=n)


def on_the_wire(job: Job, way: str, rank: Rank) -> Iterator[Record]:
    """What the kernel counts on two real ranks, and the closed form, by what gloo does for a reduce-scatter."""
    step = five_ways.WAYS[way](job, nullcontext())
    for _ in range(2):
        step()
    traffic, counts = traffic_of(step, rank)
    sent = sum(sent_bytes(c.kind, c.bytes, c.ranks, gloo=True) for c in traffic.calls)
    yield rank.record("tcp_sent_bytes", "B", rank.gather(sent), kind="modelled", way=way)
    if counts is not None:
        yield rank.record("tcp_sent_bytes", "B", counts, way=way)


STATES = {"parameters": 2, "gradients": 2, "optimizer": 12}
"""Bytes per parameter of training in 16 bits with Adam: FP32 master copy and two moments are the optimizer's.
Source: Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1."""
SHARDED = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: ("optimizer", "gradients", "parameters")}
"""What each stage of ZeRO cuts into one part per rank; 0 is DDP. The same source, section 5."""


def zero_bytes(parameters: int, ranks: int) -> dict[int, tuple[dict[str, float], float]]:
    """{ZeRO's stage: ({state: bytes on a rank}, bytes that it sends per step)}.

    Stages 0 to 2 send what an all-reduce of the gradients sends: 2 (n-1)/n of them, the second half of it, in stages 1
    and 2, as an all-gather of new parameters. Stage 3 gathers parameters twice and scatters gradients: half as much
    again. Source: the same, section 7.
    """
    once = sent_bytes("all_gather", 2 * parameters, ranks)
    return {
        stage: (
            {what: b * parameters / (ranks if what in cut else 1) for what, b in STATES.items()},
            (3 if stage == 3 else 2) * once,
        )
        for stage, cut in SHARDED.items()
    }


# -- what it says


def levels(run: Records, way: str, ranks: int, source: str = "fake ranks") -> dict[str, float]:
    """Bytes that a rank sends, by level."""
    return {r.case["level"]: r.value for r in run.where("sent_bytes", way=way, ranks=ranks, source=source)}


def sizes(run: Records) -> list[int]:
    """The numbers of fake ranks of a run, ascending."""
    return sorted(r.case["ranks"] for r in run.where("audit_s"))


def wrong(run: Records) -> list[str]:
    """Where counted calls are not those of the closed form, or of two real ranks."""
    equal = [*run.where("equal"), *run.where("same_calls")]
    off = [f"{r.case['way']} on {r.case['ranks']}" for r in equal if not r.value]
    for r in run.where("sent_bytes", source="fake ranks"):
        form = run.one("sent_bytes", **{**r.case, "source": "closed form"}).value
        if abs(r.value - form) > 1e-9 * max(form, 1.0):
            off.append(f"{r.case['way']} on {r.case['ranks']}, {r.case['level']}")
    return off


def answer(run: Records) -> Iterator[str]:
    """Whether the counts are the closed forms', what crosses at the largest size, and what this cannot show."""
    most, ways = sizes(run)[-1], sorted({r.case["way"] for r in run.where("equal")})
    off, real = wrong(run), run.where("same_calls")
    word = "all are those of the closed forms" if not off else f"NOT those of the closed forms: {'; '.join(off)}"
    yield f"{len(ways)} ways on {', '.join(f'{n:,}' for n in sizes(run))} fake ranks: the bytes counted {word}."
    if real:
        same = sum(r.value for r in real)
        yield f"On two real ranks {same:.0f} of {len(real)} ways make the calls of two fake ones."
    across = {way: levels(run, way, most)["across"] for way in ways}
    low, high = (f(across, key=across.__getitem__) for f in (min, max))
    yield (
        f"On {most:,} ranks a rank sends from {across[low] / 1e6:.2f} MB ({low}) to {across[high] / 1e6:.2f} MB "
        f"({high}) out of its node per step."
    )
    yield f"The audit of {most:,} ranks took {run.one('audit_s', ranks=most).value:.1f} s."
    yield f"It cannot show: {', '.join(CANNOT_SHOW)}."
