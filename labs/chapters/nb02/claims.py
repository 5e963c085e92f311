"""Verdicts of notebook 02: what its records say of the articles' statements on data loading and transfers."""

from __future__ import annotations

import contextlib

import torch

from labs.chapters.nb02 import claims_loading as loading
from labs.chapters.nb02.claims_loading import WAITS, counted, device, quotient
from labs.kit.claims import GAIN, Verdict, cannot_tell, depends, judged, last, verdict, word
from labs.kit.measure import differs
from labs.kit.record import Records

NO_TURNS = "not in turn"


@verdict("A33")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "dataloader", "wait_share")
    rows = loading.speeds(run)
    slower = [(speed, share, case) for speed, share, case in rows if speed.high < 1]
    if not slower:
        raise LookupError("launch('dataloader') with workers that are slower than a model alone is needed")
    idle, busy = [s.low > WAITS for _, s, _ in slower], [s.high < WAITS for _, s, _ in slower]
    speed, share, case = slower[0]
    because = (
        f"with a loader slower than the model {sum(idle)} of {len(idle)} runs wait for more than {WAITS:g} % of "
        f"the time; the slowest, {case}: {speed} the model's rate, {share} waits{device(run)}"
    )
    return judged(idle, busy, because)


@verdict("A34")
def _(evidence: Records) -> Verdict:
    by_job = loading.trained(evidence)
    faster, same = loading.brings([g for by in by_job.values() for g in by.values()])
    said = f"with workers {sum(faster)} of {len(faster)} runs train faster than without: {loading.ends(by_job)}"
    try:
        rates = loading.transfers(evidence)
    except LookupError:
        half = word(faster, same)
        if half != "depends":  # then the other half decides
            return Verdict("needs N GPUs", f"{said}; what pin_memory brings shows on a GPU only", "")
        return judged(faster, same, f"{said}; pin_memory has no effect without a GPU: that half is open")
    pinned = [quotient(rates[True, n], rates[False, n]) for n in (False, True)]
    said += f"; pin_memory gives {pinned[0]} the rate, with non_blocking {pinned[1]} ({NO_TURNS})"
    return judged(*(a + b for a, b in zip((faster, same), loading.brings(pinned), strict=True)), said)


@verdict("D23")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "dataloader", "wait_share")
    shares, right, wrong, said = loading.waits(run), [], [], []
    for model, rates in loading.together(run).items():
        several = [n for n in rates if n > 1]
        if 0 not in rates or not several:
            raise LookupError("launch('dataloader') without workers and with several is needed")
        best = max(several, key=lambda n: rates[n].value)
        share, cures = shares[model][0], {n: quotient(rates[n], rates[0]) for n in several}
        cure = cures[best]
        said.append((share.value, f"{model} waits {share} without workers, {counted(best)} give {cure} the rate"))
        if share.low > WAITS:  # "may be the cause": of others it is not shown, which says nothing about the cure
            right.append(cure.low > 1)
            wrong.append(all(c.high < GAIN for c in cures.values()))
    if not right:
        nothing = "no model here is shown to wait for data, so there is nothing to cure"
        return cannot_tell(f"{nothing}: {max(said)[1]}{device(run)}")
    open_ = len(right) - sum(right) - sum(wrong)
    because = (
        f"several workers are shown to be the cure for {sum(right)} of {len(right)} models that wait for data, "
        f"shown not to be for {sum(wrong)}{f', and cannot be told for {open_}' if open_ else ''}: "
        f"{max(said)[1]} ({NO_TURNS}){device(run)}"
    )
    return Verdict(word(right, wrong), because) if any(right) or any(wrong) else cannot_tell(because)


@verdict("E05")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "loader_traps", "worker_processes")
    found = max(run.where("worker_processes"), key=lambda r: r.case["workers"])
    n, trainer = found.case["workers"], found.case["trainer_reads"]
    if n < 1:
        raise LookupError("launch('loader_traps', traps=['workers']) with workers is needed")
    pids = sorted({int(pid) for pid in run.one("worker_pids", workers=n).samples})
    because = (
        f"num_workers={n}: the items come from {found.value:.0f} process{'es' * (found.value != 1)} (pid "
        f"{', '.join(map(str, pids))}), {'among them' if trainer else 'not from'} the trainer"
    )
    threads, processes = trainer and found.value == 1, found.value == n and not trainer
    return Verdict("holds" if threads else "does not hold" if processes else "depends", because)


