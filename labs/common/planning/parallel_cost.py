"""What each way to train a transformer on several GPUs needs: bytes per GPU and seconds per step. Closed forms.

A model to choose by, not a simulator: work is divided evenly, links are equal, and nothing else uses them. A helper
module, not a lab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from labs.common.data_parallel.scaling import ring_all_reduce_bytes

STATE_BYTES = 16  # per parameter, FP32: itself, gradient, Adam's two moments
COPY_BYTES = 2  # per parameter: a 16-bit copy to compute with; FSDP2 gathers it
GRADIENT_BYTES = 4  # per parameter: DDP and FSDP2 both sum gradients in FP32 here
# Plans whose times differ by less are taken for equal. Our choice, made after the errors on published runs had been
# seen: most err by less, not all. So a plan beyond it may still be the faster one.
NEAR = 0.1
BUCKET_BYTES = 25 * 2**20  # DDP's; the last one has no backward pass left to hide behind
ASPECT = 100  # hidden size over layers; 43 to 128 in GPT-3's models, Brown et al. 2020, arXiv 2005.14165, table 2.1
LOGIT_BYTES = 10  # per token and word: the logits in 16 and in 32 bits, and their gradient


@dataclass(frozen=True)
class Job:
    """A transformer and its batch."""

    parameters: float
    batch: int
    """Sequences per step, over all GPUs."""
    seq: int
    """Tokens per sequence."""
    layers: int
    hidden: int
    vocabulary: int

    @property
    def flop(self) -> float:
        """FLOPs of a step without recomputation: 6 N + 12 L h s per token (PaLM, arXiv 2204.02311, appendix B)."""
        per_token = 6 * self.parameters + 12 * self.layers * self.hidden * self.seq
        return self.batch * self.seq * per_token


def shape(parameters: float) -> tuple[int, int]:
    """(layers, hidden) of a transformer with 12 L h^2 parameters and h = ASPECT L; hidden is a multiple of 64."""
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    return layers, max(64, 64 * round(math.sqrt(parameters / (12 * layers)) / 64))


@dataclass(frozen=True)
class Machine:
    """Equal GPUs, all linked with all."""

    gpus: int
    memory_bytes: float
    """Of one GPU, free for training."""
    flop_s: float
    """Of one GPU in 16-bit products, reached rather than promised."""
    link_bytes_s: float
    """Of one GPU in one direction, reached."""
    latency_s: float = 20e-6
    """Of one message."""


@dataclass(frozen=True)
class States:
    """What a GPU keeps of each parameter from step to step: its own formats of weights, gradients and moments."""

    name: str
    kept_bytes: float
    """Per parameter; FSDP2 divides them."""
    copy_bytes: float = COPY_BYTES
    """Per parameter, to compute with, beside the weights that are kept; 0 if those are computed with. Not sharded."""
    reduced_bytes: float = GRADIENT_BYTES
    """Per parameter, in the format in which FSDP2 sums gradients; 0 where these weights are not trained."""
    host_bytes: float = 0.0
    """Per parameter in the host's memory, divided in the same way."""
    adapter_rank: int = 0
    """LoRA: only matrices of this rank beside each weight are trained, with states in FP32."""
    source: str = ""


ADAM = States("Adam in FP32", STATE_BYTES)
OTHERWISE = (
    States("8-bit Adam", 4 + 4 + 2 * (1 + 4 / 256), source="Dettmers et al. 2021, arXiv 2110.02861; bitsandbytes keeps "
           "one FP32 scale per 256 values"),
    States("weights, gradients and moments in BF16", 2 + 2 + 4, copy_bytes=0, reduced_bytes=2, source="Zamirai et al. "
           "2020, arXiv 2010.06192: without stochastic rounding or Kahan summation small updates are lost"),
    States("FSDP2 with CPU offload", 0, host_bytes=STATE_BYTES, source="torch's CPUOffloadPolicy; ZeRO-Offload, Ren et "
           "al. 2021, arXiv 2101.06840"),
    States("LoRA of rank 16 on BF16 weights", 2, 0, 0, adapter_rank=16, source="Hu et al. 2021, arXiv 2106.09685"),
    States("LoRA of rank 16 on 4-bit weights", 0.5 + 0.127 / 8, COPY_BYTES, 0, adapter_rank=16, source="QLoRA, "
           "Dettmers et al. 2023, arXiv 2305.14314, section 3: 0.127 bits more per parameter"),
)  # fmt: skip
"""If nothing fits: in the order in which they change the training."""


