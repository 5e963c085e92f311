"""What does torchrun need to know on two machines, what does each wrong setting look like, and may a machine die?

    python -m labs.two_nodes --nproc 1
    python -m labs.two_nodes --nproc 1 --parts wrong --settings "wrong address" "clock off"
    python -m labs.two_nodes --nproc 1 --parts kill

About 55 s on 2 CPU cores, 35 of them for the eight wrong settings and their cures; 15 s for --parts kill elastic, 4 s
for environment. It makes two machines out of this one: two addresses of the loopback. The lab itself is one process.
torchrun's agents are the real ones, with all of their options; only their ranks are forked, since importing torch would
take most of the time.
"""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from labs.common.checkpoints import load_latest
from labs.common.checkpoints.resume import differences
from labs.common.elastic import journal
from labs.common.elastic.journal import History
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.two_nodes import settings
from labs.two_nodes.machines import NODES, Machines, Torchrun, two_machines, wait_for
from labs.two_nodes.ranks import notes
from labs.two_nodes.settings import as_arguments, first_telling_line, meet_at

Part = Literal["environment", "wrong", "kill", "elastic"]
MEET, STAY, FACTS = (f"labs.two_nodes.ranks:{name}" for name in ("meet", "stay", "facts"))
TRAIN = "labs.common.elastic.train:entry"
TOLD_S, OTHERS_S = 20.0, 1.0
"""Seconds after which a job that says nothing is ended, and that the other machine has when one has told."""
LIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}
"""A machine that is silent for 2 s counts as dead here; by torch's defaults (5 s, 3 times) after 15 s."""
PATIENT = settings.SHORT | LIVE | {"read_timeout": 20, "join_timeout": 60}
"""Where no setting is wrong: a slow machine is waited for."""
SILENT_S = 6
"""Where one machine is enough to go on. With 2 s, on a machine that had ten times as much to do as it has cores, node 1
took node 0 for dead before its first sign of life: each trained alone, and no error came."""

OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks that were started again must not read what their predecessors stored: labs/kit/restart.py."""


@dataclass(frozen=True)
class Config:
    """What is tried."""

    parts: tuple[Part, ...] = ("environment", "wrong", "kill", "elastic")
    """What ranks are told; wrong settings; a machine that is killed and comes back; machines that join and leave."""
    settings: tuple[str, ...] = ()
    """Names of wrong settings; by default all."""
    steps: int = 32
    """Optimizer steps of the training of which a machine is killed."""
    kill_at_step: int = 18
    """The second machine is killed before this step."""
    save_every: int = 5
    """Steps between two checkpoints."""
    smoke: bool = False
    """Two wrong settings; and what ranks are told, if nothing else is asked for."""

    def __post_init__(self) -> None:
        require(bool(self.parts), "parts must name at least one of environment, wrong, kill, elastic")
        require(len(set(self.parts)) == len(self.parts), f"parts must hold each part once, not {self.parts}")
        for name in self.settings:
            require(name in settings.NAMES, f"settings must be among {', '.join(settings.NAMES)}, not {name!r}")
        require(self.steps >= 2, f"steps must be at least 2, not {self.steps}")
        require(
            1 <= self.kill_at_step <= self.steps,
            f"kill_at_step must be between 1 and {self.steps}, not {self.kill_at_step}",
        )
        require(self.save_every >= 1, f"save_every must be at least 1, not {self.save_every}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each part in turn on the same two machines."""
    if rank.rank != 0:
        return
    parts = {"environment": environment, "wrong": wrong_settings, "kill": killed, "elastic": join_and_leave}
    everything = config.smoke and set(config.parts) == set(parts)
    wanted = [p for p in config.parts if not everything or p in ("environment", "wrong")]
    with two_machines(rank) as machines:
        yield rank.record("machines", "1", len(NODES), rank=0, how="loopback")
        for done, part in enumerate(wanted, start=1):
            yield from parts[part](config, machines, rank)
            rank.progress(done, len(wanted), part)


# What ranks are told


