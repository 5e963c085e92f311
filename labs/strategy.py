"""Which way to train this model on these GPUs: the fastest that fits, by a cost model whose every input is listed.

    python -m labs.strategy --params 7e9 --batch 32 --gpus 8 --memory-gb 80 --link-gb-s 25
    python -m labs.strategy --params 1.5e9 --batch 64 --gpus 4 --gpu "A100 80GB SXM" --seq 1024

Takes a second: nothing is trained. Bytes are those of labs/common/planning/parallel_cost.py, seconds those of the
scaling model, labs/common/planning/scaling.py. Notebook 06 counts what DDP and FSDP2 send, notebook 08 compares the
seconds with published runs. Where nothing fits, it names what does: 8-bit Adam, BF16 states, CPU offload, LoRA.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace

import pandas

from labs.common.planning.blind_test import Band, band, band_across
from labs.common.planning.calibration import reached
from labs.common.planning.parallel_cost import (
    GRADIENT_BYTES,
    NEAR,
    STATE_BYTES,
    Cost,
    Job,
    Machine,
    States,
    best,
    complexity,
    costs,
    fewest_gpus,
    otherwise,
    shape,
    undivided,
)
from labs.common.planning.scaling import HOP_S, Cluster, Link, Work, timed, without_peer_to_peer
from labs.common.planning.scaling import REACHED as OF_DATASHEET
from labs.kit import cli, hardware
from labs.kit.errors import naming, require

ASSUMED = {"memory_gb": 24.0, "link_gb_s": 25.0, "tflops": 100.0}  # a card of this size on PCIe 4.0 x16
REACHED = 0.5  # of a datasheet's peak, for a card of which no published run is known here: printed as an assumption


@dataclass(frozen=True)
class Config:
    """The model, its batch, and the machine."""

    params: float = 7e9
    """Parameters of the transformer."""
    batch: int = 32
    """Sequences per optimizer step, over all GPUs."""
    gpus: int = 2
    """GPUs, all equal and linked with each other."""
    gpu: str = ""
    """Card whose datasheet gives what the next three leave at 0, for example "H100 SXM"."""
    memory_gb: float = 0.0
    """Memory of one GPU in 10^9 bytes. Default: 24, or the card's."""
    link_gb_s: float = 0.0
    """Bandwidth that one GPU reaches to the others, one direction, in 10^9 bytes/s: busbw of nccl-tests.

    Default: 25, or 80 % of the card's, whose datasheet adds both directions.
    """
    tflops: float = 0.0
    """10^12 FLOP/s that one GPU reaches in 16-bit training.

    Default: what published runs reach on this card, else half of its peak, else 100. A step that you have timed on one
    GPU gives a better value.
    """
    gpus_per_node: int = 8
    """GPUs that are linked as `link_gb_s` says; more of them are joined by the network."""
    network_gb_s: float = 25.0
    """Line rate of one GPU to other nodes, one direction, in 10^9 bytes/s; messages are taken to reach 80 % of it.

    Default: 200 Gbit/s for each, as in a DGX A100.
    """
    seq: int = 2048
    """Tokens per sequence."""
    layers: int = 0
    """Layers. Default: so many that the hidden size is 100 times as large."""
    hidden: int = 0
    """Hidden size. Default: that of a transformer with 12 x layers x hidden^2 parameters."""
    vocabulary: int = 50257
    """Words of the output layer."""
    reserved_gb: float = 1.0
    """Memory of each GPU that training cannot have: CUDA context, workspace, fragmentation."""
    latency_us: float = 0.0
    """Seconds x 10^-6 that a message takes from one GPU to the next, however small.

    Default: what NCCL reckons with, 3.4 over NVLink, 5.7 over PCIe, 9.6 between nodes.
    """

    def __post_init__(self) -> None:
        for name in ("params", "batch", "gpus", "seq", "vocabulary", "gpus_per_node"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name):g}")
        for name in ("memory_gb", "link_gb_s", "tflops", "layers", "hidden", "reserved_gb", "latency_us"):
            require(getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name):g}")
        require(self.network_gb_s > 0, f"network_gb_s must be positive, not {self.network_gb_s:g}")
        require(self.gpus <= 4096, f"gpus must be at most 4096, not {self.gpus}")
        require(self.params <= 1e14, f"params must be at most 1e14, not {self.params:g}")
        if self.gpu:
            with naming("gpu"):
                hardware.require_spec(self.gpu, "; or leave gpu out and give memory_gb, link_gb_s and tflops")
        free = self.machine().memory_bytes
        require(free > 0, f"reserved_gb leaves no memory: lower it below {free / 1e9 + self.reserved_gb:g}")

    @property
    def card(self) -> str:
        """The card's name in gpus.toml; "" if none is named."""
        return hardware.spec(self.gpu).gpu if self.gpu else ""

    def job(self) -> Job:
        """The model, with the shape that was given or that its size suggests."""
        layers, hidden = shape(self.params)
        if self.layers and not self.hidden:
            hidden = max(64, 64 * round((self.params / (12 * self.layers)) ** 0.5 / 64))
        return Job(self.params, self.batch, self.seq, self.layers or layers, self.hidden or hidden, self.vocabulary)

    def machine(self) -> Machine:
        """The GPUs: what was given, else the card's, else the assumptions."""
        memory, link, tflops = (self.of_machine()[name][0] for name in ("memory_gb", "link_gb_s", "tflops"))
        free = (memory - self.reserved_gb) * 1e9
        return Machine(self.gpus, free, tflops * 1e12, link * 1e9, self.hop_s("inside"))

    def hop_s(self, level: str) -> float:
        """Seconds from one GPU to the next, "inside" a node or "between" nodes. A card that is not named has PCIe."""
        if self.latency_us:
            return self.latency_us * 1e-6
        if level == "between":
            return HOP_S["network"]
        card = hardware.spec(self.gpu) if self.gpu else None
        linked = card and card.link_among(min(self.gpus, self.gpus_per_node)) == card.link_gb_s
        return HOP_S["NVLink" if linked and "NVLink" in (card.link or "") else "PCIe"]

    def cluster(self) -> Cluster:
        """The same GPUs for the scaling model: two levels of links."""
        one = self.machine()
        card = hardware.spec(self.gpu) if self.gpu else None
        memory = OF_DATASHEET * card.bandwidth_gb_s * 1e9 if card and card.bandwidth_gb_s else float("inf")
        network = Link(OF_DATASHEET * self.network_gb_s * 1e9, self.hop_s("between"))
        return Cluster(
            self.gpus, self.gpus_per_node, one.flop_s, Link(one.link_bytes_s, one.latency_s), network, memory
        )

    def of_machine(self) -> dict[str, tuple[float, str]]:
        """{name: (value, where it comes from)} of what a datasheet can tell."""
        card = hardware.spec(self.gpu) if self.gpu else None
        peak = card.tflops("bf16") or card.tflops("fp16") if card else None
        link = card.link_among(min(self.gpus, self.gpus_per_node)) if card else None
        by_card = {
            "memory_gb": (card.memory_gb, "datasheet") if card else None,
            "link_gb_s": (OF_DATASHEET * link / 2, f"{OF_DATASHEET:.0%} of one direction's datasheet")
            if link
            else None,
            "tflops": self._reached(peak) if peak else None,
        }
        given = {name: (getattr(self, name), "given") for name in ASSUMED if getattr(self, name)}
        return {name: given.get(name) or by_card[name] or (ASSUMED[name], "assumed") for name in ASSUMED}

    def _reached(self, peak: float) -> tuple[float, str]:
        known = reached(self.gpu)
        share, origin = known or (REACHED, "assumed")
        return peak * share, f"{origin}: {share:.0%} of the datasheet's"

    def inputs(self) -> pandas.DataFrame:
        """Every input of the cost model with its unit and its origin."""
        job, machine = self.job(), self.of_machine()
        rows = [
            ("parameters", self.params, "", "given"),
            ("batch", self.batch, "sequences", "given"),
            ("sequence", self.seq, "tokens", self._origin("seq")),
            ("layers", job.layers, "", self._origin("layers")),
            ("hidden size", job.hidden, "", self._origin("hidden")),
            ("vocabulary", self.vocabulary, "words", self._origin("vocabulary")),
            ("GPUs", self.gpus, "", "given"),
            ("memory of one", machine["memory_gb"][0], "GB", machine["memory_gb"][1]),
            ("of which not free", self.reserved_gb, "GB", self._origin("reserved_gb")),
            ("matrix multiplications", machine["tflops"][0], "TFLOP/s", machine["tflops"][1]),
            ("link, one direction", machine["link_gb_s"][0], "GB/s", machine["link_gb_s"][1]),
            ("GPUs in a node", self.gpus_per_node, "", self._origin("gpus_per_node")),
            ("network of one GPU, one direction", self.network_gb_s, "GB/s", self._origin("network_gb_s")),
            *(
                (f"latency {level} nodes", 1e6 * self.hop_s(level), "us", self._origin("latency_us"))
                for level in ("inside", "between")
            ),
        ]
        table = [(name, f"{value:,.6g} {unit}".strip(), origin) for name, value, unit, origin in rows]
        return pandas.DataFrame(table, columns=["input", "value", "origin"]).set_index("input")

    def _origin(self, name: str) -> str:
        return "assumed" if getattr(self, name) == type(self).__dataclass_fields__[name].default else "given"


