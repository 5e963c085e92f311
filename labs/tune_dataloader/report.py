"""What `tune_dataloader` found: settings, evidence as a table and a figure, and what to do next in plain words."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from labs.common.loading.feed import expected
from labs.kit.measure import Estimate, estimate, verdict
from labs.kit.record import Record, Records, attach_provenance
from labs.tune_dataloader.bench import MODEL, Arm, Evidence
from labs.tune_dataloader.rules import ENOUGH, TOLERANCE, Choice, Setting, limit

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

NAMES = {"model": "model alone", "loader": "loader alone", "together": "both together"}
FEED_MORE = (
    "do less per sample (of images: smaller ones, Image.draft), or do it once and keep the result, decoded or "
    "tokenized (memory map, RAM cache): labs.dataset_formats measures both for images"
)
LOAD_AT_ONCE = (
    "to hand a batch over costs more than to load it, so load many samples at once (rows of one tensor, by a "
    "BatchSampler as sampler and batch_size=None), or keep the data on the device"
)
HANDING_OVER = "batches on their way (send uint8 instead of float32) and cores that it shares with the workers"
BY_ITSELF = "loading, which without workers takes turns with it, and which workers did not make cheaper"
WAITS, IN_THE_WAY = 0.05, 0.85
TOLERANCE_TEXT = f"{100 * TOLERANCE:.0f} %"


@dataclass(frozen=True, repr=False)
class Tuning:
    """The result of `tune_dataloader`. Print it, or let a notebook show it, for what it means."""

    choice: Choice
    batch_size: int
    evidence: Evidence
    seconds: float
    """That the search took."""
    budget_s: float
    capped: bool
    """Whether more than max_workers might help."""
    untried: int | None = None
    """The next number of workers that might help and for which the budget had no time."""

    @property
    def settings(self) -> dict[str, int | bool]:
        """Keyword arguments for DataLoader, beside your own.

        Workers persist: the search times no start of an epoch, and with new workers each epoch would wait for theirs.
        """
        return self.choice.setting.options | ({"persistent_workers": True} if self.choice.setting.workers else {})

    @property
    def _loader_was_measured(self) -> bool:
        return bool(self.evidence.of(("loader", self.choice.setting)))

    @property
    def limit(self) -> str:
        """What the pipeline waits for: "loader", "model" or "neither by more than noise"."""
        return limit(self.loader_to_model)

    @cached_property
    def loader_to_model(self) -> Estimate:
        """Rate of the loader alone, with the chosen setting, over that of the model alone."""
        return self.evidence.ratio(("loader", self.choice.setting), MODEL)

    @cached_property
    def wait_share(self) -> Estimate | None:
        """Share of the time that the chosen setting lets the model wait; None if there was no time to try it."""
        waits = [t.wait for t in self.evidence.of(self._together)]
        return estimate(waits, "1") if waits else None

    @cached_property
    def records(self) -> Records:
        """rate_per_s of every way and setting, with all samples."""
        found = []
        for way, setting in sorted({t.arm for t in self.evidence}, key=lambda a: (list(NAMES).index(a[0]), a[1])):
            case = {"way": NAMES[way]} | ({"workers": setting.workers, "prefetch": setting.prefetch} if setting else {})
            samples = self.evidence.samples((way, setting))
            found.append(Record("tuning", "rate_per_s", "1/s", samples, case=case, config={"batch": self.batch_size}))
        return attach_provenance(found)

    @property
    def table(self) -> pandas.DataFrame:
        """The evidence: samples per second of each way and setting with a 95 % interval, and the share of waiting."""
        import pandas

        rows = []
        for r in self.records:
            e, setting = estimate(r.samples, "1/s"), _setting(r)
            turns = self.evidence.of(("together", setting)) if r.case["way"] == NAMES["together"] else []
            wait = statistics.median(t.wait for t in turns) if turns else None
            rows.append(
                {
                    "way": r.case["way"],
                    "setting": str(setting or ""),
                    "samples_per_s": e.value,
                    "low": e.low,
                    "high": e.high,
                    "n": e.n,
                    "wait_share": wait,
                }
            )
        return pandas.DataFrame(rows)

    @property
    def _together(self) -> Arm:
        return "together", self.choice.setting

    def figure(self) -> Figure:
        """Samples per second of the model alone, and by setting of the loader alone and of both together."""
        from labs.kit import plot

        place = {s: i for i, s in enumerate(sorted({s for _, s in (t.arm for t in self.evidence) if s}))}
        fig, ax = plot.figure(self._title(), xlabel="num_workers", ylabel="samples per second", records=self.records)
        for way in ("loader", "together"):
            found = self.records.where(way=NAMES[way])
            plot.points(ax, [place[_setting(r)] for r in found], found, label=NAMES[way])
        (model,) = self.records.where(way=NAMES["model"])
        plot.curve(ax, [-0.4, len(place) - 0.6], [model.value] * 2, kind="measured", label=NAMES["model"])
        names = [str(s.workers) if s.prefetch == 2 else f"{s.workers}\nprefetch {s.prefetch}" for s in place]
        ax.set_xticks(range(len(place)), names)
        if model.value > 5 * max(r.value for r in self.records.where(way=NAMES["loader"])):
            ax.set_yscale("log")  # otherwise the line of a fast model would press all else to the ground
        else:
            ax.set_ylim(bottom=0)
        return fig

    def _title(self) -> str:
        if not self.choice.sure:
            return f"{self.choice.setting} may be enough: this run cannot tell"
        starved = self._loader_was_measured and self.limit == "loader"
        return f"{self.choice.setting} is {'best, and the model still waits' if starved else 'enough'}"

    def __str__(self) -> str:
        """What to set, how sure that is, what limits, and what to do next."""
        return " ".join([f"{self._result()}.", *self._certainty(), *self._limits(), self._next()])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        result = self._result().removeprefix(str(self.choice.setting))
        told = " ".join([*self._certainty(), *self._limits()])
        return f"**`{self.choice.setting}`**{result}.\n\n{told}\n\n{self._next()}"

    def _result(self) -> str:
        rates = [t.rate for t in self.evidence.of(self._together)]
        return f"{self.choice.setting}: {told(estimate(rates, 'samples/s'))}" if rates else str(self.choice.setting)

    def _certainty(self) -> list[str]:
        """Evidence against each other setting that was compared, and whether it is enough."""
        if self.choice.share is None:
            return [
                f"Not sure: the {self.budget_s:g} s were over before settings could be compared with model and "
                "loader together, and this follows from their rates alone. Raise budget_s."
            ]
        others = {t.arm for t in self.evidence if t.arm[0] == "together"} - {self._together}
        said = [verdict(self.evidence.ratio(o, self._together), f"{o[1]} against it") for o in sorted(others)]
        reached = self.evidence.ratio(self._together, MODEL)
        noise = ", which only noise can exceed"
        said.append(f"it reaches {reached} of the rate of the model alone{noise if reached.value > 1 else ''}")
        if self.choice.sure:
            sure = f"Sure: none of these is faster by {TOLERANCE_TEXT}"
            near = "No other was compared: none comes near it, by the rates of the loader alone"
            rest = near if len(self.evidence.loaders()) > 1 else "No other was tried"
            return [f"In turn: {'; '.join(said)}. {sure if others else rest}."]
        few = self.choice.share.n < ENOUGH
        hint = f"rounds: {self.choice.share.n}, raise budget_s" if few else "too much noise"
        return [f"In turn: {'; '.join(said)}. Not sure ({hint}): the cheapest that may be as good was taken."]

    def _limits(self) -> list[str]:
        """What limits, what share of the time waits, and whether model and workers are in each other's way."""
        setting = self.choice.setting
        if not self._loader_was_measured:
            return ["What limits was not measured: raise budget_s."]
        loader, model = (statistics.median(self.evidence.samples(arm)) for arm in (("loader", setting), MODEL))
        name = "Neither limits by more than noise" if self.limit.startswith("neither") else f"The {self.limit} limits"
        said = [
            f"{name}: alone the loader gives {plain(loader)} samples/s, the model takes {plain(model)} "
            f"({self.loader_to_model})."
        ]
        if self.wait_share:
            said.append(f"{told(self.wait_share.scaled(100, '%'))} of each step waits for data.")
            if self._in_each_others_way():
                said.append(
                    f"Together they reach {100 * self._reached():.0f} % of the slower one. A guess: they share cores."
                )
        return said

    def _reached(self) -> float:
        """Rate of model and loader together over what both alone make one expect."""
        setting = self.choice.setting
        alone = expected(self.evidence.rate(MODEL), self.evidence.rate(("loader", setting)), setting.workers)
        return self.evidence.rate(self._together) / alone

    def _in_each_others_way(self) -> bool:
        return bool(self.choice.setting.workers and self.wait_share and self._reached() < IN_THE_WAY)

    def _next(self) -> str:
        waits = self.wait_share.value if self.wait_share else 0.0
        if self.capped and not self.choice.setting.workers:
            return "Next: raise max_workers. None were tried."
        if self.capped:
            return f"Next: raise max_workers. The last of its {self.choice.setting.workers} workers still helped."
        if self.limit == "loader" and self.untried:
            return f"Next: raise budget_s. There was no time for num_workers={self.untried}, which may be faster."
        if not self._loader_was_measured:
            return "Next: raise budget_s."
        alone = self.evidence.loaders()
        # A worker loads while the batch before is handed over: half the rate means that this takes twice as long.
        if self.limit == "loader" and not self.choice.setting.workers and 2 * alone.get(1, math.inf) < alone[0]:
            return f"Next: {LOAD_AT_ONCE}."
        if self.limit == "loader":
            return f"Next: {FEED_MORE}."
        if self.limit != "model":
            if self._in_each_others_way():
                return "Next: if they share cores, less work in either, or more cores."
            return "Next: model and loader would both have to become faster."
        waited = HANDING_OVER if self.choice.setting.workers else BY_ITSELF
        rest = f"what it still waits for is {waited}" if waits > WAITS else "data is not what it waits for"
        return f"Next: a faster step; {rest}."


def _setting(record: Record) -> Setting | None:
    return Setting(record.case["workers"], record.case["prefetch"]) if "workers" in record.case else None


def told(e: Estimate) -> str:
    """An Estimate in words; one of a single turn has no interval."""
    return str(e) if e.n > 1 else f"{str(e).split(' [')[0]} (one turn)"


def plain(value: float) -> str:
    """1234.5 -> "1,230": three digits are more than a rate holds."""
    return f"{float(f'{value:.3g}'):,.10g}"
