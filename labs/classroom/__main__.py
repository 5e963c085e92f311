"""The room on one page: who is ready, predictions beside results, and progress with the exercises.

    python -m labs.classroom /shared/room                          # writes build/room/index.html
    python -m labs.classroom /shared/room --anonymous --watch 10   # letters for names, updated every 10 s
    python -m labs.classroom /shared/room --reveal 03.1 03.3       # lets show_solution() work for these

Reads what learners save with COURSE_ROOM=/shared/room. Nothing is sent anywhere.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.record import write_atomic
from labs.kit.room import REVEALED, matches, revealed_patterns

PROG = "python -m labs.classroom"


@dataclass(frozen=True)
class Config:
    """Which room, and what to do with it."""

    folder: Annotated[Path, tyro.conf.Positional]
    """The shared folder that learners set as COURSE_ROOM."""
    out: Path = Path("build/room")
    """Folder for the page."""
    watch: float = 0.0
    """Update the page every so many seconds, until Ctrl-C. The page reloads itself."""
    anonymous: bool = False
    """Show letters instead of names, for a projected page."""
    reveal: tuple[str, ...] = ()
    """Exercises whose solutions learners may now see: ids, "03.*" or "all". Writes no page."""
    hide: tuple[str, ...] = ()
    """Exercises whose solutions learners may no longer see. Writes no page."""

    def __post_init__(self) -> None:
        require(self.folder.is_dir(), f"{self.folder} is not a folder: name the one that learners have as COURSE_ROOM")
        require(self.watch == 0 or 1 <= self.watch <= 3600, f"watch must be 1 to 3600 seconds, not {self.watch:g}")
        inside = self.out.resolve().is_relative_to(self.folder.resolve())
        require(not inside, f"{self.out} is inside the room: choose another folder with --out")


def change_revealed(folder: Path, reveal: tuple[str, ...], hide: tuple[str, ...]) -> list[str]:
    """Update the room's list of revealed solutions and return it. Raises BadInput for ids that don't exist."""
    from labs.kit.check import exercise_ids

    ids = exercise_ids()
    for pattern in (*reveal, *hide):
        known = any(matches(i, [pattern]) for i in ids)
        require(known, f'there is no exercise {pattern!r}; there are {", ".join(ids)}, "03.*" and all')
    try:
        before = revealed_patterns(folder)
    except ValueError as e:
        raise BadInput(f"{folder / REVEALED} is damaged ({e}): remove it and reveal again") from None
    chosen = [i for i in ids if matches(i, (*before, *reveal)) and not matches(i, hide)]
    write_atomic(folder / REVEALED, json.dumps({"revealed": chosen}) + "\n")
    return chosen


def watch(config: Config) -> None:
    """Write the page, and again whenever a file in the room changes."""
    from labs.classroom.collect import read_room, signature
    from labs.classroom.room_page import Letters, render

    letters, seen = Letters() if config.anonymous else None, None
    while True:
        try:
            if (now := signature(config.folder)) != seen:
                page = render(read_room(config.folder), letters, config.watch)
                print(f"{time.strftime('%H:%M:%S')}  {write_atomic(config.out / 'index.html', page)}", flush=True)
                seen = now
        except (OSError, BadInput) as e:  # the share may be gone for a while
            if not config.watch:
                raise
            print(f"{PROG}: {e}; trying again in {config.watch:g} s", file=sys.stderr)
        if not config.watch:
            return
        time.sleep(config.watch)


def main() -> int:
    config = cli.parse_config(Config, __doc__, PROG)
    try:
        if config.reveal or config.hide:
            print(f"revealed: {', '.join(change_revealed(config.folder, config.reveal, config.hide)) or 'nothing'}")
        else:
            watch(config)
    except BadInput as e:
        cli.fail(PROG, str(e))
    except OSError as e:
        cli.fail(PROG, f"{e.filename or config.out}: {e.strerror}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
