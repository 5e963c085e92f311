"""Verdicts of notebook 03, from records of data_parallel, speedup_map and ddp_bugs."""

from __future__ import annotations

from labs import data_parallel, speedup_map
from labs.claims.registry import Verdict, depends, in_general, last, model_of, runs, verdict, verdict_for
from labs.kit.measure import Estimate
from labs.kit.record import Records


def _map(records: Records) -> tuple[list[dict], int]:
    """Return the rows of the last speedup_map, and its ranks."""
    run = last(records, "speedup_map", "step_s", way="ddp")
    if (ranks := run[0].layout["world_size"]) < 2:
        raise LookupError("launch('speedup_map') on at least 2 ranks is needed")
    return speedup_map.speedups(run), ranks


@verdict("A13")
def a13_more_gpus_shorten_an_epoch(records: Records) -> Verdict:
    """Holds if DDP speeds up a pass over a fixed dataset. A step, which the article calls an epoch, gets no shorter."""
    found = {model_of(run): data_parallel.speedup(run) for run in runs(records, "data_parallel", "samples_per_s")}
    said = ", ".join(f"{ratio} ({model})" for model, ratio in found.items())
    return verdict_for(
        [ratio.low > 1 for ratio in found.values()],
        [ratio.high < 1 for ratio in found.values()],
        f"with a fixed batch per rank, two ranks finish an epoch {said} as fast as one",
    )


@verdict("A20")
def a20_ddp_makes_training_more_efficient(records: Records) -> Verdict:
    """Holds if every cell of the map gains."""
    rows, ranks = _map(records)
    cells = [row["speedup"] for row in rows]
    least, most = (choose(cells, key=lambda e: e.value) for choose in (min, max))
    return verdict_for(
        [e.low > 1 for e in cells],
        [e.high < 1 for e in cells],
        f"DDP on {ranks} ranks trains {least} to {most} as fast as one rank, by model and batch",
    )


@verdict("A21")
def a21_choose_the_number_of_gpus(records: Records) -> Verdict:
    """Holds if two ranks are slower than one in some cell of the map."""
    rows, _ = _map(records)
    lost = sum(row["speedup"].high < 1 for row in rows)
    because = f"in {lost} of {len(rows)} cells of the map two ranks are slower than one"
    return Verdict("holds", because) if lost else depends(all(row["speedup"].low > 1 for row in rows), because)


@verdict("B37")
def b37_a_sampler_is_all_it_takes(records: Records) -> Verdict:
    """Holds if the order changes from epoch to epoch without set_epoch."""
    run = last(records, "ddp_bugs", "count", case="no set_epoch")
    same = run.one("count", case="no set_epoch", sign="next epoch has the same order").value
    return Verdict(
        "depends" if same else "holds", "it splits the data; without set_epoch every epoch has the same order"
    )


@verdict("B46")
def b46_speedup_stays_linear(records: Records) -> Verdict:
    """Efficiency, the speedup over the number of ranks, must be at least 90 %."""
    rows, ranks = _map(records)
    found = [row["speedup"].scaled(100 / ranks) for row in rows]
    return in_general(
        [e.low >= 90 for e in found],
        [e.high < 90 for e in found],
        f"the efficiency of {ranks} ranks is {min(e.value for e in found):.0f} to {max(e.value for e in found):.0f} % "
        "over the map. Utilisation is another quantity",
    )


@verdict("C27")
def c27_small_batches_communicate_too_much(records: Records) -> Verdict:
    """Holds if, for each width, the smallest batch's speedup is below half of the ideal and grows with the batch."""
    rows, ranks = _map(records)
    ends = []
    for width in sorted({row["width"] for row in rows}):
        by_batch = sorted((row for row in rows if row["width"] == width), key=lambda row: row["batch_size"])
        ends.append((by_batch[0]["speedup"], by_batch[-1]["speedup"]))
    small, large = ends[-1]
    return verdict_for(
        [a.high < ranks / 2 and b.low > a.high for a, b in ends],
        [a.low > ranks / 2 or b.high < a.low for a, b in ends],
        f"of a DDP step, {_added(small, ranks)} is not one rank's computing with the smallest batch of the widest "
        f"model, {_added(large, ranks)} with the largest",
    )


def _added(speedup: Estimate, ranks: int) -> str:
    return f"{100 * (1 - speedup.value / ranks):.0f} %"
