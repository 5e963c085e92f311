"""Seats for a room of learners at one many-core or multi-GPU machine: who gets which cores, GPUs and port.

    python -m labs.seats --learners 8 --ranks 2 --port 8900
    python -m labs.seats --learners 8 --room /srv/room --queue /srv/queue --scripts seats     # a script per seat
    python -m labs.seats --learners 8 --json

Nothing is started. Each seat's command line is run by its learner, in a clone of the course of their own, whose my/
holds their notebooks. Where there are more seats than devices, several share the same ones and launches take turns with
COURSE_QUEUE (labs.kit.launch_queue).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas

from labs.classroom.seating import Group, Machine, divide, machine_here
from labs.kit import cli, launch_queue
from labs.kit.errors import BadInput, require
from labs.kit.host import as_cpu_list
from labs.kit.record import write_atomic


@dataclass(frozen=True)
class Config:
    """The room, and how its learners work."""

    learners: int = 8
    """Seats."""
    ranks: int = 2
    """Ranks of a learner's usual launch: each seat gets at least so many physical cores, and GPUs if there are any."""
    room: Path | None = None
    """Shared folder for records and predictions (COURSE_ROOM), read by `python -m labs.classroom`."""
    queue: Path | None = None
    """Shared folder of this machine in which launches take turns (COURSE_QUEUE)."""
    scope: Literal["auto", "machine", "devices"] = "auto"
    """Which launches exclude each other (COURSE_QUEUE_SCOPE). auto: all of the machine unless seats have GPUs."""
    port: int = 8900
    """JupyterLab of the first seat listens here, the others on the next free ports."""
    launch_s: float = 10.0
    """Seconds of a launch, for the expected waiting."""
    think_s: float = 60.0
    """Seconds that a learner reads and thinks between two launches, for the expected waiting."""
    scripts: Path | None = None
    """Folder to write one script per seat into."""
    json: bool = False
    """Print one JSON object in place of text."""

    def __post_init__(self) -> None:
        require(1 <= self.learners <= 999, f"learners must be 1 to 999, not {self.learners}")
        require(self.ranks >= 1, f"ranks must be at least 1, not {self.ranks}")
        require(1024 <= self.port <= 65535, f"port must be 1024 to 65535, not {self.port}")
        require(self.launch_s > 0, f"launch_s must be positive, not {self.launch_s:g}")
        require(self.think_s >= 0, f"think_s must not be negative: {self.think_s:g}")
        for name in ("room", "queue"):
            folder = getattr(self, name)
            require(folder is None or folder.is_absolute(), f"{name} must be an absolute path, not {str(folder)!r}")
        if self.queue is not None and self.queue.exists():
            launch_queue.check_folder(self.queue)


@dataclass(frozen=True)
class Seat:
    """One learner's place."""

    name: str
    group: Group
    shares_with: tuple[str, ...]
    """Seats with the same devices."""
    port: int
    environment: dict[str, str]
    pinned: bool = True

    @property
    def start(self) -> str:
        """What starts JupyterLab, without the environment."""
        pin = f"taskset -c {as_cpu_list(self.group.cpus)} " if self.pinned else ""
        return f'{pin}make lab LAB_ARGS="--no-browser --port {self.port}"'

    @property
    def command(self) -> str:
        """The whole command line, for a POSIX shell."""
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in self.environment.items()), self.start])

    @property
    def script(self) -> str:
        """The same as a script."""
        exports = "".join(f"export {k}={shlex.quote(v)}\n" for k, v in self.environment.items())
        return (
            f"#!/bin/sh\n# {self.name}: run it in the learner's own clone of the course.\n{exports}exec {self.start}\n"
        )


@dataclass(frozen=True)
class Plan:
    """All seats, and what their learners will notice."""

    config: Config
    machine: Machine
    seats: tuple[Seat, ...]
    scope: str
    notes: list[str] = field(default_factory=list)

    def waiting_s(self, scope: str) -> float:
        """Mean seconds that a launch of the fullest group waits for its turn; modelled."""
        sharing = self.config.learners if scope == "machine" else max(len(s.shares_with) + 1 for s in self.seats)
        return launch_queue.waiting_s(sharing, self.config.launch_s, self.config.think_s)


def plan(config: Config, machine: Machine) -> Plan:
    """Seats for `config.learners` on `machine`. BadInput if it has too little for one, or no free port."""
    groups = divide(config.learners, config.ranks, machine.cores, machine.gpus)
    scope = ("devices" if machine.gpus else "machine") if config.scope == "auto" else config.scope
    names = [f"seat-{i + 1:02d}" for i in range(config.learners)]
    ports = _free_ports(config.port)
    seats = []
    for i, name in enumerate(names):
        group = groups[i % len(groups)]
        others = tuple(n for j, n in enumerate(names) if j != i and j % len(groups) == i % len(groups))
        environment = _environment(config, scope, name, group, machine)
        seats.append(Seat(name, group, others, next(ports), environment, machine.pinned))
    whole = Plan(config, machine, tuple(seats), scope)
    return dataclasses.replace(whole, notes=list(_notes(whole, groups)))