def environment(config: Config, machines: Machines, rank: Rank) -> Iterator[Record]:
    """Two machines with two ranks each: every variable on every rank, and the sum that proves that they are joined."""
    folder = _folder(machines, "environment")
    jobs = start_both(machines, folder, machines.new_port(), ranks=2)
    _end(jobs)
    found = sorted(notes(folder), key=lambda note: int(note["told"]["RANK"]))
    if not found:
        raise RuntimeError(f"no rank has met another: {_lines(jobs)}")
    for note in found:
        told = note["told"]
        for name, text in told.items():
            yield rank.record(
                "variable",
                "1",
                1,
                rank=0,
                name=name,
                text=text,
                on_rank=int(told["RANK"]),
                node=int(told["GROUP_RANK"]),
            )
        yield rank.record("sum", "1", note["sum"], rank=0, on_rank=int(told["RANK"]))
    yield from _facts(machines, rank)


def _facts(machines: Machines, rank: Rank) -> Iterator[Record]:
    """Lines of programs that articles print, tried on one rank."""
    folder = _folder(machines, "facts")
    flags = meet_at(0, machines.addresses, machines.new_port(), nodes=1, ranks=1)
    variables = {"GLOO_SOCKET_IFNAME": machines.interface}
    job = machines.start(0, as_arguments(flags), FACTS, [str(folder)], variables)
    _end([job])
    if job.code:
        raise RuntimeError(f"the facts could not be tried: {_lines([job])}")
    for name, (works, line) in notes(folder)[0]["facts"].items():
        yield rank.record("works", "1", float(works), rank=0, name=name, line=line)


def start_both(
    machines: Machines, folder: Path, port: int, ranks: int = 1, wrong: settings.Wrong | None = None
) -> list[Torchrun]:
    """torchrun on both machines, which are to meet at `port`, with one wrong setting or none."""
    nobody = "192.0.2.1"  # RFC 5737: given to nobody
    words = {"nobody": nobody, "first": machines.addresses[0], "port": port, "closed": port + 1}
    jobs: list[Torchrun] = []
    for node in NODES[: 1 if wrong and wrong.missing else 2]:
        flags = meet_at(node, machines.addresses, port, ranks=ranks)
        variables = {"GLOO_SOCKET_IFNAME": machines.interface}
        if wrong:
            flags |= {name: value.format(**words) for name, value in wrong.flags.get(node, {}).items()}
            variables |= wrong.environment.get(node, {})
            if node == 1 and wrong.later:
                _until_it_waits(jobs[0])
        off = wrong.clock_off_s if wrong and node == 1 else 0.0
        jobs.append(machines.start(node, as_arguments(flags), MEET, [str(folder)], variables, off))
    return jobs


def _until_it_waits(job: Torchrun) -> None:
    """Until a torchrun has said that it looks for the others, and half a second longer."""
    wait_for(lambda: "Rendezvous'ing worker group" in job.text() or job.code is not None, "a torchrun that waits")
    time.sleep(0.5)


def _end(jobs: list[Torchrun]) -> None:
    """Until all have ended; when one has failed, or said nothing for long, the others soon are killed."""
    until, shortened = time.monotonic() + TOLD_S, False
    while any(job.code is None for job in jobs) and time.monotonic() < until:
        if not shortened and any(job.code for job in jobs):
            until, shortened = min(until, time.monotonic() + OTHERS_S), True
        time.sleep(0.02)
    for job in jobs:
        job.kill()


def _lines(jobs: list[Torchrun]) -> str:
    return "; ".join(first_telling_line(job.text()) or f"exit code {job.code}" for job in jobs)


def _folder(machines: Machines, name: str) -> Path:
    (folder := machines.root / "trainings" / name.replace(" ", "-")).mkdir(parents=True)
    return folder


# Wrong settings


