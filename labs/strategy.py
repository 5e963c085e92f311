"""Which way to train this model on these GPUs: the fastest that fits, by a cost model whose every input is listed.

    python -m labs.strategy --params 7e9 --batch 32 --gpus 8 --memory-gb 80 --link-gb-s 25
    python -m labs.strategy --params 1.5e9 --batch 64 --gpus 4 --gpu "A100 80GB SXM" --seq 1024

Takes a second: nothing is trained. The model is in labs/parts/planning/parallel_cost.py; notebook 06 holds its parts
against measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas

from labs.kit import cli, hardware
from labs.kit.errors import did_you_mean, require
from labs.parts.planning.parallel_cost import STATE_BYTES, Cost, Job, Machine, best, costs, fewest_gpus, shape

ASSUMED = {"memory_gb": 24.0, "link_gb_s": 25.0, "tflops": 100.0}  # a card of this size on PCIe 4.0 x16
REACHED = 0.5  # of a datasheet's peak, where only the card's name is given: an assumption, printed as one


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
    """Bandwidth of one GPU to the others, one direction, in 10^9 bytes/s. Default: 25, or half of the card's."""
    tflops: float = 0.0
    """10^12 FLOP/s that one GPU reaches in 16-bit training. Default: 100, or half of the card's peak."""
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
    latency_us: float = 20.0
    """Seconds x 10^-6 that a message takes, however small."""

    def __post_init__(self) -> None:
        for name in ("params", "batch", "gpus", "seq", "vocabulary"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name):g}")
        for name in ("memory_gb", "link_gb_s", "tflops", "layers", "hidden", "reserved_gb", "latency_us"):
            require(getattr(self, name) >= 0, f"{name} must not be negative: {getattr(self, name):g}")
        require(self.gpus <= 4096, f"gpus must be at most 4096, not {self.gpus}")
        require(self.params <= 1e14, f"params must be at most 1e14, not {self.params:g}")
        if self.gpu and hardware.spec(self.gpu) is None:
            known = [s.gpu for s in hardware.specs()]
            require(False, f"no datasheet of {self.gpu!r} here: {did_you_mean(self.gpu, known)}Known: "
                    f"{', '.join(known)}; or leave gpu out and give memory_gb, link_gb_s and tflops")  # fmt: skip
        free = self.machine().memory_bytes
        require(free > 0, f"reserved_gb leaves no memory: lower it below {free / 1e9 + self.reserved_gb:g}")

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
        return Machine(self.gpus, free, tflops * 1e12, link * 1e9, self.latency_us * 1e-6)

    def of_machine(self) -> dict[str, tuple[float, str]]:
        """{name: (value, where it comes from)} of what a datasheet can tell."""
        card = hardware.spec(self.gpu) if self.gpu else None
        peak = card.tflops("bf16") or card.tflops("fp16") if card else None
        by_card = {
            "memory_gb": (card.memory_gb, "datasheet") if card else None,
            "link_gb_s": (card.link_gb_s / 2, "half of the datasheet's") if card and card.link_gb_s else None,
            "tflops": (peak * REACHED, f"assumed: {REACHED:.0%} of the datasheet's") if peak else None,
        }
        given = {name: (getattr(self, name), "given") for name in ASSUMED if getattr(self, name)}
        return {name: given.get(name) or by_card[name] or (ASSUMED[name], "assumed") for name in ASSUMED}

    def inputs(self) -> pandas.DataFrame:
        """Every input of the cost model with its unit and its origin."""
        job, machine = self.job(), self.of_machine()
        rows = [
            ("parameters", self.params, "", "given"), ("batch", self.batch, "sequences", "given"),
            ("sequence", self.seq, "tokens", self._origin("seq")),
            ("layers", job.layers, "", self._origin("layers")), ("hidden size", job.hidden, "", self._origin("hidden")),
            ("vocabulary", self.vocabulary, "words", self._origin("vocabulary")), ("GPUs", self.gpus, "", "given"),
            ("memory of one", machine["memory_gb"][0], "GB", machine["memory_gb"][1]),
            ("of which not free", self.reserved_gb, "GB", self._origin("reserved_gb")),
            ("products", machine["tflops"][0], "TFLOP/s", machine["tflops"][1]),
            ("link, one direction", machine["link_gb_s"][0], "GB/s", machine["link_gb_s"][1]),
            ("latency of a message", self.latency_us, "us", self._origin("latency_us")),
        ]  # fmt: skip
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
    """The fastest that fits; None if none does."""
    enough_gpus: int | None
    """If none fits: with so many of these GPUs one would."""

    @property
    def speed_up(self) -> float | None:
        """Of the choice over one such GPU with memory without limit, which recomputes nothing."""
        return self.one_gpu_s / self.choice.step_s if self.choice else None

    @property
    def one_gpu_s(self) -> float:
        """Seconds per step of one such GPU with memory without limit."""
        return self.config.job().flop / self.config.machine().flop_s

    def by_scheme(self) -> pandas.DataFrame:
        """One row per scheme: its fastest plan that fits or, if none does, the one with the least memory."""
        free, rows = self.config.machine().memory_bytes, []
        for scheme in dict.fromkeys(c.plan.scheme for c in self.costs):
            its = [c for c in self.costs if c.plan.scheme == scheme]
            c = best(its, free) or min(its, key=lambda c: c.memory_bytes)
            fits = c.memory_bytes <= free
            rows.append((fits, c.step_s if fits else c.memory_bytes, self._row(c, fits)))
        rows.sort(key=lambda row: (not row[0], row[1]))
        return pandas.DataFrame([row for *_, row in rows]).set_index("plan")

    def _row(self, c: Cost, fits: bool) -> dict[str, str]:
        parts = {"computing": c.compute_s, "bubble": c.bubble_s, "exposed communication": c.exposed_s}
        return {
            "plan": str(c.plan), "fits": "yes" if fits else "no", "GB per GPU": f"{c.memory_bytes / 1e9:.1f}",
            "of them states": f"{c.states_bytes / 1e9:.1f}", "s per step": f"{c.step_s:.3g}",
            "speed-up": f"{self.one_gpu_s / c.step_s:.2f}", **{k: f"{v:.2g} s" for k, v in parts.items()},
        }  # fmt: skip

    def reasons(self) -> list[str]:
        """What to use and why, in sentences."""
        states, free = self.config.params * STATE_BYTES / 1e9, self.config.machine().memory_bytes / 1e9
        said = [f"Parameters, gradients and Adam's moments take {states:.3g} GB; one GPU has {free:.3g} GB free."]
        return said + (self._of_choice(self.choice) if self.choice else [self._of_none()])

    def _of_none(self) -> str:
        least = min(self.costs, key=lambda c: c.memory_bytes)
        enough = f"{self.enough_gpus} of these GPUs" if self.enough_gpus else "no number of them up to 1024"
        gb = least.memory_bytes / 1e9
        return f"Nothing fits. Least memory: {least.plan}, {gb:.3g} GB per GPU; {enough} would do."

    def _of_choice(self, c: Cost) -> list[str]:
        said = [f"Use {c.plan}: {c.memory_bytes / 1e9:.3g} GB per GPU, {c.step_s:.3g} s per step, {self.speed_up:.2f} "
                "times as fast as one GPU with memory without limit."]  # fmt: skip
        ideal = best(self.costs, float("inf"))
        if ideal and ideal.step_s < 0.99 * c.step_s:
            said.append(f"Faster if it fitted: {ideal.plan}, {ideal.step_s:.3g} s, {ideal.memory_bytes / 1e9:.3g} GB.")
        lost = {"the pipeline's bubble": c.bubble_s, "communication": c.exposed_s,
                "recomputing": c.compute_s / 4 if c.plan.recompute else 0.0}  # fmt: skip
        name = max(lost, key=lambda n: lost[n])
        if lost[name]:
            said.append(f"Most of what is lost goes into {name}: {100 * lost[name] / c.step_s:.2g} % of the step.")
        return said


def advise(config: Config) -> Advice:
    """Apply the cost model."""
    job, machine = config.job(), config.machine()
    found = costs(job, machine)
    choice = best(found, machine.memory_bytes)
    return Advice(config, found, choice, None if choice else fewest_gpus(job, machine))


def main() -> None:
    """Entry point of the command line."""
    config = cli.parse_config(Config, __doc__, "python -m labs.strategy")
    advice = advise(config)
    print(config.inputs().to_string(header=False), end="\n\n")
    print("\n".join(advice.reasons()), end="\n\n")
    print(advice.by_scheme().reset_index().to_string(index=False))


if __name__ == "__main__":
    main()