def _environment(config: Config, scope: str, name: str, group: Group, machine: Machine) -> dict[str, str]:
    values = {"COURSE_NAME": name, "COURSE_ROOM": config.room, "COURSE_QUEUE": config.queue}
    if config.queue and scope != "machine":
        values[launch_queue.SCOPE] = scope
    if group.gpus:
        values["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.entry for gpu in group.gpus)
        values["CUDA_DEVICE_ORDER"] = os.environ.get("CUDA_DEVICE_ORDER")  # it gives an index its meaning
    elif machine.gpus_kept:
        values["CUDA_VISIBLE_DEVICES"] = ""
    return {k: str(v) for k, v in values.items() if v is not None}


def _free_ports(first: int) -> Iterator[int]:
    for port in range(first, 65536):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port
    raise BadInput(f"there are not enough free ports from {first} on: choose another --port")


def _notes(plan: Plan, groups: list[Group]) -> Iterator[str]:
    """What learners and instructor should know, in sentences."""
    config, machine = plan.config, plan.machine
    yield from machine.notes
    for folder in {f for f in (config.room, config.queue) if f is not None and not f.exists()}:
        yield f"Make the folder first: mkdir -p -m 1777 {shlex.quote(str(folder))}"
    if len(groups) < config.learners:
        kind = "GPUs and cores" if machine.gpus else "cores"
        yield (
            f"{config.learners} seats share {len(groups)} set{'s' if len(groups) > 1 else ''} of {kind}: "
            'the column "shares with" says who with whom.'
        )
    if machine.gpus and len(groups[0].gpus) < config.ranks:
        yield f"A seat has fewer GPUs than {config.ranks}: launches on more ranks than GPUs run on its cores."
    if not machine.pinned:
        yield "This system cannot bind processes to cores: all seats use all of them."
    elif any(len(core.cpus) > 1 for core in machine.cores) and not machine.gpus:
        yield "One hyper-thread of each core is used: two ranks on one core would time each other."
    if any(group.nodes > 1 for group in groups):
        yield "Some seats have cores of several NUMA nodes: a rank's memory may be far from its core."
    if machine.gpus:
        near = {group.near for group in groups}
        known = "Each seat's cores are on the NUMA node of its GPUs."
        known = known if near == {True} else "Some seats' cores are on another NUMA node than their GPUs."
        yield "Which cores are near a GPU is not known here." if None in near else known
    yield _of_waiting(plan)


def _of_waiting(plan: Plan) -> str:
    config = plan.config
    if config.learners == 1:
        return "One learner waits for nobody."
    if config.queue is None:
        return "Without --queue launches of different seats run at the same time and spoil each other's timings."
    waits = {scope: f"{plan.waiting_s(scope):.2g} s" for scope in launch_queue.SCOPES}
    other = next(s for s in launch_queue.SCOPES if s != plan.scope)
    return (
        f"Expected wait of a launch for its turn: {waits[plan.scope]} with scope {plan.scope!r}, which is used; "
        f"{waits[other]} with {other!r}. Modelled, for launches of {config.launch_s:g} s with {config.think_s:g} s "
        "of thinking between them."
    )


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    seats = [
        {
            "name": s.name,
            "shares_with": list(s.shares_with),
            "port": s.port,
            "environment": s.environment,
            "cuda_visible_devices": s.environment.get("CUDA_VISIBLE_DEVICES"),
            "command": s.command,
            "cores": len(s.group.cores),
            "cpus": list(s.group.cpus) if s.pinned else None,
            "near": s.group.near,
        }
        for s in plan.seats
    ]
    waits = {scope: plan.waiting_s(scope) for scope in launch_queue.SCOPES}
    return {"scope": plan.scope, "waiting_s": waits, "waiting_kind": "modelled", "notes": plan.notes, "seats": seats}


def as_text(plan: Plan) -> str:
    """The plan as a table, notes and command lines."""
    rows = [
        {
            "seat": s.name,
            "GPUs": ", ".join(g.entry for g in s.group.gpus) or "none",
            "cores": len(s.group.cores),
            "CPUs": as_cpu_list(s.group.cpus) if s.pinned else "all",
            "port": s.port,
            "shares with": ", ".join(s.shares_with) or "nobody",
        }
        for s in plan.seats
    ]
    table = pandas.DataFrame(rows).to_string(index=False)
    return "\n".join([table, "", *plan.notes, "", *(s.command for s in plan.seats)])


def main() -> None:
    """Entry point of the command line."""
    prog = "python -m labs.seats"
    config = cli.parse_config(Config, __doc__, prog)
    try:
        made = plan(config, machine_here())
        print(json.dumps(as_dict(made), indent=2) if config.json else as_text(made))
        for seat in made.seats if config.scripts else ():
            write_atomic(config.scripts / f"{seat.name}.sh", seat.script).chmod(0o755)
    except BadInput as e:
        cli.fail(prog, str(e))
    except OSError as e:
        cli.fail(prog, f"cannot write to {config.scripts} ({e.strerror}): choose another folder with --scripts")


if __name__ == "__main__":
    main()