def wrong_settings(config: Config, machines: Machines, rank: Rank) -> Iterator[Record]:
    """One wrong setting after the other: who tells it, how and when; then the same job without it."""
    asked = [w for w in settings.WRONG if w.name in (config.settings or settings.NAMES)]
    for wrong in asked[:2] if config.smoke else asked:
        yield from _outcome(wrong, *drill(wrong, machines), rank)
        folder = _folder(machines, f"{wrong.name}-cured")
        jobs = start_both(machines, folder, machines.new_port())
        _end(jobs)
        cured = all(job.code == 0 for job in jobs) and [n["sum"] for n in notes(folder)] == [3.0, 3.0]
        yield rank.record("cured", "1", float(cured), rank=0, setting=wrong.name)


def drill(wrong: settings.Wrong, machines: Machines) -> tuple[list[Torchrun], Path]:
    """A job with one wrong setting, to its end."""
    folder = _folder(machines, wrong.name)
    port = machines.new_port()
    with machines.port_taken(port) if wrong.port == "taken" else nullcontext():
        jobs = start_both(machines, folder, port, wrong=wrong)
        _end(jobs)
    return jobs, folder


def _outcome(wrong: settings.Wrong, jobs: list[Torchrun], folder: Path, rank: Rank) -> Iterator[Record]:
    """Who told first and what, and how many ranks computed on as if nothing were wrong."""
    case = {"setting": wrong.name, "what": wrong.what, "cure": wrong.cure, "waits": wrong.waits}
    told = [
        (job.ended_s, node, line)
        for node, job in enumerate(jobs)
        if job.code and job.code > 0 and (line := first_telling_line(job.text()))
    ]
    if told:
        seconds, node, line = min(told)
        silent = [n for n, job in enumerate(jobs) if job.code is not None and job.code < 0]
        yield rank.record("told_s", "s", seconds, rank=0, node=node, line=line, silent=len(silent), **case)
    found = notes(folder)
    yield rank.record("went_on", "ranks", len(found), rank=0, of=max((n["ranks"] for n in found), default=0), **case)


# A machine is killed


def killed(config: Config, machines: Machines, rank: Rank) -> Iterator[Record]:
    """A training that nobody disturbs, and the same with a machine that dies and comes back."""
    states, losses = {}, {}
    for which in ("undisturbed", "killed"):
        folder = _folder(machines, which)
        jobs = _train(config, machines, folder, die=which == "killed")
        if any(job.code for job in jobs):
            raise RuntimeError(f"the {which} training failed: {_lines(jobs)}")
        history = History(journal.read(folder))
        found = load_latest(folder)
        states[which], losses[which] = found[1], [history.losses(r) for r in NODES]
        yield rank.record("loss", "nats", losses[which][0], rank=0, run=which)
        yield rank.record("final_loss", "nats", losses[which][0][-1], rank=0, run=which)
        if which == "killed":
            yield from _absence(history, rank)
    equal = not list(differences(*states.values())) and losses["undisturbed"] == losses["killed"]
    yield rank.record("state_equal", "1", float(equal), rank=0)


