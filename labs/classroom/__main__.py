"""The room on one page: who is ready, predictions beside results, and how far the exercises are.

    python -m labs.classroom /shared/room                          # writes build/room/index.html
    python -m labs.classroom /shared/room --anonymous --watch 10   # letters for names, drawn again every 10 s
    python -m labs.classroom /shared/room --reveal 03.1 03.3       # show_solution() works for these from now on

Reads what learners keep with COURSE_ROOM=/shared/room; nothing is sent anywhere.
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
    """The shared folder that learners have as COURSE_ROOM."""
    out: Path = Path("build/room")
    """Folder of the page."""
    watch: float = 0.0
    """Draw the page again every so many seconds, until Ctrl-C; the page reloads itself."""
    anonymous: bool = False
    """Letters in place of names, for a page that is projected."""
    reveal: tuple[str, ...] = ()
    """Exercises whose solutions learners may see from now on: ids, "03.*" or "all"; draws no page."""
    hide: tuple[str, ...] = ()
    """Exercises whose solutions they may no longer see; draws no page."""

    def __post_init__(self) -> None:
        require(self.folder.is_dir(), f"{self.folder} is not a folder: name the one that learners have as COURSE_ROOM")
        require(self.watch == 0 or 1 <= self.watch <= 3600, f"watch must be 1 to 3600 seconds, not {self.watch:g}")
        inside = self.out.resolve().is_relative_to(self.folder.resolve())
        require(not inside, f"{self.out} is inside the room: choose another folder with --out")


def change_revealed(folder: Path, reveal: tuple[str, ...], hide: tuple[str, ...]) -> list[str]:
    """Write the room's list of revealed solutions and return it. BadInput for ids that don't exist."""
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
    """Draw the page, and again whenever a file of the room has changed."""
    from labs.classroom.collect import read_room, signature
    from labs.classroom.room_page import Letters, render

    letters, seen = Letters() if config.anonymous else None, None
    while True:
        try:
            if (now := signature(config.folder)) != seen:
                page = render(read_room(config.folder), letters, config.watch)
                print(f"{time.strftime('%H:%M:%S')}  {write_atomic(config.out / 'index.html', page)}", flush=True)
                seen = now
        except (OSError, BadInput) as e:  # a share that is lost for a while
            if not config.watch:
                raise
            print(f"{PROG}: {e}; trying again in {config.watch:g} s", file=sys.stderr)
        if not config.watch:
            return
        time.sleep(config.watch)


def main() -> int:
    """Run the command line; returns the exit code."""
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