@dataclass(frozen=True)
class Advice:
    """What the cost model says of one Config."""

    config: Config
    costs: list[Cost]
    """Of every plan, fastest first."""
    choice: Cost | None
    """The simplest of the fastest that fit; None if none does."""
    enough_gpus: int | None
    """If none fits: with so many of these GPUs one would."""
    others: list[tuple[States, Cost]]
    """If none fits: what does, with other states of the optimizer and the weights."""
    error: Band
    """Published over modelled seconds, of eight rows in ten."""
    fewer: Cost | None = None
    """The best plan that leaves GPUs idle and uses a power of two of them, if it beats the choice by more than NEAR."""

    @property
    def speed_up(self) -> float | None:
        """Of the choice over one such GPU with memory without limit, which recomputes nothing."""
        return self.one_gpu_s / self.choice.step_s if self.choice else None

    @property
    def one_gpu_s(self) -> float:
        """Seconds per step of one such GPU with memory without limit."""
        return self.config.job().flop / self.config.machine().flop_s

    def seconds(self, c: Cost) -> str:
        """Seconds per step with the error band, for example "2.4 s (1.7 to 4.0)"."""
        return f"{c.step_s:.2g} s ({c.step_s * self.error.low:.2g} to {c.step_s * self.error.high:.2g})"

    def speed_ups(self, c: Cost) -> str:
        """Over one GPU, with the error band: no more than there are GPUs."""
        if c.plan.ranks == 1 and not c.plan.recompute:
            return "1 x"
        ratio = self.one_gpu_s / c.step_s
        return f"{ratio / self.error.high:.2g} to {min(c.plan.ranks, ratio / self.error.low):.2g} x"

    def by_scheme(self) -> pandas.DataFrame:
        """One row per scheme that fits, with its fastest plan; then one with the least memory that does not."""
        free, rows = self.config.machine().memory_bytes, []
        schemes = [s for s in dict.fromkeys(c.plan.scheme for c in self.costs) if "naive split x" not in s]
        for scheme in (s for s in schemes if not s.endswith("x naive split")):
            its = [c for c in self.costs if c.plan.scheme == scheme]
            if c := best(its, free):
                rows.append((c.step_s, self._row(c, "fits")))
        rows.sort(key=lambda row: row[0])
        least = [c for c in self._least_memory() if c.memory_bytes > free and " x " not in c.plan.scheme]
        rows += [(0, self._row(c, f"lacks {(c.memory_bytes - free) / 1e9:.1f} GB")) for c in least]
        return pandas.DataFrame([row for _, row in rows]).set_index("plan")

    def _least_memory(self) -> list[Cost]:
        """Of each scheme, the plan that needs least memory."""
        schemes = dict.fromkeys(c.plan.scheme for c in self.costs)
        found = (min((c for c in self.costs if c.plan.scheme == s), key=lambda c: c.memory_bytes) for s in schemes)
        return sorted(found, key=lambda c: c.memory_bytes)

    def _row(self, c: Cost, fits: str) -> dict[str, str]:
        lost = c.bubble_s + c.exposed_s + c.waiting_s
        timed = (
            {
                "s per step (band)": self.seconds(c),
                "speed-up": self.speed_ups(c),
                "waiting": f"{100 * lost / c.step_s:.2g} %",
            }
            if fits == "fits"
            else {}
        )
        blank = {"s per step (band)": "", "speed-up": "", "waiting": ""}
        return {
            "plan": str(c.plan),
            "": fits,
            "GB per GPU": f"{c.memory_bytes / 1e9:.1f}",
            "of it states": f"{c.states_bytes / 1e9:.1f}",
            **(timed or blank),
        }

    def reasons(self) -> list[str]:
        """What to use and why, in sentences."""
        states, free = self.config.params * STATE_BYTES / 1e9, self.config.machine().memory_bytes / 1e9
        said = [f"Parameters, gradients and Adam's moments take {states:.3g} GB; one GPU has {free:.3g} GB free."]
        said += self._of_choice(self.choice) if self.choice else self._of_none()
        not_considered = undivided(self.config.batch, self.config.gpus)
        unlinked = without_peer_to_peer(self.config.card)
        unlinked += " That is link_gb_s." * bool(unlinked)
        here = self.config.gpus > 1 and not self.config.link_gb_s
        return said + [not_considered] * bool(not_considered) + [unlinked] * bool(unlinked and here)

    def _of_none(self) -> list[str]:
        least = min(self.costs, key=lambda c: c.memory_bytes)
        enough = f"{self.enough_gpus} of these GPUs" if self.enough_gpus else "no number of them up to 1024"
        said = [
            f"Nothing fits with Adam in FP32. Least memory: {least.plan}, {least.memory_bytes / 1e9:.3g} GB per "
            f"GPU; {enough} would do."
        ]
        for states, c in self.others:
            host = f" and {states.host_bytes * self.config.params / 1e9:.3g} GB of the host's memory"
            said.append(
                f"Fits with {states.name}: {c.plan}, {c.memory_bytes / 1e9:.3g} GB per GPU"
                f"{host * bool(states.host_bytes)} ({states.source})."
            )
        if not self.others:
            said.append(
                "Neither 8-bit Adam, BF16 states, CPU offload nor LoRA would make it fit: take more GPUs, or "
                "shorter sequences."
            )
        return said

    def _of_choice(self, c: Cost) -> list[str]:
        said = [
            f"Use {c.plan}: {c.memory_bytes / 1e9:.3g} GB per GPU, {self.seconds(c)} per step, {self.speed_ups(c)} "
            f"one GPU with memory without limit. The range is the model's error: {self.error}"
        ]
        value, origin = self.config.of_machine()["tflops"]
        if origin.startswith("assumed"):
            said.append(f"That a GPU reaches {value:.3g} TFLOP/s is assumed, and the range does not cover that.")
        if c.plan.data > 1 and not c.plan.sharded:
            own = GRADIENT_BYTES * self.config.params / (c.plan.pipeline * c.plan.tensor) / 1e9
            said.append(
                f"DDP is counted with gradient_as_bucket_view=True: by default it holds gradients twice, which "
                f"takes {own:.2g} GB more."
            )
        free = self.config.machine().memory_bytes
        rivals = [x for x in self.costs if x.memory_bytes <= free and x.plan.scheme != c.plan.scheme]
        near = dict.fromkeys(x.plan.scheme for x in rivals if x.step_s <= (1 + NEAR) * c.step_s)
        if near:
            said.append(
                f"Within {NEAR:.0%} of it, which counts as equal here: {', '.join(near)}. None of them "
                "has fewer parts that can go wrong."
            )
        if self.fewer:
            said.append(
                f"Fewer GPUs are faster: {self.fewer.plan} on {self.fewer.plan.ranks} of them, "
                f"{self.seconds(self.fewer)}. The others can do something else."
            )
        ideal = best(self.costs, float("inf"))
        if ideal and ideal.step_s * (1 + NEAR) < c.step_s:
            said.append(f"Faster if it fitted: {ideal.plan}, {self.seconds(ideal)}, {ideal.memory_bytes / 1e9:.3g} GB.")
        lost = {
            "the pipeline's bubble": c.bubble_s,
            "communication": c.exposed_s,
            "waiting for the slowest": c.waiting_s,
            "recomputing": c.compute_s / 4 if c.plan.recompute else 0.0,
        }
        name = max(lost, key=lambda n: lost[n])
        if lost[name] >= 0.01 * c.step_s:
            said.append(f"Most of what is lost goes into {name}: {100 * lost[name] / c.step_s:.2g} % of the step.")
        return said