def _train(config: Config, machines: Machines, folder: Path, die: bool) -> list[Torchrun]:
    """labs.elastic_train on both machines to its end; one that was killed is started again with the same command."""
    port = machines.new_port()
    variables = {"GLOO_SOCKET_IFNAME": machines.interface, **OWN_STORE}
    batch, epochs = 32, 2 if config.steps % 2 == 0 else 1
    train = [
        "--folder",
        str(folder),
        "--samples",
        str(batch * len(NODES) * config.steps // epochs),
        "--epochs",
        str(epochs),
        "--save-every",
        str(config.save_every),
        "--device",
        "cpu",
    ]
    dying = ["--kill-rank", "1", "--kill-at-step", str(config.kill_at_step), "--kill-while", "machine"]

    def start(node: int, more: list[str]) -> Torchrun:
        flags = meet_at(node, machines.addresses, port, ranks=1, conf=PATIENT) | {"--max-restarts": "3"}
        return machines.start(node, as_arguments(flags), TRAIN, [[*train, *more]], variables)

    jobs = [start(node, dying if die else []) for node in NODES]
    if die:
        wait_for(lambda: jobs[1].code is not None, "the end of a machine")
        require(jobs[1].code < 0, f"the machine was to be killed: {_lines(jobs)}")
        jobs[1] = start(1, [])  # what Slurm or Kubernetes does: the same command again
    wait_for(lambda: all(job.code is not None for job in jobs), "a training", 90.0)
    return jobs


def _absence(history: History, rank: Rank) -> Iterator[Record]:
    """From the kill to the first step of all ranks that came after it, and what was done twice."""
    death = history.of("killed")[0]
    yield rank.record("killed_at_step", "steps", death["step"], rank=0)
    first = {}
    for event in history.of("step"):
        if event["time"] > death["time"] and history.of("started", pid=event["pid"])[0]["time"] > death["time"]:
            first.setdefault(event["rank"], event["time"])
    yield rank.record("away_s", "s", max(first.values()) - death["time"], rank=0)
    yield rank.record("steps_redone", "steps", history.steps_redone(), rank=0)


# Machines join and leave


def join_and_leave(config: Config, machines: Machines, rank: Rank) -> Iterator[Record]:
    """One machine begins (--nnodes 1:2), another joins, and leaves again: world sizes, and the seconds of a change."""
    folder, port = _folder(machines, "elastic"), machines.new_port()
    variables = {"GLOO_SOCKET_IFNAME": machines.interface, **OWN_STORE}

    def start(node: int) -> Torchrun:
        conf = PATIENT | {"keep_alive_max_attempt": SILENT_S}
        flags = meet_at(node, machines.addresses, port, ranks=1, conf=conf)
        flags |= {"--nnodes": "1:2", "--max-restarts": "5"}
        return machines.start(node, as_arguments(flags), STAY, [str(folder)], variables)

    first = start(0)
    jobs = [first]
    for moment, size in (("alone", 1), ("joined", 2), ("left", 1)):
        since = time.time()
        if moment == "joined":
            jobs.append(start(1))
        if moment == "left":
            jobs[1].kill()
        note = wait_for(
            lambda size=size, since=since: first.code is not None or _formed(folder, size, since),
            f"a group of {size} ({moment})",
            90.0,
        )
        if first.code is not None:
            raise RuntimeError(f"there was no group of {size} ({moment}): {_lines(jobs)}")
        yield rank.record("world_size", "ranks", size, rank=0, moment=moment)
        yield rank.record("change_s", "s", max(note["time"] - since, 0.0), rank=0, moment=moment)
    (folder / "stop").touch()
    wait_for(lambda: first.code is not None, "the end of the first machine")
    yield rank.record("ended", "1", float(first.code == 0), rank=0)


def _formed(folder: Path, size: int, since: float) -> dict | None:
    """The last note of a process group of `size` ranks that was made after `since`, when all of them have told."""
    found = [n for n in notes(folder) if n["ranks"] == size and n["time"] >= since]
    return found[-1] if len(found) >= size else None


def answer(run: Records) -> Iterator[str]:
    """What was told and what was not, and whether a killed machine changed the result."""
    yield "Two machines out of one: two addresses of its loopback."
    told, went_on = run.where("told_s"), run.where("went_on")
    if len(went_on):
        silent = [r.case["setting"] for r in went_on if r.value]
        cured = sum(r.value for r in run.where("cured"))
        yield f"{len(told)} of {len(went_on)} wrong settings were told by an error, {cured:.0f} cures worked."
        if silent:
            yield f"Ranks computed on in spite of: {', '.join(silent)}. Read the world size that they had."
    if len(run.where("state_equal")):
        equal = "equal bit for bit to" if run.one("state_equal").value else "DIFFERENT from"
        yield (
            f"A machine killed before step {run.one('killed_at_step').value:.0f} was away for "
            f"{run.one('away_s').value:.1f} s, {run.one('steps_redone').value:.0f} steps were done twice, and "
            f"model, optimizer and losses are {equal} those of an undisturbed run."
        )
    if len(changes := run.where("change_s")):
        words = ", ".join(f"{r.case['moment']} after {r.value:.1f} s" for r in changes)
        yield f"With --nnodes 1:2 the job went on through a machine that came and went: {words}."
