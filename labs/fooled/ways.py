"""The twelve ways by name: what is told, what an article does, and what in this course's measuring prevents it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One way to fool oneself."""

    key: str
    """Its name in records: `case["way"]`."""
    title: str
    quantity: str
    """What is told, for example "time of a step"."""
    unit: str
    claim: str
    """Id of the statement in labs/kit/claims.toml from whose lines an article does so; "" if none of them does."""
    does: str
    """What is done there."""
    prevents: str
    """What keeps the course's measuring from it, as Markdown."""
    share: float
    """Of the time for all of them."""
    ranks: int = 1
    """The fewest that it takes."""
    truth: float | None = None
    """Where it is known without measuring: the same code takes as long as itself."""


WAYS = {
    way.key: way
    for way in (
        Way(
            "early_clock",
            "clock stops early",
            "time of a step",
            "s",
            "C06",
            "reads `time.time()` around the loop, without `synchronize` (there each batch is copied, here "
            "the data are on the device)",
            "`measure.sync` before both readings of the clock, in `measure.time_steps`",
            0.03,
        ),
        Way(
            "cold_start",
            "first steps count",
            "time of a step",
            "s",
            "C07",
            "starts the clock at the first iteration",
            "`measure.warm_up`, until `measure.steady_from` finds the steps steady",
            0.07,
        ),
        Way(
            "best_of_many",
            "best against median",
            "speed-up of the same code",
            "x",
            "",
            "",
            "`measure.paired_ratio`: the same statistic for both sides, pair by pair",
            0.07,
            truth=1.0,
        ),
        Way(
            "blocked",
            "one after the other",
            "time over that of the same code",
            "x",
            "C15",
            "takes batch sizes one after the other, and watches",
            "`measure.interleave`: all sides in turn, in an order drawn for each round",
            0.25,
            truth=1.0,
        ),
        Way(
            "single_pair",
            "a single pair decides",
            "factor between runs of the same code",
            "x",
            "A17",
            "states one number for each number of GPUs, without a spread",
            "`measure.fewest`: under 6 samples there is no 95 % interval; `measure.differs` asks for one",
            0.08,
            truth=1.0,
        ),
        Way(
            "debug_baseline",
            "baseline in debug mode",
            "speed-up of the same code",
            "x",
            "C22",
            "calls a method complete that names no baseline",
            "no function can. `Record.config` keeps the settings of both sides; try the same code against itself",
            0.07,
            truth=1.0,
        ),
        Way(
            "weak_as_strong",
            "weak told as strong",
            "speed-up of all ranks",
            "x",
            "A13",
            "gives each rank 64 samples of its own, and a table in which epochs get shorter",
            '`Record.case` keeps `batch_per_rank`; `launch("data_parallel", split=...)` measures either',
            0.11,
            ranks=2,
        ),
        Way(
            "two_units",
            "two units, one name",
            "speed-up by sorting sentences by length, in tokens/s",
            "x",
            "A12",
            "has another such unit: it names one batch of 64 an epoch",
            "seconds of the same work on both sides of `measure.interleave`; `Record.unit` names what is counted",
            0.07,
        ),
        Way(
            "samples_rate",
            "samples, not learning",
            "speed-up by a larger batch",
            "x",
            "C10",
            "has four metrics, samples per second among them, and no loss",
            "compare the time to a loss, with a learning rate searched for each batch",
            0.12,
        ),
        Way(
            "busy_as_useful",
            "busy, not useful",
            "share of the device in use",
            "1",
            "A25",
            "watches utilisation with `nvidia-smi`",
            '`launch("utilisation")`, `launch("timing")`: work done over the best rate, beside the counter',
            0.05,
        ),
        Way(
            "one_clock",
            "one rank's clock",
            "time of shared work",
            "s",
            "",
            "",
            "`Rank.barrier` before it and `Rank.slowest` after it",
            0.03,
            ranks=2,
        ),
        Way(
            "other_size",
            "rate of another size",
            "time to exchange 40 MB",
            "s",
            "C05",
            "tests DDP with one `Linear(1000, 10)`: 40 kB of gradients",
            "`collectives.fit`: a latency and a bandwidth, two numbers from two sizes or more",
            0.05,
            ranks=2,
        ),
    )
}
"""In the order of the notebook."""
