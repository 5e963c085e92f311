"""The process in which the script runs: it becomes the script, takes the steps that are wanted, and leaves facts.

python -m labs.parts.doctor.patient SETTINGS.json     # started by the doctor, once for each rank
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.util
import json
import mmap
import os
import struct
import sys
import time
import traceback
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from labs.kit import as_main
from labs.parts.doctor.facts import Facts

STOPS = 3
"""So many times a script may catch what ends it, by `except:`; then it is ended without asking."""


class Enough(BaseException):
    """All is measured. Raised out of an optimizer's step, so that what the script does in `finally` is done."""


@dataclass(frozen=True)
class Settings:
    """Of a run, in a file."""

    argv: list[str]
    """The script and its arguments."""
    folder: str
    """For facts and progress of all ranks, and for what is written."""
    scratch: str
    """Where what the script writes goes; "": where it wants it."""
    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    steps: int = 30
    seconds: float = 40.0
    modes: tuple[str, ...] | None = None
    """Counterfactuals to try, by name; None: all but those that take long ("compiled")."""

    def save(self) -> Path:
        """As SETTINGS.json of the rank."""
        path = Path(self.folder, f"settings-{self.rank}.json")
        path.write_text(json.dumps(asdict(self)))
        return path

    @property
    def facts_path(self) -> Path:
        """Where the rank's facts are."""
        return Path(self.folder, f"facts-{self.rank}.json")


class Progress:
    """How many steps a rank has taken: eight bytes in a file that the doctor looks at."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        path = Path(folder, f"progress-{rank}")
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8)

    @property
    def steps(self) -> int:
        """So far."""
        return struct.unpack("q", self._bytes[:])[0]

    @steps.setter
    def steps(self, n: int) -> None:
        self._bytes[:] = struct.pack("q", n)


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls `then` as soon as module `name` has been imported: a script may set the environment before."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The true finders' answer, with this as its loader."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: object) -> object:
        """As the true loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: object) -> None:
        """The import itself."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()


class Patient:
    """A rank that is looked at."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.begun = settings, time.perf_counter()
        self.facts = Facts(settings.argv[0], settings.argv, settings.rank, settings.ranks, settings.local_ranks)
        self.progress = Progress(settings.folder, settings.rank)
        self.pid, self.stops = os.getpid(), 0
        self.leave_at_once = os._exit
        self.hooks = self.plan = None

    def watch(self) -> None:
        """From the moment that the script has torch."""
        from labs.parts.doctor.counterfactuals import MODES
        from labs.parts.doctor.hooks import Hooks
        from labs.parts.doctor.turns import plan, price_of_a_call

        self.hooks = Hooks(os.path.dirname(os.path.realpath(self.settings.argv[0])), self.stepped)
        self.hooks.install()
        self.facts.cost["call_s"] = price_of_a_call()
        wanted = self.settings.modes
        modes = [mode for name, mode in MODES.items() if (not mode.on_request if wanted is None else name in wanted)]
        self.plan = plan(self.hooks, self.facts, self.settings.steps, self.settings.seconds, modes)
        next(self.plan)

    def stepped(self, spans: dict[str, float]) -> None:
        """At the end of each step, within the script."""
        from labs.parts.doctor import state

        self.facts.steps += 1
        self.progress.steps = self.facts.steps
        before = self.facts.stage, self.facts.trying
        try:
            self.plan.send(spans)
        except StopIteration:
            self.stops += 1
            state.note(self.hooks, self.facts, "done")
            self.end("done")
            if self.stops > STOPS:
                self.leave_at_once(0)
            raise Enough from None
        if self.facts.stage != before[0]:
            state.note(self.hooks, self.facts, self.facts.stage)
        if (self.facts.stage, self.facts.trying) != before:
            self.save()

    def save(self) -> None:
        """What is known so far."""
        facts = self.facts
        facts.wall_s = time.perf_counter() - self.begun
        if facts.trying and facts.ended == "running":
            # It may end this process in any way: then this is what there is
            facts = _given_up(facts, "the script did not get through it")
        facts.save(self.settings.facts_path)

    def end(self, how: str, code: int | None = None, error: str = "") -> None:
        """The first end is the one that counts; in this process, not in one that the script has forked."""
        if os.getpid() != self.pid or self.facts.ended != "running":
            return
        if self.facts.trying and code:  # it would not have ended by itself
            self.facts = _given_up(self.facts, f"the script fails with it: {error or f'exit code {code}'}")
        else:
            self.facts.ended, self.facts.exit_code, self.facts.error = how, code, error
        self.save()

    def run(self) -> typing.NoReturn:
        """Become the script, up to its end; then leave without what Python tidies up: threads may never end."""
        sys.meta_path.insert(0, AfterImport("torch", self.watch))
        os._exit = self._leave
        code = 0
        try:
            as_main.run(self.settings.argv)
            self.end("script ended", 0)
        except Enough:
            pass
        except SystemExit as e:
            code = as_main.exit_code(e)
            self.end("exit", code)
        except BaseException as e:
            code = 1
            if not self.facts.trying:  # else it is no error of the script
                traceback.print_exception(type(e), e, as_main.of_script(e.__traceback__, self.settings.argv[0]))
            self.end("error", code, _told(e))
        if self.facts.ended == "done":
            code = 0
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the script
                stream.flush()
        self.leave_at_once(code)

    def _leave(self, code: int) -> typing.NoReturn:
        self.end("exit", code)
        self.leave_at_once(code)


def _given_up(facts: Facts, why: str) -> Facts:
    """As if it had not been tried."""
    turns = {name: of for name, of in facts.turns_s.items() if name != facts.trying}
    not_tried = facts.not_tried | {facts.trying: why}
    return replace(facts, ended="done", turns_s=turns, not_tried=not_tried, trying="")


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:300] + where


def main() -> None:
    """Read the settings, send what is written to the scratch folder, and become the script."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    patient = Patient(settings)
    builtins.__dict__.setdefault("exit", sys.exit)
    if settings.scratch:
        from labs.parts.doctor import scratch

        scratch.install(settings.scratch)
    patient.run()


if __name__ == "__main__":
    main()
