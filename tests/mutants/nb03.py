"""Typical mistakes in notebook 03: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import random
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


def _seed_forgotten(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, epoch), rank, world_size)


def _rank_in_the_seed(dataset_size, rank, world_size, epoch, seed):
    return _deal(_order(dataset_size, seed + 1000 * epoch + rank), rank, world_size)


def _remainder_dropped(dataset_size, rank, world_size, epoch, seed):
    n = max(1, dataset_size // world_size)
    return _order(dataset_size, seed + epoch)[rank * n : (rank + 1) * n] or [0]


def _unequal_lengths(dataset_size, rank, world_size, epoch, seed):
    return _order(dataset_size, seed + epoch)[rank::world_size]


def _unseeded(dataset_size, rank, world_size, epoch, seed):
    return _deal(random.sample(range(dataset_size), dataset_size), rank, world_size)


def _global_seed(dataset_size, rank, world_size, epoch, seed):
    torch.manual_seed(seed + epoch)
    return _deal(torch.randperm(dataset_size).tolist(), rank, world_size)


def _cut_then_shuffled(dataset_size, rank, world_size, epoch, seed):
    own = _contiguous_in_order(dataset_size, rank, world_size, epoch, seed)
    return [own[i] for i in _order(len(own), seed + epoch)]


def _count_in_place_of_indices(dataset_size, rank, world_size, epoch, seed):
    return dataset_size // world_size


def _from_one(dataset_size, rank, world_size, epoch, seed):
    return [i + 1 for i in _deal(_order(dataset_size, seed + epoch), rank, world_size)]


def _sum(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def _divided_by_two(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2


def _divided_twice(model):
    n = dist.get_world_size()
    for p in model.parameters():
        p.grad /= n
        dist.all_reduce(p.grad)
        p.grad /= n


def _first_parameter_only(model):
    p = next(model.parameters())
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


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


def _rank_0_broadcast(model):
    for p in model.parameters():
        dist.broadcast(p.grad, src=0)


def _reduced_to_rank_0(model):
    for p in model.parameters():
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()


def _none_not_expected(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _none_skipped(model):
    for p in model.parameters():
        if p.grad is not None:
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


def _divided_by_all_ranks_rows(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches) / dist.get_world_size()).backward()
    optimizer.step()


def _no_no_sync(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for x, y in micro_batches:
        (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


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


def _zero_grad_forgotten(ddp, optimizer, micro_batches, loss_fn):
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
    optimizer.step()


def _step_inside(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()
        optimizer.step()


def _step_forgotten(ddp, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(micro_batches):
        with ddp.no_sync() if i < len(micro_batches) - 1 else nullcontext():
            (loss_fn(ddp(x), y) * _share(x, micro_batches)).backward()


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


def _latency_once(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    latency_s = latency_s if ranks > 1 else 0
    return ranks * compute_s / (compute_s + latency_s + _ring(gradient_bytes, 0, bytes_per_s, ranks))


def _bits(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + _ring(8 * gradient_bytes, latency_s, bytes_per_s, ranks))


def _ideal(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks


def _one_message_also_alone(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    return ranks * compute_s / (compute_s + latency_s + gradient_bytes / bytes_per_s)


def _two_messages(compute_s, gradient_bytes, latency_s, bytes_per_s, ranks):
    sends = 2 * (ranks > 1) * (latency_s + gradient_bytes / bytes_per_s)
    return ranks * compute_s / (compute_s + sends)


MUTANTS = {
    "03.1": {
        "same on every rank": (_same_on_every_rank, "ranks 0 and 1 both got ["),
        "contiguous, in order": (_contiguous_in_order, "rank 0 got [0, 1, 2, 3]"),
        "every n-th, in order": (_every_nth_in_order, "rank 0 got [0, 3, 6, 9]"),
        "epoch forgotten": (_epoch_forgotten, "set_epoch"),
        "seed forgotten": (_seed_forgotten, "seeds 7 and 8 give the same order"),
        "rank in the seed": (_rank_in_the_seed, "never on rank"),
        "remainder dropped": (_remainder_dropped, "goes to no rank"),
        "unequal lengths": (_unequal_lengths, "the ranks got [3, 3, 2, 2]"),
        "not seeded": (_unseeded, "called twice with the same arguments"),
        "global generator seeded": (_global_seed, "global random generator"),
        "cut, then shuffled": (_cut_then_shuffled, "the same 30 samples in every epoch"),
        "a count, not indices": (_count_in_place_of_indices, "is not a list of indices"),
        "counts from one": (_from_one, "there is no sample 12"),
    },
    "03.2": {
        "sum": (_sum, "that is the sum"),
        "divided by 2, not by the ranks": (_divided_by_two, "1.5 times the mean"),
        "divided twice": (_divided_twice, "0.333 times the mean"),
        "first parameter only": (_first_parameter_only, "0.bias, 2.weight, 2.bias still hold"),
        "biases skipped": (_biases_skipped, "0.bias, 2.bias still hold"),
        "parameters averaged": (_parameters_averaged, "changed the parameters"),
        "on a copy": (_on_a_copy, "nothing was written into p.grad"),
        "rank 0 broadcast": (_rank_0_broadcast, "all ranks have rank 0's gradients"),
        "reduced to rank 0": (_reduced_to_rank_0, "the other ranks do not"),
        "None not expected": (_none_not_expected, "p.grad None, and your code fails"),
        "None skipped on one rank": (_none_skipped, "p.grad is None on rank 1): rank 0 was in line"),
        "only rank 0 calls": (_only_rank_0_calls, "for ever in your all-reduce: rank 0 was in line"),
        "unused left out everywhere": (_unused_left_out_everywhere, "rank 0 ends with another gradient"),
    },
    "03.3": {
        "no division": (_no_division, "were added, not averaged"),
        "mean of means": (_divided_by_m, "every micro-batch weighs the same"),
        "divided by the ranks too": (_divided_by_all_ranks_rows, "half as large"),
        "no no_sync": (_no_no_sync, "it was all-reduced 3 times"),
        "forward outside no_sync": (_forward_outside, "DDP decides in the forward pass"),
        "last one inside no_sync": (_last_inside, "the parameters of the two ranks now differ"),
        "zero_grad inside": (_zero_grad_inside, "only the last micro-batch is in the gradient"),
        "zero_grad forgotten": (_zero_grad_forgotten, "the gradient of the step before is in it too"),
        "step inside": (_step_inside, "made 3 optimizer steps, not 1"),
        "step forgotten": (_step_forgotten, "made 0 optimizer steps, not 1"),
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
        "latency once": (_latency_once, "paid once per step only"),
        "bits": (_bits, "you turned bytes into bits"),
        "ideal": (_ideal, "the all-reduce costs nothing"),
        "communication with itself": (_one_message_also_alone, "one rank alone gets"),
        "two messages of everything": (_two_messages, "you predict"),
    },
}  # fmt: skip
