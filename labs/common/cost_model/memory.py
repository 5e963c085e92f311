"""Bytes that one GPU holds at the peak of a step, and bytes that it sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from labs.common.cost_model.jobs import Job, Plan

STATE_BYTES = 16  # per parameter, FP32: value, gradient, Adam's two moments
COPY_BYTES = 2  # per parameter: a 16-bit copy for computing, which FSDP2 gathers
GRADIENT_BYTES = 4  # per parameter: DDP and FSDP2 both sum gradients in FP32 here
LOGIT_BYTES = 10  # per token and word: logits in 16 and in 32 bits, and their gradient
HEADROOM = 0.1
"""Share of a card's memory that no recommended plan may use: CUDA context, NCCL, workspaces, fragmentation."""


@dataclass(frozen=True)
class States:
    """What a GPU keeps per parameter from step to step: formats of weights, gradients and moments."""

    name: str
    kept_bytes: float
    """Per parameter; FSDP2 divides them."""
    copy_bytes: float = COPY_BYTES
    """Per parameter, for computing; 0 if the kept weights serve for that. FSDP2 holds it for two layers."""
    gradient_bytes: float = GRADIENT_BYTES
    """Per parameter, in the format that sums gradients; 0 if these weights aren't trained."""
    host_bytes: float = 0.0
    """Per parameter in host memory, divided the same way."""
    adapter_rank: int = 0
    """LoRA: trains only matrices of this rank beside each weight, with FP32 states."""
    source: str = ""


ADAM = States("Adam in FP32", STATE_BYTES)
REMEDIES = (
    States("8-bit Adam", 4 + 4 + 2 * (1 + 4 / 256), source="Dettmers et al. 2021, arXiv 2110.02861; one FP32 scale per "
           "256 values in bitsandbytes"),
    States("FSDP2 with CPU offload", 0, host_bytes=STATE_BYTES, source="CPUOffloadPolicy in torch; ZeRO-Offload, Ren "
           "et al. 2021, arXiv 2101.06840"),
    States("LoRA of rank 16 on BF16 weights", 2, 0, 0, adapter_rank=16, source="Hu et al. 2021, arXiv 2106.09685"),
)  # fmt: skip
"""Alternatives if nothing fits with Adam in FP32, least change to training first. Their time isn't modelled."""


def states_bytes(job: Job, plan: Plan, states: States = ADAM) -> float:
    """Return bytes of parameters, gradients, optimizer state and working copies on the GPU with the most layers.

    DDP copies gradients into its buckets, so it holds them twice unless `bucket_view`. With FSDP2, a GPU has the 16-bit
    weights of two layers (current and next), and in backward one layer's whole gradient in 16 bits and in the sum's
    format. LoRA adds r (in + out) numbers for four h x h and two h x 4h weights per layer.
    """
    layers = math.ceil(job.layers / plan.pipeline)
    layer = job.parameters / job.layers / plan.tensor
    adapters = STATE_BYTES * states.adapter_rank * 18 * job.hidden * layers / plan.tensor
    kept = layers * layer * states.kept_bytes + adapters
    if plan.sharded:
        gradients = COPY_BYTES + states.gradient_bytes if states.gradient_bytes else 0
        return kept / plan.data + layer * (2 * COPY_BYTES + gradients)
    if states.host_bytes:
        return kept + 2 * layer * states.copy_bytes
    buckets = states.gradient_bytes if plan.data > 1 and not plan.bucket_view else 0
    return kept + layers * layer * (states.copy_bytes + buckets)


def activation_bytes(job: Job, plan: Plan) -> float:
    """Return activation bytes of the fuller of the first and last stage, in 16 bits, with fused attention.

    A layer keeps h (10 + 24 / t) bytes per token: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.1, without its
    quadratic term. In 1F1B the first stage has as many micro-batches in flight as there are stages. The logits are
    those of the running micro-batch.
    """
    layers = math.ceil(job.layers / plan.pipeline)
    tokens = job.batch * job.seq / (plan.data * plan.micro_batches)
    layer = tokens * job.hidden * (10 + 24 / plan.tensor)
    kept, working = (2 * tokens * job.hidden, layer) if plan.recompute else (layer, 0.0)
    in_flight = 1 if plan.naive else min(plan.pipeline, plan.micro_batches)
    first = in_flight * layers * kept if plan.pipeline > 1 else 0.0
    last = layers * kept + tokens * job.vocabulary * LOGIT_BYTES / plan.tensor
    return max(first, last) + working


def sent_per_parameter(
    ranks: int, sharded: bool, weight: float = COPY_BYTES, gradient: float = GRADIENT_BYTES
) -> float:
    """Return the bytes that a rank sends per parameter and step; `weight`, `gradient`: bytes of their formats in
    transit.

    DDP: one all-reduce of gradients, 2 (n-1)/n. FSDP2: two all-gathers of weights and a reduce-scatter of gradients,
    (n-1)/n each. In a single format that is 3/2 of DDP's bytes; with 16-bit weights and FP32 gradients, the same.
    """
    share = (ranks - 1) / ranks
    return share * (2 * weight + gradient if sharded else 2 * gradient)
