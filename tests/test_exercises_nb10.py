"""Exercises of notebook 10: right answers of another style pass, and wrong ones are shown where they differ."""

import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector

from labs.exercises import nb10
from labs.kit.check import examine
from labs.watch.diagnosis import diagnose
from labs.watch.evidence import read


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def counts_first(model, optimizer, batches, log):
    """All ranks agree on the number of steps before the first one, and send gradient and count in one message."""
    batches = list(batches)
    steps = torch.tensor(len(batches))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    sums = torch.zeros(2, dtype=torch.float64)
    for step in range(int(steps)):
        optimizer.zero_grad(set_to_none=False)
        x, y = batches[step] if step < len(batches) else (torch.zeros(0, 3), torch.zeros(0, 1))
        loss = mse_loss(model(x), y, reduction="sum")
        loss.backward()
        sums += torch.tensor([loss.item(), len(x)])
        flat = torch.cat([*(p.grad.flatten() for p in model.parameters()), torch.tensor([float(len(x))])])
        dist.all_reduce(flat)
        sizes = [p.numel() for p in model.parameters()]
        for p, g in zip(model.parameters(), (flat[:-1] / flat[-1]).split(sizes), strict=True):
            p.grad.copy_(g.view_as(p))
        optimizer.step()
    dist.reduce(sums, dst=0)
    if dist.get_rank() == 0:
        log((sums[0] / sums[1]).item())


def asks_with_objects(model, optimizer, batches, log):
    """A flag from every rank, gathered as objects; losses as well."""
    batches, seen = iter(batches), []
    while True:
        batch, flags = next(batches, None), [None] * dist.get_world_size()
        dist.all_gather_object(flags, 0 if batch is None else len(batch[0]))
        if not any(flags):
            break
        optimizer.zero_grad()
        loss = parameters_to_vector(model.parameters()).sum() * 0
        if batch is not None:
            loss = loss + mse_loss(model(batch[0]), batch[1], reduction="sum")
        (loss / sum(flags)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        seen.append((loss.item(), flags[dist.get_rank()]))
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, seen)
    rows = [row for of_rank in everything for row in of_rank]
    if dist.get_rank() == 0:
        log(sum(loss for loss, _ in rows) / sum(n for _, n in rows))


@pytest.mark.parametrize("answer", [counts_first, asks_with_objects])
def test_other_loops_that_end(answer):
    passes("10.1", answer)


def test_the_loop_of_the_notebook_hangs():
    def given(model, optimizer, batches, log):
        total = torch.zeros(2)
        for x, y in batches:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y, reduction="sum")
            loss.backward()
            count = torch.tensor(float(len(x)))
            dist.all_reduce(count)
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= count
            optimizer.step()
            total += torch.tensor([loss.item(), len(x)])
        if dist.get_rank() == 0:
            dist.all_reduce(total)
            log(float(total[0] / total[1]))

    outcome = examine("10.1", given)
    assert outcome.state == "not yet" and "wait for each other" in outcome.text, outcome.text


def looks_at_leaves(model, x):
    """Modules without children, by name; the sample by its place in the output of halves."""
    first = {}

    def hook(module, args, output):
        if args[0].isfinite().all() and not output.isfinite().all():
            first.setdefault("name", names[module])

    names = {m: n for n, m in model.named_modules()}
    handles = [m.register_forward_hook(hook) for m in names if not list(m.children())]
    bad = (~torch.isfinite(model(x).detach()).all(dim=1)).nonzero()[0].item()
    for handle in handles:
        handle.remove()
    return first.get("name", ""), bad


def by_recursion(model, x):
    def search(low, high):
        if high - low == 1:
            return low
        middle = (low + high) // 2
        return search(middle, high) if model(x[low:middle]).isfinite().all() else search(low, middle)

    sample = search(0, len(x))
    inputs = x[sample : sample + 1]
    for i, block in enumerate(model):
        for j, layer in enumerate(block):
            output = layer(inputs)
            if inputs.isfinite().all() and not output.isfinite().all():
                return f"{i}.{j}", sample
            inputs = output
    return "", sample


@pytest.mark.parametrize("answer", [looks_at_leaves, by_recursion])
def test_other_ways_to_find_a_nan(answer):
    passes("10.2", answer)


def by_votes(dumps):
    for number in sorted({e["collective_seq_id"] for d in dumps.values() for e in d}):
        votes = {}
        for rank, entries in dumps.items():
            numbers = [e["collective_seq_id"] for e in entries]
            if number in numbers:
                e = entries[numbers.index(number)]
                votes[rank] = (e["profiling_name"], tuple(map(tuple, e["input_sizes"]))), e
            elif numbers[-1] < number:
                votes[rank] = None, None
        wanted = Counter(key for key, _ in votes.values() if key).most_common(1)[0][0]
        for rank, (key, e) in votes.items():
            if key == wanted:
                continue
            shown = e or next(entry for k, entry in votes.values() if k == wanted)
            kind = "missing" if e is None else "other size" if key[0] == wanted[0] else "other collective"
            own = next(f for f in shown["frames"] if f["filename"].endswith("train.py"))
            return rank, kind, number, f"train.py:{own['line']}"


def by_newest_first_difference(dumps):
    """Numbers that all rings still hold, then who lacks the next."""
    held = {r: {e["collective_seq_id"]: e for e in d} for r, d in dumps.items()}

    def key(e):
        return e["profiling_name"], repr(e["input_sizes"])

    def line(e):
        f = next(f for f in e["frames"] if "torch" not in f["filename"])
        return f"{f['filename']}:{f['line']}"

    for n in range(max(min(d) for d in held.values()), max(max(d) for d in held.values()) + 1):
        usual = Counter(key(d[n]) for d in held.values() if n in d).most_common(1)[0][0]
        lacking = [r for r, d in held.items() if n not in d]
        if lacking:
            return lacking[0], "missing", n, line(next(d[n] for d in held.values() if n in d))
        for r, d in held.items():
            if key(d[n]) != usual:
                return r, "other size" if key(d[n])[0] == usual[0] else "other collective", n, line(d[n])
    return None


@pytest.mark.parametrize("answer", [by_votes, by_newest_first_difference])
def test_other_post_mortems(answer):
    passes("10.3", answer)


def test_a_wrong_rank_is_shown_with_its_job():
    text = examine("10.3", lambda dumps: (0, "missing", 7, "train.py:21")).text
    assert "a healthy step" in text and "None" in text, text


def test_made_entries_are_read_by_labs_watch(tmp_path):
    for rank, entries in nb10.dumps_of("one rank broadcasts").items():
        dump = {"version": "2.10", "entries": entries, "pg_config": {"0": {"ranks": "[0, 1, 2]"}}}
        (tmp_path / f"nccl_rank_{rank}").write_text(json.dumps(dump))
    found = diagnose(read(tmp_path))
    assert found.sure and found.ranks == (1,) and found.line.line == 31, str(found)