@dataclass(frozen=True)
class Plan:
    """A way to train: ranks = data x pipeline x tensor."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    sharded: bool = False
    """Parameters, gradients and optimizer state are divided by the data-parallel ranks (FSDP2), not replicated."""
    micro_batches: int = 1
    """In a pipeline they fill it; elsewhere gradients of so many are accumulated."""
    recompute: bool = False
    """Each layer keeps its input only and is computed again in backward."""

    @property
    def ranks(self) -> int:
        """GPUs that work."""
        return self.data * self.pipeline * self.tensor

    @property
    def scheme(self) -> str:
        """The usual name of this way, without its settings."""
        split = "naive split" if self.micro_batches == 1 else "pipeline"
        names = [(self.data, "FSDP2" if self.sharded else "DDP"), (self.pipeline, split), (self.tensor, "tensor")]
        return " x ".join(name for n, name in names if n > 1) or "one GPU"

    def __str__(self) -> str:
        more = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        more += ["recomputing activations"] * self.recompute
        sizes = [f"{n} {name}" for n, name in ((self.data, "data"), (self.pipeline, "stages"), (self.tensor, "tensor"))]
        sizes = sizes if " x " in self.scheme else []
        return ", ".join([self.scheme, *(s for s in sizes if not s.startswith("1 ")), *more])


@dataclass(frozen=True)
class Cost:
    """One step of a plan, on its fullest GPU."""

    plan: Plan
    states_bytes: float
    activation_bytes: float
    compute_s: float
    """Products, recomputation included."""
    bubble_s: float
    """Waiting for other stages of the pipeline."""
    exposed_s: float
    """Communication that no computing hides."""
    waiting_s: float = 0.0
    """For the slowest rank: `labs.common.planning.scaling` knows it, the closed forms here do not."""

    @property
    def memory_bytes(self) -> float:
        """What the fullest GPU holds at its peak."""
        return self.states_bytes + self.activation_bytes

    @property
    def step_s(self) -> float:
        """Seconds per optimizer step."""
        return self.compute_s + self.bubble_s + self.exposed_s + self.waiting_s


def cost(job: Job, machine: Machine, plan: Plan, states: States = ADAM) -> Cost:
    """The model: memory and time of `plan`. The time is that of ADAM: what other states cost is not modelled."""
    layers = math.ceil(job.layers / plan.pipeline)  # of the largest stage
    imbalance = layers * plan.pipeline / job.layers
    compute = job.flop * (4 / 3 if plan.recompute else 1) / (plan.ranks * machine.flop_s) * imbalance
    own = job.parameters * layers / job.layers / plan.tensor
    return Cost(
        plan,
        states_bytes(job, plan, own, states),
        activation_bytes(job, plan, layers),
        compute,
        compute * (plan.pipeline - 1) / plan.micro_batches,
        _pipeline_s(job, machine, plan) + _tensor_s(job, machine, plan, layers) + _data_s(machine, plan, own, compute),
    )


def states_bytes(job: Job, plan: Plan, own: float, states: States = ADAM) -> float:
    """Parameters, gradients, optimizer state and copies to compute with of `own` parameters on one GPU.

    Sharded (or with weights in few bits, or on the host) a GPU has the copies of two layers only: the one at work and
    the next one. FSDP2 adds, in backward, a layer's whole gradient and the one before it, which is being summed.
    LoRA's matrices: r (in + out) numbers for four h x h and two h x 4h weights in each layer.
    """
    shares, own_layers = plan.data if plan.sharded else 1, own / job.parameters * job.layers
    layer = job.parameters / job.layers / plan.tensor
    adapters = states.adapter_rank * 18 * job.hidden * own_layers
    if plan.sharded:
        gradients = COPY_BYTES + states.reduced_bytes if states.reduced_bytes else 0
        working = layer * (2 * COPY_BYTES + gradients)
    elif states.kept_bytes < COPY_BYTES:
        working = 2 * layer * states.copy_bytes
    else:
        working = own * states.copy_bytes
    return (own * states.kept_bytes + adapters * STATE_BYTES) / shares + working


def activation_bytes(job: Job, plan: Plan, layers: int) -> float:
    """Activations of the fuller of the first and the last stage, in 16 bits, with attention that keeps no matrix.

    A layer keeps h (10 + 24 / t) bytes per token: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.1, without
    its quadratic term. 1F1B has as many micro-batches in flight on the first stage as there are stages.
    """
    tokens = job.batch * job.seq / (plan.data * plan.micro_batches)
    layer = tokens * job.hidden * (10 + 24 / plan.tensor)
    kept, working = (2 * tokens * job.hidden, layer) if plan.recompute else (layer, 0.0)
    first = min(plan.pipeline, plan.micro_batches) * layers * kept
    last = layers * kept + tokens * job.vocabulary * LOGIT_BYTES / plan.tensor
    return max(first if plan.pipeline > 1 else 0.0, last) + working


def _pipeline_s(job: Job, machine: Machine, plan: Plan) -> float:
    """Messages between stages: every micro-batch's activations one way and their gradients back, in 16 bits."""
    if plan.pipeline == 1:
        return 0.0
    size = 2 * job.hidden * job.batch * job.seq / (plan.data * plan.micro_batches)
    return 2 * (plan.micro_batches + plan.pipeline - 2) * (machine.latency_s + size / machine.link_bytes_s)


