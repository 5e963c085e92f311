"""Every plan with its bytes and seconds, the best one that fits, and the same for a grid of models and cards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pandas

from labs.common.cost_model import cards, published
from labs.common.cost_model.jobs import Job, Plan
from labs.common.cost_model.memory import ADAM, HEADROOM, REMEDIES, States, activation_bytes, states_bytes
from labs.common.cost_model.seconds import Cluster, Step, Work, step

NEAR = 0.1
"""Plans whose modelled times differ by less count as equal, so the simpler one wins. Our choice."""


@dataclass(frozen=True)
class Cost:
    """Costs of one step of a plan, on its fullest GPU."""

    plan: Plan
    states_bytes: float
    activation_bytes: float
    step: Step

    @property
    def memory_bytes(self) -> float:
        """Peak bytes of the fullest GPU."""
        return self.states_bytes + self.activation_bytes

    @property
    def step_s(self) -> float:
        """Modelled seconds per step."""
        return self.step.step_s


def cost(job: Job, cluster: Cluster, plan: Plan) -> Cost:
    """Return bytes and seconds of one plan, with Adam in FP32."""
    found = step(Work.of(job), cluster, plan)
    return Cost(plan, states_bytes(job, plan), activation_bytes(job, plan), found)


def plans(job: Job, gpus: int, gpus_per_node: int = 8) -> Iterator[Plan]:
    """Yield all plans for exactly `gpus` GPUs that divide this batch; tensor parallel stays inside a node, up to 8."""
    for pipeline, tensor in ((p, t) for p in _divisors(gpus) for t in _divisors(gpus // p)):
        data = gpus // (pipeline * tensor)
        cuts_heads = tensor > 1 and job.hidden % (64 * tensor)  # heads of 64, each whole on one GPU
        if pipeline > job.layers or tensor > min(8, gpus_per_node) or cuts_heads or job.batch % data:
            continue
        base = Plan(data, pipeline, tensor)
        ways = [base]
        if data > 1:
            ways += [replace(base, bucket_view=True), replace(base, sharded=True)]
        if pipeline == gpus > 1:
            ways.append(replace(base, naive=True))
        for micro in _divisors(int(job.batch) // data):  # down to one sequence at a time, which needs the least memory
            yield from (replace(w, micro_batches=micro, recompute=r) for w in ways for r in (False, True))


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def undivided(batch: int, gpus: int) -> str:
    """Say why no plan is data parallel over all GPUs, and which batch would allow it; "" if there is one."""
    if batch % gpus == 0:
        return ""
    enough = gpus * math.ceil(batch / gpus)
    return f"{gpus:,} GPUs can't share a batch of {batch:,} evenly; a batch of {enough:,} allows DDP and FSDP2."


def costs(job: Job, cluster: Cluster) -> list[Cost]:
    """Return the costs of every plan, for all GPUs and for a single one; fastest first."""
    counts = {1, cluster.gpus}
    found = [cost(job, cluster, p) for n in counts for p in plans(job, n, cluster.gpus_per_node)]
    return sorted(found, key=lambda c: (c.step_s, _complexity(c.plan)))


def _mechanisms(plan: Plan) -> int:
    """Rate how much you have to get right: several GPUs, sharding, splitting layers, splitting between layers."""
    return (plan.ranks > 1) + (plan.data > 1) + 2 * plan.sharded + 2 * (plan.tensor > 1) + 3 * (plan.pipeline > 1)


def _complexity(plan: Plan) -> tuple[int, ...]:
    return _mechanisms(plan), plan.bucket_view, plan.recompute, plan.micro_batches


def limit_bytes(cluster: Cluster) -> float:
    """Return the bytes of one GPU that a plan may use: everything except the headroom."""
    return (1 - HEADROOM) * cluster.memory_bytes


def best(found: Iterable[Cost], limit: float) -> Cost | None:
    """Return the fastest plan within `limit` bytes, or the simplest of those NEAR it; None if none fits."""
    fitting = [c for c in found if c.memory_bytes <= limit]
    most = (1 + NEAR) * min((c.step_s for c in fitting), default=0.0)
    near = [c for c in fitting if c.step_s <= most]
    return min(near, key=lambda c: (_mechanisms(c.plan), c.step_s, _complexity(c.plan)), default=None)


def remedies(job: Job, cluster: Cluster) -> Iterator[tuple[States, Plan, float]]:
    """Yield (states, simplest plan, its bytes) for each of REMEDIES that fits."""
    every = [p for n in {1, cluster.gpus} for p in plans(job, n, cluster.gpus_per_node) if not p.naive]
    for states in REMEDIES:
        usable = (p for p in every if not states.host_bytes or p.sharded or p.ranks == 1)
        sized = ((p, states_bytes(job, p, states) + activation_bytes(job, p)) for p in usable)
        fitting = [(p, size) for p, size in sized if size <= limit_bytes(cluster)]
        if fitting:
            plan, size = min(fitting, key=lambda f: (f[0].ranks < cluster.gpus, _complexity(f[0])))
            yield states, plan, size


def fewest_gpus(job: Job, cluster: Cluster, most: int = 1024) -> int | None:
    """Return the smallest power of two of such GPUs for which some plan fits; None above `most`."""
    for gpus in (2**k for k in range(most.bit_length())):
        every = plans(job, gpus, cluster.gpus_per_node)
        if any(states_bytes(job, p, ADAM) + activation_bytes(job, p) <= limit_bytes(cluster) for p in every):
            return gpus
    return None


def by_scheme(found: Sequence[Cost], cluster: Cluster) -> pandas.DataFrame:
    """Return the best plan of each scheme that fits, fastest first, then the smallest plan of each other scheme.

    `step_s` is the modelled time without its band: use it to compare, not to promise.
    """
    limit, rows = limit_bytes(cluster), []
    for scheme in dict.fromkeys(c.plan.scheme for c in found):
        its = [c for c in found if c.plan.scheme == scheme]
        fits = best(its, limit)
        c = fits or min(its, key=lambda c: c.memory_bytes)
        rows.append(
            {
                "scheme": scheme,
                "plan": str(c.plan),
                "fits": fits is not None,
                "states_gb": c.states_bytes / 1e9,
                "activations_gb": c.activation_bytes / 1e9,
                "limit_gb": limit / 1e9,
                "step_s": c.step_s,
                **{f"{name.replace(' ', '_')}_s": seconds for name, seconds in c.step.parts().items()},
            }
        )
    return pandas.DataFrame(rows).sort_values(["fits", "step_s"], ascending=[False, True], ignore_index=True)


def grid(
    parameters: Sequence[float],
    names: Sequence[str],
    gpus: int = 8,
    batches: Sequence[int] = (32,),
    seq: int = 2048,
    network_gb_s: float = 25.0,
) -> pandas.DataFrame:
    """Return the scheme that the model picks for each size, batch and real card with its links, one row each.

    `scheme` is "nothing fits" if no plan does; then `remedies` names the states that would. BadInput for a card without
    sourced memory, link or peak.
    """
    rows = []
    for name in names:
        spec = cards.require_card(name)
        flop_s = published.reached(spec.gpu)[0] * cards.peak_flop_s(spec)
        cluster = cards.cluster(spec, gpus, 8, network_gb_s, flop_s)
        case = {"card": spec.gpu, "link": "PCIe" if cluster.pcie else spec.link, "gpus": gpus}
        case |= {"link_gb_s": cluster.inside.bytes_s / 1e9, "limit_gb": limit_bytes(cluster) / 1e9}
        for size, batch in ((p, b) for p in parameters for b in batches):
            job = Job.of(size, batch, seq)
            choice = best(costs(job, cluster), limit_bytes(cluster))
            rows.append(
                {
                    **case,
                    "parameters": size,
                    "batch": batch,
                    "scheme": choice.plan.scheme if choice else "nothing fits",
                    "plan": str(choice.plan) if choice else "",
                    "gb_per_gpu": choice.memory_bytes / 1e9 if choice else math.nan,
                    "remedies": "" if choice else ", ".join(s.name for s, _, _ in remedies(job, cluster)),
                }
            )
    return pandas.DataFrame(rows)
