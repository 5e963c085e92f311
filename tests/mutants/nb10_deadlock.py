"""Typical mistakes in exercise 10.1: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from labs.chapters.nb10 import given_loop
from labs.chapters.nb10.given_loop import average_gradients, mean_over_ranks, validate


def way(go_on="longest", by="samples", step=True, log="zero", valid="all", loss="all", small=True):
    """A loop that is right by default, with as many mistakes as there are arguments."""

    def train(job):
        for epoch in range(job.epochs):
            seen = torch.zeros(2, dtype=torch.float64)
            batches = [b for b in job.batches(epoch) if small or len(b[0]) == 4]
            steps = torch.tensor(len(batches))
            dist.all_reduce(steps, op=dist.ReduceOp.MIN if go_on == "shortest" else dist.ReduceOp.MAX)
            for k in range(int(steps)):
                job.optimizer.zero_grad()
                batch = batches[k] if k < len(batches) else None
                if go_on == "again" and batches:
                    batch = batches[k % len(batches)]
                if go_on == "last again" and batches:
                    batch = batches[min(k, len(batches) - 1)]
                n = 0
                if batch is not None:
                    n = len(batch[0])
                    total = job.loss(job.model(batch[0]), batch[1])
                    (total if by == "samples" else total / n).backward()
                    seen[0] += total.item()
                    seen[1] += n
                if by == "samples":
                    average_gradients(job.model, n)
                else:
                    _average(job.model, n, by)
                if step or batch is not None:
                    job.optimizer.step()
            _log(job, epoch, seen)

    def _log(job, epoch, seen):
        zero = dist.get_rank() == 0
        train_loss = mean_over_ranks(seen) if loss == "all" else float(seen[0] / seen[1])
        valid_loss = validate(job) if valid == "all" else math.nan
        if valid == "own" and zero:
            n = total = 0.0
            with torch.no_grad():
                for x, y in job.validation():
                    total, n = total + job.loss(job.model(x), y).item(), n + len(x)
            valid_loss = total / n
        if log == "all" or (log == "zero" and zero):
            job.log(epoch, train_loss, valid_loss)

    return train


def _average(model, samples, by):
    active = torch.tensor(float(samples > 0))
    dist.all_reduce(active)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= active if by == "active" else dist.get_world_size()


def _validation_mended(job):
    for epoch in range(job.epochs):
        seen = torch.zeros(2, dtype=torch.float64)
        for x, y in job.batches(epoch):
            job.optimizer.zero_grad()
            loss = job.loss(job.model(x), y)
            loss.backward()
            average_gradients(job.model, len(x))
            job.optimizer.step()
            seen[0] += loss.item()
            seen[1] += len(x)
        losses = mean_over_ranks(seen), validate(job)
        if dist.get_rank() == 0:
            job.log(epoch, *losses)


def _swallowed(job):
    for epoch in range(job.epochs):
        seen = torch.zeros(2, dtype=torch.float64)
        for x, y in job.batches(epoch):
            job.optimizer.zero_grad()
            loss = job.loss(job.model(x), y)
            loss.backward()
            try:
                average_gradients(job.model, len(x))
            except RuntimeError:  # the others are done
                break
            job.optimizer.step()
            seen[0] += loss.item()
            seen[1] += len(x)
        try:
            losses = mean_over_ranks(seen), validate(job)
        except RuntimeError:
            losses = 0.0, 0.0
        if dist.get_rank() == 0:
            job.log(epoch, *losses)


def _more_barriers(job):
    """As it was given, with a barrier before and after what rank 0 does alone."""
    for epoch in range(job.epochs):
        seen = torch.zeros(2, dtype=torch.float64)
        for x, y in job.batches(epoch):
            job.optimizer.zero_grad()
            loss = job.loss(job.model(x), y)
            loss.backward()
            average_gradients(job.model, len(x))
            job.optimizer.step()
            seen[0] += loss.item()
            seen[1] += len(x)
        dist.barrier()
        if dist.get_rank() == 0:
            job.log(epoch, mean_over_ranks(seen), validate(job))
        dist.barrier()


MUTANTS = {
    "10.1": {
        "as it was given": (given_loop.train, "look for a collective that not every rank calls"),
        "the data still ends earlier": (_validation_mended, "one that has no batch left still has to take part"),
        "all stop at the shortest": (way(go_on="shortest"), "the others' last batches are never trained on"),
        "begins its own data again": (way(go_on="again"), "begins its own again"),
        "averages over the ranks": (way(by="world"), "you average over the ranks: a sample in a small batch"),
        "swallows the timeout": (_swallowed, "your `except` went on as if it had worked"),
        "no validation": (way(valid="none"), "nothing is validated any more"),
        "rank 0 validates its own": (way(valid="own"), "only rank 0 has validated"),
    }
}


def _stale(job):
    """zero_grad() only where there is a batch."""
    for epoch in range(job.epochs):
        batches, seen = list(job.batches(epoch)), torch.zeros(2, dtype=torch.float64)
        most = torch.tensor(len(batches))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        for k in range(int(most)):
            if here := batches[k : k + 1]:
                [(x, y)] = here
                job.optimizer.zero_grad()
                loss = job.loss(job.model(x), y)
                loss.backward()
                seen += torch.tensor([loss.item(), len(y)])
            average_gradients(job.model, len(y) if here else 0)
            job.optimizer.step()
        losses = mean_over_ranks(seen), validate(job)
        if dist.get_rank() == 0:
            job.log(epoch, *losses)


RARER = {
    "the last gradient once more": (_stale, "hands in the averaged gradient of the step before"),
    "barriers": (_more_barriers, "wait for each other for ever"),
    "no step without a batch": (way(step=False), "optimizer steps and rank"),
    "averages over those that have a batch": (way(by="active"), "ranks that have a batch"),
    "repeats the last batch": (way(go_on="last again"), "repeats its last one"),
    "full batches only": (way(small=False), "batches that are not full are never trained on"),
    "every rank logs": (way(log="all"), "rank 1 writes the log, too"),
    "nothing is logged": (way(log="none"), "rank 0 logs the epochs []"),
    "rank 0's own training loss": (way(loss="own"), "the training loss of epoch 0"),
}
"""More mistakes of other kinds, tried by tests/test_exercise_deadlock.py."""
