"""Where should a model be cut into stages, and can a profile of its layers tell?

    python -m labs.pipeline_split
    torchrun --nproc-per-node 2 -m labs.pipeline_split --model my_package.module:factory

About 13 s on 2 CPU cores. A model of your own must be an nn.Sequential.

A cost model times every layer once (forward, backward, the message after it) and chooses the cut whose slowest stage is
fastest. Then every cut is measured, in turn, and the best of them together with the chosen one again. A step is
forward and backward of a batch by 1F1B, without an optimizer.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate, paired_ratio
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts.pipelines import UNBALANCED, Chain, chain, even_cuts, partition, profiling, schedules
from labs.parts.pipelines.bench import actions, in_turn
from labs.parts.pipelines.engine import Links, Pipeline, new_links

BATCHES = {"funnel_mlp": 512, "word_gpt": 32, "convnet": 192}  # rows: steps of about 50 ms when cut well
FINALISTS = 2  # cuts that are measured again, beside the chosen one
SMOKE = {"repeats": 3, "batch_size": 8}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """Which models to cut, and how long to measure."""

    model: tuple[str, ...] = UNBALANCED
    """Keys of labs.parts.pipelines.CHAINS, or package.module:factory."""
    batch_size: int | None = None
    """Rows per step; None: what suits the course's models, 64 for others."""
    micro_batches: int = 8
    """Parts that the batch is cut into."""
    repeats: int = 15
    """Times that each layer and each message is profiled."""
    sweep_rounds: int = 3
    """Rounds over all cuts."""
    seconds: float = 3.6
    """Time for the rounds over the finalists of all models, in s. A slower machine takes fewer: wider intervals."""
    rounds: int | None = None
    """Rounds over the finalists; by default as many as fit into `seconds`, at least 6."""
    wait_s: float = 60.0
    """How long a stage waits for its neighbour before it gives up."""
    seed: int = 0
    """Seed of the model and of the data."""
    smoke: bool = False
    """One model and few rounds, to see that it runs."""

    def __post_init__(self) -> None:
        require(len(self.model) > 0, "model must name at least one model")
        for name in ("micro_batches", "repeats", "sweep_rounds"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
        measure.require_budget(self.seconds, self.rounds)
        require(self.wait_s > 0, f"wait_s must be positive, not {self.wait_s}")
        for name in self.model:
            rows, m = self.rows(name), self.micro_batches
            require(
                rows % m == 0,
                f"{m} micro-batches do not divide a batch of {rows} rows: take a batch_size that is a multiple of {m}",
            )

    def rows(self, name: str) -> int:
        """Rows per step for model `name`."""
        return BATCHES.get(name, 64) if self.batch_size is None else self.batch_size


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if a model cannot be cut into that many stages."""
    for name in config.model:
        even_cuts(chain(name), world_size)


def predict(costs: partition.Costs, cuts: list[int], micro_batches: int) -> float:
    """Seconds of a 1F1B step with these cuts, from profiled layers and messages."""
    return partition.predict_step_s(costs, cuts, micro_batches, schedules.one_f_one_b)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """For each model: the profile, the cut it chooses, predicted and measured steps of all cuts."""
    links, times = new_links(), profiling.message_times(config.repeats, rank)
    for size, seconds in times.items():
        yield rank.record("message_s", "s", seconds, size=size)
    for name in config.model[: 1 if config.smoke else None]:
        model, rows = chain(name, config.seed), config.rows(name)
        x, y = (t.to(rank.device) for t in model.make_batch(rows))
        layers = profiling.profile(
            model, *(t[: rows // config.micro_batches] for t in (x, y)), config.repeats, rank.device
        )
        costs = profiling.costs(layers, times, rank)
        yield from _profiled(name, layers, costs, rank)
        chosen, even = partition.choose(costs, rank.world_size), even_cuts(model, rank.world_size)
        yield rank.record("chosen", "1", chosen or [0], kind="modelled", chain=name, by="cost model")
        yield rank.record("chosen", "1", even or [0], kind="modelled", chain=name, by="equally many layers")
        swept = partition.candidates(len(model.layers), rank.world_size, chosen)
        for cuts in swept:
            seconds = predict(costs, cuts, config.micro_batches)
            yield rank.record("step_s", "s", seconds, kind="modelled", chain=name, cuts=cuts, phase="all")
        yield from _measured(config, model, swept, chosen, x, y, links, rank)


def _profiled(name: str, layers: list[profiling.Layer], costs: partition.Costs, rank: Rank) -> Iterator[Record]:
    """Rank 0's samples of every layer, the last of which is the loss; what a message over each cut should cost."""
    for number, layer in enumerate(layers):
        for part, samples in (("forward", layer.forward_s), ("backward", layer.backward_s)):
            yield rank.record("layer_s", "s", samples, chain=name, layer=number, part=part)
    for cut, seconds in enumerate(costs.message_s[1:], start=1):
        size = layers[cut - 1].output_bytes
        yield rank.record("message_s", "s", seconds, kind="modelled", chain=name, cut=cut, size=size)


def _measured(
    config: Config,
    model: Chain,
    swept: list[list[int]],
    chosen: list[int],
    x: Tensor,
    y: Tensor,
    links: Links,
    rank: Rank,
) -> Iterator[Record]:
    """Steps of all cuts in turn; then of the fastest of them and the chosen one, with more rounds."""
    steps = {tuple(cuts): _step(config, model, cuts, x, y, links, rank) for cuts in swept}
    finalists = measure.rounds_of(config, rank.slowest, 1 / len(config.model))
    for phase, rounds in (("all", 2 if config.smoke else config.sweep_rounds), ("finalists", finalists)):
        seconds = in_turn(steps, rounds, rank)
        for cuts, samples in seconds.items():
            yield rank.record("step_s", "s", samples, chain=model.name, cuts=list(cuts), phase=phase)
        ranking = sorted(seconds, key=lambda cuts: statistics.median(seconds[cuts]))
        steps = {cuts: steps[cuts] for cuts in dict.fromkeys([tuple(chosen), *ranking[:FINALISTS]])}


def _step(
    config: Config, model: Chain, cuts: list[int], x: Tensor, y: Tensor, links: Links, rank: Rank
) -> Callable[[], object]:
    pipeline, m = Pipeline(model, cuts, rank, config.wait_s, links), config.micro_batches
    todo, inputs, targets = actions("1f1b", m, rank), x.chunk(m), y.chunk(m)

    def step() -> None:
        pipeline.module.zero_grad()
        pipeline.step(todo, inputs, targets)

    return step


def chosen_over_rival(records: Records, name: str) -> Estimate:
    """Step time of the chosen cuts over that of the fastest other finalist, paired round by round; 1 without others."""
    steps = records.where("step_s", chain=name, phase="finalists")
    chosen = chosen_cuts(records, name)
    own = next(r for r in steps if r.case["cuts"] == chosen)
    others = [r for r in steps if r is not own] or [own]
    return paired_ratio(own.samples, min(others, key=lambda r: r.value).samples)


def chosen_cuts(records: Records, name: str, by: str = "cost model") -> list[int]:
    """The cuts that the cost model chose, or those with "equally many layers"."""
    return [int(c) for c in records.one("chosen", chain=name, by=by).samples if c]


def sweep(records: Records, name: str) -> list[tuple[list[int], float, float]]:
    """(cuts, predicted s, measured s) of every cut that was tried."""
    steps = records.where("step_s", chain=name, phase="all")
    predicted = {tuple(r.case["cuts"]): r.value for r in steps if r.kind == "modelled"}
    return [(r.case["cuts"], predicted[tuple(r.case["cuts"])], r.value) for r in steps if r.kind == "measured"]


def cut_word(ratio: Estimate) -> str:
    """What `ratio`, the chosen cut's time over that of its best rival, shows."""
    if ratio.high < 1:
        return "the best of those tried"
    return f"which takes {ratio} the time of another cut" if ratio.low > 1 else "no cut is shown to be better"


def answer(run: Records) -> Iterator[str]:
    """For each model: the cut that its profile chose, against the best other one and against equally many layers."""
    n = run[0].layout["world_size"]
    if n == 1:
        yield "One rank holds the whole model: there is nothing to cut. Take --nproc 2."
        return
    for name in dict.fromkeys(r.case["chain"] for r in run.where("chosen")):
        cut, even = (chosen_cuts(run, name, by=by) for by in ("cost model", "equally many layers"))
        word = cut_word(chosen_over_rival(run, name))
        swept = {tuple(c): s for c, _, s in sweep(run, name)}
        gain = f", {swept[tuple(even)] / swept[tuple(cut)]:.2f} x as fast in the sweep" * (
            cut != even and tuple(even) in swept
        )
        yield f"{name}: the profile cuts after layer {cut}, {word}; equally many layers would be {even}{gain}."


if __name__ == "__main__":
    cli.main()