def advise(config: Config) -> Advice:
    """Apply the cost model."""
    job, machine = config.job(), config.machine()
    work, cluster = Work.of(job), config.cluster()
    found = sorted((timed(c, work, cluster) for c in costs(job, machine)), key=lambda c: (c.step_s, complexity(c.plan)))
    choice = best(found, machine.memory_bytes)
    enough = None if choice else fewest_gpus(job, machine)
    # FLOP/s that are given come from a timed step, those of a card from another model, or from nobody
    error = band() if config.tflops else band_across()
    others = [] if choice else list(otherwise(job, machine))
    return Advice(config, found, choice, enough, others, error, _fewer(config, choice))


def _fewer(config: Config, choice: Cost | None) -> Cost | None:
    """The best plan for 2, 4, 8, ... GPUs below those that there are, if it beats `choice` by more than NEAR."""
    job, machine = config.job(), config.machine()
    counts = [2**k for k in range(1, config.gpus.bit_length()) if 2**k < config.gpus]
    work = Work.of(job)
    found = []
    for n in counts if choice else ():
        cluster = replace(config, gpus=n).cluster()
        found += [timed(c, work, cluster) for c in costs(job, replace(machine, gpus=n))]
    idle = best(found, machine.memory_bytes)
    return idle if idle and (1 + NEAR) * idle.step_s < choice.step_s else None


def main() -> None:
    """Entry point of the command line."""
    config = cli.parse_config(Config, __doc__, "python -m labs.strategy")
    advice = advise(config)
    with cli.closed_pipe_is_no_error():
        for sentence in advice.reasons():
            print(textwrap.fill(sentence, 100, subsequent_indent="  "))
        print("\nAll of this is modelled, from these inputs:")
        print(config.inputs().to_string(header=False), end="\n\n")
        print(advice.by_scheme().reset_index().to_string(index=False))


if __name__ == "__main__":
    main()