def _tensor_s(job: Job, machine: Machine, plan: Plan, layers: int) -> float:
    """Two all-reduces per layer forward, two backward, two more if forward is repeated; nothing can hide them."""
    if plan.tensor == 1:
        return 0.0
    size = 2 * job.hidden * job.batch * job.seq / (plan.data * plan.micro_batches)
    one = 2 * (plan.tensor - 1) * machine.latency_s + ring_all_reduce_bytes(size, plan.tensor) / machine.link_bytes_s
    return (6 if plan.recompute else 4) * layers * one * (plan.micro_batches + plan.pipeline - 1)


def sent_per_parameter(
    ranks: int, sharded: bool, weight: float = COPY_BYTES, gradient: float = GRADIENT_BYTES
) -> float:
    """Bytes that a rank sends per parameter and step. `weight`, `gradient`: bytes of the format in which they travel.

    DDP: one all-reduce of gradients, 2 (n-1)/n. FSDP2: two all-gathers of weights and a reduce-scatter of gradients,
    (n-1)/n each. In one format for all that is 3/2 of DDP's; with 16-bit weights and FP32 gradients it is as much.
    """
    share = (ranks - 1) / ranks
    return share * (2 * weight + gradient if sharded else 2 * gradient)


def _data_s(machine: Machine, plan: Plan, own: float, compute_s: float) -> float:
    """What is left of DDP's all-reduce, or of FSDP2's gathers and scatter, beside the computing.

    FP32 gradients, 16-bit weights: `sent_per_parameter`. Computing hides all that it lasts for: the best case.
    """
    n, m = plan.data, plan.micro_batches
    if n == 1:
        return 0.0
    parts = 4 if plan.recompute else 3
    forward, backward = compute_s / parts, compute_s * (parts - 1) / parts
    latency = 2 * (n - 1) * machine.latency_s
    if not plan.sharded:
        size = GRADIENT_BYTES * own
        all_reduce, last = (ring_all_reduce_bytes(s, n) / machine.link_bytes_s for s in (size, min(size, BUCKET_BYTES)))
        return latency + max(last, all_reduce - backward / m)
    gather = (n - 1) / n * COPY_BYTES * own / machine.link_bytes_s  # per micro-batch, in forward and in backward
    scatter = (n - 1) / n * GRADIENT_BYTES * own / machine.link_bytes_s
    return m * latency + max(0.0, m * gather - forward) + max(0.0, m * (gather + scatter) - backward)


