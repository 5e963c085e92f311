"""The process in which the script runs: it becomes the script, runs the planned steps, and leaves a profile.

python -m labs.doctor.script_process SETTINGS.json     # started by the doctor, once per rank
"""

from __future__ import annotations

import builtins
import json
import mmap
import os
import sys
import time
import traceback
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from labs.doctor.profile import Profile, without_colours
from labs.kit import as_main
from labs.kit.supervise import end_with_parent

MOST_SAID = 300  # Characters of an error that are kept
SAVE_S = 5.0  # Between saves while interleaving: a run that is killed loses no more


class Enough(BaseException):
    """Everything is measured. Raised from an optimizer's step, so that the script's `finally` blocks run.

    If the script catches it, with a bare `except:`, the supervisor ends the script.
    """


@dataclass(frozen=True)
class Settings:
    """Settings of a run for one rank, passed in a file."""

    argv: list[str]  # The script and its arguments
    folder: str  # For profile and progress of all ranks
    rank: int = 0
    ranks: int = 1
    local_ranks: int = 1
    steps: int = 30
    seconds: float = 40.0
    parent: int = 0  # Process id of the doctor, with which the script ends; 0: it doesn't
    module: str = ""  # The script's full module name, if it is run with -m

    def path(self, what: str) -> Path:
        """Return the rank's file: "settings", "profile" (JSON), "progress" (steps so far) or "ended" (at the end)."""
        return Path(self.folder, f"{what}-{self.rank}")

    def save(self) -> Path:
        """Write the file that `main` reads, and return its path."""
        self.path("settings").write_text(json.dumps(asdict(self)))
        return self.path("settings")


class ScriptProcess:
    """A rank that is being measured."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.begun = settings, time.perf_counter()
        self.profile = Profile(settings.argv[0], settings.argv, settings.rank, settings.ranks, settings.local_ranks)
        settings.path("progress").write_bytes(b"%12d" % 0)
        with settings.path("progress").open("r+b") as file:
            self.progress = mmap.mmap(file.fileno(), 12)  # avoids a system call in each step
        self.pid, self.saved = os.getpid(), self.begun
        self.leave_at_once = os._exit
        self.hooks = self.plan = None

    def watch(self) -> None:
        """Install the hooks and start the plan, once the script has imported torch."""
        # Imported here, because some import torch. Python finds them through the loaded `labs`, not sys.path.
        from labs.doctor.counterfactuals import MODES
        from labs.doctor.hooks import Hooks
        from labs.doctor.probes import Probes
        from labs.doctor.schedule import plan

        settings = self.settings
        folder = os.path.dirname(os.path.realpath(settings.argv[0]))
        self.hooks = Hooks(folder, self.stepped, Probes(folder, scratch=settings.folder))
        self.hooks.install()
        self.plan = plan(self.hooks, self.profile, settings.steps, settings.seconds, MODES)
        next(self.plan)

    def stepped(self, spans: dict[str, float]) -> None:
        """Advance the plan at the end of a step, within the script. Raises Enough at the plan's end."""
        profile = self.profile
        profile.steps += 1
        self.progress[:] = b"%12d" % profile.steps
        before = profile.stage
        try:
            self.plan.send(spans)
        except StopIteration:
            self.end("done")
            raise Enough from None
        if profile.stage != before or (profile.stage == "in turn" and time.perf_counter() > self.saved + SAVE_S):
            self.save()

    def save(self) -> None:
        """Save what is known so far."""
        profile = self.profile
        profile.wall_s = time.perf_counter() - self.begun
        if self.hooks is not None:
            profile.probes = self.hooks.probes.findings()
        profile.save(self.settings.path("profile"))
        self.saved = time.perf_counter()

    def end(self, how: str, code: int | None = None, error: str = "") -> None:
        """Record how the run ended and save the profile. Only the first call counts, and none in the script's forks."""
        if os.getpid() != self.pid or self.profile.ended != "running":
            return
        self.profile.ended, self.profile.exit_code, self.profile.error = how, code, error
        if self.plan is not None:
            with suppress(Exception):  # the script may have failed within torch: still report what is known
                self.plan.close()
        self.save()
        self.settings.path("ended").touch()

    def run(self) -> typing.NoReturn:
        """Run the script to its end, then exit without Python's cleanup, because threads may never end."""
        after_torch(self.watch)
        os._exit = self._leave
        code = 0
        try:
            as_main.run(self.settings.argv, self.settings.module)
            self.end("script ended", 0)
        except Enough:
            pass
        except SystemExit as e:
            code = as_main.exit_code(e)
            if e.code is not None and not isinstance(e.code, int):
                print(e.code, file=sys.stderr)  # as Python does
            self.end("exit", code)
        except BaseException as e:
            code = 1
            traceback.print_exception(type(e), e, as_main.of_script(e.__traceback__, self.settings.argv[0]))
            self.end("error", code, _in_one_line(e, self.settings.argv[0]))
        if self.profile.ended == "done":
            code = 0
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed by the script
                stream.flush()
        self.leave_at_once(code)

    def _leave(self, code: int) -> typing.NoReturn:
        self.end("exit", code)
        self.leave_at_once(code)


def after_torch(then: Callable[[], None]) -> None:
    """Call `then` once torch is imported. Before that, the script may still set environment variables, or fail."""
    plain = builtins.__import__

    def imported(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        module = plain(*args, **kwargs)
        torch = sys.modules.get("torch")
        loaded = torch is not None and not getattr(torch.__spec__, "_initializing", False)
        if loaded and builtins.__import__ is imported:
            builtins.__import__ = plain
            then()
        return module

    builtins.__import__ = imported


def _in_one_line(error: BaseException, script: str) -> str:
    """Return the error in one line, with its innermost line in the script's own folder, if there is one."""
    folder = os.path.dirname(os.path.realpath(script)) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if os.path.realpath(f.filename).startswith(folder) and "-packages" not in f.filename]
    own = [f for f in own if os.path.dirname(f.filename) != os.path.dirname(__file__)]
    where = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in own[-1:]]
    said = " ".join(without_colours(f"{type(error).__name__}: {error}").split())
    return " ".join([said[:MOST_SAID], *(f"({w})" for w in where)])


def main() -> None:
    """Read the settings and become the script."""
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    if settings.parent:
        end_with_parent(settings.parent)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # as in a terminal, so the last lines aren't lost if it is killed
    ScriptProcess(settings).run()


if __name__ == "__main__":
    main()