@verdict("E06")
def _(evidence: Records) -> Verdict:
    most = {source: max(by.items()) for source, by in loading.scaled(evidence).items()}
    right, wrong = loading.brings([g for _, g in most.values()])
    fell = []
    for by in loading.waits(last(evidence, "dataloader", "wait_share")).values():
        n = max(by)
        if 0 not in by or not n:
            raise LookupError("launch('dataloader') with and without workers is needed")
        if by[0].low <= WAITS:
            continue  # it is not shown to wait: there is nothing to cut
        fell.append(by[n].high < by[0].low)
        wrong.append(by[0].high - by[n].low < WAITS)
    jobs = {}
    with contextlib.suppress(LookupError):  # the same model computes as long: what such a job takes longer, it waits
        jobs = {name: max(by.items()) for name, by in loading.swept(evidence).items() if by}
    trained, slower = loading.brings([g for _, g in jobs.values()])
    speeds = ", ".join(f"items that {source} {g} ({counted(n)})" for source, (n, g) in most.items())
    because = (
        f"against no workers: {speeds}; the share of the time that waits for data falls for {sum(fell)} of "
        f"{len(fell)} models that wait"
    )
    if jobs:
        worst = min(jobs, key=lambda name: jobs[name][1].value)
        because += f"; of trainings the worst is {worst} with {jobs[worst][1]} the rate ({counted(jobs[worst][0])})"
    return judged(right + fell + trained, wrong + slower, because)


@verdict("E07")
def _(evidence: Records) -> Verdict:
    case = {"dataset": "Bare", "shuffle": True, "workers": 0}
    run = last(evidence, "loader_traps", "raised", **case)
    bare = run.one("raised", **case)
    if not bare.value:
        return Verdict("holds", "a Dataset without methods gives batches: nothing is raised")
    said = [f"a Dataset without methods: {bare.case['error']} at {bare.case['at']}, {bare.case['words']}"]
    for r in run.where("raised", dataset="OnlyLength", workers=0)[:1]:
        said.append(f"with a length only: {r.case['error']} at {r.case['at']}, {r.case['words']}")
    return Verdict("does not hold", "; ".join(said))


@verdict("E08")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "dataloader", "images_per_s", way="loader", workers=4)
    tiles = quotient(*(run.one("images_per_s", way="loader", workers=n) for n in (4, 0)))
    others = {f"items that {source}": by for source, by in loading.scaled(evidence).items()}
    with contextlib.suppress(LookupError):
        others |= {f"{name} with a model": by for name, by in loading.swept(evidence).items()}
    every = {"JPEG tiles": {4: tiles}} | {job: {4: by[4]} for job, by in others.items() if 4 in by}
    faster, same = loading.brings([by[4] for by in every.values()])
    slow = loading.first_batch(evidence)
    because = (
        f"4 workers against none load {sum(faster)} of {len(faster)} sources faster: {loading.ends(every)}; "
        f"with new workers the first batch of an epoch takes {slow} as long"
    )
    found = judged(faster, same, because)
    if found.word != "holds" or slow.high < GAIN:
        return found
    return depends(slow.low > 1, because)


@verdict("E09")
def _(evidence: Records) -> Verdict:
    run = last(evidence, "dataloader", "batch_bytes", send="float32")
    few, many = (run.one("batch_bytes", send=send).value for send in ("uint8", "float32"))
    rate = quotient(*(run.one("images_per_s", way="both", send=send) for send in ("float32", "uint8")))
    because = (
        f"where workers also expand uint8 to float32, {few / 1e6:.3g} MB per batch become {many / 1e6:.3g} MB, "
        f"and training has {rate} the images per second ({NO_TURNS}){device(run)}"
    )
    if not differs(rate):
        because += ": what it costs in time this run cannot tell"
    return Verdict(word([many <= few, rate.low > 1], [many > few, rate.high < 1]), because)


@verdict("E10")
def _(evidence: Records) -> Verdict:
    batch = torch.ones(2)
    there = batch.to("meta")  # a device without memory that every torch has: no GPU is woken up by a verdict
    if there is batch or there.device.type != "meta":
        return Verdict("does not hold", f'.to("meta") of a CPU tensor gives one on {there.device.type}', "")
    same = "the tensor itself" if batch.to("cpu") is batch else "a copy"
    because = f'.to("meta") of a CPU tensor gives a new one on that device, the old one stays; .to("cpu") gives {same}'
    return Verdict("holds", because, "")


@verdict("E11")
def _(evidence: Records) -> Verdict:
    try:
        rates = loading.transfers(evidence)
    except LookupError:
        last(evidence, "dataloader", "images_per_s")
        batch = torch.ones(2)
        same = "the batch itself" if batch.to("cpu") is batch else "a copy"
        return Verdict("needs N GPUs", f'on a CPU nothing is sent: .to("cpu") gives {same}', "")
    overlap = quotient(rates[True, True], rates[False, False])
    because = (
        f"with pin_memory and non_blocking the same bytes come at {overlap} the images per second of plain "
        f".to(device) ({NO_TURNS})"
    )
    if not differs(overlap):
        return cannot_tell(because)
    return Verdict("does not hold" if overlap.low > 1 else "depends", because)  # fewer would show no saving either
