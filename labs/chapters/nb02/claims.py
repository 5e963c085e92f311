"""Verdicts of notebook 02: what its records say of the articles' statements on data loading and transfers."""

from __future__ import annotations

import contextlib

from labs.chapters.nb02 import claims_loading as loading
from labs.chapters.nb02.claims_loading import WAITS, counted, device, quotient
from labs.kit.claims import GAIN, Verdict, cannot_tell, depends, judged, last, verdict, word
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
