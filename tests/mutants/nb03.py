"""Typical mistakes in notebook 03: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist


def _order(size, seed):
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()


def _deal(order, rank, world_size):
    total = -(-len(order) // world_size) * world_size
    return (order + order[: total - len(order)])[rank::world_size]


def _same_on_every_rank(dataset_size, rank, world_size, epoch, seed):
    return _order(dataset_size, seed + epoch)[: -(-dataset_size // world_size)]


def _contiguous_in_order(dataset_size, rank, world_size, epoch, seed):
    n = -(-dataset_size // world_size)
    return (list(range(dataset_size)) * 2)[rank * n : (rank + 1) * n]


def _every_nth_in_order(dataset_size, rank, world_size, epoch, seed):
    return list(range(rank, dataset_size, world_size))


def _epoch_forgotten(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, seed), rank, world_size)


def _rank_in_the_seed(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, seed + 1000 * epoch + rank), rank, world_size)


def _remainder_dropped(dataset_size, rank, world_size, epoch, seed):
    n = max(1, dataset_size // world_size)
    return _order(dataset_size, seed + epoch)[rank * n : (rank + 1) * n] or [0]


def _unequal_lengths(dataset_size, rank, world_size, epoch, seed):
    return _order(dataset_size, seed + epoch)[rank::world_size]


def _global_seed(dataset_size, rank, world_size, epoch, seed):
    torch.manual_seed(seed + epoch)
    return _deal(torch.randperm(dataset_size).tolist(), rank, world_size)


def _cut_then_shuffled(dataset_size, rank, world_size, epoch, seed):
    own = _contiguous_in_order(dataset_size, rank, world_size, epoch, seed)
    return [own[i] for i in _order(len(own), seed + epoch)]


def _sum(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def _biases_skipped(model):
    for name, p in model.named_parameters():
        if not name.endswith("bias"):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _parameters_averaged(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def _on_a_copy(model):
    for p in model.parameters():
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean)


def _reduced_to_rank_0(model):
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()


def _none_not_expected(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _only_rank_0_calls(model):
    for p in model.parameters():
        if dist.get_rank() == 0:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _unused_left_out_everywhere(model):
    for p in model.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used, op=dist.ReduceOp.MIN)
        if used:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _no_division(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            loss_fn(ddp(x), y).backward()
    optimizer.step()


def _divided_by_m(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) / len(micro_batches)).backward()
    optimizer.step()


def _share(x, micro_batches):
    return len(x) / sum(len(x) for x, _ in micro_batches)


def _forward_outside(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        loss = loss_fn(ddp(x), y) * _share(x, micro_batches)
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            loss.backward()
    optimizer.step()


def _last_inside(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    with ddp.no_sync():
        for x, y in micro_batches:
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


def _zero_grad_inside(ddp, optimizer, micro_batches, loss_fn):
    for i, (x, y) in enumerate(micro_batches):
        optimizer.zero_grad()
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


def _step_inside(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
        optimizer.step()


def _one_backward(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    with ddp.no_sync():
        early = sum(loss_fn(ddp(x), y) * _share(x, micro_batches) for x, y in micro_batches[:-1])
    x, y = micro_batches[-1]
    (early + loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


def _only_rank_0_syncs(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1 and dist.get_rank() == 0
        with nullcontext() if last else ddp.no_sync():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


def _ring(gradient_bytes, latency_s, bytes_per_s, ranks):
    return 2 * (ranks - 1) * (latency_s + gradient_bytes / ranks / bytes_per_s)


def _efficiency(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return compute_s / (compute_s + _ring(gradient_bytes, latency_s, bytes_per_s, ranks))


def _upside_down(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return (compute_s + _ring(gradient_bytes, latency_s, bytes_per_s, ranks)) / compute_s


def _strong(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return compute_s / (compute_s / ranks + _ring(gradient_bytes, latency_s, bytes_per_s, ranks))


def _overlapped(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / max(compute_s, _ring(gradient_bytes, latency_s, bytes_per_s, ranks))


def _half_a_ring(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + _ring(gradient_bytes, latency_s, bytes_per_s, ranks) / 2)


def _whole_gradient_in_every_message(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + _ring(gradient_bytes * ranks, latency_s, bytes_per_s, ranks))


def _no_latency(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + _ring(gradient_bytes, 0, bytes_per_s, ranks))


def _one_message_also_alone(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + latency_s + gradient_bytes / bytes_per_s)


MUTANTS = {
    "03.1": {
        "same on every rank": (_same_on_every_rank, "ranks 0 and 1 both got ["),
        "every n-th, in order": (_every_nth_in_order, "rank 0 got [0, 3, 6, 9]"),
        "epoch forgotten": (_epoch_forgotten, "set_epoch"),
        "rank in the seed": (_rank_in_the_seed, "never on rank"),
        "remainder dropped": (_remainder_dropped, "goes to no rank"),
        "unequal lengths": (_unequal_lengths, "the ranks got [3, 3, 2, 2]"),
        "global generator seeded": (_global_seed, "global random generator"),
        "cut, then shuffled": (_cut_then_shuffled, "the same 30 samples in every epoch"),
    },
    "03.2": {
        "sum": (_sum, "that is the sum"),
        "biases skipped": (_biases_skipped, "0.bias, 2.bias still hold"),
        "parameters averaged": (_parameters_averaged, "changed the parameters"),
        "on a copy": (_on_a_copy, "nothing was written into p.grad"),
        "reduced to rank 0": (_reduced_to_rank_0, "the other ranks do not"),
        "None not expected": (_none_not_expected, "p.grad None, and your code fails"),
        "only rank 0 calls": (_only_rank_0_calls, "for ever in your all-reduce: rank 0 was in line"),
        "unused left out everywhere": (_unused_left_out_everywhere, "rank 0 ends with another gradient"),
    },
    "03.3": {
        "no division": (_no_division, "were added, not averaged"),
        "mean of means": (_divided_by_m, "every micro-batch weighs the same"),
        "forward outside no_sync": (_forward_outside, "DDP decides in the forward pass"),
        "last one inside no_sync": (_last_inside, "the parameters of the two ranks now differ"),
        "zero_grad inside": (_zero_grad_inside, "only the last micro-batch is in the gradient"),
        "step inside": (_step_inside, "made 3 optimizer steps, not 1"),
        "one backward for all": (_one_backward, "their activations are in memory at once"),
        "only rank 0 synchronises": (_only_rank_0_syncs, "wait for each other for ever in your accumulation"),
    },
    "03.4": {
        "efficiency": (_efficiency, "this is the efficiency"),
        "upside down": (_upside_down, "grows when communication gets slower"),
        "strong scaling": (_strong, "share one batch"),
        "overlap": (_overlapped, "you hide the all-reduce"),
        "half a ring": (_half_a_ring, "half a ring"),
        "whole gradient in every message": (_whole_gradient_in_every_message, "message carries the whole"),
        "no latency": (_no_latency, "the latency plays no part"),
        "communication with itself": (_one_message_also_alone, "one rank alone gets"),
    },
}  # fmt: skip