def plans(job: Job, gpus: int) -> Iterator[Plan]:
    """All ways to use exactly `gpus` of them that divide this batch; tensor parallel over 8 at most (one machine)."""
    for pipeline, tensor in ((p, t) for p in _divisors(gpus) for t in _divisors(gpus // p)):
        data = gpus // (pipeline * tensor)
        cuts_heads = tensor > 1 and job.hidden % (64 * tensor)  # heads of 64, each whole on one GPU
        if pipeline > job.layers or tensor > 8 or cuts_heads or job.batch % data:
            continue
        for sharded in (False, True) if data > 1 else (False,):
            plan = Plan(data, pipeline, tensor, sharded)
            micro = _divisors(job.batch // data)  # up to one sequence at a time: what has the least memory
            yield from (replace(plan, micro_batches=m, recompute=r) for m in micro for r in (False, True))


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def undivided(batch: int, gpus: int) -> str:
    """Why data parallelism over all GPUs is in none of the `plans`, and the batch with which it is; "" if it is."""
    if batch % gpus == 0:
        return ""
    return (
        f"{gpus:,} GPUs cannot share a batch of {batch:,} sequences evenly, so neither DDP nor FSDP2 over all of "
        f"them was considered: a batch of {gpus * math.ceil(batch / gpus):,} allows both."
    )


def costs(job: Job, machine: Machine) -> list[Cost]:
    """Of every plan, for all GPUs and for one alone; fastest first."""
    found = (cost(job, machine, p) for g in {1, machine.gpus} for p in plans(job, g))
    return sorted(found, key=lambda c: (c.step_s, complexity(c.plan)))


def _mechanisms(plan: Plan) -> int:
    """How much has to be got right: sharding, cutting layers, cutting between layers, more than one GPU at all."""
    return (plan.ranks > 1) + (plan.data > 1) + 2 * plan.sharded + 2 * (plan.tensor > 1) + 3 * (plan.pipeline > 1)


def complexity(plan: Plan) -> tuple[int, ...]:
    """To order plans of equal time: the simpler one first."""
    return plan.ranks > 1, _mechanisms(plan), plan.recompute, plan.micro_batches


def best(costs: Iterable[Cost], memory_bytes: float) -> Cost | None:
    """The fastest that fits or, if others come NEAR, the simplest of them; None if none fits.

    A simpler plan within the model's own error is the better advice: which of the two is faster has to be measured.
    """
    fitting = [c for c in costs if c.memory_bytes <= memory_bytes]
    limit = (1 + NEAR) * min((c.step_s for c in fitting), default=0.0)
    near = [c for c in fitting if c.step_s <= limit]
    return min(near, key=lambda c: (_mechanisms(c.plan), c.step_s, complexity(c.plan)), default=None)


def otherwise(job: Job, machine: Machine) -> Iterator[tuple[States, Cost]]:
    """For each way of OTHERWISE that fits, the plan with the fewest mechanisms: bytes; its time is not modelled."""
    for states in OTHERWISE:
        found = [
            cost(job, machine, p, states)
            for g in {1, machine.gpus}
            for p in plans(job, g)
            if not states.host_bytes or p.sharded or p.ranks == 1
        ]
        fitting = [c for c in found if c.memory_bytes <= machine.memory_bytes]
        if fitting:
            yield states, min(fitting, key=lambda c: (c.plan.ranks < machine.gpus, complexity(c.plan)))


def fewest_gpus(job: Job, machine: Machine, most: int = 1024) -> int | None:
    """The least power of two of such GPUs with which some plan fits, None above `most`."""
    counts = (2**k for k in range(most.bit_length()))
    return next((g for g in counts if best(costs(job, replace(machine, gpus=g)), machine.memory_bytes)), None)
